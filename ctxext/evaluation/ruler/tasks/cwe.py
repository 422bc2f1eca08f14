"""Common words: which ten words of a long list appear more often than the others."""

from __future__ import annotations

import random

from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, words

COMMON = 10
SHORT = 4096
TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
PREFIX = " Answer: The top 10 words that appear most often in the list are:"


class CommonWords(Task):
    """Ten words appear 30 times each, all others 3 times (below 4,096 tokens: 6 times and once), after an example."""

    name = "cwe"
    tokens_to_generate = 120
    unit = "words"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        short = setting.length < SHORT
        self._repeats = (6, 1) if short else (30, 3)
        self._example = (20, 3, 1) if short else (40, 10, 3)

    @property
    def least(self) -> int:
        """Common words alone are no task; one other word is."""
        return COMMON + 1

    @property
    def most(self) -> int:
        """Each word of the lists once."""
        return len(words("all"))

    def question(self, size: int, generator: random.Random) -> Question:
        solved, common = _numbered(*self._example, generator)
        example = f"{self._asked(solved)} {_listed(common)}\n"
        context, common = _numbered(size, *self._repeats, generator)
        return Question(example + self._asked(context), tuple(common))

    def _asked(self, context: str) -> str:
        return self.setting.dress(TEMPLATE.format(context=context)) + PREFIX


def _numbered(size: int, repeats: int, other_repeats: int, generator: random.Random) -> tuple[str, list[str]]:
    """Shuffle a list of ``size`` different words, the first ten of them ``repeats`` times; return it and those ten."""
    chosen = generator.sample(words("all"), size)
    entries = chosen[:COMMON] * repeats + chosen[COMMON:] * other_repeats
    generator.shuffle(entries)
    return _listed(entries), chosen[:COMMON]


def _listed(entries: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))
