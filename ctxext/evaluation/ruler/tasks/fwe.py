"""Frequent words: the three most frequent coded words of a text whose word frequencies follow a power law."""

from __future__ import annotations

import itertools
import math
import random
import string

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, distinct

ALPHA = 2
ZETA = math.pi**2 / 6  # zeta(2)
LETTERS = 6
TOKENS_PER_WORD = 50
ASKED = 3
DOTS = "..."
TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


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
        prompt = self.setting.dress(TEMPLATE.format(context=" ".join(text))) + PREFIX
        return Question(prompt, tuple(ranked[1 : ASKED + 1]))

    def _clear(self, size: int) -> bool:
        counts = [_count(size, rank) if rank <= self._ranks else 0 for rank in range(2, ASKED + 3)]
        return all(more > less for more, less in itertools.pairwise(counts))


def _count(size: int, rank: int) -> int:
    return int(size * rank**-ALPHA / ZETA)
