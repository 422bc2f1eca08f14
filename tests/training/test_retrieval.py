"""What stands in a sequence that holds something to find again, and that what is asked for is there."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from torch import Tensor
from torch.nn.functional import cross_entropy

import ctxext
from ctxext.errors import InvalidParameterError
from ctxext.training.curriculum import StagedSequences
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.retrieval import BEGINNING, RETRIEVAL, RetrievalSequences
from ctxext.training.sequences import IGNORED, TrainingSequences
from tests.training._recipe import recipe, words_of

LENGTH, TARGET, COUNT = 900, 3600, 60


@pytest.fixture
def prose(tokenizer: Any, tmp_path: Path) -> TokenisedDocuments:
    """Sentences that say their own number, so that each place of a text is known."""
    (file := tmp_path / "prose.txt").write_text(
        " ".join(f"This is sentence number {number} of the book." for number in range(400)), encoding="utf-8"
    )
    return TokenisedDocuments.read([str(file)], tokenizer)


def sequences(documents: TokenisedDocuments, tokenizer: Any, **changes: Any) -> tuple[TrainingSequences, Any]:
    positions = changes.pop("positions", "consecutive")
    plain = TrainingSequences(documents, length=LENGTH, count=COUNT, seed=5, target_length=TARGET, positions=positions)
    return plain, RetrievalSequences(plain, tokenizer, **({"share": 1.0, "seed": 5} | changes))


def said(tokenizer: Any, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def predicted(tokenizer: Any, item: dict[str, Tensor], last: str) -> str:
    """What is to be predicted behind the last occurrence of some words."""
    text = said(tokenizer, item["input_ids"])
    behind = len(text) - text.rindex(last) - len(last)
    labels = item["labels"][-behind:]
    return said(tokenizer, labels[labels != IGNORED])


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["consecutive", "pose"])
@pytest.mark.parametrize("kind", RETRIEVAL)
def test_the_answer_stands_in_the_text_and_alone_is_to_be_predicted(
    prose: TokenisedDocuments, tokenizer: Any, kind: Any, positions: str
) -> None:
    plain, found = sequences(prose, tokenizer, kinds=[kind], positions=positions)
    changed = 0
    for index in range(COUNT):
        item, before = found[index], plain[index]
        assert all(len(item[name]) == LENGTH for name in ("input_ids", "labels", "position_ids", "attention_mask"))
        assert torch.equal(item["position_ids"], before["position_ids"])
        told = item["labels"] != IGNORED
        assert torch.equal(item["labels"][told], item["input_ids"][told]), "each label is its own token"
        if torch.equal(item["input_ids"], before["input_ids"]):
            continue  # a piece was too small
        changed += 1
        jumps = (item["position_ids"].diff() != 1).nonzero().flatten() + 1
        assert bool((item["labels"][jumps] == IGNORED).all()), "no continuation of text that has given way"
        text = said(tokenizer, item["input_ids"])
        if kind == "keys":
            name, number = re.search(r"opens the locker of (\w+)\? It is (\d{5})\.$", text).groups()  # type: ignore[union-attr]
            assert f"The locker of {name} opens with {number}." in text
            assert predicted(tokenizer, item, "It is") == f" {number}."
        elif kind == "chains":
            name, number = re.search(r"does (\w+) know in the end\? It is (\d{5})\.$", text).groups()  # type: ignore[union-attr]
            givers = dict(re.findall(r"(\w+) told (\w+) the same", text))
            takers = {taker: giver for giver, taker in givers.items()}
            while name in takers:
                assert text.index(f"{takers[name]} told {name}") < text.index("\n\nWhich")
                name = takers[name]
            assert f"{name} was given the number {number}." in text
            assert predicted(tokenizer, item, "It is") == f" {number}."
        else:
            body, passage = text.split("\n\nOnce more, what was said above:\n")
            assert passage in body
            assert predicted(tokenizer, item, "above:\n") == passage[BEGINNING:], "a token is a letter here"
    assert changed == COUNT if positions == "consecutive" else changed > COUNT / 3
    assert found.length_of(0) == LENGTH
    assert f"{kind} to find" in found.origin_of(0)


def test_prose_stays_prose_but_for_what_gives_way(prose: TokenisedDocuments, tokenizer: Any) -> None:
    plain, found = sequences(prose, tokenizer, kinds=["keys"])
    for index in range(COUNT):
        text, before = said(tokenizer, found[index]["input_ids"]), said(tokenizer, plain[index]["input_ids"])
        without = re.sub(r" The locker of \w+ opens with \d{5}\.", "", text).split("\n\nWhich")[0]
        assert before.startswith(without)
        assert re.search(r"\. The locker of", text), "between two sentences"


def test_a_share_of_all_the_same_at_every_reading(prose: TokenisedDocuments, tokenizer: Any) -> None:
    plain, found = sequences(prose, tokenizer, share=0.3)
    _, again = sequences(prose, tokenizer, share=0.3)
    changed = [not torch.equal(found[index]["input_ids"], plain[index]["input_ids"]) for index in range(COUNT)]
    assert 0.1 < sum(changed) / COUNT < 0.5
    for index in reversed(range(COUNT)):
        assert torch.equal(again[index]["input_ids"], found[index]["input_ids"])
        assert torch.equal(again[index]["labels"], found[index]["labels"])
    assert "30% of the sequences, where there is room, hold keys, copies, chains" in str(found)
    _, other = sequences(prose, tokenizer, share=0.3, seed=6)
    assert any(not torch.equal(other[index]["input_ids"], found[index]["input_ids"]) for index in range(COUNT))


def test_a_sequence_too_short_for_it_stays_as_it_is(documents: TokenisedDocuments, tokenizer: Any) -> None:
    plain = TrainingSequences(documents, length=41, count=20, seed=5, target_length=128)
    found = RetrievalSequences(plain, tokenizer, share=1.0, seed=5)
    assert all(torch.equal(found[index]["labels"], plain[index]["labels"]) for index in range(20))
    assert not any("to find" in found.origin_of(index) for index in range(20)), "nothing is said to be there"
    with pytest.raises(InvalidParameterError, match=r"None of the first 20 sequences has room for keys or copies"):
        found.require_room()


def test_a_run_whose_sequences_have_no_room_for_it_is_refused(settings: Any) -> None:
    said = r"longest has 32 tokens\. Raise data\.length, or leave out data\.ret"
    with pytest.raises(InvalidParameterError, match=said):
        recipe.finetune(settings("--data.retrieval", "0.5"))


@pytest.mark.parametrize("lengths", [(48, 900), (900, 48), (48, 48)])
def test_a_run_is_refused_where_no_stage_has_room(
    prose: TokenisedDocuments, tokenizer: Any, lengths: tuple[int, ...]
) -> None:
    """The first stage alone fills the first sequences, and may be too short to hold anything."""
    parts = [TrainingSequences(prose, length=length, count=70, seed=5, target_length=TARGET) for length in lengths]
    staged = RetrievalSequences(StagedSequences(parts), tokenizer, share=1.0, seed=5)
    if max(lengths) == LENGTH:
        staged.require_room()
        return
    with pytest.raises(InvalidParameterError, match=r"first 128 sequences .* longest has 48 tokens"):
        staged.require_room()


def test_no_space_is_doubled_where_a_tokenizer_puts_one_before_what_it_is_given(tokenizer: Any) -> None:
    """As Llama 2's does: a text in the middle of another has to be read behind something."""
    spaced = copy.deepcopy(tokenizer)
    spaced.backend_tokenizer.normalizer = normalizers.Prepend("a")
    found = RetrievalSequences(TrainingSequences.__new__(TrainingSequences), spaced, share=1.0, seed=0)
    assert said(spaced, found._tokens(" bc.")) == " bc."


def test_processes_that_read_for_a_run_make_the_same_of_it(prose: TokenisedDocuments, tokenizer: Any) -> None:
    """Where they are started anew, as on macOS, the sequences are pickled."""
    _, found = sequences(prose, tokenizer)
    again = pickle.loads(pickle.dumps(found))
    assert all(torch.equal(again[index]["input_ids"], found[index]["input_ids"]) for index in range(COUNT))


@pytest.mark.parametrize("end", [".", "!", '?"', "\u3002", "\uff01\u300d", "\u061f", "\u0964", "\n"])
def test_sentences_end_in_every_script(end: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RetrievalSequences(TrainingSequences.__new__(TrainingSequences), tokenizer, share=1.0, seed=0)
    words = ["a", "b", end, "c", "d"]
    monkeypatch.setattr(type(tokenizer), "decode", lambda _, ids: words[ids[0]])
    assert found._sentence_from(torch.arange(len(words)), 1) == 3


def test_no_question_of_an_evaluation_is_trained_on(prose: TokenisedDocuments, tokenizer: Any) -> None:
    from ctxext.evaluation import passkey

    _, found = sequences(prose, tokenizer)
    texts = " ".join(said(tokenizer, found[index]["input_ids"]) for index in range(COUNT)).lower()
    assert passkey.QUESTION.strip().lower() not in texts
    for words in ("pass key", "passkey", "special magic", "VAR "):
        assert words.lower() not in texts


@pytest.mark.nightly
def test_the_recipe_reads_them(settings: Any, tmp_path: Path) -> None:
    asked = ("--data.retrieval", "0.5", "--training.steps", "2", "--data.length", "250", "--factor", "4")
    recipe.finetune(settings(*asked))
    report = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert "50% of the sequences, where there is room, hold keys, copies, chains to find again" in report["data"]


@pytest.mark.nightly
def test_trained_on_keys_a_model_loses_less_on_their_answers(settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    """In sequences that it never saw, than one that had the same steps of the same prose without keys."""
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"Chapter {n} has a sentence or two." for n in range(200)), encoding="utf-8")
    documents = TokenisedDocuments.read([str(book)], tokenizer)
    plain = TrainingSequences(documents, length=320, count=16, seed=99, target_length=512)
    drawn = RetrievalSequences(plain, tokenizer, share=1.0, kinds=["keys"], seed=99)
    texts = [drawn[index]["input_ids"] for index in range(len(drawn))]
    asked = torch.stack([ids for ids in texts if re.search(r"It is \d{5}\.$", said(tokenizer, ids))])
    assert len(asked) >= 6, "there was no room"
    found = []
    for share in ("0", "1"):
        given = {"data.train": book, "data.length": 320, "data.positions": "consecutive", "factor": 8}
        given |= {"data.retrieval": share, "data.retrieval_kinds": "keys", "output": tmp_path / share}
        given |= {"training.steps": 60, "training.batch": 4, "training.learning_rate": 1e-2, "lora.whole": "true"}
        recipe.finetune(settings(*words_of(given)))
        model = ctxext.load(tmp_path / share / "adapter")
        with torch.no_grad():
            before = model(asked).logits[:, -8:-1]
        found.append(cross_entropy(before.flatten(0, 1), asked[:, -7:].flatten()).item())  # " 12345."
    assert found[1] < 0.75 * found[0], found
