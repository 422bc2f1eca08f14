"""Packed documents: nothing read twice, nothing lost, and none of them sees another."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.texts.corpus import tokenise
from ctxext.texts.documents import read_documents
from ctxext.training import chunk_loss
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.sequences import IGNORED, PackedSequences, TrainingSequences, require_gaps, require_separate
from tests._models import tiny
from tests.texts._conversations import PLAIN, chat_tokenizer

LENGTH = 61  # of which 60 are text; documents of 400, 90, 200 and 20 tokens leave 40, 30, 20 and 20 over


def packed(documents: TokenisedDocuments, **changes: Any) -> PackedSequences:
    return PackedSequences(documents, **({"length": LENGTH, "count": 60, "seed": 5, "target_length": 128} | changes))


def stretches(item: dict[str, Tensor]) -> list[Tensor]:
    """The texts of a sequence by where its positions begin anew."""
    starts = (item["position_ids"] == 0).nonzero().flatten().tolist()
    stops = [*starts[1:], len(item["input_ids"])]
    return [item["input_ids"][start:stop] for start, stop in zip(starts, stops, strict=True)]


def test_an_epoch_reads_nearly_all_of_every_document_and_nothing_twice(
    documents: TokenisedDocuments, tokenizer: Any, texts: list[str]
) -> None:
    found = packed(documents)
    counts = {len(found._epoch(epoch)) for epoch in range(3)}
    assert counts <= {10, 11}, "10 whole stretches or 9, and what is left over in one or two"
    index = 0
    orders = []
    for epoch in range(3):
        read: list[set[int]] = [set() for _ in texts]
        places = []
        for _ in found._epoch(epoch):
            item = found[index]
            assert {len(item[name]) for name in ("input_ids", "labels", "position_ids")} == {LENGTH}
            assert "attention_mask" not in item
            parts = stretches(item)
            for part in parts:
                if part[0] == tokenizer.bos_token_id and len(part) > 2:
                    text = "".join(tokenizer.convert_ids_to_tokens(part[1:].tolist()))
                    home = next(number for number, text_of in enumerate(texts) if text in text_of)
                    first = texts[home].find(text)
                    assert len(text) < 5 or not read[home] & set(range(first, first + len(text)))
                    read[home] |= set(range(first, first + len(text)))
                    places.append((home, first, len(text)))
            firsts = item["position_ids"] == 0
            assert (item["labels"][firsts] == IGNORED).all()
            assert "from token" in found.origin_of(index)
            index += 1
        orders.append(places)
        assert sum(map(len, read)) > 0.85 * sum(map(len, texts))
        assert sum(length == 60 for *_, length in places) >= 6 + 1 + 3, "long documents come in whole sequences first"
    assert orders[0] != orders[1] != orders[2]
    again = packed(documents, count=10**6)
    assert torch.equal(again[index - 1]["input_ids"], found[index - 1]["input_ids"])


@pytest.mark.parametrize(
    ("model_type", "method", "attention"),
    [("llama", "yarn", "sdpa"), ("llama", "yarn", "eager"), ("llama", "alibi", None), ("bloom", "pi", None)],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_loss_is_that_of_the_documents_alone(
    documents: TokenisedDocuments, model_type: str, method: str, attention: str | None, chunked: bool
) -> None:
    given = {} if attention is None else {"attn_implementation": attention}
    model = ctxext.patch(tiny(model_type, vocab_size=257, **given), method, factor=2)
    require_separate(model)
    found = packed(documents)
    index = next(index for index in range(60) if len(found.plan(index)) >= 3)
    item = found[index]
    batch = {name: item[name][None] for name in ("input_ids", "position_ids", "labels")}
    if chunked:
        chunk_loss(model, chunk=16)
    with torch.no_grad():
        together = model(**batch, use_cache=False).loss.item() * (item["labels"] != IGNORED).sum().item()
        parts = [part[None] for part in stretches(item) if len(part) > 1 and part[0] == 256]
        alone = sum(model(input_ids=part, labels=part).loss.item() * (part.shape[1] - 1) for part in parts)
        blurred = model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False).loss.item()
    assert together == pytest.approx(alone, rel=1e-5)
    if model_type == "llama" and method == "yarn":
        assert abs(blurred * (item["labels"] != IGNORED).sum().item() - alone) > 1e-3 * alone, "could not have failed"


def test_models_that_read_across_or_that_skips_change_nothing_of_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="does not keep packed documents apart"):
        require_separate(tiny("bloom"))
    for method in ("nope", "fox"):
        with pytest.raises(IncompatibleError, match=r"whatever gaps its positions have.*data\.positions=consecutive"):
            require_gaps(ctxext.patch(tiny(), method, factor=2))
    for model_type, method in (("llama", "yarn"), ("llama", "alibi"), ("llama", "self_extend"), ("bloom", "pi")):
        require_gaps(ctxext.patch(tiny(model_type), method, factor=2))


def test_too_little_text(documents: TokenisedDocuments) -> None:
    for changes, said in (
        ({"length": 1000, "target_length": 2000}, "All 4 documents together do not fill one sequence of 1,000"),
        ({"length": 500, "target_length": 2000, "shortest": 300}, "400 tokens found in documents of at least 300"),
        ({"length": 129}, "do not fit into the extended window of 128"),
    ):
        with pytest.raises(InvalidParameterError, match=said):
            packed(documents, **changes)


ANSWERS = (5, 30, 12, 9, 2, 20, 14, 8, 90, 0)  # letters in the answer to each question; the last has none


def conversations(folder: Path, seed: int = 0, *, first: str | None = None) -> TokenisedDocuments:
    """Ten conversations: one longer than a sequence, one without an answer."""
    letters = random.Random(seed)
    rows = []
    for size in ANSWERS:
        messages = [{"role": "user", "content": "".join(letters.choices("abcdef", k=7))}]
        if size:
            messages.append({"role": "assistant", "content": "".join(letters.choices("uvwxyz", k=size))})
        rows.append(json.dumps({"messages": messages}))
    if first is not None:
        rows[0] = json.dumps({"messages": [{"role": "user", "content": first}, json.loads(rows[0])["messages"][1]]})
    (folder / "chats.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return TokenisedDocuments.read([str(folder / "chats.jsonl")], chat_tokenizer(PLAIN))


def test_another_end_of_a_turn_is_read_again(tmp_path: Path) -> None:
    """Templates write special tokens by their roles, which the tokenizer's vocabulary does not tell."""
    conversations(tmp_path)
    tokenizer = chat_tokenizer(PLAIN.replace("m.content }};", "m.content }}{{ eos_token }}"))
    for end in ("<s>", "z"):
        tokenizer.eos_token = end
        ids = TokenisedDocuments.read([str(tmp_path / "chats.jsonl")], tokenizer).rows[0]["input_ids"]
        assert ids == tokenise(next(read_documents([tmp_path / "chats.jsonl"])), tokenizer).input_ids[0].tolist()


def test_conversations_are_packed_whole_and_answers_alone_are_learned(tmp_path: Path) -> None:
    found = packed(conversations(tmp_path), count=10)
    per_epoch = len(found._epoch(0))
    assert per_epoch in (4, 5), "8 conversations of 18 to 46 tokens"
    seen = []
    for index in range(per_epoch):
        item = found[index]
        assert {len(item[name]) for name in ("input_ids", "labels", "position_ids")} == {LENGTH}
        assert all(start == 0 and stop == found.documents.lengths[at] for at, start, stop in found.plan(index))
        seen += [at for at, *_ in found.plan(index)]
        starts = itertools.accumulate([stop for *_, stop in found.plan(index)][:-1], initial=0)
        assert not item["position_ids"][list(starts)].any(), "a model reads each of them alone"
        learned = item["labels"][item["labels"] != IGNORED]
        answers = [found.documents.tokens(*place)[found.documents.answers(place[0])] for place in found.plan(index)]
        assert learned.tolist() == torch.cat(answers).tolist()
        assert set(chat_tokenizer(PLAIN).decode(learned)) <= set("uvwxyz;")
    assert sorted(seen) == list(range(8))
    assert f"8 are conversations, of which {sum(ANSWERS[:8]) + 8} tokens of answers alone have a loss" in str(found)
    assert "(conversations left out: 1 longer than a sequence, 1 without an answer)" in str(found)
    assert found.plan(0) == packed(conversations(tmp_path), count=10).plan(0)


def test_conversations_beside_texts(tmp_path: Path, documents: TokenisedDocuments, corpus: Path) -> None:
    conversations(tmp_path)
    both = TokenisedDocuments.read([str(corpus), str(tmp_path / "chats.jsonl")], chat_tokenizer(PLAIN))
    found = packed(both)
    assert [answered is None for answered in both.answered] == [True] * 4 + [False] * 10
    assert {at for index in range(len(found._epoch(0))) for at, *_ in found.plan(index)} >= {0, 1, 2, *range(4, 12)}


@pytest.mark.parametrize("positions", ["consecutive", "pose"])
def test_conversations_are_not_cut_into_sequences(tmp_path: Path, positions: Any) -> None:
    given = {"length": LENGTH, "count": 1, "seed": 0, "target_length": 128, "positions": positions}
    with pytest.raises(InvalidParameterError, match=rf"found data\.positions '{positions}'\. Set it"):
        TrainingSequences(conversations(tmp_path), **given)
    with pytest.raises(InvalidParameterError, match=r"9 longer than a sequence.*or raise data.length"):
        packed(conversations(tmp_path), length=16)
