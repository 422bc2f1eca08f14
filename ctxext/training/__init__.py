"""What a training recipe needs beside the Trainer."""

from ctxext.training.callback import ExtensionCallback
from ctxext.training.loss import ChunkedLoss, chunk_loss

__all__ = ["ChunkedLoss", "ExtensionCallback", "chunk_loss"]
