"""Several documents in one sequence, none of which sees another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.surgery.wrappers import base_model
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.sequences import IGNORED, Sequences, long_enough, require_fit

__all__ = ["PackedSequences", "require_separate"]

# A stretch of one document: its number, first token, and the token after its last.
Stretch = tuple[int, int, int]
LEAST = 2  # tokens of a stretch: one to predict, and one to predict it from where nothing stands in front


class PackedSequences(Sequences):
    """``count`` sequences of ``length`` tokens that waste nothing of short documents and tails.

    Long documents come first: as in ``TrainingSequences`` each is cut, anew in every epoch, into as many whole
    sequences as it has room for. What is left over of them and the documents that are shorter than one sequence then
    fill sequences one after the other, in random order; only what does not fit into the rest of a sequence goes on in
    the next. Each stretch has the prefix in front, its positions begin at 0, and its first token is not predicted from
    the stretch before.

    The items hold no ``attention_mask``: then transformers, and ctxext's own attention, take a position that begins
    anew for the border between two texts. One row per forward pass: flash-attn's kernels take borders from one row
    only. ``require_separate`` checks on the model itself that this is so.

    Args:
        documents: tokenised.
        length: tokens of a sequence, prefixes included.
        count: how many sequences there are to be, over as many epochs as that takes.
        seed: of everything that is drawn.
        target_length: tokens; the extended window.
        shortest: tokens below which a document is left out; None takes all.

    Raises:
        InvalidParameterError: ``length`` beyond ``target_length``, or not enough text for one sequence.
    """

    def __init__(
        self,
        documents: TokenisedDocuments,
        *,
        length: int,
        count: int,
        seed: int,
        target_length: int,
        shortest: int | None = None,
    ) -> None:
        require_fit(length, target_length)
        if length < len(documents.prefix) + LEAST:
            raise InvalidParameterError(f"A sequence needs at least 2 tokens of text, found length={length}.")
        self.documents, self.length, self.count, self.seed = documents, length, count, seed
        self.lengths = tuple(long_enough(documents, shortest).tolist())
        if not self._epoch(0):
            raise InvalidParameterError(
                f"All {len(documents)} documents together do not fill one sequence of {length:,} tokens: "
                f"{sum(self.lengths):,} tokens found"
                f"{f' in documents of at least {shortest:,}' if shortest else ''}. Give more text or lower data.length."
            )
        self._starts = [0]  # of each epoch that was looked at; how many sequences it has depends on what was drawn

    def __len__(self) -> int:
        return self.count

    def length_of(self, index: int) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids``, ``labels``, ``position_ids``, each [length], and its ``index``."""
        front = torch.tensor(self.documents.prefix, dtype=torch.long)
        ids, labels, positions = [], [], []
        for document, start, stop in self.plan(index):
            stretch = torch.cat([front, self.documents.tokens(document, start, stop)])
            ids.append(stretch)
            labels.append(torch.cat([torch.tensor([IGNORED]), stretch[1:]]))
            positions.append(torch.arange(len(stretch)))
        rest = self.length - sum(map(len, ids))  # too little for a stretch: a text of its own that counts for nothing
        ids.append(torch.full((rest,), self.documents.prefix[0] if self.documents.prefix else 0))
        labels.append(torch.full((rest,), IGNORED))
        positions.append(torch.arange(rest))
        columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.cat(parts) for name, parts in columns.items()} | {"index": torch.tensor(index)}

    def plan(self, index: int) -> list[Stretch]:
        """The stretches of one sequence, in order."""
        if not 0 <= index < self.count:
            raise IndexError(f"Sequence {index} of {self.count}.")
        while index >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        epoch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._epoch(epoch)[index - self._starts[epoch]]

    def describe(self, indices: Sequence[int]) -> str:
        """Which sequences these are, for an error message."""
        names = self.documents.names
        found = []
        for index in indices:
            said = [f"{names[document]!r} from token {start:,}" for document, start, _ in self.plan(index)]
            more = f" and {len(said) - 3} more" * (len(said) > 3)
            found.append(f"sequence {index}: {', '.join(said[:3])}{more}")
        return "; ".join(found)

    def __str__(self) -> str:
        """For a report: how much there is to read, and how often it will be read."""
        first = self._epoch(0)
        whole = sum(len(one) == 1 for one in first)
        return (
            f"{self.count:,} sequences of {self.length:,} tokens, documents packed, each at positions of its own, "
            f"{self.count / len(first):.2f} times through {sum(self.lengths):,} tokens in "
            f"{np.count_nonzero(self.lengths):,} documents ({whole:,} of {len(first):,} sequences are one document's)"
        )

    def _epoch(self, epoch: int) -> list[list[Stretch]]:
        return _packed(self.lengths, self.length, len(self.documents.prefix), self.seed, epoch)


@lru_cache(maxsize=2)
def _packed(lengths: tuple[int, ...], length: int, prefix: int, seed: int, epoch: int) -> list[list[Stretch]]:
    """The sequences of one epoch, in the order in which they are read."""
    random = np.random.default_rng([seed, 2, epoch])
    read = length - prefix
    whole: list[list[Stretch]] = []
    left: list[Stretch] = []
    for document, tokens in enumerate(lengths):
        pieces = tokens // read
        offset = int(random.integers(0, tokens - pieces * read, endpoint=True)) if pieces else 0
        stop = offset + pieces * read
        whole += [[(document, start, start + read)] for start in range(offset, stop, read)]
        left += [(document, 0, offset)] if pieces else []
        left.append((document, stop, tokens))
    left = [left[place] for place in random.permutation(len(left))]
    sequences = whole + _filled(left, length, prefix)
    return [sequences[place] for place in random.permutation(len(sequences))]


def _filled(stretches: Sequence[Stretch], length: int, prefix: int) -> list[list[Stretch]]:
    """Stretches one after the other, cut where a sequence is full; the last sequence is left out if it is not."""
    sequences: list[list[Stretch]] = []
    current: list[Stretch] = []
    room = length
    for document, start, stop in stretches:
        while stop - start >= LEAST:
            taken = min(stop - start, room - prefix)
            current.append((document, start, start + taken))
            start, room = start + taken, room - prefix - taken
            if room < prefix + LEAST:
                sequences.append(current)
                current, room = [], length
    return sequences


@torch.no_grad()
def require_separate(model: nn.Module) -> None:
    """Make sure that a model keeps packed documents apart, by changing one and looking at the other.

    Args:
        model: a causal language model in evaluation mode, extended.

    Raises:
        IncompatibleError: the second of two documents changed with the first.
    """
    base = base_model(model)
    generator = torch.Generator().manual_seed(0)
    size = base.get_input_embeddings().weight.shape[0]
    first, other, second = torch.randint(0, size, (3, 16), generator=generator).to(base.device)
    positions = torch.arange(16, device=base.device).repeat(2)[None]
    ours, theirs = (
        base(torch.cat([before, second])[None], position_ids=positions, use_cache=False).logits[0, 16:]
        for before in (first, other)
    )
    if not torch.allclose(ours, theirs, rtol=0.0, atol=1e-3 * ours.abs().max().item()):
        raise IncompatibleError(
            f"{type(base).__name__} with attention {base.config._attn_implementation!r} does not keep packed documents "
            f"apart: the second changes with the first. Use data.positions=consecutive."
        )
