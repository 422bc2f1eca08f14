"""The contract of position remapping: distant pairs of tokens get relative positions that the model knows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.parameters import MOST_TOKENS, Range, require
from ctxext.spec import Frequencies, RopeSpec

Tokens = Range(above=0, most=MOST_TOKENS)
"""A number of tokens, or below 1 a share of the trained length, which ``tokens_of`` converts to tokens."""

QueryPositions = Int[Tensor, "*queries"]
KeyPositions = Int[Tensor, "*keys"]
PairMask = Bool[Tensor, "*pairs"]


@dataclass(frozen=True, kw_only=True)
class PositionMap:
    """Another position for each token: ``min(floor((p mod period) / group) * scale + offset, ceiling)``.

    The default changes nothing. Where ``group`` or ``offset`` is a tuple, positions differ by frequency.

    Args:
        period: tokens after which positions begin again at 0; None for never.
        group: neighbouring tokens that share a position, at least 1; or one number per frequency, fastest first.
        scale: positions that one group counts for, at least 0; 0 puts all tokens at ``offset``.
        offset: positions to add; or one number per frequency.
        ceiling: the largest position; None for no limit.
    """

    period: int | None = None
    group: int | tuple[int, ...] = 1
    scale: float = 1.0
    offset: float | tuple[float, ...] = 0.0
    ceiling: float | None = None

    @property
    def changes_nothing(self) -> bool:
        """True if every token keeps its position."""
        return self == PositionMap()

    def __call__(self, positions: Int[Tensor, " seq"]) -> Tensor:
        """Compute positions in float64: ``[seq]``, or ``[seq, frequencies]`` where they differ by frequency."""
        place = positions if self.period is None else positions % self.period
        if isinstance(self.group, tuple) or isinstance(self.offset, tuple):
            place = place[:, None]
        group, offset = self.group, self.offset  # a number stays one: on CUDA a tensor of it is a copy from the host
        by = torch.tensor(group, dtype=torch.long, device=place.device) if isinstance(group, tuple) else group
        more = torch.tensor(offset, dtype=torch.float64, device=place.device) if isinstance(offset, tuple) else offset
        mapped = torch.div(place, by, rounding_mode="floor").double() * self.scale + more
        return mapped if self.ceiling is None else mapped.clamp(max=self.ceiling)


class Region(ABC):
    """Set of pairs of a query and a key that a piece of attention serves.

    The key is at or before the query, except in ``Ahead``.
    """

    @abstractmethod
    def holds(self, query: QueryPositions, key: KeyPositions) -> PairMask:
        """Return the mask of the pairs that belong to the region; the positions broadcast against each other."""


@dataclass(frozen=True)
class Band(Region):
    """Keys that lie at least ``start`` and less than ``stop`` tokens back (None: to the beginning of the text).

    Queries before position ``plain_before`` are plain: the band that begins at 0 holds all their keys, other bands hold
    none. For later queries a band leaves out the first ``skip`` keys of the text.
    """

    start: int = 0
    stop: int | None = None
    plain_before: int = 0
    skip: int = 0

    def holds(self, query: QueryPositions, key: KeyPositions) -> PairMask:
        back = query - key
        inside = (back >= self.start) & (key >= self.skip)
        inside = inside if self.stop is None else inside & (back < self.stop)
        is_plain = query < self.plain_before
        return torch.where(is_plain, (back >= 0) & (self.start == 0), inside)

    def __str__(self) -> str:
        late = f" of queries from {self.plain_before:,} on" if self.plain_before else ""
        late += f", but for the first {self.skip} of the text" if self.skip else ""
        if self.stop is None:
            return f"keys {self.start:,} or more tokens back{late}" if self.start else "all keys"
        near = f"keys less than {self.stop:,} tokens back" + (f", at least {self.start:,}" if self.start else "")
        if self.start:
            return near + late
        return near + (f", and all keys of queries before {self.plain_before:,}" if self.plain_before else "")


@dataclass(frozen=True)
class Chunks(Region):
    """Keys of the chunk of ``size`` tokens that is ``back`` chunks before the query's, and of all ``older`` ones."""

    size: int
    back: int
    older: bool = False

    def holds(self, query: QueryPositions, key: KeyPositions) -> PairMask:
        apart = torch.div(query, self.size, rounding_mode="floor") - torch.div(key, self.size, rounding_mode="floor")
        return (key <= query) & ((apart >= self.back) if self.older else (apart == self.back))

    def __str__(self) -> str:
        which = ("the same chunk", "the chunk before")[self.back] if self.back < 2 else f"{self.back} chunks before"
        return f"keys of {which} of {self.size:,} tokens" + (" or older ones" if self.older else "")


@dataclass(frozen=True)
class Sinks(Region):
    """The first ``count`` keys of the text, where they lie at least ``start`` tokens back.

    For queries before position ``plain_before`` the region is empty.
    """

    count: int
    start: int
    plain_before: int = 0

    def holds(self, query: QueryPositions, key: KeyPositions) -> PairMask:
        return (key < self.count) & (query - key >= self.start) & (query >= self.plain_before)

    def __str__(self) -> str:
        late = f" of queries from {self.plain_before:,} on" if self.plain_before else ""
        return f"the first {self.count} keys, where they lie {self.start:,} or more tokens back{late}"


@dataclass(frozen=True)
class Ahead(Region):
    """Keys after their query, where the region ``of`` holds the pair with query and key exchanged.

    The first keys of a text are ahead of no far query, so ``skip`` of a band leaves none of them out.
    """

    of: Region

    def holds(self, query: QueryPositions, key: KeyPositions) -> PairMask:
        whole = replace(self.of, skip=0) if isinstance(self.of, Band) else self.of
        return (key > query) & whole.holds(key, query)

    def __str__(self) -> str:
        return f"ahead of the query, {self.of}"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of attention in which queries and keys have other positions.

    Args:
        region: pairs of a query and a key that the piece serves.
        query: positions of the queries.
        key: positions of the keys.
        weight: factor on the exponential of each score of the piece, which weighs its keys against the keys of other
            pieces. Above 0.
    """

    region: Region
    query: PositionMap = PositionMap()
    key: PositionMap = PositionMap()
    weight: float = 1.0

    @property
    def ahead(self) -> Piece | None:
        """Piece of the same pairs of tokens with query and key exchanged, for tokens that see both ways.

        A relative position keeps its size and changes its sign. None for ``Sinks``: no first token of a text is ahead.
        """
        if isinstance(self.region, Sinks):
            return None
        return replace(self, region=Ahead(self.region), query=self.key, key=self.query)


@dataclass(frozen=True, kw_only=True)
class RemapMethod(RopeMethod):
    """A method that leaves the frequencies as they are and gives distant pairs of tokens other relative positions.

    Near pairs keep theirs, so that a text inside the trained window is computed as before or nearly so, without
    training. Attention is computed by ctxext, in pieces. The positions of a token depend on its place alone, not on the
    length of the text: a cache stays right, and later tokens change nothing before them.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: sharpening of attention. "none"; "logn" multiplies the scores of the query at position i by
            max(1, ln(i + 1) / ln(trained_length)) (Su, kexue.fm/8823), where i is the last position of the text if
            tokens see both ways; "yarn" multiplies all scores by (0.1 ln(factor) + 1)^2 (arXiv:2309.00071, section
            3.4), inside the trained window too; "growing" does so with (i + 1) / trained_length for the factor, beyond
            the trained window only.
    """

    temperature: Literal["none", "logn", "yarn", "growing"] = "none"

    @property
    def is_table(self) -> bool:
        return False

    @abstractmethod
    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        """Return the pieces of attention for texts of up to ``length`` tokens, nearest keys first.

        The regions of the pieces do not overlap. A pair of tokens outside all regions is masked. Pieces are of keys at
        or before their query; ``Piece.ahead`` has those after it, where tokens see both ways.

        Raises:
            InvalidParameterError: if the parameters do not fit the trained length, or cannot reach ``length`` with
                relative positions that the model knows; the message names the largest length that works.
        """

    def parts(self, rope: RopeSpec, length: int) -> tuple[tuple[object, ...], ...]:
        """Return all that decides its attention for texts of up to ``length`` tokens, for a fingerprint."""
        return ((self.pieces(rope, length), self.temperature),)

    def sharpness(self, rope: RopeSpec, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"] | None:
        """Compute the factor on the scores of the queries at these positions, in float64; None without temperature."""
        if self.temperature == "none":
            return None
        if self.temperature == "yarn":
            return torch.full_like(positions, (0.1 * math.log(self.factor) + 1) ** 2, dtype=torch.float64)
        if self.temperature == "growing":
            stretch = ((positions + 1).double() / rope.trained_length).clamp(min=1.0)
            return (0.1 * stretch.log() + 1).square()
        return ((positions + 1).double().log() / math.log(rope.trained_length)).clamp(min=1.0)

    def exact_length(self, rope: RopeSpec) -> int:
        """Return the length in tokens up to which every pair keeps its relative position.

        A call whose tokens all lie before that length gives the unextended model's bits, temperature apart, with a
        cache too. In a cache that was longer and was cropped, keys were rotated back: values are equal up to rounding.
        """
        nearest = self.pieces(rope, self.target_length(rope.trained_length))[0].region
        return max(nearest.stop or 0, nearest.plain_before) if isinstance(nearest, Band) else 0

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(plain_inv_freq(rope))


def near_and_far(window: int, rope: RopeSpec, *, exact: bool) -> tuple[Band, Band]:
    """Return two regions: keys less than ``window`` tokens back, and all other keys.

    Args:
        window: tokens.
        rope: the model's rotation.
        exact: True if all keys of a query inside the trained window are near: no key there is farther back than any
            was in training.
    """
    plain_before = rope.trained_length if exact else 0
    return Band(0, window, plain_before), Band(window, None, plain_before)


def tokens_of(parameter: str, value: float, rope: RopeSpec, *, most: int) -> int:
    """Convert a parameter to tokens: a value below 1 is a share of the trained length.

    Raises:
        InvalidParameterError: unless the result is from 1 to ``most`` tokens.
    """
    tokens = math.floor(value * rope.trained_length) if 0 < value < 1 else value
    expected = (
        f"from 1 to {most:,} tokens (the checkpoint was trained for {rope.trained_length:,}), or a share of the "
        f"trained length that comes to as many"
    )
    require(tokens == int(tokens) and 1 <= tokens <= most, parameter, value, expected)
    return int(tokens)


def require_reach(name: str, length: int, longest: int, remedy: str) -> None:
    """Raise ``InvalidParameterError`` if ``length`` is above the ``longest`` that a method's parameters reach."""
    if length > longest:
        raise InvalidParameterError(
            f"Method {name!r} with these parameters reaches {longest:,} tokens, found a target of {length:,}. Beyond "
            f"its reach, keys would be farther away than any were in training. {remedy}"
        )
