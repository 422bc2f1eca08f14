"""Readers older than transformers 5 read the same positions from an extended config, or cannot compute at all.

Which fields they read is from transformers 4.57.1: ``configuration_llama.py`` (``rope_theta``, ``rope_scaling``,
``partial_rotary_factor``; ``rope_parameters`` is an unknown extra) and ``modeling_rope_utils.py``, in float64.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXForCausalLM, LlamaForCausalLM, PreTrainedConfig

import ctxext
from ctxext.checkpoints.load import extended_config
from ctxext.checkpoints.source import read_any_config
from ctxext.checkpoints.write import patch_checkpoint, with_old_form
from ctxext.core.old_form import OLD_GUARD
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError
from ctxext.methods import METHODS, RopeMethod
from ctxext.rotary.sites import find_sites
from ctxext.spec import RopeSpec
from tests._formulas import Spectrum, spectrum
from tests._models import FOR_LLAMA, RECENT, logits, tiny, tokens
from tests._products import crossed
from tests.walk.tiny import TRAINED_LENGTH, tiny_config

SPEC = RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)
OLD_KEYS = {"rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"}


def old_reading(config: dict[str, Any]) -> Spectrum:
    """Inverse frequencies and the scale of cos and sin as transformers 4.57.1 computes them for a Llama at load."""
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = int(head_dim * config.get("partial_rotary_factor", 1.0))
    if scaling.get("rope_type", scaling.get("type")) == "dynamic":  # from max_position_embeddings on
        scaling = {}
    beside = {"max_position_embeddings": config["max_position_embeddings"], "rope_theta": theta}
    return spectrum({"original_max_position_embeddings": config["max_position_embeddings"]} | beside | scaling, width)


def saved_config(model: Any, directory: Path) -> dict[str, Any]:
    """What ``ctxext patch`` writes for this model; what ``save_pretrained`` writes is that, or stops older readers.

    The Trainer reads the latter, in each of its checkpoints, as the config of no type.
    """
    model.save_pretrained(directory)
    PreTrainedConfig.from_json_file(directory / "config.json")
    live = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(with_old_form(model.config).to_json_string(use_diff=True))
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    assert live == config or OLD_GUARD in live.values()
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi", "yarn", "longrope", "self_extend"])
def test_saving_writes_what_the_command_line_does_and_the_model_keeps_its_guard(name: str, tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), METHODS[name].example(SPEC), trained_length=TRAINED_LENGTH)
    model.save_pretrained(tmp_path / "live")
    before = copy.deepcopy(vars(model.config))
    ctxext.save(model, tmp_path / "saved")
    assert vars(model.config) == before
    live, saved = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("live", "saved"))
    assert saved == json.loads(with_old_form(model.config).to_json_string(use_diff=True))
    assert live["rope_theta"] == OLD_GUARD, "nothing here would show what saving writes"
    assert ("rope_scaling" in saved) == (name in ("pi", "yarn"))
    assert type(saved["rope_theta"]) is (float if name in ("pi", "yarn") else str)
    again = ctxext.load(tmp_path / "saved").eval()
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_a_number_without_end_is_read_in_both_forms(tmp_path: Path) -> None:
    """transformers writes it as an object, which its own class of the config does not take for a number."""
    config = with_old_form(extended_config(tiny_config("bamba"), "pi", factor=2.0))
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=True))
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_any_config(tmp_path).ctxext == config.ctxext


def test_a_save_that_fails_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=4.0)
    before = copy.deepcopy(vars(model.config))
    monkeypatch.setattr(type(model), "save_pretrained", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(CheckpointError, match="no space"):
        ctxext.save(model, tmp_path / "saved")
    assert vars(model.config) == before


@pytest.mark.parametrize(
    ("name", "base"), crossed(["yarn", *(name for name in FOR_LLAMA if name not in ("yarn", "alibi"))], [1e4, 5e5])
)
def test_an_older_reader_reads_the_same_or_fails(name: str, base: float, tmp_path: Path) -> None:
    model = tiny(rope_parameters={"rope_type": "default", "rope_theta": base})
    spec = find_sites(Subject.of(model), TRAINED_LENGTH)[0].spec
    cls = METHODS[name]
    assert issubclass(cls, RopeMethod)
    model.save_pretrained(tmp_path / "plain")  # saving fills in fields of the config
    before = model.config.to_dict()
    ctxext.patch(model, cls.example(spec))
    config = saved_config(model, tmp_path)
    if ctxext.describe(model).stock and name != "longrope":  # its two sets switch at another length there
        inv_freq, scale = old_reading(config)
        if name == "dynamic_ntk":  # both stretch from max_position_embeddings on
            assert config["max_position_embeddings"] == TRAINED_LENGTH
            torch.testing.assert_close(inv_freq, spec.base ** (-torch.arange(0, 32, 2).double() / 32))
            assert config["rope_scaling"]["factor"] == 4.0
        else:
            torch.testing.assert_close(inv_freq.float(), model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)
            assert scale == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-6)
        assert config.get("rope_scaling", {}).get("type") == config.get("rope_scaling", {}).get("rope_type")
    else:
        assert config["rope_theta"] == OLD_GUARD
        with pytest.raises(TypeError):  # no base to compute with
            old_reading(config)
    ctxext.unpatch(model)
    assert model.config.to_dict() == before


def test_replaced_rotation_fails_in_an_older_reader(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        old_reading(saved_config(ctxext.patch(tiny(), "alibi", factor=4), tmp_path))


def test_the_command_line_writes_both_forms_over_old_keys(plain: Path, tmp_path: Path) -> None:
    """A Llama 3 as published: transformers 5 reads its base from an old key, and writes none."""
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((plain / "config.json").read_text())
    del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_scaling": None}))
    (source / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    patch_checkpoint(source, tmp_path / "long", "yarn", factor=4.0)
    written = json.loads((tmp_path / "long/config.json").read_text())
    assert written["rope_theta"] == 5e5
    live = ctxext.patch(LlamaForCausalLM.from_pretrained(source), "yarn", factor=4.0).model.rotary_emb
    inv_freq, scale = old_reading(written)
    torch.testing.assert_close(inv_freq.float(), live.inv_freq, rtol=1e-5, atol=0)
    assert scale == pytest.approx(live.attention_scaling)


@pytest.mark.parametrize("name", ["ntk", "yarn"])
def test_transformers_5_reads_both_forms_as_one_and_says_nothing(
    name: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ctxext.patch(LlamaForCausalLM.from_pretrained(plain), name, factor=4)
    model.save_pretrained(tmp_path)
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        log.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if "rope" in record.getMessage().lower()] == []
    assert torch.equal(logits(stock, tokens()), logits(model, tokens()))
    expected = dict(model.config.rope_parameters)
    assert {k: v for k, v in stock.config.rope_parameters.items() if k != "type"} == expected
    assert not {"rope_theta", "rope_scaling"} & vars(stock.config).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "name", "expected"),
    [
        ("gemma3_text", "yarn", {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": "yarn"}),
        ("gemma3_text", "dynamic_yarn", {"rope_theta": OLD_GUARD}),
        ("gpt_neox", "pi", {"rotary_emb_base": 1e4, "rotary_pct": 0.25, "rope_scaling": "linear"}),
        ("gpt_neox", "dynamic_yarn", {"rotary_emb_base": OLD_GUARD}),
        ("stablelm", "pi", {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_scaling": "linear"}),
        # One base for all layers, of which only some are extended: transformers 4 cannot say it.
        ("olmo3", "ntk", {"rope_theta": OLD_GUARD}),
        ("olmo3", "yarn", {"rope_theta": 5e5, "rope_scaling": "yarn"}),
        ("nemotron", "yarn", {"rope_theta": OLD_GUARD}),  # its class there passes over rope_scaling
    ],
)
def test_families_with_fields_of_their_own(
    model_type: str, name: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny(model_type)
    ctxext.patch(model, name, factor=4)
    config = saved_config(model, tmp_path)
    names = OLD_KEYS | {"rope_local_base_freq"}
    found = {key: config[key] for key in names & config.keys()}
    if "rope_scaling" in found:
        found["rope_scaling"] = found["rope_scaling"]["type"]
    if not RECENT and model_type == "nemotron":  # 5.17 keeps the share that rotates under its old name, too
        found.pop("partial_rotary_factor")
    assert found == expected
    loaded = ctxext.load(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_a_neox_reads_its_part_and_base_from_old_names(tmp_path: Path) -> None:
    """Its config class in transformers 5 is the proof: it takes the old names alone for the same."""
    model = tiny("gpt_neox", rope_parameters={"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5})
    config = saved_config(ctxext.patch(model, "yarn", factor=4), tmp_path)
    assert config.pop("rope_parameters")
    assert (config["rotary_emb_base"], config["rotary_pct"]) == (2e4, 0.5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(GPTNeoXForCausalLM.from_pretrained(tmp_path).eval(), tokens()), logits(model, tokens()))


@pytest.mark.slow
def test_a_live_config_is_extended_anew_from_what_it_says_now() -> None:
    """The old form of the first extension must not outlive it in a model built from the same config."""
    first = ctxext.patch(tiny(), "yarn", factor=8)
    again = LlamaForCausalLM(first.config).eval()
    again.load_state_dict(first.state_dict())
    ctxext.patch(again, "pi", factor=2, trained_length=TRAINED_LENGTH)
    scaling = with_old_form(again.config).to_dict()["rope_scaling"]
    assert scaling == {"rope_type": "linear", "type": "linear", "factor": 2.0}
    ctxext.unpatch(again)
    ctxext.patch(again, "ntk", factor=2, trained_length=TRAINED_LENGTH)  # needs no scaling: none may be left
    assert "rope_scaling" not in again.config.to_dict()
    assert again.config.to_dict()["rope_theta"] == again.config.rope_parameters["rope_theta"] > 10000


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "falcon"])
def test_models_with_biases_cannot_be_computed_by_an_older_reader(model_type: str, tmp_path: Path) -> None:
    """transformers 4 checks no types of fields; all three build their norms from this one, and cannot run them."""
    model = tiny(model_type, **({"alibi": True} if model_type == "falcon" else {}))
    config = saved_config(ctxext.patch(model, "pi", factor=4, trained_length=TRAINED_LENGTH), tmp_path)
    norm = torch.nn.LayerNorm(8, eps=config["layer_norm_epsilon"])
    with pytest.raises(TypeError, match="eps"):
        norm(torch.zeros(1, 8))
