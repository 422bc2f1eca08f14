"""Limits of texts beside a config: each that was the old window becomes the new one, each other one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import BertModel, LlamaForCausalLM

import ctxext
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError
from tests._models import RECENT, bert, tiny
from tests._tokenizer import make_tokenizer
from tests.walk.tiny import TRAINED_LENGTH

TRAINED, TARGET = 32, 128


@pytest.fixture
def source(tmp_path: Path) -> Path:
    bert(BertModel, max_position_embeddings=TRAINED).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def put(place: Path, name: str, field: tuple[str, ...], value: int | float) -> None:
    """Write a limit into a file beside the model; a tokenizer.json is a whole tokenizer that truncates."""
    if name == "tokenizer.json":
        tokenizer = make_tokenizer(bos=True).backend_tokenizer
        tokenizer.enable_truncation(max_length=int(value))
        tokenizer.save(str(place / name))
        return
    inner: Any = value
    for part in reversed(field):
        inner = {part: inner}
    (place / name).write_text(json.dumps(inner | {"kept": "é"}), encoding="utf-8")


def found(place: Path, name: str, field: tuple[str, ...]) -> float:
    inner: Any = json.loads((place / name).read_text(encoding="utf-8"))
    assert name == "tokenizer.json" or inner["kept"] == "é"
    for part in field:
        inner = inner[part]
    assert isinstance(inner, int | float)
    return inner


LIMITS = [
    ("tokenizer.json", ("truncation", "max_length")),
    ("tokenizer_config.json", ("max_length",)),
    ("generation_config.json", ("max_length",)),
    # The first as sentence-transformers call it, the others as older ones do.
    *((f"sentence_{kind}_config.json", ("max_seq_length",)) for kind in ("bert", "roberta", "xlm-roberta")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "field"), LIMITS)
@pytest.mark.parametrize("value", [TRAINED, 24])
def test_a_limit_is_raised_or_named(source: Path, name: str, field: tuple[str, ...], value: int) -> None:
    put(source, name, field, value)
    written = patch_checkpoint(source, source.parent / "out", "tile", factor=4)
    limit = f"{name}: {'.'.join(field)} {value}"
    if value == TRAINED:
        assert (found(written.directory, name, field), written.limits) == (TARGET, ())
        assert written.changed == (f"{limit} -> {TARGET}",)
    else:
        assert (found(written.directory, name, field), written.changed) == (value, ())
        assert written.limits == (f"{limit} is below {TARGET}",)
    assert found(source, name, field) == value


@pytest.mark.slow
def test_a_tokenizer_cuts_where_the_new_window_ends(source: Path) -> None:
    put(source, "tokenizer.json", (), TRAINED)
    written = patch_checkpoint(source, source.parent / "out", "tile", factor=4)
    tokenizer = Tokenizer.from_file(str(written.directory / "tokenizer.json"))
    assert len(tokenizer.encode("a " * 1000).ids) == TARGET


@pytest.mark.slow
@pytest.mark.parametrize("value", [TRAINED, 24, 30])
def test_a_bound_of_the_tokenizer_is_raised_whatever_it_is(source: Path, value: int) -> None:
    put(source, "tokenizer_config.json", ("model_max_length",), value)
    written = patch_checkpoint(source, source.parent / "out", "tile", factor=4)
    assert found(written.directory, "tokenizer_config.json", ("model_max_length",)) == TARGET
    assert written.limits == ()


@pytest.mark.slow
@pytest.mark.parametrize("is_pipeline", [True, False])
def test_what_still_cuts_is_in_the_model_card(source: Path, is_pipeline: bool) -> None:
    """With the line that raises it, where the folder is one of sentence-transformers."""
    put(source, "sentence_bert_config.json", ("max_seq_length",), 24)
    put(source, "generation_config.json", ("max_length",), 20)
    if is_pipeline:
        (source / "modules.json").write_text("[]")
    written = patch_checkpoint(source, source.parent / "out", "tile", factor=4)
    code = (written.directory / "README.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    cut, other = "sentence_bert_config.json: max_seq_length 24", "generation_config.json: max_length 20"
    assert f"# Texts are cut: {other} is below {TARGET}" in code
    first = "sentence_transformers import SentenceTransformer" if is_pipeline else "transformers import BertModel"
    assert code.startswith(f"from {first}\n")
    assert f"\nmodel.max_seq_length = {TARGET}\n" in code or not is_pipeline
    assert f"# Texts are cut: {cut} is below {TARGET}" in code


@pytest.mark.slow
def test_limits_above_the_window_and_none_at_all_stay_unsaid(source: Path) -> None:
    put(source, "tokenizer_config.json", ("model_max_length",), 1e30)
    put(source, "sentence_bert_config.json", ("max_seq_length",), 4 * TARGET)
    (source / "tokenizer.json").write_text(json.dumps({"truncation": None, "model": {}}))
    written = patch_checkpoint(source, source.parent / "out", "tile", factor=4)
    assert (written.changed, written.limits) == ((), ())
    assert (written.directory / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_shorter_window_after_a_longer_one_lowers_what_was_raised(source: Path, tmp_path: Path) -> None:
    limits = [("tokenizer_config.json", ("model_max_length",)), *LIMITS[2:4]]
    for name, field in limits:
        put(source, name, field, TRAINED)
    patch_checkpoint(source, tmp_path / "long", "tile", factor=4)
    written = patch_checkpoint(tmp_path / "long", tmp_path / "short", "tile", factor=2, trained_length=TRAINED)
    assert [found(written.directory, *limit) for limit in limits] == [2 * TRAINED] * 3
    ctxext.save(ctxext.load(tmp_path / "long", "tile", factor=2, trained_length=TRAINED), tmp_path / "long")
    assert [found(tmp_path / "long", *limit) for limit in limits] == [2 * TRAINED] * 3


def test_saving_raises_the_same(source: Path, tmp_path: Path) -> None:
    model = ctxext.patch(BertModel.from_pretrained(source), "tile", factor=4)
    place = tmp_path / "saved"
    place.mkdir()
    for name, field in LIMITS[::2]:
        put(place, name, field, TRAINED)
    ctxext.save(model, place)
    assert [found(place, name, field) for name, field in LIMITS[::2]] == [TARGET] * 3


@pytest.mark.slow
def test_a_file_that_is_no_json_is_named_by_its_own_place(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^{source}/tokenizer_config.json is not valid JSON"):
        patch_checkpoint(source, tmp_path / "long", "pi", factor=4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "t5gemma"])
def test_a_loaded_model_that_is_unpatched_writes_no_further_than_it_was_trained_for(
    model_type: str, tmp_path: Path
) -> None:
    """Its limit of ``generate`` was saved with the extension; the model is plain without it."""
    model = tiny(model_type)
    shorter: dict[str, Any] = {"method": "yarn", "factor": 2, "trained_length": TRAINED_LENGTH}
    plain: dict[str, Any] = {}
    model.generation_config.max_length = TRAINED_LENGTH
    ctxext.patch(model, "yarn", factor=4).save_pretrained(tmp_path / "long")
    for factor, given in ((4, plain), (2, shorter)):
        loaded = ctxext.load(tmp_path / "long", **given)
        assert loaded.generation_config.max_length == factor * TRAINED_LENGTH
        assert ctxext.unpatch(loaded).generation_config.max_length == TRAINED_LENGTH
    saved = ctxext.patch(type(model).from_pretrained(tmp_path / "long"), **shorter)
    assert ctxext.unpatch(saved).generation_config.max_length == 4 * TRAINED_LENGTH  # its config is extended again
    model.generation_config.max_length = 20  # a choice, and no window
    model.save_pretrained(tmp_path / "chosen")
    assert ctxext.unpatch(ctxext.load(tmp_path / "chosen")).generation_config.max_length == 20


# As Llama 2 was published at first: numbers of sampling without do_sample, which transformers calls invalid.
FAULTY = {"max_length": TRAINED_LENGTH, "temperature": 0.9, "top_p": 0.6}


def faulty(place: Path, model: Any) -> Path:
    model.save_pretrained(place)
    (place / "generation_config.json").write_text(json.dumps(FAULTY), encoding="utf-8")
    return place


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="older transformers save no settings with faults")
def test_settings_with_faults_are_saved_as_they_were_loaded(tmp_path: Path) -> None:
    """transformers refuses to save them once they have changed, and the limit of ``generate`` has."""
    source, window = faulty(tmp_path / "source", tiny()), {"max_length": 2 * TRAINED_LENGTH}
    model = ctxext.patch(LlamaForCausalLM.from_pretrained(source), "yarn", factor=2)
    model.save_pretrained(tmp_path / "saved")
    ctxext.save(model, tmp_path / "by ctxext")
    ctxext.load(source, "self_extend", factor=2).save_pretrained(tmp_path / "loaded")
    patch_checkpoint(source, tmp_path / "encoded", "kerple", factor=2)
    patch_checkpoint(faulty(tmp_path / "table", tiny("gpt2")), tmp_path / "longer", "pi", factor=2)
    for name in ("saved", "by ctxext", "loaded", "longer"):
        told = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert told.items() >= (FAULTY | window).items()
    ctxext.unpatch(model).save_pretrained(tmp_path / "plain")
    ctxext.unpatch(ctxext.load(tmp_path / "saved")).save_pretrained(tmp_path / "unpatched")
    for name in ("plain", "unpatched"):
        assert json.loads((tmp_path / name / "generation_config.json").read_text()).items() >= FAULTY.items()


@pytest.mark.slow
def test_settings_that_a_user_changed_are_refused_as_transformers_refuses_them(tmp_path: Path) -> None:
    source = faulty(tmp_path / "source", tiny())
    for before in (True, False):
        model = LlamaForCausalLM.from_pretrained(source)
        if before:
            model.generation_config.temperature = 0.5
        ctxext.patch(model, "yarn", factor=2)
        model.generation_config.temperature = 0.5
        with pytest.raises(ValueError, match="GenerationConfig is invalid"):
            model.save_pretrained(tmp_path / "saved")
