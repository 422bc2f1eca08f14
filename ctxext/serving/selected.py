"""The part of a text that is read for one question, where not all of it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.measuring.selection import CHUNK, RankedChunks
from ctxext.methods.parameters import checked_tokens

LEFT_OUT = "\n...\n"


@dataclass(frozen=True, kw_only=True)
class SelectedText:
    """The beginning of a text, and the chunks that share most with a question, in the text's order.

    Args:
        read: Tokens of the text that are read.
        tokens: Tokens of the whole text.
        places: Token at which each chunk begins, the beginning aside.
    """

    text: str
    read: int
    tokens: int
    places: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """Sentence on how much is read, and from where."""
        if not self.places:
            return f"All {self.tokens:,} tokens of the text are read."
        first, last = (round(100 * place / self.tokens) for place in (self.places[0], self.places[-1]))
        between = f"at {first} %" if len(self.places) == 1 else f"from {first} to {last} %"
        chunks = "1 chunk" if len(self.places) == 1 else f"{len(self.places)} chunks"
        return f"{self.read:,} of {self.tokens:,} tokens are read: the beginning, and {chunks} {between} of the text."


def tokens_in(tokenizer: Any, text: str, advice: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text, without special ones, and the character at which each begins.

    Raises:
        InvalidParameterError: the tokenizer is written in Python; ``advice`` is the sentence on what to do then.
    """
    if not tokenizer.is_fast:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} is written in Python and does not say where a token stands in a text. {advice}"
        )
    known = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return known["input_ids"], [first for first, _ in known["offset_mapping"]]


def select(tokenizer: Any, text: str, questions: Sequence[str], tokens: int) -> list[SelectedText]:
    """Choose what to read of a text for each question, by BM25 (``ctxext.measuring.selection``).

    Args:
        tokens: Tokens of the text to read, at most; at least two chunks.

    Raises:
        InvalidParameterError: fewer tokens, or a tokenizer that is written in Python.
    """
    if checked_tokens("select", tokens) < 2 * CHUNK:
        raise InvalidParameterError(f"select must be at least {2 * CHUNK} tokens, found {tokens}.")
    ids, starts = tokens_in(tokenizer, text, "Leave select out, or cut the text yourself.")
    if len(ids) <= tokens:
        return [SelectedText(text=text, read=len(ids), tokens=len(ids), places=())] * len(questions)
    chunks = RankedChunks(ids, CHUNK, CHUNK)
    # As in the text, where a space may stand before a word.
    asked = [tokenizer(f" {question}", add_special_tokens=False)["input_ids"] for question in questions]
    chosen = [chunks.best(words, most=tokens // CHUNK - 1, before=len(ids)) for words in asked]
    return [_joined(text, starts, [(0, CHUNK), *spans]) for spans in chosen]


def _joined(text: str, starts: Sequence[int], spans: Sequence[tuple[int, int]]) -> SelectedText:
    """Join spans of tokens, with a mark where something is left out between two."""
    parts = ""
    for number, (begin, end) in enumerate(spans):
        parts += LEFT_OUT if number and begin > spans[number - 1][1] else ""
        parts += text[starts[begin] : starts[end] if end < len(starts) else len(text)]
    read, places = sum(end - begin for begin, end in spans), tuple(begin for begin, _ in spans[1:])
    return SelectedText(text=parts, read=read, tokens=len(starts), places=places)
