"""What a perplexity measurement is to do, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import ctxext
from ctxext.architectures import architecture_of
from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation._cached import length_dependent
from ctxext.evaluation._memory import cached_tokens_for
from ctxext.evaluation.protocols import STRIDE
from ctxext.patching import patched_state, trained_length_of
from ctxext.saved import already_extended
from ctxext.surgery.wrappers import base_model

__all__ = ["MODES", "Plan", "groups_by_positions", "make_plan"]

MODES = ("position", "sliding", "yarn", "longlora")
PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """From ``make_plan``.

    Args:
        mode: one of ``MODES``.
        trained_length: tokens of the longest truncation.
        lengths: tokens, increasing.
        stride: tokens between windows; None in position mode.
        truncate: YaRN's option of that name.
        method: to extend by; None measures the checkpoint as it is.
        arguments: of ``ctxext.patch`` beside the method.
        dynamic: whether the extension's positions follow the length.
        regimes: for each length, the length that its positions are made for.
        cached: tokens per cached call; None for uncached passes.
        unpatched: whether the unextended model also reads beyond its window, as a negative control.
    """

    mode: str
    trained_length: int
    lengths: tuple[int, ...]
    stride: int | None = None
    truncate: bool = False
    method: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False
    regimes: Mapping[int, int] = field(default_factory=dict)
    cached: int | None = None
    unpatched: bool = True

    @property
    def length(self) -> int:
        """The greatest length."""
        return self.lengths[-1]

    @property
    def beyond(self) -> bool:
        """Whether anything lies beyond the trained window."""
        return self.length > self.trained_length


def make_plan(
    model: nn.Module,
    *,
    mode: str = "position",
    lengths: Sequence[int] = (),
    stride: int | None = None,
    truncate: bool = False,
    method: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    memory: int | None = None,
    unpatched: bool = True,
) -> Plan:
    """Check what was asked for against the model; the model is at the end what it was.

    Args:
        model: as it was loaded.
        mode: one of ``MODES``.
        lengths: tokens; default what the extended model is meant for. In position mode one length is divided into
            seven spans: up to a quarter, a half and the whole of the trained window, and four equal ones beyond.
        stride: tokens between windows; default an eighth of the shortest length (sliding) or 256 (yarn, longlora).
        truncate: YaRN's option of that name.
        method: to extend by; None measures the checkpoint as it is.
        arguments: of ``ctxext.patch`` beside the method; without factor and target length, the greatest length is
            the target.
        memory: budget in bytes for weights and passes; None for no limit.
        unpatched: see ``Plan``.

    Raises:
        CtxextError: as ``ctxext.patch``.
        UnknownNameError: an unknown mode.
        InvalidParameterError: a length, stride or option out of range, or one that the mode does not have.
    """
    if mode not in MODES:
        raise UnknownNameError.of("mode", mode, MODES)
    if (stride is not None and mode == "position") or (truncate and mode != "yarn"):
        raise InvalidParameterError(f"{'truncate' if truncate else 'stride'} has no meaning in mode {mode!r}.")
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    if method is None and given.keys() - {"trained_length"}:
        raise InvalidParameterError(f"{', '.join(given)}: only with a method.")
    base = base_model(model)
    trained = given.get("trained_length") or trained_length_of(base, already_extended(base.config))
    if trained is None:
        raise InvalidParameterError(
            "The checkpoint's config does not say for how many tokens it was trained; give --trained-length."
        )
    if method is not None and not given.keys() & {"factor", "target_length"} and max(lengths, default=0) > trained:
        given["target_length"] = max(lengths)
    reach, dynamic, regime = _extension(model, method, given, trained)
    chosen = _lengths(mode, lengths, trained, reach, stride)
    _require_reach(model, chosen[-1], reach, dynamic, trained, method)
    return Plan(
        mode=mode,
        trained_length=trained,
        lengths=chosen,
        stride=None if mode == "position" else stride or (STRIDE if mode != "sliding" else max(1, chosen[0] // 8)),
        truncate=truncate,
        method=method,
        arguments=given if method is not None else {},
        dynamic=dynamic,
        regimes={length: regime(length) for length in chosen},
        cached=cached_tokens_for(model, chosen[-1], memory),
        unpatched=unpatched,
    )


def groups_by_positions(plan: Plan) -> dict[int, list[int]]:
    """The lengths of a plan that one pass serves because their positions are the same, by the longest of them."""
    found: dict[int, list[int]] = {}
    for length in plan.lengths:
        found.setdefault(plan.regimes[length], []).append(length)
    return {max(group): group for group in found.values()}


def _extension(
    model: nn.Module, method: str | None, given: Mapping[str, Any], trained: int
) -> tuple[int | None, bool, Callable[[int], int]]:
    """How far the model reaches once extended, whether it is dynamic, and what lengths share their positions."""
    if method is not None:
        ctxext.patch(model, method, **given)
    try:
        base = base_model(model)
        found, patched = ctxext.describe(model), patched_state(base)
        if patched is not None:
            own = patched.method
            return found.target_length, own.dynamic, lambda length: own.regime(trained, length)
        if length_dependent(base):
            return found.target_length, True, lambda length: max(length, trained)
        extended = already_extended(base.config)
        return (found.target_length if extended else None), False, lambda length: 0
    finally:
        if method is not None:
            ctxext.unpatch(model)


def _lengths(mode: str, lengths: Sequence[int], trained: int, reach: int | None, stride: int | None) -> tuple[int, ...]:
    asked = sorted(set(lengths)) or [max(reach or 0, trained)]
    if asked[0] < 2 or (stride is not None and stride < 1):
        raise InvalidParameterError(
            f"A length is at least 2 tokens and a stride at least 1, found length={asked[0]}, stride={stride}."
        )
    if mode != "position":
        return tuple(asked)
    if len(asked) > 1:
        return tuple(sorted({*asked, *({trained} if asked[-1] > trained else ())}))
    inside = min(asked[0], trained)
    beyond = [trained + (asked[0] - trained) * part // PARTS for part in range(1, PARTS + 1)]
    spans = {inside // 4, inside // 2, inside, *(beyond if asked[0] > trained else ())}
    return tuple(sorted(length for length in spans if length >= 2))


def _require_reach(
    model: nn.Module, length: int, reach: int | None, dynamic: bool, trained: int, method: str | None
) -> None:
    """Refuse a length that an extension is not meant for, or that the model has no positions for."""
    if reach is not None and length > reach and not dynamic:
        raise InvalidParameterError(
            f"A length of {length:,} tokens is beyond what the model is extended for: {reach:,}. Raise --factor, or "
            f"ask for a smaller --length."
        )
    if method is None and length > trained:
        architecture_of(base_model(model))
