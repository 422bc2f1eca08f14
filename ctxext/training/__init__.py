"""What a training recipe needs beside the Trainer."""

from ctxext.training.callback import ExtensionCallback

__all__ = ["ExtensionCallback"]
