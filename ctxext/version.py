"""The version, for what is written into files; its own file, so that every room may ask for it."""

__version__ = "0.1.0"
