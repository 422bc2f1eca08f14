"""Haystacks to hide something in: repeated noise, or any text, as sentences of tokens."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.texts.corpus import special_prefix, tokens_behind

NOISE = (
    " The rain falls on the hills.",
    " The river runs to the sea.",
    " A cart goes down the road.",
    " The bread is in the oven.",
    " Here and there a dog barks.",
)


@dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences, each as token ids, to be taken from any sentence on.

    Args:
        sentences: Token ids of each sentence; no sentence is empty.
        repeated: True if the first follows the last; a text that does not repeat can be too short.
    """

    name: str
    sentences: tuple[tuple[int, ...], ...]
    repeated: bool

    @property
    def tokens(self) -> int:
        """Tokens of all sentences."""
        return sum(map(len, self.sentences))

    def take(self, room: int, generator: random.Random) -> list[tuple[int, ...]]:
        """Take sentences of ``room`` tokens in total, from a random one on; the last is cut to make that exact.

        Raises:
            InvalidParameterError: if the text is too short.
        """
        if self.repeated:
            offset = generator.randrange(len(self.sentences))
            return _cut(itertools.chain(self.sentences[offset:], itertools.cycle(self.sentences)), room)
        left = list(itertools.accumulate(map(len, reversed(self.sentences))))
        starts = len(left) - bisect.bisect_left(left, room)
        if starts < 1:
            raise InvalidParameterError(
                f"The text {self.name!r} has {self.tokens:,} tokens, found a need for {room:,}. Use a longer text, a "
                f"smaller length, or noise."
            )
        return _cut(self.sentences[generator.randrange(starts) :], room)


def noise(tokenizer: Any) -> Haystack:
    """Repeat five short sentences about nothing, over and over."""
    return Haystack("noise", tuple(tuple(tokens_behind(tokenizer, sentence)) for sentence in NOISE), repeated=True)


def of_text(tokenizer: Any, name: str, text: str) -> Haystack:
    """Cut a text into sentences of tokens.

    Raises:
        InvalidParameterError: if no sentence ends inside the text, so that nothing can be hidden in it.
    """
    sentences = split_sentences(text)
    if len(sentences) < 2:
        raise InvalidParameterError(
            f"The text {name!r} has no two sentences to hide something between. A sentence ends with a full stop, a "
            f"question mark, an exclamation mark or a blank line. Use prose, or noise."
        )
    tokens = (tuple(tokens_behind(tokenizer, sentence)) for sentence in sentences)
    return Haystack(name, tuple(sentence for sentence in tokens if sentence), repeated=False)


def nearest_boundary(sentences: Sequence[Sequence[int]], depth: float) -> int:
    """Count the sentences to put in front so that they hold as nearly as possible the share ``depth`` of all tokens."""
    ends = list(itertools.accumulate(map(len, sentences), initial=0))
    return min(range(len(ends)), key=lambda count: abs(ends[count] - depth * ends[-1]))


def hide(
    tokenizer: Any,
    haystack: Haystack,
    needles: Sequence[Sequence[int]],
    depths: Sequence[float],
    *,
    opening: str,
    length: int,
    behind: int,
    generator: random.Random,
    kind: str,
) -> tuple[list[int], list[int]]:
    """Begin a prompt of exactly ``length`` tokens: an opening, then a haystack with needles between its sentences.

    Args:
        haystack: Sentences to hide in; the last is cut so that the length fits.
        needles: Token ids of each, in the order in which they are to stand.
        depths: Depths of the needles, from 0 (start) to 1 (end), not decreasing.
        behind: Tokens of the prompt that stand behind the haystack.

    Returns:
        Token ids, ``length - behind`` of them, the tokenizer's special tokens in front; and the place of each needle's
        first.

    Raises:
        InvalidParameterError: a length that is too small, or too large for the text.
    """
    front = [*special_prefix(tokenizer), *tokenizer(opening, add_special_tokens=False).input_ids]
    room = length - len(front) - behind - sum(map(len, needles))
    least = haystack.tokens if haystack.repeated else 1
    if room < least:
        raise InvalidParameterError(
            f"A prompt for {kind} needs at least {length - room + least} tokens with this tokenizer, found "
            f"length={length}."
        )
    sentences = haystack.take(room, generator)
    cuts = [nearest_boundary(sentences, depth) for depth in depths]
    parts = inserted(sentences, [[tuple(needle)] for needle in needles], cuts)
    starts = itertools.accumulate((sum(map(len, part)) for part in parts), initial=len(front))
    chain = itertools.chain.from_iterable
    return [*front, *chain(chain(parts))], [*starts][1:-1:2]


def inserted(items: Any, needles: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Cut a sequence at places, in ascending order, and put a needle at each: piece, needle, piece, ..., piece."""
    pieces = [items[start:stop] for start, stop in itertools.pairwise([0, *places, len(items)])]
    return [*itertools.chain.from_iterable(zip(pieces, needles, strict=False)), pieces[-1]]


def _cut(sentences: Any, room: int) -> list[tuple[int, ...]]:
    taken: list[tuple[int, ...]] = []
    for sentence in sentences:
        if room <= 0:
            break
        taken.append(sentence[:room])
        room -= len(sentence)
    return taken


# The end of a sentence, with the quotes and brackets that close there: in Latin script before a space, in Chinese and
# Japanese anywhere. A blank line ends a sentence too.
_LATIN = r"""[.!?…]+["'\u201d\u2019»)\]]*(?=\s)"""
_EAST_ASIAN = r"[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019\uff09]*"
_END = re.compile(rf"{_LATIN}|{_EAST_ASIAN}|(?=\n\s*\n)")
_TITLES = "Mr Mrs Ms Dr St Prof Rev Hon Capt Col Gen Lt Sgt Jr Sr vs No Vol cf"
_ABBREVIATION = re.compile(rf"\b(?:[A-Z]|i\.e|e\.g|{'|'.join(_TITLES.split())})\.$")


def split_sentences(text: str) -> list[str]:
    """Cut a text at the ends of its sentences. Whitespace stays in front of what follows, and nothing is lost.

    A stop does not end a sentence where a small letter follows, nor after an initial or a title. This is good enough to
    hide something between two sentences, and needs no download of a model.

    Returns:
        Pieces that join to ``text``; one piece where no sentence ends inside it.
    """
    ends = [0]
    for match in _END.finditer(text):
        end = match.end()
        following = text[end : end + 64].lstrip()[:1]
        if end > ends[-1] and following and not following.islower() and not _is_abbreviation(text[ends[-1] : end]):
            ends.append(end)
    return [text[start:stop] for start, stop in itertools.pairwise([*ends, len(text)])] if text else []


def _is_abbreviation(sentence: str) -> bool:
    return _ABBREVIATION.search(sentence, max(0, len(sentence) - 8)) is not None
