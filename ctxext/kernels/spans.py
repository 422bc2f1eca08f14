"""Check positions and documents on the host, and find blocks of plain causal attention in them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError

Extent = tuple[int, int]
"""Start and stop of some rows, heads, slots or positions."""
Block = tuple[Extent, Extent, Extent]  # rows, queries, keys
PerSlot = Int[Tensor, "batch seq"]
PerQuery = Int[Tensor, "batch query"]
PerKey = Int[Tensor, "batch key"]


def require_no_hole(name: str, keep: Bool[Tensor, "batch seq"], remedy: str) -> None:
    """Raise unless the tokens of each row are contiguous, so that padding has one meaning only.

    Raises:
        InvalidParameterError: with the mask, the row and the way out.
    """
    starts = (keep.int().diff(dim=1) == 1).sum(1) + keep[:, 0].int()
    if bool((starts > 1).any()):
        raise InvalidParameterError(
            f"{name} has a hole in row {int((starts > 1).nonzero()[0, 0])}, and the result depends on whether "
            f"positions skip it. {remedy}"
        )


def require_counted(side: str, positions: PerSlot, documents: PerSlot) -> None:
    """Raise unless every token's position is at least 0.

    Raises:
        InvalidParameterError: with the row and the position.
    """
    negative = (documents >= 0) & (positions < 0)
    if bool(negative.any()):
        row, index = negative.nonzero()[0].tolist()
        raise InvalidParameterError(
            f"{side} position {int(positions[row, index])} in row {row} is negative. Positions count from 0. "
            "Mark a slot without a token by a negative document."
        )


def require_distinct(side: str, positions: PerSlot, documents: PerSlot) -> None:
    """Raise unless positions are distinct inside each document.

    Raises:
        InvalidParameterError: with the row, the document and the position.
    """
    for row, (place, document) in enumerate(zip(positions.long(), documents.long(), strict=True)):
        real = document >= 0
        base = int(place[real].max()) + 1 if bool(real.any()) else 1
        tokens, counts = torch.unique(document[real] * base + place[real], return_counts=True)
        if bool((counts > 1).any()):
            document_id, position = divmod(int(tokens[counts > 1][0]), base)
            raise InvalidParameterError(
                f"{side} position {position} occurs twice in document {document_id} of row {row}, so it is ambiguous "
                "which token sees the other. Give packed documents different document ids."
            )


def find_spans(
    query_positions: PerQuery,
    key_positions: PerKey,
    query_documents: PerQuery,
    key_documents: PerKey,
) -> tuple[list[Block], bool] | None:
    """Return the blocks of ``Layout.spans``, and whether positions step by one in all; None without such blocks.

    Neighbouring rows with the same blocks become one block.
    """
    merged: list[Block] = []
    previous: list[Block] = []
    consecutive = True
    for row in range(query_positions.shape[0]):
        row_result = _row_blocks(query_positions[row], key_positions[row], query_documents[row], key_documents[row])
        if row_result is None:
            return None
        blocks, steps = row_result
        consecutive = consecutive and steps
        if row and blocks == [(b[1], b[2]) for b in previous]:
            previous = [((b[0][0], row + 1), b[1], b[2]) for b in previous]
        else:
            merged += previous
            previous = [((row, row + 1), q, k) for q, k in blocks]
    return merged + previous, consecutive


def _row_blocks(
    qp: Int[Tensor, " query"], kp: Int[Tensor, " key"], qd: Int[Tensor, " query"], kd: Int[Tensor, " key"]
) -> tuple[list[tuple[Extent, Extent]], bool] | None:
    """Return the blocks of one row for ``find_spans``."""
    key_runs = _runs(kp, kd)
    query_runs = _runs(qp, qd)
    if key_runs is None or query_runs is None:
        return None
    blocks: list[tuple[Extent, Extent]] = []
    consecutive = True
    for document, (start, stop) in query_runs.items():
        if document not in key_runs:
            continue
        first, last = key_runs[document]
        aligned = last - (stop - start)
        if aligned < first or not torch.equal(kp[aligned:last], qp[start:stop]):
            return None
        consecutive = consecutive and int(kp[last - 1] - kp[first]) == last - 1 - first
        blocks.append(((start, stop), (first, last)))
    return blocks, consecutive


def _runs(positions: Int[Tensor, " seq"], documents: Int[Tensor, " seq"]) -> dict[int, Extent] | None:
    """Return ``{document: (start, stop)}`` if each is one block of increasing positions, else None."""
    ids, counts = torch.unique_consecutive(documents, return_counts=True)
    stops = counts.cumsum(0)
    runs: dict[int, Extent] = {}
    for document, count, stop in zip(ids.tolist(), counts.tolist(), stops.tolist(), strict=True):
        if document < 0:
            continue
        block = positions[stop - count : stop]
        if document in runs or bool((block.diff() <= 0).any()):
            return None
        runs[document] = (stop - count, stop)
    return runs
