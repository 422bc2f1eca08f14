"""Give an existing Hugging Face checkpoint a longer context, in place and in one line."""

__version__ = "0.1.0"

from ctxext import errors, training
from ctxext._api import describe, method, patch, unpatch
from ctxext._export import export
from ctxext._load import load, save
from ctxext.methods import package as methods

__all__ = ["describe", "errors", "export", "load", "method", "methods", "patch", "save", "training", "unpatch"]
