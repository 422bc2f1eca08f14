"""Dynamic methods, stateless: each row's frequencies follow its own length and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.architectures._hf import ROPE_TYPE, restoring
from ctxext.methods import RopeMethod
from ctxext.spec import RopeSpec

__all__ = ["DynamicForward"]


@dataclass
class DynamicForward:
    """Stands in for ``rotary.forward`` when the method depends on the length of the sequence.

    Stock transformers keeps one set of frequencies in the module: it is shared by all rows of a batch, stays
    stretched after a long input, and its own update is tied to the rope type's name. Here the frequencies are a
    function of each row's positions alone. The numbers are those of the stock rope function where there is one, so
    a single row equals a stock reload bit for bit.

    Args:
        rotary: the patched module; its class's own ``forward`` lays the angles out.
        methods: ``{layer type or None: (method, rope spec, stock rope type or None)}`` for the extended layer types.
    """

    rotary: nn.Module
    methods: dict[str | None, tuple[RopeMethod, RopeSpec, str]]

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Cos and sin as the class lays them out, for ``position_ids`` of shape [batch, seq] or [3, batch, seq]."""
        kwargs = {} if layer_type is None else {"layer_type": layer_type}
        forward: Callable[..., Any] = type(self.rotary).forward
        if layer_type not in self.methods:
            return forward(self.rotary, x, position_ids, **kwargs)
        rows = position_ids.amax(dim=-1) + 1
        if rows.dim() == 2:
            rows = rows.amax(dim=0)
        lengths = rows.tolist()
        distinct = sorted(set(lengths))
        if len(distinct) == 1:
            self._use(distinct[0], layer_type)
            return forward(self.rotary, x, position_ids, **kwargs)
        parts: dict[int, Any] = {}
        for row, length in enumerate(lengths):
            self._use(length, layer_type)
            here = slice(row, row + 1)
            parts[row] = forward(self.rotary, x[here], position_ids[..., here, :], **kwargs)
        if isinstance(parts[0], Tensor):
            return torch.cat([parts[row] for row in range(len(lengths))])
        return tuple(torch.cat(pieces) for pieces in zip(*(parts[row] for row in range(len(lengths))), strict=True))

    def _use(self, length: int, layer_type: str | None) -> None:
        """Put the frequencies for ``length`` tokens into the module, where its class's forward reads them."""
        rotary, prefix = self.rotary, "" if layer_type is None else f"{layer_type}_"
        method, rope, rope_type = self.methods[layer_type]
        if length <= rope.trained_length:
            inv_freq = getattr(rotary, f"{prefix}original_inv_freq")
            scale = float(method.frequencies(rope, length).attention_scale)
        else:
            seq_len: int | Tensor = length if rope_type == ROPE_TYPE else torch.tensor(length)
            kwargs = {} if layer_type is None else {"layer_type": layer_type}
            with restoring():
                inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](rotary.config, None, seq_len=seq_len, **kwargs)
        buffer = getattr(rotary, f"{prefix}inv_freq")
        buffer.copy_(inv_freq)
        setattr(rotary, f"{prefix}attention_scaling", scale)
