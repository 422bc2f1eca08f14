"""Models with buckets of relative distances: T5 and its kin, stretched in stock form."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, T5Config, T5EncoderModel

import ctxext
from ctxext.checkpoints.export import export
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError, UnknownNameError
from ctxext.models import find_architecture
from tests._famous import FAMOUS
from tests._models import both_sides, tiny
from tests.walk.tiny import TRAINED_LENGTH


def patched(model_type: str = "t5", **arguments: Any) -> PreTrainedModel:
    return ctxext.patch(
        tiny(model_type), "stretch_buckets", **{"factor": 4.0, "trained_length": TRAINED_LENGTH} | arguments
    )


@pytest.mark.slow
def test_a_short_text_is_read_as_before_and_a_long_one_otherwise() -> None:
    plain, long = tiny("t5"), patched()
    assert torch.equal(both_sides(long, 8), both_sides(plain, 8)), "8 tokens know 7 tokens of distance each way"
    assert (both_sides(long, 9) - both_sides(plain, 9)).abs().max() == 0, (
        "and the first wide bucket begins where it did"
    )
    assert (both_sides(long) - both_sides(plain)).abs().max() > 1e-3


@pytest.mark.slow
def test_every_part_says_the_same_and_unpatching_brings_all_back(tmp_path: Path) -> None:
    model = tiny("t5")
    before, said = both_sides(model), copy.deepcopy(model.config.to_dict())
    parts = [module for module in model.modules() if hasattr(module, "relative_attention_max_distance")]
    assert len(parts) == 6
    ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    assert {part.relative_attention_max_distance for part in parts} == {512}
    assert {one.config.relative_attention_max_distance for one in (model, model.encoder, model.decoder)} == {512}
    model.encoder.save_pretrained(tmp_path)
    alone = T5EncoderModel.from_pretrained(tmp_path)
    assert alone.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance == 512
    with pytest.raises(PatchStateError, match="already extended by 'stretch_buckets'"):
        ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    ctxext.unpatch(model)
    assert torch.equal(both_sides(model), before)
    assert model.config.to_dict() == said
    assert {part.relative_attention_max_distance for part in parts} == {128}
    assert {one.config.relative_attention_max_distance for one in (model.encoder, model.decoder)} == {128}


@pytest.mark.nightly
def test_the_published_config_says_its_length(tmp_path: Path) -> None:
    """t5-small's config.json has n_positions, which no code reads; other T5 are told trained_length."""
    config = T5Config.from_dict(FAMOUS["google-t5/t5-small"])
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    ctxext.patch(model, "stretch_buckets", factor=4)
    assert (model.config.n_positions, model.config.relative_attention_max_distance) == (2048, 512)
    assert "512 -> 2048 tokens" in str(ctxext.describe(model))
    assert "from 128 to 512 tokens, which shared one bucket, are distinguished" in str(ctxext.describe(model))
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["relative_attention_max_distance"] == 512
    found = inspect_checkpoint(tmp_path)
    assert found.no_positions == "none: this t5 has buckets of relative distances"
    assert {one.method for one in found.verdicts if one.refused is None} <= {"stretch_buckets"}
    with pytest.raises(IncompatibleError, match="not one of rotary positions"):
        export(tmp_path, to="llama.cpp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trained_length": None}, IncompatibleError, "does not state the trained length. Pass trained_length"),
        ({"sliding_window": "lift"}, InvalidParameterError, "sliding_window='lift': this t5 has only buckets"),
        ({"attention": "sdpa"}, InvalidParameterError, "attention='sdpa': this t5 has only buckets"),
        ({"sharpening": 0.1}, UnknownNameError, "sharpening"),
        ({"factor": 0.5}, InvalidParameterError, "factor must be a finite number, at least 1"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(arguments: Any, error: type[Exception], message: str) -> None:
    model = tiny("t5")
    before = model.config.to_dict()
    given = {"factor": 4.0, "trained_length": TRAINED_LENGTH} | arguments
    with pytest.raises(error, match=message):
        ctxext.patch(model, "stretch_buckets", **given)
    assert model.config.to_dict() == before
    assert torch.equal(both_sides(model), both_sides(tiny("t5")))


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("longt5", "sees only the tokens around each token"),
        ("udop", "whose largest distance is in its code and not in its config"),
    ],
)
def test_buckets_that_cannot_be_stretched_rightly_are_refused(model_type: str, said: str) -> None:
    config = AutoConfig.for_model(model_type, d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=2, vocab_size=64)
    with torch.device("meta"):
        named = transformers.LongT5ForConditionalGeneration, transformers.UdopForConditionalGeneration
        model = named[model_type == "udop"](config)
    before = config.to_dict()
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    assert model.config.to_dict() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Pop2PianoForConditionalGeneration", "Pix2StructTextModel", "T5EncoderModel"])
def test_kin_that_reads_or_writes_something_else(kind: str) -> None:
    """Music and pictures beside text, an encoder alone: what each class calls itself does not matter."""
    cls = getattr(transformers, kind)
    width = {"hidden_size": 16} if kind.startswith("Pix") else {"d_model": 16}
    config = cls.config_class(d_kv=8, d_ff=16, num_heads=2, num_layers=2, vocab_size=64, **width)
    with torch.device("meta"):
        model = cls(config)
    before = model.config.to_dict()
    ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    assert model.config.relative_attention_max_distance == 512
    ctxext.unpatch(model)
    assert model.config.to_dict() == before


def test_code_that_buckets_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof fails where the model's code does not do what the paper says."""
    model = tiny("t5")
    attention = type(model.encoder.block[0].layer[0].SelfAttention)
    original = attention._relative_position_bucket

    def otherwise(relative_position: Tensor, **given: Any) -> Tensor:
        return original(relative_position // 2, **given)

    monkeypatch.setattr(attention, "_relative_position_bucket", staticmethod(otherwise))
    with pytest.raises(IncompatibleError, match=r"does not bucket a distance of -?\d+ tokens as T5 does"):
        ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)


@pytest.mark.parametrize("model_type", ["mpnet", "llama", "bloom", "deberta-v2"])
def test_other_models_refuse_it_by_name(model_type: str) -> None:
    model = tiny(model_type)
    architecture = find_architecture(Subject.of(model))
    assert architecture is None or architecture.name != "buckets"
    with pytest.raises(IncompatibleError) as refusal:
        ctxext.patch(model, "stretch_buckets", factor=4)
    assert model_type in str(refusal.value)
    assert "changes rotations" not in str(refusal.value)
