"""Which texts an extension is chosen on, and which it is judged on afterwards.

What it is judged on must be new, so a text that stands there twice is used once: equal texts, copies that differ in
spaces and case, copies with another beginning or end, and excerpts of one another. A stretch is left out where at least
half of its runs of 32 characters, spaces and case aside, occur in the stretches before it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.texts.corpus import TokenisedDocument

# Of eight documents, three are chosen on and five are judged on: a verdict needs more of them than a choice.
SHARE = 3 / 8
# A run that two texts have in common, in characters or, without a tokenizer, in tokens; and the share of its runs by
# which a stretch is the same as others.
RUN, SAME = 32, 0.5
# Runs that are looked at in all texts together: more texts are sampled, by the runs themselves.
MOST_RUNS = 1 << 19


@dataclass(frozen=True, eq=False)
class TextStretch:
    """A part of a document, as long as the target.

    Args:
        text: its tokens.
        document: name that no other document has.
    """

    text: TokenisedDocument
    document: str


@dataclass(frozen=True, eq=False)
class SplitTexts:
    """Stretches of texts, none of which are in both parts.

    Args:
        choosing: those that a race reads, in its order.
        held_out: those that its choice is judged on.
        same_documents: whether both are of the one document that there is.
        accepting: of those to choose on, what is kept back for accepting what a search found on the others.
        left_out: names of stretches that are in others.
    """

    choosing: tuple[TextStretch, ...]
    held_out: tuple[TextStretch, ...]
    same_documents: bool
    accepting: tuple[TextStretch, ...] = ()
    left_out: tuple[str, ...] = ()

    def first(self, choosing: int, held_out: int) -> SplitTexts:
        """The first so many of each."""
        return replace(self, choosing=self.choosing[:choosing], held_out=self.held_out[:held_out])

    def keep_back(self) -> SplitTexts:
        """The same, where a third of the documents to choose on, or of the stretches of the only one, is kept back.

        Raises:
            InvalidParameterError: there is a single stretch to choose on.
        """
        documents = list(dict.fromkeys(one.document for one in self.choosing))
        if len(self.choosing) < 2:
            raise InvalidParameterError(
                "A search needs a third part of the texts: on one it searches, on another it must be better to be "
                "accepted, and a third judges. Give more or longer texts, or choose without --search."
            )
        if len(documents) > 1:
            kept = set(documents[-max(1, len(documents) // 3) :])
            accepting = tuple(one for one in self.choosing if one.document in kept)
        else:
            accepting = self.choosing[-max(1, len(self.choosing) // 3) :]
        return replace(self, choosing=tuple(one for one in self.choosing if one not in accepting), accepting=accepting)


def split_texts(
    documents: Sequence[TokenisedDocument], *, tokens: int, seed: int, search: bool = False, tokenizer: Any = None
) -> SplitTexts:
    """Cut documents into stretches and keep some documents for the verdict; of a single one, some of its stretches.

    A stretch that is in others is left out first, so that nothing is both chosen on and judged on.

    Args:
        documents: whole.
        tokens: in a stretch, the prefix included.
        seed: decides which documents are for what.
        search: keep a part of those to choose on back, see ``keep_back``.
        tokenizer: of the documents, which tells copies that differ in spaces and case alone; None compares tokens.

    Raises:
        InvalidParameterError: no document is long enough, or there is one stretch in all; two for a search.
    """
    longest = max((one.tokens for one in documents), default=0)
    if longest < tokens:
        raise InvalidParameterError(
            f"No text is as long as the target: {len(documents)} texts, the longest of {longest:,} tokens, and "
            f"{tokens:,} are needed. Give longer texts, or a smaller target."
        )
    cut = [_stretches(one, name, tokens) for one, name in zip(documents, _names(documents), strict=True)]
    cut, left_out = _distinct([stretches for stretches in cut if stretches], tokenizer)
    if sum(map(len, cut)) < 2:
        copies = f" ({len(left_out)} more are copies of it)" if left_out else ""
        raise InvalidParameterError(
            f"One stretch of {tokens:,} tokens{copies} is too little for a verdict: one is chosen on, and another, "
            f"never read before, is judged on; better are three and five. The text has {longest:,} tokens. Give more "
            f"or longer texts."
        )
    draw = random.Random(f"choose {seed}")
    draw.shuffle(cut)
    if len(cut) == 1:
        (only,) = cut
        draw.shuffle(only)
        count = _share(len(only), search)
        found = SplitTexts(tuple(only[:count]), tuple(only[count:]), same_documents=True, left_out=left_out)
    else:
        count = _share(len(cut), search)
        found = SplitTexts(_in_turns(cut[:count]), _in_turns(cut[count:]), same_documents=False, left_out=left_out)
    return found.keep_back() if search else found


def _share(of: int, search: bool) -> int:
    return min(of - 1, max(2 if search else 1, int(of * SHARE)))


def _names(documents: Sequence[TokenisedDocument]) -> list[str]:
    """Return a name for each document that no other has, numbered where two are the same."""
    names = [one.name for one in documents]
    taken = {name for name in names if names.count(name) == 1}
    found = []
    for name in names:
        numbers = (f"{name} ({number})" for number in itertools.count(1))
        unique = name if names.count(name) == 1 else next(one for one in numbers if one not in taken)
        taken.add(unique)
        found.append(unique)
    return found


def _distinct(
    documents: Sequence[list[TextStretch]], tokenizer: Any
) -> tuple[list[list[TextStretch]], tuple[str, ...]]:
    """Return the stretches of documents without those that are in others, and the names of the latter.

    The longest document comes first, so that of a text and its excerpt the text is kept.
    """
    characters = {id(one): _characters(one, tokenizer) for stretches in documents for one in stretches}
    every = max(1, sum(map(len, characters.values())) // MOST_RUNS)
    seen: set[int] = set()
    copies = set()
    for stretches in sorted(documents, key=len, reverse=True):
        for one in stretches:
            runs = _runs(characters[id(one)], every)
            if len(runs & seen) >= SAME * len(runs) and runs:
                copies.add(id(one))
            seen |= runs
    kept = [[one for one in stretches if id(one) not in copies] for stretches in documents]
    left_out = tuple(one.text.name for stretches in documents for one in stretches if id(one) in copies)
    return [stretches for stretches in kept if stretches], left_out


def _characters(stretch: TextStretch, tokenizer: Any) -> Int[Tensor, " characters"]:
    """Return what two texts are compared by: bytes without spaces and in one case, or token ids."""
    ids = stretch.text.input_ids[0, stretch.text.prefix :]
    if tokenizer is None:
        return ids
    folded = "".join(tokenizer.decode(ids.tolist()).split()).casefold()
    return torch.tensor(list(folded.encode()), dtype=torch.long)


def _runs(characters: Int[Tensor, " characters"], every: int) -> set[int]:
    """Return hashes of all runs of a text, or of about one in ``every``: the same ones in each text."""
    width = min(RUN, len(characters))
    starts = len(characters) - width + 1
    hashes = torch.zeros(starts, dtype=torch.long)
    for place in range(width):
        hashes = hashes * 6364136223846793005 + characters[place : place + starts] + 1
    hashes >>= 16  # the lower digits of such a sum are far from random
    return set(hashes[hashes % every == 0].tolist())


def _stretches(document: TokenisedDocument, name: str, tokens: int) -> list[TextStretch]:
    own, step = document.tokens - document.prefix, tokens - document.prefix
    parts = range(own // step)
    named = [f"{name}, part {part + 1}" if len(parts) > 1 else name for part in parts]
    return [
        TextStretch(replace(document.take(tokens, skip=part * step), name=title), name)
        for part, title in zip(parts, named, strict=True)
    ]


def _in_turns(documents: Sequence[Sequence[TextStretch]]) -> tuple[TextStretch, ...]:
    """The first stretch of each document, then the second of each: as many documents as there are come first."""
    rounds = itertools.zip_longest(*documents)
    return tuple(stretch for one in rounds for stretch in one if stretch is not None)
