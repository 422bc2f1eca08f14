"""What ``ctxext.load`` refuses, and what the user reads: nothing there, nothing safe, nothing that fits together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.checkpoints.source import read_any_config, read_tokenizer
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, UnknownNameError, VerificationError
from ctxext.methods import METHODS, RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec
from tests._checkpoints import rewrite
from tests._models import logits, tiny, tokens
from tests._tokenizer import make_tokenizer


@pytest.fixture
def edited(plain: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """A YaRN checkpoint whose config.json somebody changed."""

    def edit(change: Callable[[dict[str, Any]], object]) -> Path:
        ctxext.patch(tiny(), "yarn", factor=4).save_pretrained(tmp_path)
        rewrite(tmp_path / "config.json", change)
        return tmp_path

    return edit


@pytest.mark.parametrize(
    ("part", "value"), [("post_processor", {"type": "OfTomorrow"}), ("added_tokens", 7), ("added_tokens", [7])]
)
def test_a_tokenizer_that_is_damaged_or_of_a_newer_version(part: str, value: Any, tmp_path: Path) -> None:
    make_tokenizer(bos=True).save_pretrained(tmp_path)
    rewrite(tmp_path / "tokenizer.json", lambda content: content.update({part: value}))
    with pytest.raises(CheckpointError, match="has no tokenizer that can be read"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("place", ["/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c"])
def test_nothing_there(place: str) -> None:
    with pytest.raises(CheckpointError, match=f"There is no checkpoint at {place}: no such directory"):
        ctxext.load(place, "yarn", factor=4)


def test_a_file_and_a_directory_without_config(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a file; give the directory that holds config"):
        ctxext.load(plain / "model.safetensors", "yarn", factor=4)
    with pytest.raises(CheckpointError, match=r"has no config\.json \(found: nothing\)"):
        ctxext.load(tmp_path, "yarn", factor=4)
    (tmp_path / "notes.txt").write_text("weights to follow")
    with pytest.raises(CheckpointError, match=r"has no config\.json \(found: notes\.txt\). Give a directory saved by"):
        ctxext.load(tmp_path, "yarn", factor=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "should hold a JSON object; found []"),
        ("{}", "transformers cannot read the config of"),
        ('{"model_type": "no_such_thing"}', "transformers cannot read the config of"),
        ('{"model_type": "llama", "dtype": "float8"}', "transformers cannot read the config of"),
        ('{"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": "abc"}}', "chunk_size='abc'"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "own.Code"}}', "names Python code of its own"),
    ],
)
def test_unreadable_configs(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        ctxext.load(tmp_path, "yarn", factor=4)
    assert said in str(caught.value)


def test_a_plain_checkpoint_without_a_method(plain: Path) -> None:
    with pytest.raises(CheckpointError, match=r"restore\. Say which one.*AutoModelForCausalLM\.from_pretrained\("):
        ctxext.load(plain)


@pytest.mark.parametrize(
    "asked", [{"factor": 4}, {"target_length": 256}, {"trained_length": 64}, {"sliding_window": "keep"}], ids=str
)
def test_a_factor_without_a_method(asked: dict[str, Any], plain: Path) -> None:
    (given,) = (f"{name}={value!r}" for name, value in asked.items())
    with pytest.raises(InvalidParameterError, match=f"{given} belongs to a method; without one, load restores"):
        ctxext.load(plain, **asked)


@pytest.mark.parametrize("given", [{"group": 4}, {"reach": 2.0}, {"base": 1e6}], ids=str)
def test_a_parameter_of_another_method_is_named_as_patch_names_it(given: dict[str, Any], plain: Path) -> None:
    error: type[Exception] = InvalidParameterError if "base" in given else UnknownNameError
    with pytest.raises(error, match="is for adapters" if "base" in given else "Unknown yarn parameter"):
        ctxext.load(plain, "yarn", factor=2, **given)
    with pytest.raises(InvalidParameterError, match=r"belongs to a method|is for adapters"):
        ctxext.load(plain, **given)


@pytest.mark.parametrize("method", ["yarn", "self_extend", None])
def test_fields_of_the_config_are_taken_as_from_pretrained_takes_them(
    method: str | None, plain: Path, tmp_path: Path
) -> None:
    place, extend = (plain, {"method": method, "factor": 2}) if method else (tmp_path, {})
    ctxext.save(ctxext.patch(tiny(), "self_extend", factor=2), tmp_path)
    given: dict[str, Any] = {"num_labels": 5, "use_cache": False, "attention_dropout": 0.25, "pad_token_id": 1}
    for auto_class in (None, "AutoModelForSequenceClassification"):
        model, report = ctxext.load(place, **extend, auto_class=auto_class, output_loading_info=True, **given)
        stock, expected = getattr(transformers, auto_class or "AutoModelForCausalLM").from_pretrained(
            plain, output_loading_info=True, **given
        )
        assert all(getattr(model.config, name) == getattr(stock.config, name) for name in given)
        assert {name: set(keys) for name, keys in report.items()} == {name: set(expected[name]) for name in expected}
        assert model.model.layers[0].self_attn.attention_dropout == 0.25
    with pytest.raises(UnknownNameError, match="Did you mean 'num_labels'"):
        ctxext.load(place, **extend, num_label=5)
    with pytest.raises(CheckpointError, match="'use_cache' expected bool"):
        ctxext.load(place, **extend, use_cache="x")


@pytest.mark.slow
@pytest.mark.parametrize("auto_class", ["T5ForConditionalGeneration", "BertModel", "GPT2LMHeadModel"])
def test_a_class_of_other_models_is_named(auto_class: str, plain: Path, tmp_path: Path) -> None:
    ctxext.patch(tiny(), "yarn", factor=2).save_pretrained(tmp_path)
    for place, method in ((plain, {"method": "yarn", "factor": 2}), (tmp_path, {})):
        with pytest.raises(IncompatibleError, match=f"{auto_class} is the class of a .*, and this .* is a llama"):
            ctxext.load(place, auto_class=auto_class, **method)
    assert ctxext.describe(ctxext.load(tmp_path, subfolder=None)).target_length == 128


def test_bad_requests_fail_before_the_weights_are_read(plain: Path, tmp_path: Path) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(UnknownNameError, match="Did you mean 'yarn'"):
        ctxext.load(tmp_path, "yran", factor=4)
    with pytest.raises(InvalidParameterError, match="factor must be a finite number"):
        ctxext.load(tmp_path, "yarn", factor="4")
    with pytest.raises(InvalidParameterError, match=r"is for adapters, and .* is a whole model"):
        ctxext.load(tmp_path, "yarn", factor=4, base="elsewhere")
    with pytest.raises(CheckpointError, match=r"has no safetensors weights \(found: no weights at all\)"):
        ctxext.load(tmp_path, "yarn", factor=4)


@pytest.mark.slow
def test_pickled_weights_are_refused(plain: Path, tmp_path: Path) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    model = tiny()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    said = r"has no safetensors weights \(found: pytorch_model\.bin\); other formats can run code .* convert"
    with pytest.raises(CheckpointError, match=said):
        ctxext.load(tmp_path, "yarn", factor=4)
    trusted = ctxext.load(tmp_path, "yarn", factor=4, use_safetensors=False)
    assert torch.equal(logits(trusted, tokens()), logits(ctxext.patch(model, "yarn", factor=4), tokens()))


@pytest.mark.slow
def test_broken_weights(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for broken in (b"", whole[:1000], b"version https://git-lfs.github.com/spec/v1", whole[:-1]):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
            ctxext.load(tmp_path, "yarn", factor=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda config: config["ctxext"].update(fingerprint="000000000000"),
            "the one that was saved: fingerprint '000000000000' there",
        ),
        (lambda config: config["ctxext"]["method"].update(factor=8.0), "Either its config.json was changed by hand"),
        (lambda config: config["ctxext"].update(trained_length=128), "that was saved: fingerprint"),
        (lambda config: config["rope_parameters"].update(factor=8.0), "contradicts itself"),
        (lambda config: config["rope_parameters"].update(beta_fast=16.0), "contradicts itself"),
        (
            lambda config: config["ctxext"]["original"]["rope_parameters"].update(rope_theta=5e5),
            "that was saved: fingerprint",
        ),
    ],
)
def test_tampered_extensions(change: Callable[[Any], object], said: str, edited: Callable[..., Path]) -> None:
    with pytest.raises(VerificationError) as caught:
        ctxext.load(edited(change))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["rope_scaling"].update(factor=8.0),
        lambda config: config["rope_scaling"].update(type="linear", rope_type="linear"),
        lambda config: config["rope_scaling"].update(beta_fast=16.0),
        lambda config: config["rope_scaling"].pop("original_max_position_embeddings"),
        lambda config: config["rope_parameters"].update(attention_factor=2.0),
        lambda config: config["rope_parameters"].update(rope_theta=5e5),
        lambda config: config.update(rope_theta=5e5),
    ],
)
def test_two_forms_of_the_positions_that_differ(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(), "yarn", factor=4), tmp_path)
    rewrite(tmp_path / "config.json", change)
    with pytest.raises(VerificationError, match=r"contradicts itself: rope_scaling .* rope_parameters="):
        read_any_config(tmp_path)


def test_a_length_that_no_frequency_shows(tmp_path: Path) -> None:
    """Of a dynamic method: transformers counts its stretch from another field than ctxext."""
    ctxext.save(ctxext.patch(tiny(), "dynamic_ntk", factor=4), tmp_path)
    rewrite(tmp_path / "config.json", lambda config: config["ctxext"].update(trained_length=128))
    with pytest.raises(VerificationError, match="that was saved: target_length"):
        ctxext.load(tmp_path)


@dataclass(frozen=True, kw_only=True)
class Halving(RopeMethod):
    """A method of a user's own; ``stock`` says whether stock transformers can express it."""

    name: ClassVar[str] = "halving"
    stock: bool = True

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(plain_inv_freq(rope) / self.factor)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        return {"rope_type": "linear", "rope_theta": rope.base, "factor": self.factor} if self.stock else None

    @property
    def dynamic(self) -> bool:
        return not self.stock  # what is dynamic and has no stock form is computed by the class when it is loaded


@pytest.mark.slow
@pytest.mark.parametrize("stock", [True, False])
def test_a_method_of_ones_own_has_to_be_registered_before_its_checkpoint_is_loaded(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "halving", Halving)
    patched = ctxext.patch(tiny(), Halving(factor=2, stock=stock))
    ctxext.save(patched, tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(patched, tokens()))
    monkeypatch.delitem(METHODS, "halving")
    said = (
        r"'halving' is unknown .* class of your own, import it and register it first: ctxext\.methods\.METHODS\['halv"
    )
    with pytest.raises(CheckpointError, match=said):
        ctxext.load(tmp_path)
    if not stock:
        with pytest.raises(CheckpointError, match=said):
            AutoModelForCausalLM.from_pretrained(tmp_path)
