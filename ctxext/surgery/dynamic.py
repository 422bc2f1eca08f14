"""Dynamic methods, stateless: each row's frequencies follow its own length and nothing is left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.surgery.caches import NOT_ONE_GRAPH, cache_in, outside_graphs
from ctxext.surgery.edits import Edits
from ctxext.surgery.generation import LengthRule, note_fitted_lengths, refuse_stale_cache
from ctxext.surgery.positions import PositionedForward, declared_length
from ctxext.surgery.rebuild import restoring
from ctxext.surgery.rope_types import ROPE_TYPE
from ctxext.surgery.rotary import RotarySite
from ctxext.surgery.stored_form import StoredForm

# Modules kept per model, one for each length read of late: a few kilobytes each.
KEPT = 64


@dataclass
class CountedForward(PositionedForward):
    """Stands in for a decoder's ``forward``: where a mask says that rows are padded, positions count tokens.

    Stock decoders count slots then, which is right for methods whose positions do not depend on the length.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
        mask, cache = given.get("attention_mask"), cache_in(given)
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
        site: which of its frequencies.
        method: the extension.
        rope_type: under which name the config stores it.
    """

    rotary: nn.Module
    site: RotarySite
    method: RopeMethod
    rope_type: str
    _modules: dict[Any, nn.Module] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_modules": {}}  # a copy of the model computes its own

    @property
    def rule(self) -> LengthRule:
        """Which positions a text of so many tokens gets."""
        return LengthRule(self.method, self.site.spec.trained_length)

    def module(self, length: int) -> nn.Module:
        """The rotary module that rotates for ``length`` tokens, kept per device.

        A copy that shares everything but the frequencies: other threads read the module itself at the same time.
        """
        fitted = self.rule.fitted(length)
        key = (fitted, self._plain.device)
        found = self._modules.get(key)
        if found is None:
            if len(self._modules) > KEPT:
                self._modules.clear()
            # Not inside inference mode: what is made there could not be used in training, and this is kept.
            with torch.inference_mode(False), torch.no_grad():
                inv_freq, scale = self._frequencies(fitted)
                found = copy.copy(self.rotary)
                found._buffers = self.rotary._buffers | {f"{self.site.prefix}inv_freq": inv_freq}
                setattr(found, f"{self.site.prefix}attention_scaling", scale)
            self._modules[key] = found
        return found

    @property
    def _plain(self) -> Tensor:
        """The frequencies of a text inside the trained window."""
        plain: Tensor = getattr(self.rotary, f"{self.site.prefix}original_inv_freq")
        return plain

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """``inv_freq`` in float32, ``[half]``, and the scale of cos and sin."""
        if length <= self.site.spec.trained_length:
            return self._plain, float(self.site.mathematics(self.method)(length).attention_scale)
        # float32, as stock code has it by default: a whole number would take the default dtype of the moment
        tensor = torch.tensor(length, dtype=torch.float32, device="cpu")
        seq_len: int | Tensor = length if self.rope_type == ROPE_TYPE else tensor
        compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        with restoring():
            inv_freq, scale = compute(self.rotary.config, None, seq_len=seq_len, **self.site.arguments)
        return inv_freq.to(self._plain), scale


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

    @outside_graphs(NOT_ONE_GRAPH)
    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Cos and sin as the class lays them out, for ``position_ids`` of shape [batch, seq] or [3, batch, seq]."""
        forward: Callable[..., Any] = type(self.rotary).forward
        own = self.sites.get(layer_type)
        if own is None:
            return forward(self.rotary, x, position_ids, layer_type=layer_type)
        kwargs = own.site.arguments
        lengths = self._lengths(position_ids, own)
        pieces = [piece for row in lengths for piece in row]
        if len({length for _, length in pieces}) == 1:
            return forward(own.module(pieces[0][1]), x, position_ids, **kwargs)
        rows = []
        for row, documents in enumerate(lengths):
            here, parts = slice(row, row + 1), []
            for (start, stop), length in documents:
                at = position_ids[..., here, start:stop]
                parts.append(forward(own.module(length), x[here, start:stop], at, **kwargs))
            rows.append(_joined(parts, dim=1))
        return _joined(rows, dim=0)

    def _lengths(self, position_ids: Tensor, own: DynamicSite) -> list[list[tuple[tuple[int, int], int]]]:
        """For each row, its documents as (start, stop) and how many tokens each holds with this call.

        Refuses documents whose cached part had other positions.
        """
        planes = position_ids if position_ids.dim() == 3 else position_ids[None]
        batch, width = planes.shape[1:]
        declared = declared_length()
        if declared is not None:
            note_fitted_lengths(0, [own.rule.fitted(declared)] * batch)
            return [[((0, width), declared)]] * batch
        found = []
        for index, row in enumerate(planes.amax(dim=0).tolist()):
            cuts = [0, *(at for at in range(1, width) if _restarts(row[at - 1], row[at], len(planes))), width]
            documents = [((start, stop), max(row[start:stop]) + 1) for start, stop in pairwise(cuts)]
            before, now = [min(row[start:stop]) for (start, stop), _ in documents], [length for _, length in documents]
            refuse_stale_cache(own.rule, index, batch, before, now)
            found.append(documents)
        return found


def _restarts(previous: int, place: int, planes: int) -> bool:
    """Whether a document begins here. In several planes, places also go back from row to row of an image."""
    return place < previous if planes == 1 else place == 0 < previous


def _joined(parts: list[Any], dim: int) -> Any:
    """Concatenate what a rotary module returned for parts of its input: one tensor, or cos and sin."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    return tuple(torch.cat(pieces, dim) for pieces in zip(*parts, strict=True))


def follow_length(model: PreTrainedModel, form: StoredForm, edits: Edits) -> None:
    """Edit the rotary modules of a model that became ``form.rebuild``, and the decoders that call them.

    Raises:
        IncompatibleError: if some of them rotate other positions than those of the sequence.
    """
    method, paths = form.method, dict.fromkeys(site.path for site in form.sites)
    owners = {path: _owner(model, path) for path in paths}
    for owner in owners.values():
        if not hasattr(owner, "config"):  # neither a decoder nor its attention: it is not called with the sequence
            raise IncompatibleError(
                f"Method {method.name!r} follows the length of the sequence, but {type(owner).__name__} rotates "
                f"positions of its own, which do not tell that length. Pick a method that is not dynamic."
            )
    for path in paths:
        rotary = model.get_submodule(path)
        here = [site for site in form.sites if site.path == path]
        table = {site.layer_type: DynamicSite(rotary, site, method, form.rope_type(site)) for site in here}
        edits.set(rotary, "forward", DynamicForward(rotary, table))
        # Stock forward methods update themselves by the name of the rope type; this name means: do not.
        kinds = rotary.rope_type
        changed = kinds | dict.fromkeys(table, ROPE_TYPE) if isinstance(kinds, dict) else ROPE_TYPE
        edits.set(rotary, "rope_type", changed)
    for decoder in dict.fromkeys(owners.values()):
        edits.set(decoder, "forward", CountedForward.around(decoder))


def _owner(model: PreTrainedModel, path: str) -> nn.Module:
    """The module that calls the rotary module at ``path``; a list that holds it is never called itself."""
    owner: nn.Module = model
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            break
    return owner
