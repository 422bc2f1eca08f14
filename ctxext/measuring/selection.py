"""The other baseline that a longer context has to beat: choosing what to read, within the trained window.

Who has more text than the model was trained for need not drop its beginning. Half of the window holds the newest
tokens, and the rest holds the chunks of older text that share most with what was said last, in the text's order. They
are ranked by BM25 over tokens and pairs of neighbouring tokens: nothing is learned, and nothing but the text is read.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), section 3, with
k1 = 1.2, and without a correction for length, since all chunks but the last are equally long.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from jaxtyping import Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.measuring.loss import Window

CHUNK, BLOCK = 128, 256
"""Tokens of a chunk, and tokens that are predicted from one choice; both less where the window is small."""
K1 = 1.2
Term = int | tuple[int, int]


class RankedChunks:
    """Pieces of a text that may be chosen, by the tokens and pairs of tokens in them.

    Args:
        tokens: Tokens of the text.
        size: Tokens of a chunk, at least 1; the last one may have fewer.
        first: Token at which the first chunk begins.
    """

    def __init__(self, tokens: Sequence[int], size: int, first: int = 0) -> None:
        self.spans = [(at, min(at + size, len(tokens))) for at in range(first, len(tokens), size)]
        self._counts = defaultdict[Term, list[tuple[int, int]]](list)  # of each term: chunks and how often they hold it
        for number, span in enumerate(self.spans):
            for term, count in Counter(_terms(tokens[slice(*span)])).items():
                self._counts[term].append((number, count))

    def best(self, asked: Sequence[int], *, most: int, before: int) -> tuple[tuple[int, int], ...]:
        """Return the spans of the chunks that rank highest, in the text's order.

        Args:
            asked: tokens by which the chunks are ranked.
            most: number of chunks, at most.
            before: token at or before which a chunk has to end.
        """
        known = sum(stop <= before for _, stop in self.spans)
        scores = dict.fromkeys(range(known), 0.0)
        for term in set(_terms(asked)):
            held = [(number, count) for number, count in self._counts.get(term, ()) if number < known]
            weight = math.log(1 + (known - len(held) + 0.5) / (len(held) + 0.5))
            for number, count in held:
                scores[number] += weight * count * (K1 + 1) / (count + K1)
        ranked = sorted(scores, key=lambda number: (-scores[number], -number))  # of equal ones the newest
        return tuple(self.spans[number] for number in sorted(ranked[:most]))


def _terms(tokens: Sequence[int]) -> Iterator[Term]:
    yield from tokens
    yield from itertools.pairwise(tokens)


def selection_windows(
    input_ids: Int[Tensor, "1 tokens"],
    *,
    window: int,
    start: int,
    positions: int,
    prefix: int = 0,
    block: int | None = None,
) -> tuple[Window, ...]:
    """Lay out the passes that score a text from ``start`` on when the model sees the newest tokens and chosen chunks.

    Args:
        window: positions that the model sees at most, at least 16 besides the prefix for chunks to fit.
        start: first position to score, at least ``window``.
        positions: Positions of the text, one fewer than its tokens.
        prefix: leading tokens of the text, with which each pass begins.
        block: positions that are scored by one choice, at most a quarter of the window; None for 256, or an eighth of
            a small window. The choice is made by as many tokens before them, at most 256.

    Returns:
        A pass for each block of predicted tokens. None sees more than ``window`` positions, nor a token that comes
        after the predicted ones.

    Raises:
        InvalidParameterError: a window that is too small.
    """
    tokens, size, usual = input_ids[0].tolist(), max(1, min(CHUNK, window // 16)), max(1, min(BLOCK, window // 8))
    block = usual if block is None else block
    newest = window // 2 + block
    if window < prefix + newest:
        raise InvalidParameterError(
            f"A window of {window} tokens is too small for a selection: {prefix} in front and the newest {newest} fill "
            f"it. Give a greater --trained-length, or leave the selection out."
        )
    chunks, windows = RankedChunks(tokens[: positions + 1], size, prefix), []
    for begin in range(start, positions, block):
        stop = min(begin + block, positions)
        asked, first = tokens[begin + 1 - usual : begin + 1], stop - newest
        chosen = chunks.best(asked, most=(window - prefix - newest) // size, before=first)
        windows.append(Window(first, stop + 1, stop - begin, prefix, chosen))
    return tuple(windows)
