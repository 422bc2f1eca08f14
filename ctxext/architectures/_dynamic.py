"""Dynamic methods, stateless: each row's frequencies follow its own length and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.architectures._hf import ROPE_TYPE, restoring
from ctxext.architectures._positions import PositionedForward, declared_length
from ctxext.architectures._regime import refuse_mixed_regimes
from ctxext.architectures._sites import rotating
from ctxext.methods import RopeMethod
from ctxext.spec import RopeSpec

__all__ = ["CountedForward", "DynamicForward", "DynamicSite"]


@dataclass
class CountedForward(PositionedForward):
    """Stands in for a decoder's ``forward``: where a mask says that rows are padded, positions count tokens.

    Stock decoders count slots then, which is right for methods whose positions do not depend on the length.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
        mask, cache = given.get("attention_mask"), given.get("past_key_values")
        new = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if new is None or given.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.ndim != 2:
            return super().run(*args, **kwargs)
        start = 0 if cache is None else int(cache.get_seq_length())
        stop = start + new.shape[1]
        if mask.shape[1] >= stop and not bool(mask[:, :stop].all()):
            positions = (mask[:, :stop].long().cumsum(1) - 1).clamp(min=0)
            kwargs = kwargs | {"position_ids": positions[:, start:].to(new.device)}
        return super().run(*args, **kwargs)


@dataclass(frozen=True)
class DynamicSite:
    """Frequencies of one layer type as a function of the length.

    The numbers are those of the stock rope function where there is one, so that a model equals its stock reload bit
    for bit.

    Args:
        rotary: the patched module.
        layer_type: whose frequencies; None where the module has one set.
        method: the extension.
        rope: what the method starts from.
        rope_type: under which name the config stores it.
    """

    rotary: nn.Module
    layer_type: str | None
    method: RopeMethod
    rope: RopeSpec
    rope_type: str

    @property
    def prefix(self) -> str:
        """What the names of the module's buffers start with."""
        return "" if self.layer_type is None else f"{self.layer_type}_"

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """``inv_freq`` in float32, ``[half]``, and the scale of cos and sin."""
        if length <= self.rope.trained_length:
            inv_freq: Tensor = getattr(self.rotary, f"{self.prefix}original_inv_freq")
            return inv_freq, float(rotating(self.rope, self.method.frequencies(self.rope, length)).attention_scale)
        length = self.method.regime(self.rope.trained_length, length)
        # float32, as stock code has it by default: a whole number would take the default dtype of the moment
        tensor = torch.tensor(length, dtype=torch.float32, device="cpu")
        seq_len: int | Tensor = length if self.rope_type == ROPE_TYPE else tensor
        kwargs = {} if self.layer_type is None else {"layer_type": self.layer_type}
        with restoring():
            inv_freq, scale = ROPE_INIT_FUNCTIONS[self.rope_type](self.rotary.config, None, seq_len=seq_len, **kwargs)
        return inv_freq, scale


@dataclass
class DynamicForward:
    """Stands in for ``rotary.forward`` when the method depends on the length of the sequence.

    Stock transformers keeps one set of frequencies in the module: it is shared by all rows of a batch, stays
    stretched after a long input, and its own update is tied to the rope type's name. Here the frequencies are a
    function of each row's positions alone, and of each document's in a packed row.

    Args:
        rotary: the patched module; its class's own ``forward`` lays the angles out.
        sites: the extended layer types.
    """

    rotary: nn.Module
    sites: dict[str | None, DynamicSite]

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Cos and sin as the class lays them out, for ``position_ids`` of shape [batch, seq] or [3, batch, seq]."""
        kwargs = {} if layer_type is None else {"layer_type": layer_type}
        forward: Callable[..., Any] = type(self.rotary).forward
        if layer_type not in self.sites:
            return forward(self.rotary, x, position_ids, **kwargs)
        lengths = self._lengths(position_ids, self.sites[layer_type])
        pieces = [piece for row in lengths for piece in row]
        if len({length for _, length in pieces}) == 1:
            self._use(pieces[0][1], layer_type)
            return forward(self.rotary, x, position_ids, **kwargs)
        rows = []
        for row, documents in enumerate(lengths):
            here, parts = slice(row, row + 1), []
            for (start, stop), length in documents:
                self._use(length, layer_type)
                parts.append(forward(self.rotary, x[here, start:stop], position_ids[..., here, start:stop], **kwargs))
            rows.append(_joined(parts, dim=1))
        return _joined(rows, dim=0)

    def _lengths(self, position_ids: Tensor, site: DynamicSite) -> list[list[tuple[tuple[int, int], int]]]:
        """For each row, its documents as (start, stop) and how many tokens each holds with this call.

        Refuses documents whose cached part had other positions.
        """
        planes = position_ids if position_ids.dim() == 3 else position_ids[None]
        width = planes.shape[2]
        declared = declared_length()
        if declared is not None:
            return [[((0, width), declared)]] * planes.shape[1]
        found = []
        for row in planes.amax(dim=0).tolist():
            cuts = [0, *(at for at in range(1, width) if row[at] < row[at - 1]), width]
            documents = [((start, stop), max(row[start:stop]) + 1) for start, stop in pairwise(cuts)]
            before, now = [min(row[start:stop]) for (start, stop), _ in documents], [length for _, length in documents]
            refuse_mixed_regimes(site.method, site.rope.trained_length, before, now)
            found.append(documents)
        return found

    def _use(self, length: int, layer_type: str | None) -> None:
        """Put the frequencies for ``length`` tokens into the module, where its class's forward reads them."""
        site = self.sites[layer_type]
        inv_freq, scale = site.frequencies(length)
        with torch.no_grad():
            getattr(self.rotary, f"{site.prefix}inv_freq").copy_(inv_freq)
        setattr(self.rotary, f"{site.prefix}attention_scaling", scale)


def _joined(parts: list[Any], dim: int) -> Any:
    """Concatenate what a rotary module returned for parts of its input: one tensor, or cos and sin."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    return tuple(torch.cat(pieces, dim) for pieces in zip(*parts, strict=True))
