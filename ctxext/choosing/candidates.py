"""The candidates: every formula, some ways to remap positions, and three families of numbers.

A grid over the four numbers of YaRN is the heart of it. Its published thresholds (1 and 32 turns), its factor and its
temperature are one point among many, and models differ in which point suits them; each point is a ``yarn`` dictionary
that plain transformers loads. Another family is NTK up to a critical dimension (LongRoPE2), a ``longrope`` one. The
last is how many heads read far, and what the others see.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from jaxtyping import Float
from torch import Tensor

from ctxext.files import JsonObject
from ctxext.measuring.readings import TIMES, Reading, ignores_factor, label_for
from ctxext.methods import METHODS, Method, RopeMethod, saved_class
from ctxext.methods.formulas import index_that_turns, plain_inv_freq
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.remap import RemapMethod
from ctxext.methods.retrieval_heads import SHARE, RetrievalHeads
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec

# Share of the key-value groups that read far, and the window of the others, as a share of the trained length. The
# first of each is the default, which is among the formulas.
SHARES = (SHARE, 0.1, 0.4)
NEAR_WINDOWS = (RetrievalHeads.window, 0.5)
# How much further than asked a formula is also tried: some need it to hold to their target.
FURTHER = 1.5
# One of each kind: groups of tokens, for all heads or for a few, one distance for all that is far, chunks. The other
# ones are kin of the last, or see no old text at all.
REMAPS = ("self_extend", "retrieval_heads", "rerope", "dual_chunk")
# The grid: turns from which a frequency is divided in full; the ratio to those from which it is kept (the smallest is a
# step, whose ends round to neighbouring dimensions); the divisor, as a share of the factor; and the share of YaRN's
# temperature.
SLOW = (1.0, 0.5, 2.0)
RATIOS = (32.0, 4.0, 1.001)
STRETCHES = (1.0, 0.75, 1.5)
TEMPERATURES = (1.0, 0.5, 0.0)
# The critical dimension is looked for between the one that turned so often in training and the one that turned once.
CRITICAL_TURNS, CRITICAL = 10.0, 4


def candidates(factor: float, rope: RopeSpec) -> tuple[RopeMethod, ...]:
    """Return all methods that are tried; the first is YaRN as published, which the others are compared with."""
    formulas = [
        cls(factor=factor)
        for name, cls in METHODS.items()
        if issubclass(cls, RopeMethod)
        and not (cls.needs_training or cls.required())
        and (name in REMAPS or not issubclass(cls, RemapMethod))
    ]
    further = [
        replace(method, factor=factor * FURTHER)
        for method in formulas
        if not method.dynamic and not isinstance(method, RemapMethod) and not ignores_factor(method)
    ]
    heads = [
        RetrievalHeads(factor=factor, share=share, window=window)
        for share, window in itertools.product(SHARES, NEAR_WINDOWS)
    ]
    # Of two equal methods the first stays, so methods made for the target come before methods made for more.
    numbers = [*grid(factor), *critical(factor, rope)]
    return tuple(dict.fromkeys([YaRN(factor=factor), *formulas, *heads[1:], *numbers, *further]))


def grid(factor: float) -> list[YaRN]:
    """Return YaRN at every point of the grid where it divides by 1 or more, in a form that llama.cpp reads too.

    The ends of its ramps are rounded to whole dimensions, as published, so that several points may be the same on a
    model that has few of them; ``distinct`` joins those.
    """
    return [
        YaRN(
            factor=factor,
            beta_slow=slow,
            beta_fast=slow * ratio,
            divisor=None if stretch == 1 else stretch * factor,
            attention_factor=None if share == 1 else round(1 + share * 0.1 * math.log(stretch * factor), 6),
        )
        for slow, ratio, stretch, share in itertools.product(SLOW, RATIOS, STRETCHES, TEMPERATURES)
        if stretch * factor >= 1
    ]


def critical(factor: float, rope: RopeSpec) -> list[LongRoPE]:
    """Return NTK up to a critical dimension, at two scales: divided by the factor from there, by powers of it before.

    High dimensions completed few turns in training, so they are trained worse than expected: the dimension from which
    a frequency must be divided in full may lie below the one that turned once. Its place differs by model.

    Source: Shang et al., arXiv:2502.20082, section 3.2 and table 5 (NTK-rcd). Authors' code for the first point of
        their search: J-shang/LongRoPE@61de922, evolution/algorithms/dim_mono.py.
    """
    if rope.rotary_dim <= 2:
        return []
    first, last = (math.ceil(index_that_turns(rope, turned)) for turned in (CRITICAL_TURNS, 1.0))
    half = rope.rotary_dim // 2
    first, last = (min(max(at, 1), half - 1) for at in (first, last))
    places = {round(first + (last - first) * step / (CRITICAL - 1)) for step in range(CRITICAL)}
    scales = [1.0]
    if rope.trained_length > 1:  # and LongRoPE's own
        scales.append(round(math.sqrt(1 + math.log(factor) / math.log(rope.trained_length)), 6))
    return [
        LongRoPE(factor=factor, short_factor=divisors, long_factor=divisors, attention_factor=scale)
        for divisors in (_critical_divisors(factor, place, half) for place in sorted(places))
        for scale in scales
    ]


def _critical_divisors(factor: float, place: int, half: int) -> tuple[float, ...]:
    return tuple(factor ** min(1.0, index / place) for index in range(half))


def short_label(method: Method) -> str:
    """Name a candidate briefly: one of the grid by the turns between which its ramp lies, its divisor and its scale."""
    if isinstance(method, RetrievalHeads) and isinstance(method.heads, tuple):
        count = f"{len(method.heads)} group" + "s" * (len(method.heads) > 1)
        rest = label_for(replace(method, heads=None))
        return f"{rest[:-1]}, {count} far)" if rest.endswith(")") else f"{rest} ({count} far)"
    if isinstance(method, LongRoPE):
        divisors = method.long_factor
        place = next((at for at, divisor in enumerate(divisors) if at and divisor >= method.factor), 0)
        if place and divisors == _critical_divisors(method.factor, place, len(divisors)):
            scale = f"scale {method.attention_factor:.4g}"
            return f"LongRoPE2 {TIMES}{method.factor:.4g} (critical dimension {place}, {scale})"
    if not isinstance(method, YaRN) or method == YaRN(factor=method.factor):
        return label_for(method)
    ratio = method.beta_fast / method.beta_slow
    ramp = f"step at {method.beta_slow:g}" if ratio < 1.1 else f"{method.beta_slow:g}-{method.beta_fast:g}"
    return f"YaRN {TIMES}{method.factor:.4g} ({ramp}, by {method.stretch:.4g}, scale {method.attention_scale:.4g})"


def distinct(readings: Iterable[Reading]) -> tuple[list[Reading], dict[str, tuple[str, ...]]]:
    """Return the readings whose frequencies differ, and by the name of each, the names of the readings equal to it.

    A dynamic method with the same frequencies at the target as a static method is left out.
    """
    kept: dict[str, Reading] = {}
    twins: dict[str, tuple[str, ...]] = {}
    for reading in readings:
        first = kept.setdefault(reading.fingerprint, reading)
        if first is not reading:
            twins[first.name] = (*twins.get(first.name, ()), reading.name)
    return list(kept.values()), twins


@dataclass(frozen=True, eq=False, kw_only=True)
class CandidateReach:
    """Reach of a method: how it stretches the positions that are new beyond the trained window.

    Args:
        slow: frequencies, in radians per token, of the dimensions that did not complete a turn in training. None where
            losses inside the window say nothing about those beyond: positions follow the length, or are remapped.
        stretch: geometric mean of the divisors of those frequencies; one that is stopped has no divisor.
        far: distance of ``stretch`` from the wanted factor, as a logarithm.
    """

    slow: Float[Tensor, " slow"] | None = None
    stretch: float = 1.0
    far: float = 0.0
    dynamic: bool = False

    @classmethod
    def of(cls, method: Method, rope: RopeSpec, length: int) -> CandidateReach:
        """Return the reach of a method on a model whose trained frequencies are ``rope``, at the target length."""
        if not isinstance(method, RopeMethod) or not method.is_table:
            return cls(dynamic=method.dynamic)
        plain = plain_inv_freq(rope)
        is_new = plain * rope.trained_length < 2 * math.pi
        frequencies = method.frequencies(rope, length).inv_freq
        if not is_new.any():  # every dimension turned in training: the slowest one represents new angles
            is_new[plain.argmin()] = True
        turning = is_new & (frequencies > 0)
        stretch = (plain / frequencies)[turning].log().mean().exp().item()
        far = abs(math.log(stretch / (length / rope.trained_length)))
        return cls(slow=frequencies[is_new], stretch=stretch, far=far)

    @property
    def is_judged_inside(self) -> bool:
        """True where losses inside the window say anything about the method."""
        return self.slow is not None

    def covers(self, other: CandidateReach) -> bool:
        """Return whether every new frequency is at least as slow as under another method.

        The factor does not say that: of NTK and YaRN with the same factor, YaRN reaches further.
        """
        if self.slow is None or other.slow is None:
            return False
        return bool((self.slow <= other.slow * (1 + 1e-6)).all())


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An extension that is tried.

    Args:
        twins: names of other readings with the same frequencies at the target, which are not read themselves.
    """

    reading: Reading
    reach: CandidateReach
    twins: tuple[str, ...] = ()

    @classmethod
    def of(cls, reading: Reading, rope: RopeSpec, length: int, twins: Mapping[str, tuple[str, ...]]) -> Candidate:
        """Return the candidate of a reading; see ``CandidateReach.of``, and ``distinct`` for the twins by name."""
        reach = CandidateReach.of(_method_of(reading), rope, length)
        return cls(reading=reading, reach=reach, twins=twins.get(reading.name, ()))

    @property
    def method(self) -> Method:
        """The method object."""
        return _method_of(self.reading)

    @property
    def label(self) -> str:
        """A short name to show."""
        return short_label(self.method)

    @property
    def stretch(self) -> float | None:
        """The divisor of the frequencies that are new beyond the window; None where it is not judged inside."""
        return self.reach.stretch if self.reach.is_judged_inside else None

    def to_dict(self, course: JsonObject) -> JsonObject:
        """Return plain JSON values, including the values of the candidate's course."""
        reading = asdict(self.reading)
        about = {"twins": self.twins, "stretch": self.stretch, "label": self.label}
        return {"reading": reading, "course": course, "method": self.reading.method} | about


def _method_of(reading: Reading) -> Method:
    assert reading.method is not None, "a candidate is an extension"
    return saved_class(reading.method["method"]).from_dict(reading.method)
