"""The contract of a RULER task: a prompt of any size, its answers, and how a reply is scored.

Prompts, counts and scores follow NVIDIA's generator and scorer, github.com/NVIDIA/RULER@c3f5e3b (Apache-2.0):
scripts/synthetic.yaml, scripts/data/synthetic, scripts/eval/synthetic. The prompt templates are theirs, word for word:
they are what defines the benchmark. Source of the benchmark: Hsieh et al., arXiv:2404.06654.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.errors import require_package
from ctxext.texts.documents import Document

# Sizes that largest_fit interpolates before it halves the rest of the range.
GUESSES = 8


@dataclass(frozen=True)
class Setting:
    """The length, tokenizer and essay for which a task writes its prompts.

    Args:
        length: Tokens of prompt and reply together.
        count: Function from a text to its tokens, as the model will read it.
        essay: Text in English to hide things in, where NVIDIA uses the essays of one author; repeated where it is too
            short, as NVIDIA does. None without a text.
        dress: Function that puts a user's message into the model's chat template; the answer begins behind it.
    """

    length: int
    count: Callable[[str], int]
    essay: Document | None = None
    dress: Callable[[str], str] = str


@dataclass(frozen=True)
class Question:
    """One prompt.

    Args:
        answers: Strings that a right reply contains.
        index: Number of the prompt within its task and length, from 0.
        tokens: Tokens of the prompt, as the model reads it; 0 where nobody counted.
        size: Units in the prompt, see ``Task.unit``; 0 where no length was to be filled.
    """

    prompt: str
    answers: tuple[str, ...]
    index: int = 0
    tokens: int = 0
    size: int = 0


class Task(ABC):
    """One task of the benchmark at one length.

    A task writes prompts of any *size*; ``run.draw`` finds the largest that fits a length. A subclass says its
    ``name``, the ``tokens_to_generate`` for a reply, the ``unit`` that its sizes count (words, lines), and by
    ``in_essay`` that it hides things in an essay; other tasks are made from chance alone.
    """

    name: ClassVar[str]
    tokens_to_generate: ClassVar[int]
    unit: ClassVar[str]
    in_essay: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @classmethod
    def variant(cls, name: str, **fields: Any) -> type[Task]:
        """Make a task of this family: a class of that name with other values of the family's class variables."""
        return type(name, (cls,), {"name": name, "__doc__": cls.__doc__, "__module__": cls.__module__, **fields})

    @classmethod
    def why_not(cls, essay: Document | None) -> str | None:
        """Return why this task cannot be made with this essay; None if it can."""
        if cls.in_essay and (essay is None or not essay.text.split()):
            return "it hides its needles in a long text, and there is none; give one (--text)"
        return None

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest size that is still the task."""

    @property
    def most(self) -> int | None:
        """The largest possible size; None without a limit."""
        return None

    @abstractmethod
    def question(self, size: int, generator: random.Random) -> Question:
        """Write a prompt of ``size`` units; the same generator state gives the same prompt."""


def all_of(reply: str, answers: Sequence[str]) -> float:
    """Return the percentage of the answers that the reply contains, in any case of letters: ``string_match_all``."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", reply.strip()).strip().lower()
    return 100 * sum(answer.lower() in cleaned for answer in answers) / len(answers)


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Return a sorted list of English words, each word once: ``nouns``, ``adjectives``, or ``all`` with verbs too.

    Raises:
        InvalidParameterError: wonderwords is not installed.
    """
    require_package("wonderwords", "eval", "RULER takes its words from")
    from wonderwords import Defaults, RandomWord

    lists = {"nouns": Defaults.NOUNS, "adjectives": Defaults.ADJECTIVES, "verbs": Defaults.VERBS}
    if kind == "all":
        return tuple(sorted({word for each in lists for word in words(each)}))
    return tuple(RandomWord(enhanced_prefixes=False, words=lists[kind]).filter())


def distinct(count: int, draw: Callable[[], str], without: Collection[str] = ()) -> list[str]:
    """Return the first ``count`` different texts that ``draw`` makes, except the texts of ``without``."""
    drawn_texts: dict[str, None] = {}
    while len(drawn_texts) < count:
        drawn = draw()
        if drawn not in without:
            drawn_texts[drawn] = None
    return list(drawn_texts)


def largest_fit(
    tokens: Callable[[int], int], least: int, room: int, *, most: int | None = None, near: int | None = None
) -> int:
    """Find the size whose text fits ``room`` tokens while the text of the next size does not.

    A text is almost, but not exactly, proportional to its size, since words are drawn again for every size. So the next
    size to try is interpolated, and the returned size has been counted: it fits, and one unit more does not.

    Args:
        tokens: Function from a size to the tokens of its text.
        least: Size that is known to fit.
        most: Largest size there is; returned if it fits.
        near: Size that is probably near to the result; saves time where counting tokens takes long.
    """
    low, at_low, step = least, tokens(least), max(1, least if near is None else near - least)
    while True:
        high = low + step if most is None else min(low + step, most)
        if high == low:
            return low
        at_high = tokens(high)
        if at_high > room:
            break
        per_token = (high - low) / max(1, at_high - at_low)
        step = min(round(1.02 * (room - at_high) * per_token) + step // 8 + 1, 8 * high)
        low, at_low = high, at_high
    for attempt in itertools.count():
        if high - low == 1:
            return low
        part = (room - at_low) / (at_high - at_low) if attempt < GUESSES else 0.5
        size = min(max(low + int(part * (high - low)), low + 1), high - 1)
        at_size = tokens(size)
        if at_size > room:
            high, at_high = size, at_size
        else:
            low, at_low = size, at_size
    raise AssertionError  # the count has no end
