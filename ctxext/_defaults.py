"""What training programs set for tensors of their own must not reach ours: ``torch.set_default_device`` and dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["own_defaults"]


@contextlib.contextmanager
def own_defaults() -> Iterator[None]:
    """Make tensors that name no device or dtype on the CPU, in float32, as transformers' and our proofs expect.

    Entered where a verb begins, so that no line below it has to think of it; ``torch.device`` entered inside wins.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
