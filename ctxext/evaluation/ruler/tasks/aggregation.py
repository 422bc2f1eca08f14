"""The two tasks of aggregation: the most common of many words, in a numbered list and in a text of coded words."""

from __future__ import annotations

import itertools
import math
import random
import string

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, distinct, words

COMMON = 10
SHORT = 4096
COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

ALPHA = 2
ZETA = math.pi**2 / 6  # zeta(2)
LETTERS = 6
TOKENS_PER_WORD = 50
ASKED = 3
DOTS = "..."
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


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
        """The common words and one other word: with common words alone there is nothing to tell apart."""
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
        return self.setting.dress(COMMON_TEMPLATE.format(context=context)) + COMMON_PREFIX


def _numbered(size: int, repeats: int, other_repeats: int, generator: random.Random) -> tuple[str, list[str]]:
    """Shuffle a list of ``size`` different words, the first ten of them ``repeats`` times; return it and those ten."""
    chosen = generator.sample(words("all"), size)
    entries = chosen[:COMMON] * repeats + chosen[COMMON:] * other_repeats
    generator.shuffle(entries)
    return _listed(entries), chosen[:COMMON]


def _listed(entries: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))


class FrequentWords(Task):
    """Words of six random letters, the word of rank k making up k^-2/zeta(2) of the text; rank 1 is dots.

    The size is the number of words before each rank's count is rounded down, so the text has a few less.
    """

    name = "fwe"
    tokens_to_generate = 50
    unit = "words"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._ranks = (setting.length - self.tokens_to_generate) // TOKENS_PER_WORD
        if self._ranks <= ASKED:
            least = (ASKED + 1) * TOKENS_PER_WORD + self.tokens_to_generate
            raise InvalidParameterError(f"{self.name} needs at least {least} tokens, found {setting.length}.")

    @property
    def least(self) -> int:
        """Words for which the asked ranks differ in count from each other and from the next."""
        return next(size for size in itertools.count(1) if self._clear(size))

    def question(self, size: int, generator: random.Random) -> Question:
        coded = distinct(self._ranks, lambda: "".join(generator.choices(string.ascii_lowercase, k=LETTERS)))
        ranked = [DOTS, *coded[1:]]
        text = [word for rank, word in enumerate(ranked, start=1) for _ in range(_count(size, rank))]
        generator.shuffle(text)
        prompt = self.setting.dress(FREQUENT_TEMPLATE.format(context=" ".join(text))) + FREQUENT_PREFIX
        return Question(prompt, tuple(ranked[1 : ASKED + 1]))

    def _clear(self, size: int) -> bool:
        counts = [_count(size, rank) if rank <= self._ranks else 0 for rank in range(2, ASKED + 3)]
        return all(more > less for more, less in itertools.pairwise(counts))


def _count(size: int, rank: int) -> int:
    return int(size * rank**-ALPHA / ZETA)
