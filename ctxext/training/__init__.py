"""What a training recipe needs beside the Trainer."""
