"""A needle stands between two sentences of a text."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from ctxext.errors import InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.passkey import build
from ctxext.texts.haystack import of_text, split_sentences

STORY = "".join(f" Day {day}: Mr. A. walked {day % 7} miles. Why? Nobody knew!" for day in range(60))


def test_a_key_in_a_text_stands_between_two_sentences(tokenizer: PreTrainedTokenizerFast) -> None:
    haystack = of_text(tokenizer, "story", STORY)
    starts = set()
    for seed, depth in [(seed, depth) for seed in range(20) for depth in (0.0, 0.37, 0.5, 1.0)]:
        prompt = build(tokenizer, length=700, depth=depth, seed=seed, haystack=haystack)
        text = tokenizer.decode(prompt.prompt)
        assert prompt.length == 700
        head, _, rest = text.removeprefix(passkey.OPENING).partition(passkey.KEY_BEFORE)
        key, _, tail = rest.removesuffix(passkey.QUESTION).partition(passkey.KEY_AFTER)
        assert (key.strip(), head + tail in STORY) == (prompt.key, True)
        # Between two sentences, the last of which is cut; as near to the depth as half a sentence of 31 bytes.
        assert not head or (head[-1] in ".?!" and not head.endswith(("Mr.", "A."))) or depth == 1.0
        assert abs(len(head) - depth * len(head + tail)) <= 16
        starts.add(head + tail)
    assert len(starts) > 15


def test_haystacks_refuse(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidParameterError, match="'note' has no two sentences"):
        of_text(tokenizer, "note", "one line without an end")
    short = of_text(tokenizer, "short", STORY[:400])
    with pytest.raises(InvalidParameterError, match=r"'short' has 400 tokens, found a need for \d{3}"):
        build(tokenizer, length=900, depth=0.5, haystack=short)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("No end", ["No end"]),
        ("He said. She said? Yes! ok. no", ["He said.", " She said?", " Yes! ok. no"]),
        ('"Go!" he cried. (He left.) Mr. B. J. Cox, e.g. I, came at 3.5', ['"Go!" he cried.', " (He left.)"]),
        ("A line\n\nB line", ["A line", "\n\nB line"]),
        ("\u4eca\u65e5\u306f\u3002\u660e\u65e5", ["\u4eca\u65e5\u306f\u3002", "\u660e\u65e5"]),
    ],
)
def test_sentences(text: str, pieces: list[str]) -> None:
    found = split_sentences(text)
    assert "".join(found) == text
    assert found[: len(pieces)] == pieces
    assert len(found) - len(pieces) == (1 if text.startswith('"') else 0)
