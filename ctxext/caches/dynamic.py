"""Dynamic methods without state: the frequencies of each row follow its length, and no call affects the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.caches.call import PositionedForward, declared_length, paged_batch, tokens_in
from ctxext.caches.generation import LengthRule, fit_to_lengths, note_fitted_lengths, of_row
from ctxext.caches.guards import NOT_ONE_GRAPH
from ctxext.caches.records import FittedModules, cache_in, cached_tokens, current_pass, outside_graphs
from ctxext.core.edits import Edits
from ctxext.core.rebuild import restoring
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods import RopeMethod
from ctxext.probe.layers import readers_of
from ctxext.rope_types import ROPE_TYPE
from ctxext.rotary.sites import RotarySite
from ctxext.rotary.stored_form import StoredForm

NO_TOKEN = -1
"""Position of the slots of a row that has padding alone in a call."""
# Axes of cos and sin from the last one: older transformers put the planes of Qwen2-VL in front.
ROWS, SLOTS = -3, -2
# Rotary modules cached per model, one for each recent length: a few kilobytes each.
KEPT = 64


@dataclass
class CountedForward(PositionedForward):
    """Replacement of a decoder's ``forward`` that counts tokens as positions if the mask shows padding.

    Decoders of transformers count slots, padding included, which is right only if frequencies ignore the length.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = self.given(args, kwargs)
        cache, positions = cache_in(given), given.get("position_ids")
        if (new := tokens_in(given)) is not None:
            of_row(declared_length(), 0, new.shape[0])  # here, as rotary modules may be given positions of one row
            in_graph = torch.compiler.is_compiling() and positions is not None  # which reads no length from positions
            mask = None if in_graph else given.get("attention_mask")
            real = _tokens_among(mask, cache, new.shape[1], earlier=positions is None)
            if real is not None and not bool(real.all()):
                if positions is None:
                    positions = (real.long().cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
                kwargs = kwargs | {"position_ids": _without_padding(positions, real).to(new.device)}
        return super().run(*args, **kwargs)


def _tokens_among(mask: Any, cache: Any, width: int, *, earlier: bool) -> Tensor | None:
    """Return the slots of a call that hold tokens, ``[rows, slots]``; None where the mask does not say it.

    Args:
        width: slots of the call.
        earlier: True for the slots of earlier calls in front, which a mask that generate() prepared does not tell.
    """
    mask = next(iter(mask.values()), None) if isinstance(mask, dict) else mask
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4) or isinstance(cache, PagedAttentionCache):
        return None
    start = cached_tokens(cache)
    if mask.shape[-1] < start + width or (earlier and start and mask.ndim == 4):
        return None
    if mask.ndim == 4:  # a token sees itself, and nothing sees padding
        return (mask if mask.dtype is torch.bool else mask == 0)[:, 0].diagonal(start, 1, 2)[:, :width]
    return mask[:, 0 if earlier else start : start + width].bool()


def _without_padding(positions: Tensor, real: Tensor) -> Tensor:
    """Give padding the position of the token before it, or of the first one. Others would begin or lengthen a text.

    Args:
        positions: positions of the slots of a call, ``[rows, slots]``, perhaps with axes in front.
        real: slots that hold tokens, ``[rows, slots]``; slots of earlier calls may lie in front. A row without a token
            gets the position ``NO_TOKEN`` everywhere.
    """
    real = real[:, -positions.shape[-1] :].to(positions.device)
    slots, rows = torch.arange(real.shape[1], device=real.device), torch.arange(len(real), device=real.device)
    before = torch.where(real, slots, -1).cummax(1).values
    nearest = torch.where(before < 0, real.int().argmax(1, keepdim=True), before)
    moved = positions.expand(*positions.shape[:-2], *real.shape)[..., rows[:, None], nearest]
    return torch.where(real.any(1, keepdim=True), moved, NO_TOKEN)


class GraphRotary:
    """The attributes of a rotary module, with the frequencies as inputs of a graph.

    A graph takes the tensors of a module to be the same ones in every call, and compiles its numbers in.
    """

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self._class = type(module)
        vars(self).update(vars(module) | module._buffers)
        inv_freq, scale = (getattr(module, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
        setattr(self, f"{prefix}inv_freq", inv_freq.clone())
        setattr(self, f"{prefix}attention_scaling", torch.tensor(scale, dtype=torch.float32, device=inv_freq.device))

    def __getattr__(self, name: str) -> Any:
        if hasattr(nn.Module, name):  # accelerate moves whatever has a method ``to``
            raise AttributeError(name)
        return getattr(self._class, name).__get__(self)


@dataclass(frozen=True)
class DynamicSite:
    """The frequencies of one layer type as a function of the length.

    They come from transformers' rope function if there is one, so that a model equals its plain reload bit for bit.
    Where a method leaves texts inside the trained window alone, the model's frequencies before the extension stay:
    float32 has rounded some of them to a neighbour of the formula's value.
    """

    rotary: nn.Module
    site: RotarySite
    method: RopeMethod
    rope_type: str
    before: tuple[float, ...]
    _modules: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_modules": {}}  # a copy of the model computes its modules again

    @property
    def rule(self) -> LengthRule:
        """The rule that fits positions to the length of a text."""
        return LengthRule(self.method, self.site.spec.trained_length)

    def module(self, fitted: int) -> nn.Module:
        """Return the rotary module of a text that is fitted to this length, cached per device.

        It is a copy that shares everything except the frequencies, since other threads use the original meanwhile.
        """
        key = (fitted, self._plain.device)
        fitted_module: nn.Module | None = self._modules.get(key)
        if fitted_module is None:
            if len(self._modules) > KEPT:
                self._modules.clear()
            # Training could not use a tensor from inference mode, and this one is kept.
            with torch.inference_mode(False), torch.no_grad():
                inv_freq, scale = self._frequencies(fitted)
                fitted_module = copy.copy(self.rotary)
                fitted_module._buffers = self.rotary._buffers | {f"{self.site.prefix}inv_freq": inv_freq}
                setattr(fitted_module, f"{self.site.prefix}attention_scaling", scale)
            self._modules[key] = fitted_module
        return fitted_module

    def in_graph(self, fitted: int) -> GraphRotary:
        """Return the module that replaces, in a graph, the rotary module of a text fitted to this length."""
        key = ("graph", fitted, self._plain.device)
        rotary: GraphRotary | None = self._modules.get(key)
        if rotary is None:
            with torch.inference_mode(False), torch.no_grad():
                rotary = self._modules[key] = GraphRotary(self.module(fitted), self.site.prefix)
        return rotary

    @property
    def _plain(self) -> Tensor:
        """Frequencies that the rotary module computes from its config for a text inside the trained window."""
        plain: Tensor = getattr(self.rotary, f"{self.site.prefix}original_inv_freq")
        return plain

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return ``inv_freq`` in float32, ``[half]``, and the scale of cos and sin."""
        if length <= self.site.spec.trained_length:
            exact = self.site.mathematics(self.method)(length)
            before = torch.tensor(self.before, dtype=torch.float64, device="cpu")
            kept = before.shape == exact.inv_freq.shape and torch.allclose(before, exact.inv_freq, rtol=1e-5, atol=0)
            inv_freq = before.to(self._plain) if kept and self.rope_type == ROPE_TYPE else self._plain
            return inv_freq, float(exact.attention_scale)
        # float32, as in transformers: an integer would take the current default dtype
        tensor = torch.tensor(length, dtype=torch.float32, device="cpu")
        seq_len: int | Tensor = length if self.rope_type == ROPE_TYPE else tensor
        compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        with restoring():
            inv_freq, scale = compute(self.rotary.config, None, seq_len=seq_len, **self.site.arguments)
        return inv_freq.to(self._plain), scale


@dataclass
class DynamicForward:
    """Replacement of ``rotary.forward`` for methods that depend on the length of the sequence.

    transformers keeps one set of frequencies in the module, which all rows of a batch share and which stays stretched
    after a long input. Here the frequencies follow the positions of each row, or of each document in a packed row.
    """

    rotary: nn.Module
    sites: dict[str | None, DynamicSite]

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin as the class arranges them; ``position_ids`` is [batch, seq] or [3, batch, seq]."""
        forward: Callable[..., Any] = type(self.rotary).forward
        site, fitted = self.sites.get(layer_type), current_pass.fitted
        if site is None:
            return forward(self.rotary, x, position_ids, layer_type=layer_type)
        if fitted is None:
            return self._outside(site, forward, x, position_ids)
        modules, kwargs = fitted[site.site.path, layer_type], site.site.arguments
        if len(modules) == 1:
            return forward(modules[0], x, position_ids, **kwargs)
        positions = position_ids.expand(*position_ids.shape[:-2], len(modules), position_ids.shape[-1])
        rows = [(slice(row, row + 1), module) for row, module in enumerate(modules)]
        return _joined([forward(module, x[here], positions[..., here, :], **kwargs) for here, module in rows], dim=ROWS)

    @outside_graphs(NOT_ONE_GRAPH)
    def _outside(self, site: DynamicSite, forward: Callable[..., Any], x: Tensor, position_ids: Tensor) -> Any:
        declared, filling = declared_length(), current_pass.filling
        fitted_before = filling.before.fitted_lengths if filling is not None and filling.before is not None else ()
        rows = declared if declared is not None and not isinstance(declared, int) else fitted_before
        if len(rows) > 1 and position_ids.shape[-2] == 1:  # which does not serve all of them
            position_ids = position_ids.expand(*position_ids.shape[:-2], len(rows), position_ids.shape[-1])
        kwargs = site.site.arguments
        lengths = self._lengths(position_ids, site)
        pieces = [piece for row in lengths for piece in row]
        if len({length for _, length in pieces}) == 1:
            return forward(site.module(pieces[0][1]), x, position_ids, **kwargs)
        rows = []
        for row, documents in enumerate(lengths):
            here, parts = slice(row, row + 1), []
            for (start, stop), length in documents:
                positions = position_ids[..., here, start:stop]
                parts.append(forward(site.module(length), x[here, start:stop], positions, **kwargs))
            rows.append(_joined(parts, dim=SLOTS))
        return _joined(rows, dim=ROWS)

    def fitted_to(self, lengths: Sequence[int]) -> FittedModules:
        """Return the modules with which a graph rotates rows that are fitted to these lengths."""
        return {
            (site.site.path, layer_type): [site.in_graph(length) for length in lengths]
            for layer_type, site in self.sites.items()
        }

    def _lengths(self, position_ids: Tensor, site: DynamicSite) -> list[list[tuple[tuple[int, int], int]]]:
        """Return for each row its documents, as (start, stop) and the length to which each is fitted.

        Refuse documents whose cached part has other positions.
        """
        if (paged := paged_batch()) is not None:
            fitted_lengths = [site.rule.fitted(reach) for reach in paged.reaches]
            return [list(zip(paged.spans, fitted_lengths, strict=True))]
        planes = position_ids if position_ids.dim() == 3 else position_ids[None]
        batch, width = planes.shape[1:]
        declared = declared_length()
        if isinstance(declared, int) and not (site.rule.by_request or current_pass.continues):
            fitted = site.rule.fitted(declared)
            note_fitted_lengths(0, [fitted] * batch)
            return [[((0, width), fitted)]] * batch
        lengths = []
        for index, row in enumerate(planes.amax(dim=0).tolist()):
            cuts = [0, *(at for at in range(1, width) if _restarts(row[at - 1], row[at], len(planes))), width]
            spans = list(pairwise(cuts)) if max(row) != NO_TOKEN else []
            before, now = [min(row[slice(*span)]) for span in spans], [max(row[slice(*span)]) + 1 for span in spans]
            fitted_lengths = fit_to_lengths(site.rule, index, batch, before, now, declared)
            fitted_spans = list(zip(spans, fitted_lengths, strict=True))
            lengths.append(fitted_spans or [((0, width), site.rule.trained_length)])
        return lengths


def _restarts(previous: int, position: int, planes: int) -> bool:
    """Return whether a document begins here; in several planes, positions also fall from row to row of an image."""
    return position < previous if planes == 1 else position == 0 < previous


def _joined(parts: list[Any], dim: int) -> Any:
    """Concatenate outputs of a rotary module for parts of its input: each one tensor, or cos and sin."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    return tuple(torch.cat(pieces, dim) for pieces in zip(*parts, strict=True))


def follow_length(
    subject: Subject, form: StoredForm, before: Mapping[tuple[str, str | None], tuple[float, ...]], edits: Edits
) -> None:
    """Make the rotary modules of a model, and the decoders that call them, follow the length of each sequence.

    Raises:
        IncompatibleError: if a module does not rotate by the positions of the sequence.
    """
    method, paths = form.method, dict.fromkeys(site.path for site in form.sites)
    owners = {path: _owner(subject.model, path) for path in paths}
    for owner in owners.values():
        # Neither a decoder nor its attention, so it is not called with the whole sequence.
        if not hasattr(owner, "config"):
            raise IncompatibleError(
                f"Method {method.name!r} follows the length of the sequence, but {type(owner).__name__} rotates "
                f"positions that do not tell this length. Pick a method that is not dynamic."
            )
    for path in paths:
        rotary = subject.model.get_submodule(path)
        table = {
            site.layer_type: DynamicSite(rotary, site, method, form.rope_type(site), before[path, site.layer_type])
            for site in form.sites
            if site.path == path
        }
        edits.set(rotary, "forward", DynamicForward(rotary, table))
        # transformers updates frequencies by the name of the rope type; under this name it leaves them alone.
        kinds = rotary.rope_type
        changed = kinds | dict.fromkeys(table, ROPE_TYPE) if isinstance(kinds, dict) else ROPE_TYPE
        edits.set(rotary, "rope_type", changed)
    for decoder in dict.fromkeys(owners.values()):
        edits.set(decoder, "forward", CountedForward.around(decoder))


def _owner(model: nn.Module, path: str) -> nn.Module:
    """Return the module that reads the tokens around the rotary module at ``path``, or else the one that calls it."""
    owner, above = model, path
    while above:
        above = above.rpartition(".")[0]
        owner = model.get_submodule(above)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            break
    # Attention that rotates by itself (Moshi) sees neither tokens nor their mask.
    return next(readers_of(model, path), owner) if hasattr(owner, "config") else owner
