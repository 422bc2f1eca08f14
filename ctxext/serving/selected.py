"""The part of a text that is read for one question, where not all of it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.measuring.selection import CHUNK, RankedChunks

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


def select(tokenizer: Any, text: str, question: str, tokens: int) -> SelectedText:
    """Choose what to read of a text for a question, by BM25 (``ctxext.measuring.selection``).

    Args:
        tokens: Tokens of the text to read, at most; at least two chunks.

    Raises:
        InvalidParameterError: fewer tokens, or a tokenizer that is written in Python.
    """
    if tokens < 2 * CHUNK:
        raise InvalidParameterError(f"select must be at least {2 * CHUNK} tokens, found {tokens}.")
    if not tokenizer.is_fast:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} is written in Python and does not say where a token stands in a text. Leave "
            f"select out, or cut the text yourself."
        )
    known = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = known["input_ids"], [first for first, _ in known["offset_mapping"]]
    if len(ids) <= tokens:
        return SelectedText(text=text, read=len(ids), tokens=len(ids), places=())
    # As in the text, where a space may stand before a word.
    asked = tokenizer(f" {question}", add_special_tokens=False)["input_ids"]
    spans = [(0, CHUNK), *RankedChunks(ids, CHUNK, CHUNK).best(asked, most=tokens // CHUNK - 1, before=len(ids))]
    parts = ""
    for number, (begin, end) in enumerate(spans):
        parts += LEFT_OUT if number and begin > spans[number - 1][1] else ""
        parts += text[starts[begin] : starts[end] if end < len(ids) else len(text)]
    return SelectedText(
        text=parts,
        read=sum(end - begin for begin, end in spans),
        tokens=len(ids),
        places=tuple(a for a, _ in spans[1:]),
    )
