"""Variable tracking: who holds a value after a chain of assignments that are spread over the text."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence

from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, distinct, largest_fit
from ctxext.evaluation.ruler.tasks.needles import NOISE, scattered

HOPS = 4
LETTERS, LETTERS_IN_EXAMPLE = 5, 3
EXAMPLE_TOKENS = 500
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the "
    "value {query}, they are: "
)


class VariableTracking(Task):
    """One chain of four hops in repeated noise, after a solved example of about 500 tokens: name its five variables."""

    name = "vt"
    tokens_to_generate = 30
    unit = "lines"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)

        def tokens(size: int) -> int:
            return setting.count("".join(_assignments(size, LETTERS_IN_EXAMPLE, random.Random(0))[:2]))

        self._example_size = largest_fit(tokens, self.least, max(EXAMPLE_TOKENS, tokens(self.least)))

    @property
    def least(self) -> int:
        """One line of noise per assignment."""
        return HOPS + 1

    def question(self, size: int, generator: random.Random) -> Question:
        solved, prefix, names = _assignments(self._example_size, LETTERS_IN_EXAMPLE, generator)
        example = f"{solved}{prefix} {' '.join(names)}\n\n"
        text, prefix, names = _assignments(size, LETTERS, generator)
        return Question(self.setting.dress(example + text) + prefix, tuple(names))


def _assignments(size: int, letters: int, generator: random.Random) -> tuple[str, str, list[str]]:
    """Write the task without its example, the start of the answer, and the chain's variables in order."""
    chain = distinct(HOPS + 1, lambda: "".join(generator.choices(string.ascii_uppercase, k=letters)))
    value = generator.randrange(10_000, 99_999)
    context = scattered([NOISE] * size, [*reversed(chained(chain, value))], generator)
    prefix = PREFIX.format(num_v=HOPS + 1, query=value)
    return TEMPLATE.format(context=context, query=value), prefix, chain


def chained(names: Sequence[str], value: int | str) -> list[str]:
    """Write the assignments that give a value to the first variable, and each variable to the next."""
    # The space at the end of a hop is the benchmark's.
    hops = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]
