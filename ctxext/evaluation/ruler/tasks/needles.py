"""What the eight needle tasks share: sentences that give a key a value, hidden among others or in prose."""

from __future__ import annotations

import random
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from ctxext.evaluation.ruler.tasks.base import Question, Setting, Sources, Task, distinct, words
from ctxext.texts.haystack import split_sentences

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
    """Find the values of one or several keys.

    A subclass says what keys and values are, how many keys there are, how many values each has, and how many keys are
    asked for. Keys differ from each other; beyond that, all is as NVIDIA draws it.
    """

    tokens_to_generate = 128
    kind_of_key: ClassVar[Kind] = "words"
    kind_of_value: ClassVar[Kind] = "numbers"
    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1

    def question(self, size: int, index: int, generator: random.Random) -> Question:
        keys = distinct(max(self.keys, self.queries), lambda: _draw(self.kind_of_key, generator))
        pairs = {key: [_draw(self.kind_of_value, generator) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in pairs[key]]
        generator.shuffle(needles)
        asked = generator.sample(keys, self.queries)
        context = self._context(size, needles, asked, generator)
        one = self.queries * self.values == 1
        fields = {"kind": self.kind_of_value.removesuffix("s") if one else self.kind_of_value, "query": _listed(asked)}
        text = (ONE if one else MANY).format(context=context, **fields)
        prompt = self.setting.dress(text) + (ONE_PREFIX if one else MANY_PREFIX).format(**fields)
        return Question(prompt, tuple(value for key in asked for value in pairs[key]))

    @property
    def least(self) -> int:
        return max(self.keys, self.queries) * self.values

    @abstractmethod
    def _context(self, size: int, needles: Sequence[str], asked: Sequence[str], generator: random.Random) -> str:
        """The haystack with the needles in it."""

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.kind_of_value, key=key, value=value)


class InNoise(Needles):
    """The haystack is one line of noise, repeated."""

    unit = "lines"

    def _context(self, size: int, needles: Sequence[str], asked: Sequence[str], generator: random.Random) -> str:
        return "\n".join(inserted([NOISE] * size, needles, generator))


class InNeedles(Needles):
    """The haystack is made of needles too, with other keys."""

    unit = "lines"

    def _context(self, size: int, needles: Sequence[str], asked: Sequence[str], generator: random.Random) -> str:
        others = distinct(size, lambda: _draw(self.kind_of_key, generator), without=asked)
        lines = [self._needle(key, _draw(self.kind_of_value, generator)) for key in others]
        return "\n".join(inserted(lines, needles, generator))


class InEssay(Needles):
    """The haystack is prose, the same for all prompts; needles stand between its sentences."""

    unit = "words"
    source = "essay"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        essay = setting.sources.essay
        self._words = essay.text.split() if essay else []
        sentences = split_sentences(" ".join(self._words))[: super().least]
        self._least = sum(len(sentence.split()) for sentence in sentences)

    @classmethod
    def why_not(cls, sources: Sources) -> str | None:
        if sources.essay is None or not sources.essay.text.split():
            return "it hides its needles in a long text, and there is none; give one (--text)"
        return None

    @property
    def least(self) -> int:
        """Words for at least one sentence per needle."""
        return self._least

    def _context(self, size: int, needles: Sequence[str], asked: Sequence[str], generator: random.Random) -> str:
        repeats = -(-size // len(self._words))
        text = " ".join((self._words * repeats)[:size])
        sentences = [sentence.strip() for sentence in split_sentences(text)]
        places = sorted(len(sentences) * depth // 100 for depth in generator.sample(DEPTHS, len(needles)))
        parts = []
        for start, stop, needle in zip([0, *places], places, needles, strict=False):
            parts += [" ".join(sentences[start:stop]), needle]
        return " ".join([*parts, " ".join(sentences[places[-1] :])])


def inserted(lines: list[str], needles: Sequence[str], generator: random.Random) -> list[str]:
    """``lines`` with every needle in front of another line, the first needle nearest to the end."""
    places = sorted(generator.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return lines


def _draw(kind: Kind, generator: random.Random) -> str:
    if kind == "numbers":
        return str(generator.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=generator.getrandbits(128), version=4))
    return f"{generator.choice(words().adjectives)}-{generator.choice(words().nouns)}"


def _listed(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


class Single1(InNoise):
    """A number in repeated noise: a passkey."""

    name = "niah_single_1"


class Single2(InEssay):
    """A number in prose."""

    name = "niah_single_2"


class Single3(InEssay):
    """A UUID in prose: 36 characters to repeat without a mistake."""

    name = "niah_single_3"
    kind_of_value = "uuids"


class MultiKey1(InEssay):
    """Four keys in prose, one asked for."""

    name = "niah_multikey_1"
    keys = 4


class MultiKey2(InNeedles):
    """Nothing but needles, one asked for."""

    name = "niah_multikey_2"


class MultiKey3(InNeedles):
    """Nothing but needles whose keys and values are UUIDs, one asked for."""

    name = "niah_multikey_3"
    kind_of_key = "uuids"
    kind_of_value = "uuids"


class MultiValue(InEssay):
    """One key with four values, all asked for."""

    name = "niah_multivalue"
    values = 4


class MultiQuery(InEssay):
    """Four keys with a value each, all asked for."""

    name = "niah_multiquery"
    queries = 4
