"""What travels to the layers in the place of a mask tensor."""

from __future__ import annotations

from typing import Any

import torch

from ctxext.attention import Layout
from ctxext.errors import PatchStateError

__all__ = ["LayoutMask", "layout_of"]


class LayoutMask:
    """A layout in the place of an attention mask.

    No dataclass: engines that cast a layer's inputs look into those, and would build another layout for every layer.

    Args:
        layout: where queries and keys stand.
        length: the sequence's global length in tokens, where a caller that holds only a shard of it said so.
        window: tokens that the mask in whose place this is would have let a query see; None for all.
    """

    ndim = 2

    def __init__(self, layout: Layout, length: int | None = None, window: int | None = None) -> None:
        self.layout, self.length, self.window = layout, length, window

    def to(self, *args: Any, **kwargs: Any) -> LayoutMask:
        """Models and device hooks move masks like tensors; a dtype means nothing here."""
        target = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device | str | int)), None)
        if target is None or torch.empty(0, device=target).device == self.layout.query_positions.device:
            return self
        layout = self.layout.memo(("to", str(target)), lambda: self.layout.to(torch.device(target)))
        return LayoutMask(layout, self.length, self.window)


def layout_of(attention_mask: Any) -> LayoutMask:
    """Read the layout off what a layer received as its mask.

    Raises:
        PatchStateError: if it is not there, because something between the decoder and the layer replaced the mask.
    """
    if isinstance(attention_mask, LayoutMask):
        return attention_mask
    raise PatchStateError(
        f"The attention of a model patched by ctxext received {type(attention_mask).__name__} instead of a layout. Its "
        f"decoder was called in a way that ctxext does not see; call the model itself, and do not change its "
        f"_attn_implementation."
    )
