"""Write texts that say something twice, so that the tokens of the second time can be copied from the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.core.scaling import stated_length
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError

REPEATED = 512  # tokens of the text that is repeated, where the model was trained for twice as many
LONGEST = 2048  # tokens of a text with needles
LEAST = 32  # tokens that a model must read
# Of needles: what each is called, and of those made of random tokens, how many tokens name one and how many it has.
PLACES = ("Lisbon", "Cairo", "Oslo", "Lima", "Kyoto", "Dublin", "Nairobi", "Quito")
NEEDLE = "\n\nThe pass key of {place} is"
NAMED, HIDDEN = 4, 4


@dataclass(frozen=True, eq=False)
class Repetition:
    """A text that says something again, so that tokens can be copied from the first time.

    Args:
        queries: positions whose next token can be copied, in ascending order.
        twins: for each of them the earlier position of the same token; the token after the twin is the one to copy.
    """

    tokens: Int[Tensor, " tokens"]
    queries: Int[Tensor, " pairs"]
    twins: Int[Tensor, " pairs"]


def inductions(subject: Subject, seeds: Sequence[int], trained: int | None = None) -> list[Repetition]:
    """Return random tokens that are repeated, a text for each seed, inside a model's window or ``trained`` tokens.

    Raises:
        IncompatibleError: the model reads too few tokens, or knows too few.
    """
    with torch.device("cpu"):  # whatever device is the default
        return [_repeated(_Source(subject, seed, trained)) for seed in seeds]


def probe_texts(
    subject: Subject, tokenizer: Any, text: str | None, seeds: Sequence[int]
) -> dict[str, list[Repetition]]:
    """Return the texts of both probes, one for each seed: random tokens again, and needles, perhaps in a given text.

    Raises:
        IncompatibleError: the model reads too few tokens, or knows too few.
        InvalidParameterError: the text is too short, or the model reads too few tokens for a needle and its question.
    """
    with torch.device("cpu"):
        sources = [_Source(subject, seed) for seed in seeds]
        texts = {"induction": [_repeated(source) for source in sources]}
        texts["needle"] = [
            _random_needles(source) if text is None else _needles_in(text, tokenizer, source) for source in sources
        ]
        return texts


class _Source:
    """Random tokens of a model's vocabulary, each at most once, none of them special.

    Raises:
        IncompatibleError: the model reads too few tokens, or knows too few.
    """

    def __init__(self, subject: Subject, seed: int, trained: int | None = None) -> None:
        text, self.ordinary = subject.text, subject.ordinary_tokens
        # Many models read a text rightly only behind the token that begins it.
        first, vocabulary = getattr(text, "bos_token_id", None), getattr(text, "vocab_size", None) or 0
        self.start = torch.tensor(
            [first] if isinstance(first, int) and 0 <= first < vocabulary else [], dtype=torch.long
        )
        trained = trained or stated_length(text) or 0
        self.room = (trained if 0 < trained < LONGEST else LONGEST) - len(self.start)
        self.generator = torch.Generator().manual_seed(seed)
        if self.room < LEAST - 1 or len(self.ordinary) < LEAST // 2:
            raise IncompatibleError(
                f"This {subject.kind} reads {self.room} tokens and knows {len(self.ordinary)} ordinary ones. Heads "
                f"that retrieve are found on {LEAST} tokens or more, of {LEAST // 2} kinds or more."
            )

    def draw(self, count: int) -> Int[Tensor, " tokens"]:
        """Return ``count`` different tokens, or all ordinary ones where they are fewer."""
        return self.ordinary[torch.randperm(len(self.ordinary), generator=self.generator)[:count]]


def _repeated(source: _Source) -> Repetition:
    """Repeat random tokens: the successor of each is known from the second time on."""
    tokens = source.draw(min(REPEATED, source.room // 2))
    first = len(source.start)
    twins = torch.arange(first, first + len(tokens) - 1)
    return Repetition(torch.cat([source.start, tokens, tokens]), twins + len(tokens), twins)


def _random_needles(source: _Source) -> Repetition:
    """Hide needles of random tokens between random tokens, about one to 64 tokens."""
    size = NAMED + HIDDEN
    count = max(1, min(source.room // 64, len(source.ordinary) // 64))
    tokens = source.draw(source.room - count * size)
    facts = [(needle[:NAMED], needle[NAMED:]) for needle in tokens[: count * size].view(count, size)]
    return _hidden(source, tokens[count * size :], facts, tokens[:0])


def _needles_in(text: str, tokenizer: Any, source: _Source) -> Repetition:
    """Hide pass keys of five digits in a stretch of a text, about one to 512 tokens.

    Raises:
        InvalidParameterError: the text is too short, or the model reads too few tokens for a needle and its question.
    """

    def encoded(words: str) -> Int[Tensor, " tokens"]:
        return torch.tensor(tokenizer(words, add_special_tokens=False).input_ids, dtype=torch.long)

    def drawn(below: int) -> int:
        return int(torch.randint(below, (1,), generator=source.generator))

    facts = [
        (encoded(NEEDLE.format(place=place)), encoded(f" {10_000 + drawn(90_000)}"))
        for place in PLACES[: max(1, source.room // 512)]
    ]
    end = encoded(".\n\n")
    room = source.room - 2 * sum(len(name) + len(key) + len(end) for name, key in facts)
    letters = 8 * source.room  # an upper bound for the text of ``room`` tokens
    begin = drawn(max(1, len(text) - letters))
    body = encoded(text[begin : begin + letters])[: max(0, room)]
    if len(body) < 2 * len(facts):
        raise InvalidParameterError(
            f"{len(facts)} needles and their questions leave {room} of {source.room} tokens to the text, which has "
            f"{len(body)} there. Give a longer text, or none: then needles are random tokens."
        )
    return _hidden(source, body, facts, end)


def _hidden(source: _Source, body: Tensor, facts: Sequence[Sequence[Tensor]], end: Tensor) -> Repetition:
    """Put facts between pieces of a text, and say each again at its end in another order."""
    *pieces, last = body.tensor_split(len(facts) + 1)
    parts, places = [source.start], []
    for piece, (name, key) in zip(pieces, facts, strict=True):
        parts += [piece, name, key, end]
        places.append(sum(map(len, parts)) - len(end) - len(key) - 1)
    parts.append(last)
    queries, twins = [], []
    for index in torch.randperm(len(facts), generator=source.generator).tolist():
        name, key = facts[index]
        asked = torch.arange(len(key))  # from the last token of the name on, each predicts a token of the key
        queries.append(asked + sum(map(len, parts)) + len(name) - 1)
        twins.append(asked + places[index])
        parts += [name, key, end]
    return Repetition(torch.cat(parts), torch.cat(queries), torch.cat(twins))
