"""Which texts an extension is chosen on, and which it is judged on afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.corpus import TokenisedDocument

__all__ = ["SplitTexts", "TextStretch", "split_texts"]

# Of eight documents, three are chosen on and five are judged on: a verdict needs more of them than a choice.
SHARE = 3 / 8


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
    """

    choosing: tuple[TextStretch, ...]
    held_out: tuple[TextStretch, ...]
    same_documents: bool
    accepting: tuple[TextStretch, ...] = ()

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


def split_texts(documents: Sequence[TokenisedDocument], *, tokens: int, seed: int, search: bool = False) -> SplitTexts:
    """Cut documents into stretches and keep some documents for the verdict; of a single one, some of its stretches.

    Args:
        documents: whole.
        tokens: in a stretch, the prefix included.
        seed: decides which documents are for what.
        search: keep a part of those to choose on back, see ``keep_back``.

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
    cut = [stretches for stretches in cut if stretches]
    if sum(map(len, cut)) < 2:
        raise InvalidParameterError(
            f"One stretch of {tokens:,} tokens is too little for a verdict: one is chosen on, and another, never read "
            f"before, is judged on; better are three and five. The text has {longest:,} tokens. Give more or longer "
            f"texts."
        )
    draw = random.Random(f"choose {seed}")
    draw.shuffle(cut)
    if len(cut) == 1:
        (only,) = cut
        draw.shuffle(only)
        count = _share(len(only), search)
        found = SplitTexts(tuple(only[:count]), tuple(only[count:]), same_documents=True)
    else:
        count = _share(len(cut), search)
        found = SplitTexts(_in_turns(cut[:count]), _in_turns(cut[count:]), same_documents=False)
    return found.keep_back() if search else found


def _share(of: int, search: bool) -> int:
    return min(of - 1, max(2 if search else 1, int(of * SHARE)))


def _names(documents: Sequence[TokenisedDocument]) -> list[str]:
    """Names of documents, numbered where two are the same."""
    names = [one.name for one in documents]
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, start=1)]


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
