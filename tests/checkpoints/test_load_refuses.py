"""What ``ctxext.load`` refuses, and what the user reads: nothing there, nothing safe, nothing that fits together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import hub

import ctxext
from ctxext.checkpoints import source
from ctxext.checkpoints.source import read_any_config, read_tokenizer
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, UnknownNameError, VerificationError
from ctxext.methods import METHODS, RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec
from tests._checkpoints import rewrite
from tests._models import logits, tiny, tokens
from tests._tokenizer import make_tokenizer
from tests.walk.tiny import tiny_config

WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was compiled with CUDA")


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


@pytest.mark.parametrize(
    ("method", "given", "error", "said"),
    [
        ("yran", {"factor": 4}, UnknownNameError, "Did you mean 'yarn'"),
        ("yarn", {"factor": "4"}, InvalidParameterError, "factor must be a finite number"),
        ("yarn", {"factor": 4, "base": "x"}, InvalidParameterError, "is for adapters, and .* is a whole model"),
        ("yarn", {"factor": 4, "config": LlamaConfig()}, InvalidParameterError, "config=.*own, build the model"),
        ("yarn", {"factor": 2, "group": 4}, UnknownNameError, "Unknown yarn parameter"),
        ("retrieval_heads", {"factor": 4, "share": 2.0}, InvalidParameterError, "share must be"),
        ("retrieval_heads", {}, InvalidParameterError, "needs to know how far to reach"),
        (None, {}, CheckpointError, r"restore\. Say which one.*AutoModelForCausalLM\.from_pretrained\("),
        (None, {"factor": 4}, InvalidParameterError, "factor=4 belongs to a method; without one, load restores"),
        (None, {"target_length": 256}, InvalidParameterError, "target_length=256 belongs to a method"),
        (None, {"trained_length": 64}, InvalidParameterError, "trained_length=64 belongs to a method"),
        (None, {"sliding_window": "keep"}, InvalidParameterError, "sliding_window='keep' belongs to a method"),
        (None, {"reach": 2.0}, InvalidParameterError, "belongs to a method"),
        (None, {"base": 1e6}, InvalidParameterError, "is for adapters"),
    ],
)
def test_bad_requests_fail_before_the_weights_are_read(
    method: str | None, given: dict[str, Any], error: type[Exception], said: str, plain: Path, tmp_path: Path
) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(error, match=said):
        ctxext.load(tmp_path, method, **given)


@pytest.mark.parametrize("method", ["tile", "stretch"])
def test_a_method_that_is_to_change_weights_is_built_before_they_are_read(method: str, tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    with pytest.raises(InvalidParameterError, match="needs to know how far to reach"):
        ctxext.load(tmp_path, method)
    with pytest.raises(UnknownNameError, match=f"Unknown {method} parameter 'beta_fast'"):
        ctxext.load(tmp_path, method, factor=2, beta_fast=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "float13"}, "a string representation of a valid `torch.dtype`"),
        ({"attn_implementation": "sdpaa"}, "sdpaa"),
        ({"device_map": "cpux"}, "needs to be a device name"),
        pytest.param({"device_map": "cuda"}, "not compiled with CUDA", marks=WITHOUT_CUDA),
        ({"state_dict": {}}, "`state_dict` cannot be passed together with a model name"),
    ],
)
@pytest.mark.parametrize("method", ["yarn", "retrieval_heads"])
def test_what_transformers_does_not_take_is_a_sentence(
    given: dict[str, Any], said: str, method: str, plain: Path
) -> None:
    with pytest.raises(InvalidParameterError, match=f"transformers does not load {plain} as it was asked to: .*{said}"):
        ctxext.load(plain, method, factor=4, **given)


@pytest.mark.slow
def test_pickled_weights_are_read_only_where_they_are_asked_for(plain: Path, tmp_path: Path) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    model = tiny()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin\); other formats can run code .* convert"):
        ctxext.load(tmp_path, "yarn", factor=4)
    trusted = ctxext.load(tmp_path, "yarn", factor=4, use_safetensors=False)
    assert torch.equal(logits(trusted, tokens()), logits(ctxext.patch(model, "yarn", factor=4), tokens()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        ("ctxext", {"fingerprint": "000000000000"}, "the one that was saved: fingerprint '000000000000' there"),
        ("ctxext method", {"factor": 8.0}, r"Either its config\.json was changed by hand"),
        ("ctxext", {"trained_length": 128}, "that was saved: fingerprint"),
        ("rope_parameters", {"factor": 8.0}, "contradicts itself"),
        ("rope_parameters", {"beta_fast": 16.0}, "contradicts itself"),
        ("ctxext original rope_parameters", {"rope_theta": 5e5}, "that was saved: fingerprint"),
    ],
)
def test_tampered_extensions(place: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    ctxext.patch(tiny(), "yarn", factor=4).save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", lambda config: reduce(getitem, place.split(), config).update(change))
    with pytest.raises(VerificationError, match=said):
        ctxext.load(tmp_path)


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
    for load in (ctxext.load, *[AutoModelForCausalLM.from_pretrained] * (not stock)):
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)


def test_a_connection_that_fails_meanwhile(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an error of huggingface_hub is none of the operating system's."""

    calls: list[dict[str, Any]] = []

    def broken(*_: Any, **how: Any) -> Any:
        calls.append(how)
        raise HTTPError("the connection broke")

    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)  # no revision is asked for
    monkeypatch.setattr(hub, "hf_hub_download", broken)
    monkeypatch.setattr(source, "snapshot_download", broken)
    asked = "There is no directory someone/model. The hub did not give it either: "
    for forced in ({}, {"force_download": True}):
        with pytest.raises(CheckpointError, match=asked):
            ctxext.load("someone/model", "yarn", factor=4, **forced)
    assert not any(how.get("force_download") and how.get("local_files_only") for how in calls), "the hub takes one only"
    with pytest.raises(CheckpointError, match=f"{asked}the connection broke"):
        patch_checkpoint("someone/model", tmp_path / "long", "yarn", factor=4)
    with pytest.raises(CheckpointError, match="someone/model has no tokenizer that can be read: the connection broke"):
        read_tokenizer("someone/model", config=LlamaConfig())
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", broken)
    with pytest.raises(CheckpointError, match=f"The weights in {plain} cannot be read: the connection broke"):
        ctxext.load(plain, "yarn", factor=4)
