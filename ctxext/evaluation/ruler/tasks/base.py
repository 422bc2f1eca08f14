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
from pathlib import Path
from typing import Any, ClassVar

from ctxext.errors import require_package
from ctxext.texts.documents import Document

# Sizes that largest_fit interpolates before it halves what is left.
GUESSES = 8


@dataclass(frozen=True)
class Sources:
    """The texts and data sets that tasks are made from.

    Args:
        essay: a long text in English, for the tasks that hide something in prose, where NVIDIA uses the essays of one
            author; None where there is no text. It is repeated where it is too short, as NVIDIA does.
        squad: SQuAD 2.0's dev set, a JSON file in its published form, for ``qa_1``.
        hotpotqa: HotpotQA's dev set (distractor), a JSON file in its published form, for ``qa_2``.
    """

    essay: Document | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None


@dataclass(frozen=True)
class Setting:
    """The length, tokenizer and sources for which a task writes its prompts.

    Args:
        length: tokens of prompt and reply together.
        count: tokens of a text, as the model will read it.
        dress: puts a user's message into the model's chat template; the start of the answer comes after it.
    """

    length: int
    count: Callable[[str], int]
    sources: Sources
    dress: Callable[[str], str] = str


@dataclass(frozen=True)
class Question:
    """One prompt.

    Args:
        answers: strings that a right reply contains.
        tokens: of the prompt, as the model reads it; 0 where nobody counted.
        size: units in the prompt, see ``Task.unit``; 0 where the task was not asked to fill a length.
    """

    prompt: str
    answers: tuple[str, ...]
    index: int = 0
    tokens: int = 0
    size: int = 0


class Task(ABC):
    """One task of the benchmark at one length.

    A task writes prompts of any *size*; how large one fits a length is found by whoever counts tokens. A subclass says
    its ``name``, the ``tokens_to_generate`` for a reply, the ``unit`` that its sizes count (words, lines, documents),
    and which field of ``Sources`` is its ``source``, None where it is made from chance alone.
    """

    name: ClassVar[str]
    tokens_to_generate: ClassVar[int]
    unit: ClassVar[str]
    source: ClassVar[str | None] = None

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @classmethod
    def variant(cls, name: str, **fields: Any) -> type[Task]:
        """Make a task of this family: a class of that name with other values of the family's class variables."""
        return type(name, (cls,), {"name": name, "__doc__": cls.__doc__, "__module__": cls.__module__, **fields})

    @classmethod
    def why_not(cls, sources: Sources) -> str | None:
        """Return why this task cannot be made from ``sources``; None if it can."""
        return None

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest size that is still the task."""

    @property
    def most(self) -> int | None:
        """The largest size that the sources allow; None where there is no end."""
        return None

    @abstractmethod
    def question(self, size: int, index: int, generator: random.Random) -> Question:
        """Write prompt number ``index`` (from 0) of ``size`` units; the same generator state gives the same prompt."""

    def score(self, reply: str, answers: Sequence[str]) -> float:
        """Score a reply from 0 to 100, as NVIDIA scores this task."""
        return all_of(reply, answers)


def all_of(reply: str, answers: Sequence[str]) -> float:
    """Return the percentage of the answers that the reply contains, whatever their case: ``string_match_all``."""
    cleaned = _clean(reply)
    return 100 * sum(answer.lower() in cleaned for answer in answers) / len(answers)


def any_of(reply: str, answers: Sequence[str]) -> float:
    """Return 100 if the reply contains one of the answers, whatever its case, else 0: ``string_match_part``."""
    cleaned = _clean(reply)
    return 100.0 * any(answer.lower() in cleaned for answer in answers)


def _clean(reply: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", reply.strip()).strip().lower()


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
    """Return the first ``count`` different texts that ``draw`` makes, leaving out those of ``without``."""
    drawn_texts: dict[str, None] = {}
    while len(drawn_texts) < count:
        drawn = draw()
        if drawn not in without:
            drawn_texts[drawn] = None
    return list(drawn_texts)


def largest_fit(
    tokens: Callable[[int], int], least: int, room: int, *, most: int | None = None, near: int | None = None
) -> int:
    """Find the size whose text fits ``room`` tokens while that of the next size does not.

    A text is almost, but not exactly, proportional to its size, since words are drawn anew for every size. So the next
    size to try is interpolated, and what is returned has been counted: it fits, and one unit more does not.

    Args:
        tokens: tokens of the text of a size.
        least: a size that is known to fit.
        most: the largest size there is; returned if it fits.
        near: a size that is probably near to the one wanted; saves time where counting tokens takes long.
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
