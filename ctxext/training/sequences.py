"""Training sequences cut from documents, with their positions.

Sequence ``i`` is a function of the documents, the seed and ``i`` alone. So a run that is resumed, or spread over more
processes, sees the same sequences in the same order, and nothing about the data has to be stored in a checkpoint.
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import Dataset

from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.parallel import attention_of, gathering

IGNORED = -100
"""Label of a token without a loss, as everywhere in transformers."""

Positions = Literal["consecutive", "pose"]
Item = dict[str, Tensor]
"""One training sequence: its ``input_ids``, ``labels``, ``position_ids`` and more, by name."""


LEAST = 2
"""Tokens of a stretch of text: one to predict, and one to predict it from where nothing stands in front."""


class Sequences(Dataset[Item]):
    """Data of a run: a known number of items, each a function of its number alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Item:
        """Return ``input_ids``, ``labels``, ``position_ids``, each [length], and ``index``."""

    @abstractmethod
    def length_of(self, index: int) -> int:
        """Return the number of tokens of an item."""

    @abstractmethod
    def origin_of(self, index: int) -> str:
        """Name the texts of an item, for an error message."""

    def require_index(self, index: int) -> None:
        """Raise ``IndexError``, which ends a loop over the items, if the item does not exist."""
        if not 0 <= index < len(self):
            raise IndexError(f"Sequence {index} of {len(self)}.")


class DerivedSequences(Sequences):
    """The sequences of ``whole`` from number ``start`` on; their ``index`` is still that in the whole."""

    def __init__(self, whole: Sequences, start: int = 0) -> None:
        self.whole, self.start = whole, start

    def __len__(self) -> int:
        return len(self.whole) - self.start

    def __getitem__(self, index: int) -> Item:
        self.require_index(index)
        return self.whole[self.start + index]

    def length_of(self, index: int) -> int:
        return self.whole.length_of(self.start + index)

    def origin_of(self, index: int) -> str:
        """Name the texts of the item with this ``index``, its number in the whole."""
        return self.whole.origin_of(index)


@dataclass(eq=False, repr=False, kw_only=True)
class CutSequences(Sequences):
    """``count`` sequences of ``length`` tokens, cut from documents.

    Args:
        length: tokens of a sequence, what the tokenizer puts in front of a text included.
        target_length: tokens; the extended window. Positions are below it.
        shortest: tokens below which a document is left out; None for no such limit.

    Raises:
        InvalidParameterError: ``length`` is beyond ``target_length`` or leaves no room for text, or the documents do
            not fill one sequence.
    """

    documents: TokenisedDocuments = field(kw_only=False)
    length: int
    count: int
    seed: int
    target_length: int
    shortest: int | None = None

    def __post_init__(self) -> None:
        if self.length > self.target_length:
            raise InvalidParameterError(
                f"Sequences of {self.length:,} tokens do not fit into the extended window of {self.target_length:,}; "
                f"lower data.length or extend further."
            )
        if self.length < len(self.documents.prefix) + LEAST:
            raise InvalidParameterError(
                f"A sequence needs at least {LEAST} tokens of text, found length={self.length}."
            )
        # Tokens of each document; 0 for a document to leave out.
        self.lengths = tuple(tokens if tokens >= (self.shortest or 0) else 0 for tokens in self.documents.lengths)

    def __len__(self) -> int:
        return self.count

    def length_of(self, index: int) -> int:
        return self.length


@dataclass(eq=False, repr=False, kw_only=True)
class TrainingSequences(CutSequences):
    """``count`` sequences of ``length`` tokens; none crosses from one document into another.

    In every epoch each document is cut anew, from a random first token on, into as many sequences as it has room for,
    and the sequences of all documents are shuffled. A document's share is thus proportional to its length; documents
    shorter than one sequence, or than ``shortest``, are left out. That is how long documents are preferred: by what
    they hold, and by ``shortest``.

    With ``positions="pose"`` (skip-wise positions) a sequence consists of two pieces: the second is moved on by a gap
    drawn anew for each sequence, so that the model sees distances up to ``target_length`` for the price of ``length``
    tokens. Its text is moved on by the same gap, as far as the document goes: the sequence is then a text of
    ``target_length`` tokens whose middle was left out, and the rest keep their positions.

    Every item also holds an ``attention_mask`` of ones. Without one transformers takes a jump in the positions for the
    border between two packed texts and keeps the second piece from seeing the first.

    Args:
        shortest: tokens that a document must have, ``target_length`` for instance, so that with ``pose`` no text gap
            is shorter than the gap in the positions; None for the tokens of one sequence.

    Source: Zhu et al., arXiv:2309.10400, section 3; authors' code: dwzhu-pku/PoSE@43b43b3f, src/train_pose.py, whose
        first piece has 1 to length / 2 tokens. Its text gap is drawn apart from the gap in the positions, up to five
        windows; the paper finds no difference.
    """

    positions: Positions = "consecutive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(answered is not None for answered in self.documents.answered):
            raise InvalidParameterError(
                f"Conversations stand whole in a sequence, several beside each other, found data.positions "
                f"{self.positions!r}. Set it to packed, and leave out data.masked."
            )
        self.read = self.length - len(self.documents.prefix)
        self.per_epoch = sum(tokens // self.read for tokens in self.lengths)
        if self.per_epoch == 0:
            why = "asked for" if self.shortest else "of one sequence"
            raise InvalidParameterError(
                f"No document has the {max(self.read, self.shortest or 0):,} tokens {why}; the longest of "
                f"{len(self.documents)} has {max(self.documents.lengths, default=0):,}. Give longer texts or lower "
                f"data.length{' and data.shortest' if self.shortest else ''}."
            )

    def __getitem__(self, index: int) -> Item:
        """Return ``input_ids``, ``labels``, ``position_ids``, ``attention_mask``, each [length], and ``index``."""
        document, start, split, text_gap, gap = self.plan(index)
        tokens = self.documents.tokens
        first = tokens(document, start, start + split)
        second = tokens(document, start + split + text_gap, start + self.read + text_gap)
        prefix = torch.tensor(self.documents.prefix, dtype=torch.long)
        input_ids = torch.cat([prefix, first, second])
        border = len(prefix) + split
        position_ids = torch.arange(self.length)
        position_ids[border:] += gap
        labels = input_ids.clone()
        labels[0] = IGNORED  # nothing predicts it; loss averages must not count it
        if text_gap:  # the token after the gap does not continue the text before it
            labels[border] = IGNORED
        item = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "index": torch.tensor(index)}
        return item | {"attention_mask": torch.ones_like(input_ids)}

    def plan(self, index: int) -> tuple[int, int, int, int, int]:
        """Return document, first token, tokens in the first piece, gap in the text, gap in the positions."""
        self.require_index(index)
        epoch, place = divmod(index, self.per_epoch)
        document, start = _cut(self.lengths, self.read, self.seed, epoch)[place].tolist()
        if self.positions != "pose":
            return document, start, self.read, 0, 0
        random = np.random.default_rng([self.seed, 1, index])
        split = int(random.integers(1, (self.read + 1) // 2, endpoint=True))
        gap = int(random.integers(0, self.target_length - self.length, endpoint=True))
        room = self.documents.lengths[document] - self.read
        text_gap = min(gap, room)
        return document, min(start, room - text_gap), split, text_gap, gap

    def origin_of(self, index: int) -> str:
        """Name the document, the sequence's first token in it, and the gap."""
        document, start, split, text_gap, gap = self.plan(index)
        origin = f"sequence {index}: {self.documents.names[document]!r} from token {start:,}"
        return origin + (f", {split:,} tokens before a gap of {gap:,} ({text_gap:,} in the text)" if gap else "")

    def __str__(self) -> str:
        """For a report: how much there is to read, and how often it will be read."""
        used = [tokens for tokens in self.lengths if tokens >= self.read]
        return (
            f"{self.count:,} sequences of {self.length:,} tokens, positions {self.positions} up to "
            f"{self.length if self.positions == 'consecutive' else self.target_length:,}, "
            f"{self.count / self.per_epoch:.2f} times through {sum(used):,} tokens in {len(used):,} documents"
            f" ({len(self.documents) - len(used):,} shorter ones left out)"
        )


@lru_cache(maxsize=2)
def _cut(lengths: tuple[int, ...], read: int, seed: int, epoch: int) -> Int[np.ndarray, "per_epoch 2"]:
    """Return document and first token of every sequence of one epoch, in reading order."""
    random = np.random.default_rng([seed, 0, epoch])
    rows = []
    for document, length in enumerate(lengths):
        pieces = length // read
        offset = int(random.integers(0, length - pieces * read, endpoint=True))
        rows.append(np.stack([np.full(pieces, document), offset + read * np.arange(pieces)], axis=1))
    return random.permutation(np.concatenate(rows), axis=0)


# A stretch of one document: its number, first token, and the token after its last.
Stretch = tuple[int, int, int]
# The stretches of each sequence.
Packing = list[list[Stretch]]


@dataclass(eq=False, repr=False, kw_only=True)
class PackedSequences(CutSequences):
    """``count`` sequences of ``length`` tokens that waste nothing of short documents and tails.

    Long documents come first: as in ``TrainingSequences`` each is cut, anew in every epoch, into as many whole
    sequences as it has room for. Their remainders and the documents that are shorter than one sequence then fill
    sequences one after the other, in random order; only what does not fit into the rest of a sequence goes on in
    the next. Each stretch has the prefix in front, its positions begin at 0, and its first token is not predicted from
    the stretch before.

    Conversations are never cut: each goes into the fullest sequence that has room for it, and only the assistant's
    answers are predicted. Conversations longer than a sequence or without an answer are left out.

    The items hold no ``attention_mask``: then transformers, and ctxext's own attention, take a position that begins
    anew for the border between two texts. One row per forward pass: flash-attn's kernels take borders from one row
    only. ``require_separate`` checks on the model itself that this is so.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        answered = self.documents.answered
        self.whole = tuple(answers is not None for answers in answered)
        long = {place for place, tokens in enumerate(self.lengths) if self.whole[place] and tokens > self.length}
        silent = {place for place, answers in enumerate(answered) if answers == 0} - long
        self.lengths = tuple(0 if place in long | silent else tokens for place, tokens in enumerate(self.lengths))
        kinds = [(long, "longer than a sequence"), (silent, "without an answer")]
        reasons = ", ".join(f"{len(places):,} {why}" for places, why in kinds if places)
        self.left_out = f" (conversations left out: {reasons})" if reasons else ""
        if not self._epoch(0):
            raise InvalidParameterError(
                f"All {len(self.documents)} documents together do not fill one sequence of {self.length:,} tokens: "
                f"{sum(self.lengths):,} tokens found"
                f"{f' in documents of at least {self.shortest:,}' if self.shortest else ''}{self.left_out}. Give more "
                f"text or {'raise' if long else 'lower'} data.length."
            )
        # First sequence of each epoch looked at so far; how many an epoch has depends on what was drawn for it.
        self._starts = [0]

    def __getitem__(self, index: int) -> Item:
        """Return ``input_ids``, ``labels``, ``position_ids``, each [length], and ``index``."""
        front = torch.tensor(self.documents.prefix, dtype=torch.long)
        ids, labels, positions = [], [], []
        for document, start, stop in self.plan(index):
            tokens = self.documents.tokens(document, start, stop)
            stretch = tokens if self.whole[document] else torch.cat([front, tokens])
            targets = torch.cat([torch.tensor([IGNORED]), stretch[1:]])
            if self.whole[document]:
                targets[~self.documents.answers(document)] = IGNORED
            ids.append(stretch)
            labels.append(targets)
            positions.append(torch.arange(len(stretch)))
        rest = self.length - sum(map(len, ids))  # too little for a stretch: padding, as a separate text without a loss
        ids.append(torch.full((rest,), self.documents.prefix[0] if self.documents.prefix else 0))
        labels.append(torch.full((rest,), IGNORED))
        positions.append(torch.arange(rest))
        columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.cat(parts) for name, parts in columns.items()} | {"index": torch.tensor(index)}

    def plan(self, index: int) -> list[Stretch]:
        """Return the stretches of one sequence, in order."""
        self.require_index(index)
        while index >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        epoch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._epoch(epoch)[index - self._starts[epoch]]

    def origin_of(self, index: int) -> str:
        """Name the first three documents of the sequence, and its first token in each."""
        names = self.documents.names
        origins = [f"{names[document]!r} from token {start:,}" for document, start, _ in self.plan(index)]
        more = f" and {len(origins) - 3} more" if len(origins) > 3 else ""
        return f"sequence {index}: {', '.join(origins[:3])}{more}"

    def __str__(self) -> str:
        """For a report: how much there is to read, and how often it will be read."""
        first = self._epoch(0)
        alone = sum(len(stretches) == 1 for stretches in first)
        used = [place for place, tokens in enumerate(self.lengths) if tokens and self.whole[place]]
        answers = sum(self.documents.answered[place] or 0 for place in used)
        learned = f"; {len(used):,} are conversations, of which {answers:,} tokens of answers alone have a loss"
        return (
            f"{self.count:,} sequences of {self.length:,} tokens, documents packed, each at positions of its own, "
            f"{self.count / len(first):.2f} times through {sum(self.lengths):,} tokens in "
            f"{np.count_nonzero(self.lengths):,} documents ({alone:,} of {len(first):,} sequences are one document's)"
            f"{learned if used else ''}{self.left_out}"
        )

    def _epoch(self, epoch: int) -> Packing:
        return _packed(self.lengths, self.whole, self.length, len(self.documents.prefix), self.seed, epoch)


@lru_cache(maxsize=2)
def _packed(
    lengths: tuple[int, ...], uncut: tuple[bool, ...], length: int, prefix: int, seed: int, epoch: int
) -> Packing:
    """Return the sequences of one epoch, in reading order."""
    random = np.random.default_rng([seed, 2, epoch])
    read = length - prefix
    whole: Packing = []
    left: list[Stretch] = []
    conversations: list[Stretch] = []
    for document, tokens in enumerate(lengths):
        if uncut[document]:
            conversations += [(document, 0, tokens)] if tokens else []
            continue
        pieces = tokens // read
        offset = int(random.integers(0, tokens - pieces * read, endpoint=True)) if pieces else 0
        stop = offset + pieces * read
        whole += [[(document, start, start + read)] for start in range(offset, stop, read)]
        left += [(document, 0, offset)] if pieces else []
        left.append((document, stop, tokens))
    left = [left[place] for place in random.permutation(len(left))]
    sequences = whole + _filled(left, length, prefix)
    if conversations:
        sequences += _fitted([conversations[place] for place in random.permutation(len(conversations))], length)
    return [sequences[place] for place in random.permutation(len(sequences))]


def _filled(stretches: Sequence[Stretch], length: int, prefix: int) -> Packing:
    """Fill sequences with stretches one after the other; drop the last sequence if it is not full."""
    sequences: Packing = []
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


def _fitted(stretches: Sequence[Stretch], length: int) -> Packing:
    """Put each stretch, uncut, into the sequence with the least room that is enough (best fit)."""
    sequences: Packing = []
    rooms: list[tuple[int, int]] = []  # tokens left, and the number of the sequence, in ascending order
    for document, start, stop in stretches:
        place = bisect.bisect_left(rooms, (stop - start, 0))
        if place == len(rooms):
            rooms.append((length, len(sequences)))
            sequences.append([])
        room, number = rooms.pop(place)
        sequences[number].append((document, start, stop))
        bisect.insort(rooms, (room - (stop - start), number))
    return sequences


def random_tokens(subject: Subject, *shape: int) -> Int[Tensor, "texts tokens"]:
    """Draw ordinary tokens, the same in every call, onto the device of a model."""
    known, generator = subject.ordinary_tokens, torch.Generator().manual_seed(0)
    return known[torch.randint(len(known), shape, generator=generator)].to(subject.model.device)


def are_alike(logits: Tensor, expected: Tensor, *, within: float) -> bool:
    """Return whether no logit differs from the one expected by more than this share of the largest of those."""
    return torch.allclose(logits, expected, rtol=0.0, atol=within * expected.abs().max().item())


def require_separate(model: nn.Module) -> None:
    """Check that a model keeps packed documents apart, by changing the first and comparing the second.

    Raises:
        IncompatibleError: if the logits of the second document change with the first.
    """
    subject = Subject.of(model)
    base, (first, changed, second) = subject.model, random_tokens(subject, 3, 16)
    positions = torch.arange(16, device=base.device).repeat(2)[None]
    with torch.no_grad(), gathering(base):
        ours, theirs = (
            base(torch.cat([before, second])[None], position_ids=positions, use_cache=False).logits[0, 16:]
            for before in (first, changed)
        )
    if not are_alike(theirs, ours, within=1e-3):
        raise IncompatibleError(
            f"{type(base).__name__} with attention {attention_of(subject)!r} does not keep packed documents "
            f"apart: the second changes with the first. Use data.positions=consecutive."
        )


def require_gaps(model: nn.Module) -> None:
    """Check that a gap between positions, as in skip-wise ones, changes what a model computes.

    Raises:
        IncompatibleError: if the logits are the same, as without positions.
    """
    subject, places = Subject.of(model), torch.arange(16)
    base, ids = subject.model, random_tokens(subject, 1, 16)
    whole = torch.ones_like(ids)  # without a mask, transformers takes a gap for the border of two documents
    with torch.no_grad(), gathering(base):
        plain, apart = (
            base(ids, attention_mask=whole, position_ids=positions[None].to(base.device), use_cache=False).logits
            for positions in (places, places + places.ge(8) * 16)
        )
    if are_alike(apart, plain, within=1e-6):
        raise IncompatibleError(
            f"This {type(base).__name__} computes the same whatever gaps its positions have, so data.positions=pose "
            f"would teach it no distance. Use data.positions=consecutive."
        )
