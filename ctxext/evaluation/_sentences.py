"""Where one sentence ends and the next begins: the places where something can be hidden in a text."""

from __future__ import annotations

import itertools
import re

__all__ = ["split_sentences"]

# The end of a sentence, with the quotes and brackets that close there: in Latin script before a space, in Chinese and
# Japanese anywhere. A blank line ends a sentence too.
_LATIN = r"""[.!?…]+["'\u201d\u2019»)\]]*(?=\s)"""
_EAST_ASIAN = r"[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019\uff09]*"
_END = re.compile(rf"{_LATIN}|{_EAST_ASIAN}|(?=\n\s*\n)")
_TITLES = "Mr Mrs Ms Dr St Prof Rev Hon Capt Col Gen Lt Sgt Jr Sr vs No Vol cf"
_ABBREVIATION = re.compile(rf"\b(?:[A-Z]|i\.e|e\.g|{'|'.join(_TITLES.split())})\.$")


def split_sentences(text: str) -> list[str]:
    """Cut a text at the ends of its sentences. Whitespace stays in front of what follows, and nothing is lost.

    A stop is no end where a small letter follows, nor after an initial or a title. Good enough to hide something
    between two sentences; no more is needed, and no model has to be downloaded for it.

    Returns:
        Pieces that join to ``text``; one piece where no sentence ends inside it.
    """
    ends = [0]
    for found in _END.finditer(text):
        end = found.end()
        following = text[end : end + 64].lstrip()[:1]
        if end > ends[-1] and following and not following.islower() and not _is_abbreviation(text[ends[-1] : end]):
            ends.append(end)
    return [text[start:stop] for start, stop in itertools.pairwise([*ends, len(text)])] if text else []


def _is_abbreviation(sentence: str) -> bool:
    return _ABBREVIATION.search(sentence, max(0, len(sentence) - 8)) is not None
