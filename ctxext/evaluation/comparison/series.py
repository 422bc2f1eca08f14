"""Several ways to read the same text, side by side: what each costs by position, and against truncation."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.perplexity import Bucket, PairedDifference, bucketed, paired_difference
from ctxext.evaluation.truncation import TRUNCATED, BestTruncation

__all__ = ["Series", "block_for", "edges_for", "summarise"]

IN_WINDOW, BEYOND, CURVE = 1, 4, 16
# Fewer texts than this say too little about the spread between texts; blocks within them then count.
MANY_DOCUMENTS, BLOCK = 8, 64


@dataclass(frozen=True)
class Series:
    """One way to read a text.

    Args:
        name: of the method, or of a reference: ``unpatched``, ``truncated 2048`` for the one that sees the last 2,048
            tokens, and ``truncated`` for the best of those.
        buckets: the trained window as one bucket, then equal buckets beyond it.
        curve: the same losses in fine buckets, for a plot.
        in_window_ratio: perplexity inside the trained window over the unpatched model's, dimensionless.
        versus_truncation: for each bucket beyond the window, the loss minus that of the best truncation there.
        dynamic: whether the method's frequencies follow the length, so that the one pass at the full length charges
            its stretched frequencies to every position.
        seconds: wall time of the measurement.
        windows: of the best truncation: which window is the best in each bucket beyond the trained one, in tokens.
    """

    name: str
    buckets: tuple[Bucket, ...]
    curve: tuple[Bucket, ...]
    in_window_ratio: float
    versus_truncation: tuple[PairedDifference, ...]
    dynamic: bool
    seconds: float
    windows: tuple[int, ...] = ()


def edges_for(trained_length: int, length: int, *, inside: int = IN_WINDOW, beyond: int = BEYOND) -> tuple[int, ...]:
    """Bucket edges: ``inside`` equal buckets up to the trained length, ``beyond`` equal ones from there to ``length``.

    Raises:
        InvalidParameterError: if there are not enough positions for the buckets.
    """
    if trained_length < inside or length - trained_length < beyond:
        raise InvalidParameterError(
            f"length={length} leaves too little beyond the trained length of {trained_length} tokens for {beyond} "
            f"buckets; ask for more."
        )
    window = [trained_length * i // inside for i in range(inside)]
    return (*window, *(trained_length + (length - trained_length) * i // beyond for i in range(beyond + 1)))


def block_for(documents: int, positions: int) -> int | None:
    """What counts as independent in a paired difference: with many texts each text (None), else blocks of tokens.

    Args:
        documents: how many texts.
        positions: losses of each; blocks are no longer than a quarter of them, so that a short text has an error too.
    """
    return None if documents >= MANY_DOCUMENTS else max(1, min(BLOCK, positions // 4))


def summarise(
    name: str,
    losses: Tensor,
    *,
    unpatched: Tensor,
    truncated: BestTruncation,
    trained_length: int,
    dynamic: bool = False,
    seconds: float = 0.0,
) -> Series:
    """Compare one way of reading with the references.

    Args:
        name: of the method.
        losses: nats per token, [documents, positions].
        unpatched: of the same tokens, by the unpatched model.
        truncated: of the same tokens, by the best truncation, chosen between the edges of ``edges_for``.
        trained_length: tokens.
        dynamic: see ``Series``.
        seconds: see ``Series``.

    Raises:
        InvalidParameterError: if the losses are not of the same tokens, or do not go beyond the trained length.
    """
    length = losses.shape[1]
    edges = edges_for(trained_length, length)
    fine = min(CURVE, length - trained_length)
    curve_edges = edges_for(trained_length, length, inside=min(fine, trained_length), beyond=fine)
    window = slice(0, trained_length)
    block = block_for(len(losses), edges[-1] - edges[-2])
    beyond = [slice(start, stop) for start, stop in itertools.pairwise(edges[1:])]
    return Series(
        name=name,
        buckets=bucketed(losses, edges),
        curve=bucketed(losses, curve_edges),
        in_window_ratio=math.exp((losses[:, window].double() - unpatched[:, window].double()).mean().item()),
        versus_truncation=tuple(
            paired_difference(losses[:, s], truncated.losses[:, s], block=block, baselines=len(truncated.measured))
            for s in beyond
        ),
        dynamic=dynamic,
        seconds=seconds,
        windows=truncated.windows if name == TRUNCATED else (),
    )
