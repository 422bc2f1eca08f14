"""Training sequences cut from documents: which tokens stand in which, and at which positions.

Sequence ``i`` is a function of the documents, the seed and ``i`` alone. So a run that is resumed, or spread over more
processes, sees the same sequences in the same order, and nothing about the data has to be stored in a checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from ctxext.errors import InvalidParameterError
from ctxext.training.documents import TokenisedDocuments

__all__ = ["IGNORED", "Positions", "RemainingSequences", "Sequences", "TrainingSequences", "long_enough", "require_fit"]

IGNORED = -100
"""The label that counts for nothing, as everywhere in transformers."""

Positions = Literal["consecutive", "pose"]


class Sequences(Dataset[dict[str, Tensor]]):
    """What a run reads: a known number of items, each a function of its number alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids``, ``labels``, ``position_ids``, each [length], and its ``index``."""

    @abstractmethod
    def length_of(self, index: int) -> int:
        """Tokens of an item."""

    @abstractmethod
    def describe(self, indices: Sequence[int]) -> str:
        """Which texts these items hold, for an error message."""


class RemainingSequences(Sequences):
    """The sequences of ``whole`` from number ``start`` on; their ``index`` is still that in the whole."""

    def __init__(self, whole: Sequences, start: int) -> None:
        self.whole, self.start = whole, start

    def __len__(self) -> int:
        return len(self.whole) - self.start

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Sequence {index} of {len(self)}.")
        return self.whole[self.start + index]

    def length_of(self, index: int) -> int:
        return self.whole.length_of(self.start + index)

    def describe(self, indices: Sequence[int]) -> str:
        return self.whole.describe(indices)


def long_enough(documents: TokenisedDocuments, shortest: int | None) -> Int[np.ndarray, " documents"]:
    """The tokens of each document; 0 for those that are to be left out.

    Args:
        documents: tokenised.
        shortest: tokens below which a document is left out; None for no such limit.
    """
    lengths = np.asarray(documents.lengths, dtype=np.int64)
    return np.where(lengths >= (shortest or 0), lengths, 0)


def require_fit(length: int, target_length: int) -> None:
    """Raise ``InvalidParameterError`` where sequences of ``length`` tokens are longer than the extended window."""
    if length > target_length:
        raise InvalidParameterError(
            f"Sequences of {length:,} tokens do not fit into the extended window of {target_length:,}; lower "
            f"data.length or extend further."
        )


class TrainingSequences(Sequences):
    """``count`` sequences of ``length`` tokens; none crosses from one document into another.

    In every epoch each document is cut anew, from a random first token on, into as many sequences as it has room for,
    and the sequences of all documents are shuffled. A document's share is thus proportional to its length; documents
    shorter than one sequence, or than ``shortest``, are left out. That is how long documents are preferred: by what
    they hold, and by ``shortest``.

    With ``positions="pose"`` (skip-wise positions) a sequence consists of two pieces: the second is moved on by a gap
    drawn anew for each sequence, so that the model sees distances up to ``target_length`` for the price of ``length``
    tokens. Its text is moved on by the same gap, as far as the document goes: the sequence is then a text of
    ``target_length`` tokens whose middle was left out, each token at its own position.

    Every item also holds an ``attention_mask`` of ones. Without one transformers takes a jump in the positions for the
    border between two packed texts and keeps the second piece from seeing the first.

    Args:
        documents: tokenised.
        length: tokens of a sequence, the documents' prefix included.
        count: how many sequences there are to be, over as many epochs as that takes.
        seed: of everything that is drawn.
        positions: ``consecutive`` or ``pose``.
        target_length: tokens; the extended window. Positions are below it.
        shortest: tokens that a document must have, ``target_length`` for instance, so that with ``pose`` no text gap
            is shorter than the gap in the positions; None for those of one sequence.

    Raises:
        InvalidParameterError: ``length`` beyond ``target_length``, or no document of that length.

    Source: Zhu et al., arXiv:2309.10400, section 3; authors' code: dwzhu-pku/PoSE@43b43b3f, src/train_pose.py, whose
        first piece has 1 to length / 2 tokens. Its text gap is drawn apart from the gap in the positions, up to five
        windows; the paper finds no difference.
    """

    def __init__(
        self,
        documents: TokenisedDocuments,
        *,
        length: int,
        count: int,
        seed: int,
        positions: Positions = "consecutive",
        target_length: int,
        shortest: int | None = None,
    ) -> None:
        require_fit(length, target_length)
        self.documents, self.count, self.seed = documents, count, seed
        self.length, self.target_length, self.positions = length, target_length, positions
        self.read = length - len(documents.prefix)
        if self.read < 2:
            raise InvalidParameterError(f"A sequence needs at least 2 tokens of text, found length={length}.")
        self.lengths = long_enough(documents, shortest)
        self.pieces = self.lengths // self.read
        self.per_epoch = int(self.pieces.sum())
        if self.per_epoch == 0:
            wanted = f"{max(self.read, shortest or 0):,} tokens " + ("of one sequence" if not shortest else "asked for")
            raise InvalidParameterError(
                f"No document has the {wanted}; the longest of {len(documents)} has "
                f"{max(documents.lengths, default=0):,}. Give longer texts or lower data.length"
                f"{' and data.shortest' if shortest else ''}."
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids``, ``labels``, ``position_ids``, ``attention_mask``, each [length], and its ``index``."""
        document, start, split, text_gap, gap = self.plan(index)
        tokens = self.documents.tokens
        first = tokens(document, start, start + split)
        second = tokens(document, start + split + text_gap, start + self.read + text_gap)
        prefix = torch.tensor(self.documents.prefix, dtype=torch.long)
        input_ids = torch.cat([prefix, first, second])
        position_ids = torch.arange(self.length)
        border = len(prefix) + split
        position_ids[border:] += gap
        labels = input_ids.clone()
        labels[0] = IGNORED  # nothing predicts it; loss averages must not count it
        if text_gap:  # what follows the gap is no continuation of what stands before it
            labels[border] = IGNORED
        return {
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": position_ids,
            "attention_mask": torch.ones_like(input_ids),
            "index": torch.tensor(index),
        }

    def length_of(self, index: int) -> int:
        return self.length

    def plan(self, index: int) -> tuple[int, int, int, int, int]:
        """Document, first token, tokens in the first piece, gap in the text, gap in the positions."""
        if not 0 <= index < self.count:
            raise IndexError(f"Sequence {index} of {self.count}.")
        epoch, place = divmod(index, self.per_epoch)
        document, start = self._epoch(epoch)[place].tolist()
        if self.positions == "consecutive":
            return document, start, self.read, 0, 0
        random = np.random.default_rng([self.seed, 1, index])
        split = int(random.integers(1, (self.read + 1) // 2, endpoint=True))
        gap = int(random.integers(0, self.target_length - self.length, endpoint=True))
        room = self.documents.lengths[document] - self.read
        text_gap = min(gap, room)
        return document, min(start, room - text_gap), split, text_gap, gap

    def describe(self, indices: Sequence[int]) -> str:
        """Which sequences these are, for an error message."""
        found = []
        for index in indices:
            document, start, split, text_gap, gap = self.plan(index)
            said = f"sequence {index}: {self.documents.names[document]!r} from token {start:,}"
            found.append(said + (f", {split:,} tokens before a gap of {gap:,} ({text_gap:,} in the text)" * bool(gap)))
        return "; ".join(found)

    def __str__(self) -> str:
        """For a report: how much there is to read, and how often it will be read."""
        used = [length for length, pieces in zip(self.documents.lengths, self.pieces, strict=True) if pieces]
        return (
            f"{self.count:,} sequences of {self.length:,} tokens, positions {self.positions} up to "
            f"{self.target_length if self.positions == 'pose' else self.length:,}, "
            f"{self.count / self.per_epoch:.2f} times through {sum(used):,} tokens in {len(used):,} documents"
            f" ({len(self.documents) - len(used):,} shorter ones left out)"
        )

    def _epoch(self, epoch: int) -> Int[np.ndarray, "per_epoch 2"]:
        return _cut(tuple(self.lengths.tolist()), self.read, self.seed, epoch)


@lru_cache(maxsize=2)
def _cut(lengths: tuple[int, ...], read: int, seed: int, epoch: int) -> Int[np.ndarray, "per_epoch 2"]:
    """Document and first token of every sequence of one epoch, in the order in which they are read."""
    random = np.random.default_rng([seed, 0, epoch])
    rows = []
    for document, length in enumerate(lengths):
        pieces = length // read
        offset = int(random.integers(0, length - pieces * read, endpoint=True))
        rows.append(np.stack([np.full(pieces, document), offset + read * np.arange(pieces)], axis=1))
    return random.permutation(np.concatenate(rows), axis=0)
