"""Split texts: an extension is chosen on some, and judged on others afterwards.

Texts that it is judged on must be new, so a text that stands there twice is used once: equal texts, copies that differ
in spaces and case, copies with another beginning or end, and excerpts of one another. A stretch is left out where at
least half of its runs of 32 characters, spaces and case aside, occur in the stretches before it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.texts.conversations import normalised
from ctxext.texts.corpus import Corpus, TokenisedDocument, corpus_of
from ctxext.texts.documents import Document, read_documents, texts_in

# Of eight documents, three are chosen on and five are judged on: a verdict needs more of them than a choice.
SHARE = 3 / 8
# A run that two texts have in common, in characters or, without a tokenizer, in tokens; and the share of its runs by
# which a stretch is the same as others.
RUN, SAME = 32, 0.5
# Runs that are looked at in all texts together: more texts are sampled, by the runs themselves.
MOST_RUNS = 1 << 19


def corpus_from(texts: Iterable[str | Path | Document], tokenizer: Any) -> Corpus:
    """Return texts, paths of files and documents as a corpus of whole documents.

    Raises:
        InvalidParameterError: no text, one string instead of a list, or the name of a file instead of its text.
    """
    if isinstance(texts, str) or not (given := texts_in("texts", texts, Path, Document)):
        raise InvalidParameterError(
            "texts must be a list of texts, of paths (pathlib.Path) or of documents, with at least one in it."
        )
    documents: list[Document] = []
    for number, text in enumerate(given, start=1):
        if isinstance(text, Path):
            documents += read_documents([text])
        else:
            documents.append(Document(f"text {number}", normalised(text)) if isinstance(text, str) else text)
    return corpus_of(documents, tokenizer, tokens=2, whole=True)


@dataclass(frozen=True, eq=False)
class TextStretch:
    """A part of a document, as long as the target; no other document has its name."""

    text: TokenisedDocument
    document: str


@dataclass(frozen=True, eq=False)
class SplitTexts:
    """Stretches of texts, each with one purpose.

    Args:
        same_documents: True if ``choosing`` and ``held_out`` are of the one document that there is.
        left_out: names of stretches that are in others.
    """

    choosing: tuple[TextStretch, ...]
    held_out: tuple[TextStretch, ...]
    same_documents: bool
    left_out: tuple[str, ...] = ()


def split_texts(documents: Sequence[TokenisedDocument], *, tokens: int, seed: int, tokenizer: Any = None) -> SplitTexts:
    """Cut documents into stretches and keep some documents for the verdict, or some stretches of a single document.

    A stretch that is in others is left out first, so that nothing is both chosen on and judged on.

    Args:
        tokenizer: the documents' tokenizer, which tells copies that differ in spaces and case; None compares tokens.

    Raises:
        InvalidParameterError: no document is long enough, or there is one stretch in all.
    """
    longest = max((document.tokens for document in documents), default=0)
    if longest < tokens:
        raise InvalidParameterError(
            f"No text is as long as the target: {len(documents)} texts, the longest of {longest:,} tokens, and "
            f"{tokens:,} are needed. Give longer texts, or a smaller target."
        )
    cut = [_stretches(document, name, tokens) for document, name in zip(documents, _names(documents), strict=True)]
    cut, left_out = _distinct(cut, tokenizer)
    if sum(map(len, cut)) < 2:
        copies = f" ({len(left_out)} more are copies of it)" if left_out else ""
        raise InvalidParameterError(
            f"One stretch of {tokens:,} tokens{copies} is too little for a verdict. One is chosen on and another, "
            f"never read before, is judged on; better are three and five. The longest text has {longest:,} tokens. "
            f"Give more or longer texts."
        )
    draw = random.Random(f"choose {seed}")
    draw.shuffle(cut)
    single = len(cut) == 1
    if single:  # its stretches take the places of documents
        draw.shuffle(cut[0])
        cut = [[stretch] for stretch in cut[0]]
    count = min(len(cut) - 1, max(1, int(len(cut) * SHARE)))
    return SplitTexts(_in_turns(cut[:count]), _in_turns(cut[count:]), same_documents=single, left_out=left_out)


def _names(documents: Sequence[TokenisedDocument]) -> list[str]:
    """Return a name for each document that no other has, numbered where two are the same."""
    names = [document.name for document in documents]
    taken = {name for name in names if names.count(name) == 1}
    unique = []
    for name in names:
        numbered = (f"{name} ({number})" for number in itertools.count(1))
        unique.append(name if names.count(name) == 1 else next(other for other in numbered if other not in taken))
        taken.add(unique[-1])
    return unique


def _distinct(
    documents: Sequence[list[TextStretch]], tokenizer: Any
) -> tuple[list[list[TextStretch]], tuple[str, ...]]:
    """Return the stretches without copies and excerpts of others, and the names of the stretches left out.

    The longest document comes first, so that a text is kept and its excerpt is left out.
    """
    characters = {stretch: _characters(stretch, tokenizer) for stretches in documents for stretch in stretches}
    every = max(1, sum(map(len, characters.values())) // MOST_RUNS)
    seen: set[int] = set()
    copies = set()
    for stretch in (stretch for stretches in sorted(documents, key=len, reverse=True) for stretch in stretches):
        runs = _runs(characters[stretch], every)
        if len(runs & seen) >= SAME * len(runs) and runs:
            copies.add(stretch)
        seen |= runs
    kept = [[stretch for stretch in stretches if stretch not in copies] for stretches in documents]
    left_out = tuple(stretch.text.name for stretches in documents for stretch in stretches if stretch in copies)
    return [stretches for stretches in kept if stretches], left_out


def _characters(stretch: TextStretch, tokenizer: Any) -> Int[Tensor, " characters"]:
    """Return the values that two texts are compared by: bytes without spaces and in one case, or token ids."""
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
    step = tokens - document.prefix
    parts = (document.tokens - document.prefix) // step
    return [
        TextStretch(
            replace(document.take(tokens, skip=part * step), name=f"{name}, part {part + 1}" if parts > 1 else name),
            name,
        )
        for part in range(parts)
    ]


def _in_turns(documents: Sequence[Sequence[TextStretch]]) -> tuple[TextStretch, ...]:
    """Return the first stretch of each document, then the second of each: as many documents as there are come first."""
    turns = itertools.zip_longest(*documents)
    return tuple(stretch for turn in turns for stretch in turn if stretch is not None)
