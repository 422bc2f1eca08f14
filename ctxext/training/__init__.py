"""What a training recipe needs beside the Trainer."""

from ctxext.training.callback import ExtensionCallback
from ctxext.training.loss import ChunkedLoss, chunk_loss
from ctxext.training.memory import Memory, return_freed_memory

__all__ = ["ChunkedLoss", "ExtensionCallback", "Memory", "chunk_loss", "return_freed_memory"]
