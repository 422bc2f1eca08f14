"""Keep rotary frequencies in float32 whatever the model is cast to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["PinnedApply"]


@dataclass
class PinnedApply:
    """Stands in for ``module._apply``: moves tensors between devices but never rounds them.

    ``model.bfloat16()`` would otherwise round ``inv_freq``: 0.7 rad of phase error at position 4096.
    """

    module: nn.Module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply ``fn`` and undo a change of floating dtype."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype != tensor.dtype:
                return tensor.to(device=moved.device)
            return moved

        type(self.module)._apply(self.module, keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self.module
