"""Stretches of documents, chosen on or judged on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.texts.corpus import TokenisedDocument, tokenise
from ctxext.texts.documents import Document
from ctxext.texts.stretches import corpus_from, split_texts
from tests._products import crossed
from tests._tokenizer import BYTES, make_tokenizer


def document(name: str, tokens: int) -> TokenisedDocument:
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(len(name) + tokens))
    return TokenisedDocument(name, ids, 1)


def test_texts_are_read_as_those_of_files(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("\ufeffa\r\nb".encode())
    given = ["\ufeffa\r\nb", tmp_path / "text.txt", "half of \ud83d"]
    whole = [each.input_ids[0] for each in corpus_from(given[1:], BYTES).documents]
    assert [BYTES.decode(ids) for ids in whole] == ["a\nb", "half of \ufffd"]
    assert corpus_from(given, BYTES).copies == 1


def test_documents_are_chosen_on_or_judged_on_and_never_both() -> None:
    documents = [document(f"novel {number}", 400 + 50 * number) for number in range(8)]
    found = split_texts(documents, tokens=101, seed=3)
    choosing, judging = ({one.document for one in part} for part in (found.choosing, found.held_out))
    assert (len(choosing), len(judging)) == (3, 5)
    assert not choosing & judging
    assert not found.same_documents
    assert all(one.text.tokens == 101 for one in (*found.choosing, *found.held_out))
    # As many documents as there are come first.
    assert len({one.document for one in found.held_out[:5]}) == 5
    again = split_texts(documents, tokens=101, seed=3)
    assert [one.text.sha256 for one in again.choosing] == [one.text.sha256 for one in found.choosing]
    others = {tuple(one.document for one in split_texts(documents, tokens=101, seed=s).choosing[:3]) for s in range(5)}
    assert len(others) > 1


def test_of_a_single_document_other_stretches_judge() -> None:
    whole = document("one", 901)
    found = split_texts([whole], tokens=101, seed=0)
    assert (len(found.choosing), len(found.held_out), found.same_documents) == (3, 6, True)
    parts = [one.text.input_ids[0, 1:] for one in (*found.choosing, *found.held_out)]
    assert len({tuple(part.tolist()) for part in parts}) == 9
    assert sum(map(len, parts)) == 900


def test_a_name_is_that_of_one_document() -> None:
    """Texts of one name are two documents, also where a numbered name is another document's own."""
    found = split_texts([document("a", 150), document("a", 151)], tokens=101, seed=0)
    assert {found.choosing[0].document, found.held_out[0].document} == {"a (1)", "a (2)"}
    documents = [document(name, 150 + n) for n, name in enumerate(("a", "a", "a (1)", "a (1)", "a (2)", "b"))]
    found = split_texts(documents, tokens=101, seed=0)
    names = [one.document for one in (*found.choosing, *found.held_out)]
    assert len(set(names)) == len(documents)
    assert {"a (2)", "b"} <= set(names)


WORDS = [f"w{number}" for number in random.Random(0).sample(range(10_000), 3000)]


def written(name: str, words: list[str]) -> TokenisedDocument:
    return tokenise(Document(name, " ".join(words)), make_tokenizer(bos=True))


COPIES: dict[str, Callable[[list[str]], list[str]]] = {
    "equal": lambda words: words,
    "in capitals": lambda words: [word.upper() for word in words],
    "in other lines": lambda words: "\n".join(words).split(" "),
    "with another beginning": lambda words: ["copied", "by", "hand", *words],
    "with another end": lambda words: [*words[:-40], "the", "end"],
    "an excerpt": lambda words: words[200:500],
    "one word in fifty changed": lambda words: ["changed" if n % 50 == 7 else word for n, word in enumerate(words)],
}


@pytest.mark.parametrize(("copy", "seed"), crossed(list(COPIES), range(3)))
def test_what_is_chosen_on_is_not_judged_on(copy: str, seed: int) -> None:
    one, others = WORDS[:600], [WORDS[600 * n : 600 * (n + 1)] for n in range(1, 5)]
    documents = [written("copy", COPIES[copy](one)), written("one", one), *map(written, "0123", others)]
    found = split_texts(documents, tokens=256, seed=seed, tokenizer=make_tokenizer(bos=True))
    parts = [{stretch.document for stretch in part} for part in (found.choosing, found.held_out)]
    places = [number for number, part in enumerate(parts) if part & {"one", "copy"}]
    assert len(places) == 1, "one and its copy are never on two sides"
    assert found.left_out
    assert all(name.startswith(("one", "copy")) for name in found.left_out)
    assert set.union(*parts) >= {"0", "1", "2", "3"}


def test_a_text_that_stands_twice_in_a_document_is_read_once() -> None:
    once = written("twice", WORDS[:600])
    twice = written("twice", [*WORDS[:600], "again:", *WORDS[:600]])
    for tokenizer in (None, make_tokenizer(bos=True)):
        found = split_texts([twice], tokens=256, seed=0, tokenizer=tokenizer)
        left = len(found.choosing) + len(found.held_out)
        assert found.same_documents
        assert left <= once.tokens // 255 + 1
        assert len(found.left_out) == (twice.tokens - 1) // 255 - left
    with pytest.raises(InvalidParameterError, match="2 more are copies of it"):
        split_texts([written(name, WORDS[:80]) for name in "abc"], tokens=256, seed=0)


def test_texts_that_share_little_are_all_read() -> None:
    """A licence at the end of every text does not make it a copy."""
    licence = [f"licence{n}" for n in range(40)]
    documents = [written(str(n), [*WORDS[600 * n : 600 * (n + 1)], *licence]) for n in range(5)]
    found = split_texts(documents, tokens=1024, seed=0, tokenizer=make_tokenizer(bos=True))
    assert not found.left_out


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ((90, 60), r"No text is as long as the target: 2 texts, the longest of 90 tokens, and 101 are needed"),
        ((150,), r"One stretch of 101 tokens is too little for a verdict"),
        ((), r"No text is as long as the target: 0 texts"),
    ],
)
def test_too_little_text_is_said(tokens: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        split_texts([document(str(length), length) for length in tokens], tokens=101, seed=0)
