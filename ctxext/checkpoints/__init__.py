"""Checkpoints on disk: read, checked, extended, written, exported."""
