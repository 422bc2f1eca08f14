"""Passage retrieval: the task, the simple ways, extensions, and the command with a real embedding model around."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertModel

from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.evaluation.passages import (
    AVERAGED,
    FIRST,
    LAST,
    NEAREST,
    Embedder,
    PassageReport,
    PassageSet,
    load_embedder,
    make_passages,
    passage_jobs,
    passage_readers,
    passage_report,
)
from ctxext.evaluation.report.passages import passage_sentences
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.survey import Survey
from ctxext.measuring.truncation import TRUNCATED
from tests._models import bert
from tests._programs import command
from tests._tokenizer import make_tokenizer

TRAINED = 256


class Words:
    """An encoder whose embedding says which names there are: it finds whatever it is shown, and nothing else."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer(bos=False)
        self.max_seq_length = TRAINED
        self.numbers = {name: number for number, name in enumerate((*FIRST, *LAST))}
        self.longest = 0

    def encode_query(self, texts: list[str], **_: Any) -> Tensor:
        return self.encode_document(texts)

    def encode_document(self, texts: list[str], **_: Any) -> Tensor:
        found = torch.zeros(len(texts), len(self.numbers))
        for row, text in enumerate(texts):
            self.longest = max(self.longest, min(len(text.encode()), self.max_seq_length))
            for word in text.encode()[: self.max_seq_length].decode(errors="ignore").split():
                if (name := word.strip(".?")) in self.numbers:
                    found[row, self.numbers[name]] = 1
        return found


@pytest.fixture
def words() -> Embedder:
    encoder = Words()
    return Embedder(Checkpoint("words", bert(BertModel, max_position_embeddings=TRAINED), encoder.tokenizer), encoder)


def passages(embedder: Embedder, length: int, documents: int = 12) -> PassageSet:
    return make_passages(embedder.checkpoint.tokenizer, length=length, documents=documents)


def measured(embedder: Embedder, lengths: list[int], methods: tuple[str, ...] = ()) -> PassageReport:
    readers = passage_readers(embedder, methods=methods, lengths=lengths)
    survey = Survey(
        "test", embedder.checkpoint, passage_jobs(embedder, readers, [passages(embedder, n) for n in lengths])
    )
    survey.measure(survey.begin())
    return passage_report(survey, "noise", provenance_of(embedder.checkpoint, seed=0))


def test_documents_have_their_length_one_sentence_each_and_depths_from_start_to_end(words: Embedder) -> None:
    made = passages(words, 1024)
    tokenizer = words.checkpoint.tokenizer
    lengths = [len(tokenizer(text).input_ids) for text in made.documents]
    assert max(lengths) <= 1024
    assert min(lengths) > 1024 - 16
    names = [query.removeprefix("What is the pass key of ").removesuffix("?") for query in made.queries]
    assert len(set(names)) == len(made.documents)
    for document, name, depth in zip(made.documents, names, made.depths, strict=True):
        assert document.count("Remember that") == 1
        at = document.index(f"The pass key of {name} is ")
        sentence = len(f" The pass key of {name} is 12345. Remember that 12345 is the pass key of {name}.")
        assert at / (len(document) - sentence) == pytest.approx(depth, abs=0.05)
    assert sorted(made.depths) == [pytest.approx(place / 11) for place in range(12)]


def test_the_same_seed_gives_the_same_documents_and_another_one_others(words: Embedder) -> None:
    tokenizer = words.checkpoint.tokenizer
    assert passages(words, 512).sha256 == passages(words, 512).sha256
    assert make_passages(tokenizer, length=512, documents=12, seed=1).sha256 != passages(words, 512).sha256


def test_an_encoder_that_finds_what_it_is_shown_finds_just_what_each_way_shows(words: Embedder) -> None:
    report = measured(words, [TRAINED, 1024], ("pi",))
    by_name = {one.reading: one for one in report.readings}
    assert list(by_name) == [TRUNCATED, AVERAGED, NEAREST, "pi x4"]
    assert all(trial.accuracy == 1 for one in report.readings for trial in one.trials if trial.length == TRAINED)
    for name in (NEAREST, AVERAGED, "pi x4"):
        assert by_name[name].at(1024).accuracy == 1, name  # type: ignore[union-attr]
    cut = by_name[TRUNCATED].at(1024)
    assert cut is not None
    shown = [found for found, depth in zip(cut.found, cut.depths, strict=True) if depth < 0.1]
    hidden = [found for found, depth in zip(cut.found, cut.depths, strict=True) if depth > 0.3]
    assert all(shown)
    assert len(shown) >= 1
    assert not any(hidden)
    gap = by_name["pi x4"].beyond(by_name[TRUNCATED], 1024)
    assert gap is not None
    assert gap.mean == pytest.approx(1 - cut.accuracy)
    assert report.best_baseline(1024).reading in (AVERAGED, NEAREST)


def test_pieces_are_of_equal_length_and_no_longer_than_the_window(words: Embedder) -> None:
    encoder: Words = words.encoder
    measured(words, [TRAINED + 100])
    assert encoder.longest <= TRAINED
    assert encoder.max_seq_length == TRAINED  # as it was


def test_the_model_is_extended_while_a_method_reads_and_as_it_was_afterwards(words: Embedder) -> None:
    model: BertModel = words.checkpoint.model  # type: ignore[assignment]
    rows: list[int] = []
    embed = words.encoder.encode_document

    def noted(texts: list[str], **more: Any) -> Tensor:
        rows.append(model.embeddings.position_embeddings.weight.shape[0])
        return embed(texts, **more)

    words.encoder.encode_document = noted
    measured(words, [1024], ("tile",))
    assert set(rows) == {TRAINED, 1024}
    assert model.embeddings.position_embeddings.weight.shape[0] == TRAINED


def test_identical_documents_are_not_found(words: Embedder) -> None:
    made = passages(words, 1024)
    same = PassageSet(made.length, (made.documents[0],) * 12, made.queries, made.depths, made.haystack)
    readers = passage_readers(words, lengths=[1024])
    survey = Survey("test", words.checkpoint, passage_jobs(words, readers, [same]))
    survey.measure(survey.begin())
    report = passage_report(survey, "noise", provenance_of(words.checkpoint, seed=0))
    assert all(trial.accuracy == 0 for one in report.readings for trial in one.trials)


def test_a_report_is_read_as_it_was_written(words: Embedder) -> None:
    report = measured(words, [TRAINED, 512], ("pi",))
    assert PassageReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    told = passage_sentences(report)
    assert any("PI" in one and "points over the same questions" in one for one in told)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"length": 100}, InvalidParameterError, "needs at least"),
        ({"length": 512, "documents": 1}, InvalidParameterError, "documents must be from 2"),
        ({"length": 512, "documents": 1000}, InvalidParameterError, "found 1000"),
    ],
)
def test_what_cannot_be_made_is_refused(words: Embedder, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_passages(words.checkpoint.tokenizer, **options)


def test_a_length_or_method_that_nobody_is_meant_for_is_refused(words: Embedder) -> None:
    with pytest.raises(InvalidParameterError, match=r"beyond what any method here is patched for.*512"):
        passage_readers(words, methods=("pi",), factors=(2.0,), lengths=(1024,))
    with pytest.raises(IncompatibleError, match="learned positions"):
        passage_readers(words, methods=("yarn",), lengths=(1024,))


def saved_model(folder: Path) -> Path:
    """A tiny BERT as sentence-transformers saves it."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs ctxext[embed]")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules", reason="an older version")
    bert(BertModel, max_position_embeddings=TRAINED).save_pretrained(folder / "bert")
    make_tokenizer(bos=False).save_pretrained(folder / "bert")
    inside = modules.Transformer(str(folder / "bert"))
    inside.tokenizer.pad_token = "<s>"
    encoder = sentence_transformers.SentenceTransformer(
        modules=[inside, modules.Pooling(inside.get_embedding_dimension())], device="cpu"
    )
    encoder.save(str(folder / "model"))
    return folder / "model"


@pytest.mark.slow
def test_a_real_encoder_reads_past_its_table_once_it_is_extended(tmp_path: Path) -> None:
    import ctxext

    embedder = load_embedder(str(saved_model(tmp_path)), device="cpu")
    texts = [f"{'a' * 600} {ending}" for ending in ("one", "two")]
    cut = embedder.embed(texts, TRAINED)
    assert torch.equal(cut[0], cut[1])
    ctxext.patch(embedder.checkpoint.model, "hierarchical", factor=4)
    whole = embedder.embed(texts, 4 * TRAINED)
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(embedder.embed(texts, TRAINED), cut)


@pytest.mark.slow
def test_the_command_writes_its_result_and_goes_on_where_it_was(tmp_path: Path) -> None:
    model = saved_model(tmp_path)
    out = tmp_path / "found.json"
    arguments = ["eval", "passages", str(model), "-m", "tile", "-l", "256", "-l", "512", "-n", "4", "-o", str(out)]
    first = command(*arguments)
    assert "Documents found" in first.stdout
    written = out.read_text()
    out.unlink()
    again = command(*arguments)
    assert "8 of them finished before" in again.stdout
    assert json.loads(out.read_text())["readings"] == json.loads(written)["readings"]


def test_what_is_no_embedding_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="needs ctxext[embed]")
    with pytest.raises(CheckpointError, match="Cannot load an embedding model"):
        load_embedder(str(tmp_path / "nothing"))


def test_names_are_told_apart() -> None:
    names = [*FIRST, *LAST]
    assert len(set(names)) == len(names)
    assert not any(one != other and one in other for one, other in itertools.product(names, names))
