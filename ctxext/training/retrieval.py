"""Sequences of prose with something in them to find again: keys, passages to repeat, chains to follow.

Prose needs a long window only now and then, so that a model trained on prose alone may learn to predict in it and not
to find anything. These sequences are the user's own texts with a few sentences between theirs, made on the fly: what
becomes of sequence ``i`` follows from the seed and ``i`` alone, as everything about sequences.

``ctxext eval passkey`` and ``ctxext eval ruler`` use none of these sentences. So after training they measure whether a
model finds things, not whether it knows the question.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.texts.corpus import special_prefix, tokens_behind
from ctxext.texts.haystack import inserted
from ctxext.training.sequences import IGNORED, DerivedSequences, Item, Sequences
from ctxext.training.settings import RETRIEVAL, Retrieval

NAMES = "Ada Bruno Clara Dario Edith Felix Greta Hugo Irene Jonas Karin Leo Mina Nora Oscar Paula Ralf Sonja Theo Vera"
LOCKERS, CHAINS, LINKS = 4, 2, 3  # the most sentences of a kind in a sequence; the question is about one
PASSAGE = (16, 64)  # tokens of a passage to repeat
BEGINNING = 8  # first tokens of a repeated passage, which identify it and are not to be predicted
MOST = 0.5  # share of a piece of text that insertions may replace
TRIED = 64  # sequences that are looked at for room
NEAR = 64  # tokens within which the end of a sentence is looked for
ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f", "\u061f", "\u06d4", "\u0964")  # Chinese, Arabic, Hindi too
CLOSING = " \"'\u201d\u2019)\u00bb\u300d\u300f\uff09"  # what may stand behind them

Insertion = tuple[int, Int[Tensor, " _"]]
"""Index of the token before which to insert, and the tokens to insert."""
Hidden = tuple[list[Insertion], Tensor, Tensor]
"""Insertions, the question about one of them, and its answer."""


class RetrievalSequences(DerivedSequences):
    """The sequences of ``whole``, a share of them with something to find again at their ends.

    Insertions replace as many tokens of text, at the end of the piece that holds them, so that lengths and positions
    stay as they were; with skip-wise positions the answer lies as far back as positions say. Only
    the text and the answer are to be predicted: a number, and what will be asked, cannot be predicted.

    * ``keys``: up to four numbers, each under a name, and a question for one of them.
    * ``copies``: a passage of 16 to 64 tokens that stood somewhere, again from its first eight tokens on.
    * ``chains``: two numbers that are handed on from name to name, up to three times, and a question about the last.

    A sequence too short for that stays as it is.
    """

    def __init__(
        self, whole: Sequences, tokenizer: Any, *, share: float, kinds: Sequence[Retrieval] = RETRIEVAL, seed: int
    ) -> None:
        super().__init__(whole)
        self.tokenizer, self.share, self.kinds, self.seed = tokenizer, share, tuple(kinds), seed
        self.front = len(special_prefix(tokenizer))
        self._ends: dict[int, bool] = {}  # what was asked of tokens; a functools.cache could not be pickled

    def require_room(self) -> None:
        """Raise ``InvalidParameterError`` if none of the first sequences of any stage has room for its insertions."""
        first, start = list[int](), 0
        for stage in getattr(self.whole, "parts", [self.whole]):
            first += range(start, start + min(len(stage), TRIED))
            start += len(stage)
        if all(self._found(index, self.whole[index]) is None for index in first):
            raise InvalidParameterError(
                f"None of the first {len(first)} sequences has room for {' or '.join(self.kinds)} to find again; "
                f"the longest has {max(map(self.length_of, first)):,} tokens. Raise data.length, or leave out "
                f"data.retrieval."
            )

    def __getitem__(self, index: int) -> Item:
        """Return an item of ``whole``, with something to find in its ``input_ids`` and ``labels``."""
        item = self.whole[index]
        return item | (self._found(index, item) or {})

    def origin_of(self, index: int) -> str:
        kind, _ = self._drawn(index)
        is_there = kind is not None and self._found(index, self.whole[index]) is not None
        return self.whole.origin_of(index) + (f", with {kind} to find" if is_there else "")

    def __str__(self) -> str:
        """Describe the sequences and the share with something to find, for a report."""
        kinds = ", ".join(self.kinds)
        return f"{self.whole}; {self.share:.0%} of the sequences, where there is room, hold {kinds} to find again"

    def _drawn(self, index: int) -> tuple[Retrieval | None, np.random.Generator]:
        """Draw the kind of thing to find in a sequence (None for none); return it with the generator of the rest."""
        random = np.random.default_rng([self.seed, 4, index])
        chosen, kind = random.random() < self.share, int(random.integers(len(self.kinds)))
        return self.kinds[kind] if chosen else None, random

    def _found(self, index: int, item: Item) -> Item | None:
        """Build ids and labels with something to find; return None if the sequence has none, or no room for it."""
        kind, random = self._drawn(index)
        ids = item["input_ids"]
        if kind is None or len(ids) - self.front < NEAR:
            return None
        made = {"keys": self._keys, "copies": self._copies, "chains": self._chains}[kind](ids, random)
        return None if made is None else self._placed(item, *made)

    def _keys(self, ids: Tensor, random: np.random.Generator) -> Hidden | None:
        count = int(random.integers(1, LOCKERS, endpoint=True))
        names, numbers = self._names(count, random), random.integers(10_000, 100_000, size=count).tolist()
        facts = [self._tokens(f" The locker of {name} opens with {n}.") for name, n in zip(names, numbers, strict=True)]
        places = self._places(ids, count, random)
        wanted = int(random.integers(count))
        asked = self._tokens(f"\n\nWhich number opens the locker of {names[wanted]}? It is")
        return list(zip(places, facts, strict=True)), asked, self._tokens(f" {numbers[wanted]}.")

    def _chains(self, ids: Tensor, random: np.random.Generator) -> Hidden | None:
        links = int(random.integers(1, LINKS, endpoint=True))
        names = self._names(CHAINS * (links + 1), random)
        numbers = random.integers(10_000, 100_000, size=CHAINS).tolist()
        insertions: list[Insertion] = []
        for chain, number in enumerate(numbers):
            people = names[chain * (links + 1) : (chain + 1) * (links + 1)]
            sentences = [f" {people[0]} was given the number {number}."]
            sentences += [f" {giver} told {taker} the same number." for giver, taker in itertools.pairwise(people)]
            places = sorted(self._places(ids, len(sentences), random))
            insertions += zip(places, map(self._tokens, sentences), strict=True)
        wanted = int(random.integers(CHAINS))
        last = names[wanted * (links + 1) + links]
        asked = self._tokens(f"\n\nWhich number does {last} know in the end? It is")
        return sorted(insertions, key=lambda insertion: insertion[0]), asked, self._tokens(f" {numbers[wanted]}.")

    def _copies(self, ids: Tensor, random: np.random.Generator) -> Hidden | None:
        size = int(random.integers(*PASSAGE, endpoint=True))
        lead = self._tokens("\n\nOnce more, what was said above:\n")
        room = len(ids) - self.front - 2 * size - len(lead)
        if room < 1:
            return None
        start = self.front + int(random.integers(room))
        passage = ids[start : start + size]
        return [], torch.cat([lead, passage[:BEGINNING]]), passage[BEGINNING:]

    def _placed(self, item: Item, insertions: Sequence[Insertion], asked: Tensor, answer: Tensor) -> Item | None:
        """Build ids and labels of the same length with insertions, question and answer; return None without room."""
        ids, labels = item["input_ids"], item["labels"]
        jumps = (item["position_ids"].diff() != 1).nonzero().flatten().tolist()
        is_skipwise = len(jumps) == 1  # positions drawn at random jump everywhere, and their text is one piece
        border = jumps[0] + 1 if is_skipwise else len(ids)
        pieces = [(self.front, border), (border, len(ids))] if is_skipwise else [(self.front, border)]
        columns = {"input_ids": [ids[: self.front]], "labels": [labels[: self.front]]}
        for number, (start, stop) in enumerate(pieces):
            is_last = number == len(pieces) - 1
            tail = torch.cat([asked, answer]) if is_last else ids[:0]
            here = [(place, what) for place, what in insertions if start <= place < stop]
            taken = len(tail) + sum(len(what) for _, what in here)
            if taken > MOST * (stop - start):
                return None
            kept = stop - taken  # the text up to here stays
            places = [min(place, kept) - start for place, _ in here]
            needles, quiet = [what for _, what in here], len(asked) if is_last else 0
            silent = [torch.full_like(what, IGNORED) for what in (*needles, tail[:quiet])]
            columns["input_ids"] += [*inserted(ids[start:kept], needles, places), tail]
            columns["labels"] += [*inserted(labels[start:kept], silent[:-1], places), silent[-1], tail[quiet:]]
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        if is_skipwise:  # the token behind the border may continue text that was replaced
            joined["labels"][border] = IGNORED
        return joined

    def _places(self, ids: Tensor, count: int, random: np.random.Generator) -> list[int]:
        """Return the nearest beginnings of sentences behind places drawn at random, in ascending order."""
        drawn = sorted(random.integers(self.front + 1, len(ids), size=count).tolist())
        return [self._sentence_from(ids, place) for place in drawn]

    def _sentence_from(self, ids: Tensor, place: int) -> int:
        near = ids[place - 1 : place - 1 + NEAR].tolist()
        beginning = place + next((number for number, token in enumerate(near) if self._ends_sentence(token)), 0)
        return min(beginning, len(ids) - 1)

    def _ends_sentence(self, token: int) -> bool:
        if token not in self._ends:
            text: str = self.tokenizer.decode([token])
            self._ends[token] = "\n" in text or text.rstrip(CLOSING).endswith(ENDS)
        return self._ends[token]

    def _names(self, count: int, random: np.random.Generator) -> list[str]:
        names = NAMES.split()
        return [names[number] for number in random.permutation(len(names))[:count]]

    def _tokens(self, text: str) -> Int[Tensor, " tokens"]:
        return torch.tensor(tokens_behind(self.tokenizer, text), dtype=torch.long)
