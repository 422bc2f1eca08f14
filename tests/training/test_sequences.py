"""Which tokens stand in a training sequence, at which positions, and what the model makes of them."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

import ctxext
from ctxext.errors import CheckpointError, InvalidParameterError, UnknownNameError
from ctxext.texts.documents import Document
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.sequences import IGNORED, TrainingSequences
from tests._models import tiny

LENGTH, TARGET = 41, 128


def sequences(documents: TokenisedDocuments, **changes: Any) -> TrainingSequences:
    settings = {"length": LENGTH, "count": 100, "seed": 5, "target_length": TARGET}
    return TrainingSequences(documents, **(settings | changes))


def letters(tokenizer: Any, ids: Tensor) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


def test_consecutive_sequences_tile_documents_and_never_cross_them(
    documents: TokenisedDocuments, tokenizer: Any, texts: list[str]
) -> None:
    found = sequences(documents)
    per_epoch = sum(len(text) // (LENGTH - 1) for text in texts)
    epochs = []
    for epoch in range(2):
        places = []
        for index in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            item = found[index]
            assert item["input_ids"][0] == tokenizer.bos_token_id
            assert item["position_ids"].tolist() == list(range(LENGTH))
            assert item["labels"].tolist() == [IGNORED, *item["input_ids"][1:].tolist()]
            text = letters(tokenizer, item["input_ids"][1:])
            homes = [(number, home.find(text)) for number, home in enumerate(texts) if text in home]
            assert len(homes) == 1, text
            assert repr(f"document {homes[0][0]}") in found.origin_of(index)
            places += homes
        covered = {(number, start + i) for number, start in places for i in range(LENGTH - 1)}
        assert len(covered) == per_epoch * (LENGTH - 1), "some token was read twice in an epoch"
        epochs.append(places)
    assert sorted(epochs[0]) != epochs[0], "not shuffled"
    assert set(epochs[0]) != set(epochs[1]), "cut at the same places in every epoch"


@pytest.mark.slow
def test_skipwise_positions(documents: TokenisedDocuments, tokenizer: Any, texts: list[str]) -> None:
    found = sequences(documents, positions="pose", count=3000)
    gaps, firsts = set(), set()
    for index in range(len(found)):
        item = found[index]
        ids, positions = item["input_ids"], item["position_ids"]
        steps = positions.diff()
        jumps = (steps != 1).nonzero().flatten().tolist()
        assert len(jumps) <= 1
        assert positions[0] == 0
        assert positions[-1] < TARGET
        border = jumps[0] + 1 if jumps else LENGTH
        gap = int(steps[border - 1]) - 1 if jumps else 0
        gaps.add(gap)
        firsts.add(border - 1)
        if index < 300:
            first, second = letters(tokenizer, ids[1:border]), letters(tokenizer, ids[border:])
            homes = [home for home in texts if second in home and first in home] if len(second) > 5 < len(first) else []
            for home in homes:
                text_gap = home.find(second) - home.find(first) - len(first)
                assert text_gap == min(gap, len(home) - (LENGTH - 1)), "a long document keeps its tokens' own distances"
                assert item["labels"][0] == IGNORED
                assert (item["labels"][1:] == IGNORED).nonzero().flatten().tolist() == [border - 1] * bool(text_gap)
    assert gaps == set(range(TARGET - LENGTH + 1)), "every distance, the longest too"
    assert {1, (LENGTH - 1) // 2} <= firsts <= {*range(1, (LENGTH - 1) // 2 + 1), LENGTH - 1}


def test_positions_are_drawn_anew_and_an_item_depends_on_its_number_alone(documents: TokenisedDocuments) -> None:
    found = sequences(documents, positions="pose", count=10**6)
    plans = [found.plan(index) for index in range(200)]
    again = sequences(documents, positions="pose", count=10**9)
    assert [again.plan(index) for index in reversed(range(200))] == plans[::-1]
    other = sequences(documents, positions="pose", seed=6)
    assert [other.plan(index) for index in range(50)] != plans[:50]
    epoch = found.per_epoch
    gaps = [[plan[4] for plan in plans[start : start + epoch]] for start in range(0, 3 * epoch, epoch)]
    assert gaps[0] != gaps[1] != gaps[2]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_jump_in_the_positions_is_not_taken_for_packing(documents: TokenisedDocuments, attention: str) -> None:
    """The model sees all of the past: as with an explicit mask, and not as with none."""
    model = ctxext.patch(tiny(vocab_size=257, attn_implementation=attention), "yarn", factor=2)
    found = sequences(documents, positions="pose")
    item = next(found[index] for index in range(100) if found.plan(index)[4] > 20 and found.plan(index)[2] > 10)
    batch = {name: item[name][None] for name in ("input_ids", "position_ids", "attention_mask")}
    dense = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        ours = model(**batch, use_cache=False).logits
        right = model(**batch | {"attention_mask": dense}, use_cache=False).logits
        packed = model(**batch | {"attention_mask": None}, use_cache=False).logits
    assert torch.allclose(ours, right, atol=1e-5)
    assert not torch.allclose(packed, right, atol=1e-2), "transformers takes jumps for packing no more; drop the mask"
    embeddings = model.get_input_embeddings()(batch["input_ids"])
    positions = batch["position_ids"]
    mask = create_causal_mask(model.config, embeddings, batch["attention_mask"], None, position_ids=positions)
    # Tokens x tokens must not be made where a kernel is causal by itself.
    assert (mask is None) == (attention == "sdpa")


def test_too_short_too_long_and_what_is_no_document(
    documents: TokenisedDocuments, corpus: Path, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameterError, match=r"has the 499 tokens of one sequence; the longest of 4 has 400\."):
        sequences(documents, length=500, target_length=1000)
    with pytest.raises(InvalidParameterError, match=r"of 129 tokens do not fit into the extended window of 128"):
        sequences(documents, length=129)
    with pytest.raises(IndexError):
        sequences(documents)[100]
    with pytest.raises(UnknownNameError, match=r"Unknown column of .* 'txt'\. Did you mean 'text'"):
        TokenisedDocuments.read([str(corpus)], tokenizer, column="txt")
    (tmp_path / "none.jsonl").write_text('{"a": "x", "b": "y"}\n', encoding="utf-8")
    with pytest.raises(InvalidParameterError, match="no column 'text'"):
        TokenisedDocuments.read([str(tmp_path / "none.jsonl")], tokenizer)
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(InvalidParameterError, match="No document with any text"):
        TokenisedDocuments.read([str(tmp_path / "blank.txt")], tokenizer)


def test_long_documents_can_be_asked_for(documents: TokenisedDocuments) -> None:
    def read(**changes: Any) -> set[int]:
        found = sequences(documents, **changes)
        return {found.plan(index)[0] for index in range(60)}

    assert (read(), read(shortest=200), read(shortest=201)) == ({0, 1, 2}, {0, 2}, {0})
    with pytest.raises(InvalidParameterError, match=r"has the 401 tokens asked for; the longest of 4 has 400\."):
        read(shortest=401)


def test_no_more_is_read_than_asked_for(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of terabytes is streamed up to the limit."""
    read = []

    def endless(*args: Any, **kwargs: Any) -> Iterator[Document]:
        for number in itertools.count():
            read.append(number)
            yield Document(f"{number}", "abcdefghij")

    monkeypatch.setattr("ctxext.training.documents.read_documents", endless)
    found = TokenisedDocuments.read(["endless"], tokenizer, tokens=35)
    assert found.lengths == [10] * 4
    assert read == [0, 1, 2, 3]


def test_a_cache_that_cannot_be_written(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Iterator[Document]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    monkeypatch.setattr("ctxext.training.documents.read_documents", full)
    with pytest.raises(CheckpointError, match=r"tokenised documents in .*No space left.* set HF_DATASETS_CACHE"):
        TokenisedDocuments.read(["any"], tokenizer)


def test_a_limit_of_tokens_and_a_changed_file(corpus: Path, tokenizer: Any, tmp_path: Path) -> None:
    assert len(TokenisedDocuments.read([str(corpus)], tokenizer, tokens=401)) == 2
    copy = tmp_path / "copy.txt"
    copy.write_text("abc", encoding="utf-8")
    assert TokenisedDocuments.read([str(copy)], tokenizer).lengths == [3]
    copy.write_text("abcd", encoding="utf-8")
    assert TokenisedDocuments.read([str(copy)], tokenizer).lengths == [4], "read from a cache that is out of date"
