"""Give an existing Hugging Face checkpoint a longer context, in place and in one line."""

__version__ = "0.1.0"
