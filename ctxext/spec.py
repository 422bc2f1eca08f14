"""The nouns that methods, architectures and evaluation share. All frozen, none knows a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError

ScoreForm = Literal["none", "columns", "places", "rows", "own"]
"""Form in which an encoding's term of the scores reaches a kernel: see ``PairScore``."""


@dataclass(frozen=True)
class RopeSpec:
    """Facts about a rotary model that a RoPE method may use.

    Args:
        rotary_dim: number of head dimensions that rotate (not ``head_dim`` when rotary is partial). Even, at least 2.
        base: ``rope_theta``, dimensionless, above 1.
        trained_length: tokens that the unextended checkpoint was trained for, at least 1.
        inv_freq: radians per token that the weights were trained with, one per rotated pair, above 0; None for
            ``base^(-2i/d)``. Llama 3.1 and others were trained with scaled frequencies.
        attention_scale: factor on cos and sin in that training, above 0. The scale that a method returns multiplies
            this one.
    """

    rotary_dim: int
    base: float
    trained_length: int
    inv_freq: tuple[float, ...] | None = None
    attention_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InvalidParameterError(f"rotary_dim must be even and at least 2, found {self.rotary_dim}.")
        if not self.base > 1.0:
            raise InvalidParameterError(f"base (rope_theta) must be above 1, found {self.base}.")
        if self.trained_length < 1:
            raise InvalidParameterError(f"trained_length must be at least 1 token, found {self.trained_length}.")
        if self.inv_freq is not None and len(self.inv_freq) != self.rotary_dim // 2:
            raise InvalidParameterError(
                f"inv_freq must have {self.rotary_dim // 2} numbers (rotary_dim / 2), found {len(self.inv_freq)}."
            )


LLAMA = RopeSpec(rotary_dim=128, base=10000.0, trained_length=4096)
"""Llama 2: the model that most rotary methods were published on, and that examples are made for."""


@dataclass(frozen=True)
class AlibiSpec:
    """Facts about an ALiBi model that a method may use.

    Args:
        num_heads: query heads, at least 1.
        trained_length: tokens that the checkpoint was trained for, at least 1.
        slopes: slopes that the checkpoint was trained with, one per head, positive; None for the ALiBi paper's series.
    """

    num_heads: int
    trained_length: int
    slopes: tuple[float, ...] | None = None


@dataclass(frozen=True)
class BucketSpec:
    """Facts about a model with buckets of relative distances that a method may use.

    Args:
        buckets: number of buckets, both directions together; at least 2.
        max_distance: tokens from which all distances share the last bucket.
        trained_length: tokens that the checkpoint was trained for, at least 1.
    """

    buckets: int
    max_distance: int
    trained_length: int


@dataclass(frozen=True, kw_only=True)
class EncodingSpec:
    """Facts about a model that a method with its own position encoding may use.

    Args:
        hidden_size: width of the states between layers.
        num_heads: query heads.
        num_kv_heads: key heads; divides ``num_heads``.
        head_dim: dimensions of a head of queries and keys.
        num_layers: attention layers.
        trained_length: tokens that the checkpoint was trained for, at least 1.
        embedding_std: standard deviation that token embeddings are initialised with, above 0.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    trained_length: int
    embedding_std: float = 0.02


@dataclass(frozen=True, eq=False)
class Carried:
    """Numbers that an encoding computes for each token from the states of its layer, cached with the keys.

    Args:
        keys: numbers of every key, in the order of the keys: ``heads`` are the queries' or the keys'.
        places: index of the key at which each query stands; one row where all rows of the batch are alike.
        real: mask of the keys that are tokens, not padding; None where all are. Numbers of padding are arbitrary but
            finite.
    """

    keys: Float[Tensor, "batch heads key numbers"]
    places: Int[Tensor, "rows query"]
    real: Bool[Tensor, "rows key"] | None = None

    def of_queries(self, keys: Float[Tensor, "batch heads key numbers"]) -> Float[Tensor, "batch heads query numbers"]:
        """Gather a per-key tensor at the queries' places."""
        places = self.places[:, None, :, None].expand(keys.shape[0], keys.shape[1], -1, keys.shape[3])
        return keys.gather(2, places)

    def without_padding(self, keys: Float[Tensor, "batch heads key numbers"]) -> Tensor:
        """Set a per-key tensor to 0 at padding."""
        return keys if self.real is None else keys * self.real[:, None, :, None]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The queries and keys of one attention call, for whose pairs an encoding has a score.

    Args:
        q: queries, as attention gets them.
        k: keys; ``kv_heads`` divides ``heads``.
        query_positions: tokens from the start of the document; one row where all rows of the batch are alike.
        key_positions: tokens from the start of the document, arbitrary at padding, which is masked.
        scale: factor of attention on ``q . k``.
        visible: function from a slice of the queries to the mask of the keys that each sees, ``[rows, queries, key]``.
        carried: numbers that the encoding caches with the keys; None if it caches none.
        key_documents: number of each key's document, negative at padding; None if all keys are of one document. The
            tokens of a document are adjacent and in order.
    """

    q: Float[Tensor, "batch heads query head_dim"]
    k: Float[Tensor, "batch kv_heads key head_dim"]
    query_positions: Int[Tensor, "rows query"]
    key_positions: Int[Tensor, "rows key"]
    scale: float
    visible: Callable[[slice], Tensor]
    carried: Carried | None = None
    key_documents: Int[Tensor, "rows key"] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the scores: float32, or float64 for queries in float64."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def like_scores(self, weight: Tensor) -> Tensor:
        """Convert a weight to the queries' device and the scores' dtype."""
        return weight.to(self.q.device, self.dtype)

    def distances(self, queries: slice) -> Int[Tensor, "rows queries key"]:
        """Return the distance in tokens from each of these queries back to each key, at least 0."""
        return (self.query_positions[:, queries, None] - self.key_positions[:, None, :]).clamp(min=0)


class PairScore(ABC):
    """Term that an encoding adds to the scaled product of every query and key.

    Attention computes the term for a few queries at a time, so that it is never stored for all pairs, and computes it
    again in the backward pass.

    Attributes of every score:
        weights: parameters of the term, which get gradients from attention.
        floats: numbers per pair that ``rows`` holds while it computes, all heads together.
        reads_all: True if a query needs all tokens before it; the cache of a sliding window keeps the last ones only.
        far_from: distance in tokens, at least 1, from which on all keys of a query get the same; None if there is none.
    """

    weights: tuple[Tensor, ...]
    floats: int
    reads_all: bool = False
    far_from: int | None = None

    @abstractmethod
    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        """Compute the term for these queries, in float32 or float64; one row where all rows of the batch are alike."""

    def columns(self) -> tuple[Tensor, Tensor]:
        """Factor the term into ``query . key`` of a few more dimensions, ``[rows, heads or 1, seq, n]``.

        The product may differ from the term by a constant per query, which a softmax cancels. Only terms of low rank
        have this form.
        """
        raise NotImplementedError

    def above_far(self) -> Float[Tensor, "rows heads queries distances"]:
        """Return near keys' surplus over far keys, for distances below ``far_from``; one query where all are alike."""
        raise NotImplementedError

    def places(self) -> tuple[Float[Tensor, "batch heads query"], Float[Tensor, "batch heads key"]]:
        """Split the term into the place of the query minus the place of the key, in float64, where it has this form.

        A place is one number per head and token, such as a cumulative distance.
        """
        raise NotImplementedError


class OwnAttention(PairScore):
    """Attention that is no softmax of scores: the encoding computes the weights of the values itself."""

    reads_all = True

    @abstractmethod
    def weights_of(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        """Compute the weights of the values for these queries by definition, in float32 or float64; 0 where masked."""

    @abstractmethod
    def attend(self, v: Float[Tensor, "batch kv_heads key head_dim"]) -> Float[Tensor, "batch heads query head_dim"]:
        """Multiply the weights by the values without storing the weights, in the queries' dtype."""

    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Frequencies:
    """Result of a RoPE method: the frequencies and the scale of the rotation.

    Args:
        inv_freq: radians per token, float64, one entry per rotated pair of dimensions.
        attention_scale: multiplies cos *and* sin, so attention scores grow by its square. Dimensionless.
    """

    inv_freq: Float[Tensor, " half"]
    attention_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PositionMap:
    """Another position for each token: ``min(floor((p mod period) / group) * scale + offset, ceiling)``.

    The default changes nothing. Where ``group`` or ``offset`` is a tuple, every frequency has a position of its own.

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
        """Compute positions in float64: ``[seq]``, or ``[seq, frequencies]`` where each frequency has its own."""
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
    def holds(self, query: Int[Tensor, "*queries"], key: Int[Tensor, "*keys"]) -> Bool[Tensor, "*pairs"]:
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

    def holds(self, query: Int[Tensor, "*queries"], key: Int[Tensor, "*keys"]) -> Bool[Tensor, "*pairs"]:
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

    def holds(self, query: Int[Tensor, "*queries"], key: Int[Tensor, "*keys"]) -> Bool[Tensor, "*pairs"]:
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

    def holds(self, query: Int[Tensor, "*queries"], key: Int[Tensor, "*keys"]) -> Bool[Tensor, "*pairs"]:
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

    def holds(self, query: Int[Tensor, "*queries"], key: Int[Tensor, "*keys"]) -> Bool[Tensor, "*pairs"]:
        whole = replace(self.of, skip=0) if isinstance(self.of, Band) else self.of
        return (key > query) & whole.holds(key, query)

    def __str__(self) -> str:
        return f"ahead of the query, {self.of}"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of attention in which queries and keys stand at positions of its own.

    Args:
        region: pairs of a query and a key that the piece serves.
        query: positions of the queries.
        key: positions of the keys.
        weight: factor on the exponential of each score of the piece, which weighs its keys against those of other
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


PIECE = "Piece"  # begins the notes that say which keys a remapping reads where


@dataclass(frozen=True, kw_only=True)
class Description:
    """Report of ``ctxext.describe`` on a model; ``str()`` and ``repr()`` give it as text.

    Args:
        model_type: transformers' name of the architecture.
        method: ``Method.to_dict()`` of the extension, None where the model is not extended.
        trained_length: tokens that the unextended checkpoint was trained for, None where nothing says so.
        target_length: tokens that the model is meant for now.
        stored_as: Form in which the config expresses the extension.
        stock: True if a process without ctxext loads the same model.
        fingerprint: 12 hexadecimal digits of a hash of the frequencies.
        attention: attention backend that serves the model, and why others do not; empty where it keeps its own.
        notes: sentences that a user must know.
        edits: attributes of this model that ctxext changed; empty for a model loaded already extended.
        sides: For an encoder-decoder that is extended, each side's name and its own description. The lengths are then
            those of the text that is read (of the decoder, where the encoder is not extended), and ``method`` has each
            side's method under its name.
        verbose: True if the text also names the pieces, the fingerprint, the backends passed over, and what was edited.
    """

    model_type: str
    method: dict[str, Any] | None
    trained_length: int | None
    target_length: int | None
    stored_as: str = ""
    stock: bool = True
    fingerprint: str = ""
    attention: str = ""
    notes: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    sides: tuple[tuple[str, Description], ...] = ()
    verbose: bool = field(default=False, compare=False)

    def __repr__(self) -> str:  # what an interactive session shows
        return str(self)

    def __str__(self) -> str:
        if self.method is None:
            reach = "its config names no length" if self.target_length is None else f"{self.target_length} tokens"
            lines = [f"{self.model_type}: not extended by ctxext, {reach}"]
            return "\n".join([*lines, *(f"  note         {note}" for note in self.notes)])
        loads = f"  loads with   {'plain transformers' if self.stock else 'ctxext.load only, in transformers'}"
        if self.sides:
            lines = [f"{self.model_type}: an encoder-decoder, {len(self.sides)} of its 2 sides extended"]
            lines += [f"{name}: {side}" for name, side in self.sides]
            lines += [f"{self.model_type} as a whole", loads]
        else:
            given = {key: value for key, value in self.method.items() if self.verbose or value is not None}
            parameters = ", ".join(f"{key}={_short(value)}" for key, value in given.items() if key != "method")
            lines = [
                f"{self.model_type} extended by {self.method['method']} ({parameters})",
                f"  length       {self.trained_length} -> {self.target_length} tokens",
                f"  stored as    {self.stored_as}",
                loads,
            ]
        lines += [f"  fingerprint  {self.fingerprint}"] if self.verbose and not self.sides else []
        attention = self.attention if self.verbose else self.attention.partition(" (")[0]
        lines += [f"  attention    {attention}"] if attention else []
        lines += [f"  note         {note}" for note in self.notes if self.verbose or not note.startswith(PIECE)]
        lines += [f"  edited       {', '.join(self.edits)}"] if self.verbose and self.edits else []
        return "\n".join(lines)


def _short(value: object) -> str:
    return f"<{len(value)} values>" if isinstance(value, list) and len(value) > 4 else repr(value)


@dataclass(frozen=True, kw_only=True)
class ExtensionArguments:
    """The arguments of ``ctxext.patch``, whose docstring explains them, as the user wrote them.

    Nothing is checked here: each value is checked where it is used, with a sentence. An architecture gets them with the
    method itself, with the trained length that the user or else the config says (None where neither does), and with the
    scaling that is extended or replaced.
    """

    method: Any
    parameters: dict[str, Any] = field(default_factory=dict)
    factor: Any = None
    target_length: Any = None
    trained_length: Any = None
    sliding_window: Any = None
    scaling: Any = None
    attention: Any = None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Record of the changes that an architecture made to a model; the journal can undo them.

    Args:
        stored_as: one line: how the config expresses the method.
        stock: True if a process without ctxext loads the same model.
        fingerprint: 12 hexadecimal digits of a hash of the frequencies at ``target_length``.
        notes: sentences that a user must know before relying on the model.
        sliding_window: the user's choice for a sliding window, see ``ctxext.patch``.
        scaling: Fate of a scaling that the checkpoint had, "extend" or "replace"; None where it had none.
        attention: the attention backend asked for, where the method needs one of ctxext's; else None.
        original: the config fields that were changed, as they were.
    """

    trained_length: int
    target_length: int
    stored_as: str
    stock: bool
    fingerprint: str
    notes: tuple[str, ...] = field(default=())
    sliding_window: str | None = None
    scaling: str | None = None
    attention: str | None = None
    original: dict[str, Any] = field(default_factory=dict)
