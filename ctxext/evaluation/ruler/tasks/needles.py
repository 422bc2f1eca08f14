"""The eight needle tasks: sentences that give a key a value, hidden among others or in prose."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, distinct, words
from ctxext.texts.haystack import inserted, split_sentences

Kind = Literal["numbers", "words", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?"
)
MANY_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
)
ONE_PREFIX = " The special magic {kind} for {query} mentioned in the provided text is"

# Forty depths from 0 to 100 percent, rounded to whole ones; halves do not occur.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


class Needles(Task):
    """Values of keys, hidden in a haystack; the prompt asks for one or several of them.

    The haystack is a line of ``noise``, repeated; other ``needles``, with other keys; or an ``essay``, the same for all
    prompts, with the needles between its sentences.
    """

    tokens_to_generate = 128
    haystack: ClassVar[Literal["noise", "needles", "essay"]] = "essay"
    kind_of_key: ClassVar[Kind] = "words"
    kind_of_value: ClassVar[Kind] = "numbers"
    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._least = max(self.keys, self.queries) * self.values
        if self.haystack == "essay":
            self._words = setting.essay.text.split() if setting.essay else []
            sentences = split_sentences(" ".join(self._words))[: self._least]
            self._least = sum(len(sentence.split()) for sentence in sentences)

    @property
    def least(self) -> int:
        """A line per needle, or the words of a sentence per needle."""
        return self._least

    def question(self, size: int, generator: random.Random) -> Question:
        keys = distinct(max(self.keys, self.queries), lambda: _draw(self.kind_of_key, generator))
        pairs = {key: [_draw(self.kind_of_value, generator) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in pairs[key]]
        generator.shuffle(needles)
        asked = generator.sample(keys, self.queries)
        context = self._context(size, needles, asked, generator)
        single = self.queries * self.values == 1
        fields = {
            "kind": self.kind_of_value.removesuffix("s") if single else self.kind_of_value,
            "query": _listed(asked),
        }
        text = (ONE if single else MANY).format(context=context, **fields)
        prompt = self.setting.dress(text) + (ONE_PREFIX if single else MANY_PREFIX).format(**fields)
        return Question(prompt, tuple(value for key in asked for value in pairs[key]))

    def _context(self, size: int, needles: Sequence[str], asked: Sequence[str], generator: random.Random) -> str:
        """Write the haystack with the needles in it."""
        if self.haystack == "essay":
            text = " ".join((self._words * -(-size // len(self._words)))[:size])
            sentences = [sentence.strip() for sentence in split_sentences(text)]
            places = sorted(len(sentences) * depth // 100 for depth in generator.sample(DEPTHS, len(needles)))
            return " ".join(" ".join(part) for part in inserted(sentences, [[needle] for needle in needles], places))
        lines = [NOISE] * size
        if self.haystack == "needles":
            others = distinct(size, lambda: _draw(self.kind_of_key, generator), without=asked)
            lines = [self._needle(key, _draw(self.kind_of_value, generator)) for key in others]
        return scattered(lines, needles, generator)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.kind_of_value, key=key, value=value)


_ESSAY: dict[str, Any] = {"unit": "words", "in_essay": True}
_UUIDS = {"kind_of_key": "uuids", "kind_of_value": "uuids"}
NEEDLES = (
    Needles.variant("niah_single_1", unit="lines", haystack="noise"),  # a passkey
    Needles.variant("niah_single_2", **_ESSAY),
    Needles.variant("niah_single_3", kind_of_value="uuids", **_ESSAY),  # 36 characters to repeat without a mistake
    Needles.variant("niah_multikey_1", keys=4, **_ESSAY),  # four keys, one asked for
    Needles.variant("niah_multikey_2", unit="lines", haystack="needles"),
    Needles.variant("niah_multikey_3", unit="lines", haystack="needles", **_UUIDS),
    Needles.variant("niah_multivalue", values=4, **_ESSAY),  # one key with four values, all asked for
    Needles.variant("niah_multiquery", queries=4, **_ESSAY),  # four keys with a value each, all asked for
)


def scattered(lines: Sequence[str], needles: Sequence[str], generator: random.Random) -> str:
    """Put every needle in front of another of the ``lines``, the first needle nearest to the end."""
    places = sorted(generator.sample(range(len(lines)), len(needles)))
    parts = inserted(lines, [[needle] for needle in reversed(needles)], places)
    return "\n".join(itertools.chain.from_iterable(parts))


def _draw(kind: Kind, generator: random.Random) -> str:
    if kind == "numbers":
        return str(generator.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=generator.getrandbits(128), version=4))
    return f"{generator.choice(words('adjectives'))}-{generator.choice(words('nouns'))}"


def _listed(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
