"""Layout: the positions and documents of the queries and keys of a call, which alone decide the visible pairs.

A query sees a key iff both are tokens of the same document and the key's position is not after the query's. In an
encoder (``sees="both"``) any position will do::

    visible(i, j) = key_documents[j] >= 0
                    and key_documents[j] == query_documents[i]
                    and (sees == "both" or key_positions[j] <= query_positions[i])
                    and (window is None or distance(i, j) < window)

    distance(i, j) = query_positions[i] - key_positions[j], without its sign where sees == "both"

A negative document marks a slot without a token: padding, or an unfilled slot of a static cache. This one rule covers
left and right padding, packing, dynamic and static caches, chunked prefill and permuted shards. A query that sees
nothing gets zeros, in the output and in the gradient.

An example: two documents of 3 and 2 tokens, packed and padded to 6 slots, have::

    positions  0 1 2 0 1 0
    documents  0 0 0 1 1 -1          query 4 sees keys 3 and 4; query 5 and key 5 see nothing and are seen by nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.kernels.spans import (
    Extent,
    PerKey,
    PerQuery,
    find_spans,
    require_counted,
    require_distinct,
    require_no_hole,
)

T = TypeVar("T")


class Span(NamedTuple):
    """A block of plain attention, inside which the last query is at the last key, as kernels assume.

    It holds rows ``rows`` of the batch, queries ``query`` and keys ``key``, each as (start, stop). With Q queries and
    K >= Q keys in the block, query ``i`` sees exactly keys ``0 .. K - Q + i`` of the block (all of them if tokens see
    both ways), and no key outside.
    """

    rows: Extent
    query: Extent
    key: Extent

    def covers(self, *sizes: int) -> bool:
        """Return whether the block is all of ``sizes``: rows, queries and keys."""
        # One by one: to compare tuples, dynamo of torch 2.11 fixes the sizes in them, and compiles each length again.
        return all(start == 0 and stop == size for (start, stop), size in zip(self, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions and documents of queries and keys. Build it once per forward; all layers share it.

    Use a constructor: ``causal``, ``padded``, ``packed``, ``cached``, ``shard``; ``of`` for anything else.

    Args:
        query_positions: ``[batch, query]``, tokens from the start of the document, at least 0 for a token.
        key_positions: ``[batch, key]``, counted in the same way.
        query_documents: ``[batch, query]`` ids, negative for padding. None: everything is document 0.
        key_documents: ``[batch, key]``; given iff ``query_documents`` is.
        spans: the same information as blocks of plain attention, if it has that form and the host knows it.
        consecutive: True if positions step by exactly one inside every span.
        from_zero: True if the host knows that the first key of every span is at position 0.
        external_causality: True if an engine around the kernel (context parallelism) decides the visible pairs.
        sees: ``"past"``: a token sees itself and earlier tokens; ``"both"``: later tokens as well.
    """

    query_positions: PerQuery
    key_positions: PerKey
    query_documents: PerQuery | None = None
    key_documents: PerKey | None = None
    spans: tuple[Span, ...] | None = None
    consecutive: bool = False
    from_zero: bool = False
    external_causality: bool = False
    sees: Literal["past", "both"] = "past"
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def causal(
        cls, batch: int, query: int, key: int | None = None, *, device: torch.device | str | None = None
    ) -> Layout:
        """Return the usual layout: one document per row and the last query at the last key.

        Args:
            key: number of keys, at least ``query``; None means as many.

        Raises:
            InvalidParameterError: if there are fewer keys than queries.
        """
        key = query if key is None else key
        if key < query:
            raise InvalidParameterError(f"Causal attention needs at least one key per query, found {key} for {query}.")
        positions = torch.arange(key, device=device).expand(batch, key)
        span = Span((0, batch), (0, query), (0, key))
        return cls(positions[:, key - query :], positions, spans=(span,), consecutive=True, from_zero=True)

    @classmethod
    def padded(cls, keep: Tensor, *, query: int | None = None, analyse: bool = True) -> Layout:
        """Return a layout of one document per row with padding on the left, on the right, or both.

        Positions count real tokens, so a row's result does not depend on its padding.

        Args:
            keep: bool ``[batch, key]``, True where the key is a token. The queries are the last ``query`` slots.
            query: number of queries; None means all.

        Raises:
            InvalidParameterError: if ``keep`` has a hole (pass explicit positions to ``of`` instead), or is not a
                two-dimensional bool tensor.
        """
        if keep.dtype != torch.bool or keep.ndim != 2:
            raise InvalidParameterError(
                f"keep must be a bool tensor [batch, key], found {keep.dtype} {tuple(keep.shape)}. "
                "A float mask is a bias. Pass what it encodes: keep, documents or a window."
            )
        key = keep.shape[1]
        query = key if query is None else query
        if not 0 < query <= key:
            raise InvalidParameterError(f"query must be between 1 and the number of keys {key}, found {query}.")
        if analyse and not torch.compiler.is_compiling():
            require_no_hole("keep", keep, "Call Layout.of with explicit positions.")
        positions = (keep.long().cumsum(1) - 1).clamp(min=0)
        documents = keep.long() - 1
        return cls.of(positions[:, -query:], positions, documents[:, -query:], documents, analyse=analyse)

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        queries: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> Layout:
        """Return a layout of one row with several documents, one after the other, each starting at position 0.

        Args:
            lengths: tokens per document, each at least 1 (the differences of ``cu_seqlens``).
            queries: queries per document, its newest tokens, at least 1; None for all.
            keys: keys per document, its newest tokens, at least as many as its queries; None for all.

        Raises:
            InvalidParameterError: if a document or its queries are empty, none is given, or the counts do not fit.
        """
        if not lengths or min(lengths) < 1:
            raise InvalidParameterError(f"lengths must be at least one positive integer each, found {list(lengths)}.")
        counts = [list(lengths if side is None else side) for side in (queries, keys)]
        alike = len(lengths) == len(counts[0]) == len(counts[1])
        if not alike or not all(0 < q <= k <= n for q, k, n in zip(*counts, lengths, strict=True)):
            found = f"found {counts[0]}, {counts[1]}, {list(lengths)}"
            raise InvalidParameterError(f"Each document needs 0 < queries <= keys <= length, {found}.")

        def tokens(counts: list[int]) -> tuple[Tensor, Tensor]:
            """Return positions and documents of the newest tokens of each document."""
            newest = [torch.arange(n - count, n, device="cpu") for n, count in zip(lengths, counts, strict=True)]
            documents = torch.arange(len(lengths), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
            return torch.cat(newest)[None].to(device), documents[None].to(device)

        qp, qd = tokens(counts[0])
        kp, kd = (qp, qd) if counts[0] == counts[1] else tokens(counts[1])
        places = (pairwise(accumulate(side, initial=0)) for side in counts)
        spans = tuple(Span((0, 1), query, key) for query, key in zip(*places, strict=True))
        return cls(qp, kp, qd, kd, spans=spans, consecutive=True, from_zero=counts[1] == list(lengths))

    @classmethod
    def cached(
        cls, batch: int, query: int, key: int, *, filled: int, device: torch.device | str | None = None
    ) -> Layout:
        """Return the layout of a static cache: ``key`` slots, ``filled`` of them tokens, the last ``query`` new.

        Raises:
            InvalidParameterError: unless ``query <= filled <= key``.
        """
        if not 0 < query <= filled <= key:
            raise InvalidParameterError(f"Need 0 < query <= filled <= key, found {query}, {filled}, {key}.")
        slots = torch.arange(key, device=device).expand(batch, key)
        documents = torch.where(slots < filled, 0, -1)
        positions = torch.arange(filled - query, filled, device=device).expand(batch, query)
        span = Span((0, batch), (0, query), (0, filled))
        queries = torch.zeros_like(positions)
        return cls(positions, slots, queries, documents, spans=(span,), consecutive=True, from_zero=True)

    @classmethod
    def shard(cls, positions: PerQuery) -> Layout:
        """Return the layout of a shard in a sequence-parallel run whose engine applies causality itself.

        Only the ALiBi term uses ``positions`` (global, any order). The kernel is called as plainly causal, without a
        mask, as torch's context parallelism and Ulysses expect.
        """
        batch, length = positions.shape
        span = Span((0, batch), (0, length), (0, length))
        return cls(positions, positions, spans=(span,), external_causality=True)

    @classmethod
    def of(
        cls,
        query_positions: Tensor,
        key_positions: Tensor,
        query_documents: Tensor | None = None,
        key_documents: Tensor | None = None,
        *,
        analyse: bool = True,
        sees: Literal["past", "both"] = "past",
    ) -> Layout:
        """Return any layout from explicit positions and documents; see the module for the rule.

        Args:
            analyse: True to check the values and look for spans, which on an accelerator copies the ids to the host
                once (a few bytes per token). Never done while compiling.

        Raises:
            InvalidParameterError: if a shape does not fit, a dtype is not a signed integer, a position is negative, or
                two tokens of one document have the same position.
        """
        _require_shapes(query_positions, key_positions, query_documents, key_documents)
        query_positions, key_positions = query_positions.long(), key_positions.long()  # a sum may pass 32 bits
        spans, consecutive = None, False
        if analyse and not torch.compiler.is_compiling():
            qp, kp = query_positions.cpu(), key_positions.cpu()
            qd = torch.zeros_like(qp) if query_documents is None else query_documents.cpu()
            kd = torch.zeros_like(kp) if key_documents is None else key_documents.cpu()
            require_counted("query", qp, qd)
            require_counted("key", kp, kd)
            blocks = find_spans(qp, kp, qd, kd)
            if blocks is None:
                require_distinct("query", qp, qd)
                require_distinct("key", kp, kd)
            else:
                spans, consecutive = tuple(Span(*block) for block in blocks[0]), blocks[1]
        return cls(query_positions, key_positions, query_documents, key_documents, spans, consecutive, sees=sees)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.query_positions.shape[0]

    @property
    def query_length(self) -> int:
        """Number of queries per row, padding included."""
        return self.query_positions.shape[1]

    @property
    def key_length(self) -> int:
        """Number of keys per row, padding and unfilled slots included."""
        return self.key_positions.shape[1]

    @property
    def whole(self) -> bool:
        """True if the layout is plain attention over all of q and k: one span that covers everything."""
        sizes = self.batch, self.query_length, self.key_length
        return self.spans is not None and len(self.spans) == 1 and self.spans[0].covers(*sizes)

    def rows(self, start: int, stop: int) -> Layout:
        """Return the layout of some rows of the batch."""
        qp, kp, qd, kd = self._each(lambda part: part[start:stop])
        if self.external_causality:
            return Layout.shard(qp)
        return Layout.of(qp, kp, qd, kd, sees=self.sees)

    def at_slots(self, slots: Int[Tensor, "rows held"]) -> Layout:
        """Return the layout of a cache that holds the keys of some slots only, in this order; the queries stay.

        Args:
            slots: slots of one document per row, ascending, the queries' last; -1 for none, under padding only. One
                row if all are equal.
        """
        slots = slots.to(self.key_positions.device).expand(self.batch, -1)
        keys = self.key_positions.gather(1, slots.clamp(min=0))
        if self.query_documents is None or self.key_documents is None:
            everything = Span((0, self.batch), (0, self.query_length), (0, slots.shape[1]))
            return Layout(self.query_positions, keys, spans=(everything,), sees=self.sees)
        documents = torch.where(slots < 0, -1, self.key_documents.gather(1, slots.clamp(min=0)))
        analyse = self.query_length > 1  # a single query has no spans, and decoding must be fast
        return Layout.of(self.query_positions, keys, self.query_documents, documents, analyse=analyse, sees=self.sees)

    @property
    def both_ways(self) -> Layout:
        """Layout of the same tokens that sees later tokens as well.

        Raises:
            InvalidParameterError: for a ``shard``, whose engine makes it causal.
        """
        if self.external_causality:
            raise InvalidParameterError("This layout is a shard: its engine makes it causal. Use Layout.of.")
        return replace(self, sees="both", _memo={})

    @property
    def past(self) -> Layout:
        """Layout of the same tokens that sees the past only."""
        return replace(self, sees="past", _memo={})

    @property
    def mirrored(self) -> Layout:
        """Layout of the rows read from their end, for tokens that see themselves and *later* tokens.

        Slots are in reverse order and positions count from the last token of the row. So attention over the past of
        this layout, on flipped queries, keys and values, is attention over the future.

        Raises:
            InvalidParameterError: if there are more keys than queries, so that tokens after some of them are unknown.
        """
        if self.query_length != self.key_length or self.external_causality:
            raise InvalidParameterError(
                f"A layout of {self.query_length} queries and {self.key_length} keys cannot be read from its end. "
                f"Heads that look ahead need the whole text at once: pass no cache and no shard of it."
            )
        qp, kp, qd, kd = self._each(lambda part: part.flip(1))
        last = kp.amax(1, keepdim=True) if kd is None else torch.where(kd >= 0, kp, 0).amax(1, keepdim=True)
        qp, kp = (
            last - part if of is None else torch.where(of >= 0, last - part, 0) for part, of in ((qp, qd), (kp, kd))
        )
        stop = self.key_length
        spans = None
        if self.spans is not None and all(query == key for _, query, key in self.spans):
            mirrored_spans = [Span(r, (stop - q[1], stop - q[0]), (stop - k[1], stop - k[0])) for r, q, k in self.spans]
            spans = tuple(sorted(mirrored_spans))
        return Layout(qp, kp, qd, kd, spans, self.consecutive)

    def to(self, device: torch.device) -> Layout:
        """Return the layout with its tensors on another device."""
        moved = self._each(lambda part: part.to(device))
        return Layout(*moved, self.spans, self.consecutive, self.from_zero, self.external_causality, self.sees)

    def _each(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        qd, kd = (None if part is None else change(part) for part in (self.query_documents, self.key_documents))
        return change(self.query_positions), change(self.key_positions), qd, kd

    def distances(self, *, queries: slice | None = None) -> Int[Tensor, "batch query key"]:
        """Return query position minus key position for each pair, as absolute values if tokens see both ways."""
        rows = slice(None) if queries is None else queries  # torch 2.11 cannot trace a slice as a default
        apart = self.query_positions[:, rows, None] - self.key_positions[:, None, :]
        return apart.abs() if self.sees == "both" else apart

    def places(self) -> PerQuery:
        """Return the index of the key at each query's document and position; padding gets any index."""
        if self.whole:
            slots = torch.arange(self.key_length - self.query_length, self.key_length, device=self.key_positions.device)
            return slots.expand(self.batch, -1)

        def build() -> Tensor:
            reach = self.key_positions.amax() + 1
            qd, kd = self.query_documents, self.key_documents
            queries, keys = (
                positions if documents is None else torch.where(documents < 0, -1, documents * reach + positions)
                for positions, documents in ((self.query_positions, qd), (self.key_positions, kd))
            )
            ordered, order = keys.sort(1)
            return order.gather(1, torch.searchsorted(ordered, queries).clamp(max=self.key_length - 1))

        return self.memo("places", build)

    def visible(self, window: int | None = None, *, queries: slice | None = None) -> Bool[Tensor, "batch query key"]:
        """Return the visible pairs, by the rule in the module's docstring; memory is one byte per pair.

        Args:
            window: tokens that a query sees to each side, itself included; None for all.
            queries: the queries to return; None for all.

        Raises:
            InvalidParameterError: for a ``shard``, whose engine decides.
        """
        if self.external_causality:
            raise InvalidParameterError("This layout is a shard: its engine decides the visible pairs. Use Layout.of.")
        rows = slice(None) if queries is None else queries
        keys, places = self.key_positions[:, None, :], self.query_positions[:, rows, None]
        reach = 1 << 40 if window is None else window - 1
        # Borders of each query, as distances of all pairs would take eight bytes each.
        seen = keys <= (places + reach if self.sees == "both" else places)
        if window is not None:
            seen = seen & (keys >= places - reach)
        if self.query_documents is not None and self.key_documents is not None:
            same = self.query_documents[:, rows, None] == self.key_documents[:, None, :]
            seen = seen & same & (self.key_documents >= 0)[:, None, :]
        return seen

    def memo(self, key: Any, build: Callable[[], T], *, owner: Tensor | None = None) -> T:
        """Return ``build()``, cached under ``key`` so that the layers of one forward pass share the work.

        ``owner`` is the tensor that the result depends on, compared by identity and version. While compiling,
        only keys that are strings are cached; the compiler merges most equal expressions by itself.
        """
        if torch.compiler.is_compiling():
            if not isinstance(key, str):
                return build()
            if key not in self._memo:
                self._memo[key] = (None, None, build())
            known: T = self._memo[key][2]
            return known
        version = None if owner is None or owner.is_inference() else owner._version
        entry = self._memo.get(key)
        if entry is None or entry[0] is not owner or entry[1] != version:
            entry = (owner, version, build())
            self._memo[key] = entry
        result: T = entry[2]
        return result


def _require_shapes(qp: Tensor, kp: Tensor, qd: Tensor | None, kd: Tensor | None) -> None:
    """Raise unless the four are integer tensors whose shapes fit."""
    if (qd is None) != (kd is None):
        raise InvalidParameterError("Pass documents for both queries and keys, or for neither.")
    named = {"query_positions": qp, "key_positions": kp, "query_documents": qd, "key_documents": kd}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if not tensor.dtype.is_signed or tensor.is_floating_point() or tensor.is_complex():
            raise InvalidParameterError(f"{name} must be a tensor of signed integers, found {tensor.dtype}.")
        like = qp if name.startswith("query") else kp
        if tensor.ndim != 2 or tensor.shape != like.shape or tensor.shape[0] != qp.shape[0]:
            raise InvalidParameterError(
                f"{name} must be [batch, {name.split('_')[0]}] and fit the others, found {tuple(tensor.shape)} "
                f"beside query_positions {tuple(qp.shape)} and key_positions {tuple(kp.shape)}."
            )
