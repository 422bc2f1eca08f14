"""A sample of ``tests/walk/run.py``, through its own code; the night walks all model types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.probe.layers import Layers
from tests._models import tiny
from tests.walk import check, run
from tests.walk.check import Stock, check_model, walked_methods
from tests.walk.tiny import model_types

# One method that stays static, one stored as another base, one with a temperature, one that needs its own cache.
METHODS = ["pi", "ntk", "yarn", "dynamic_ntk"]


@pytest.fixture(autouse=True)
def _with_the_sessions_stock_process(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_stock", stock)


def outcomes(model_type: str, stock: Stock, folder: Path, *methods: str) -> dict[str, tuple[str, str]]:
    findings = check_model(tiny(model_type), walked_methods(list(methods) or METHODS), stock, folder)
    return {finding.method: (finding.outcome, finding.detail) for finding in findings}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v2", "gpt_oss"])
def test_every_structure_is_right(model_type: str, stock: Stock, tmp_path: Path) -> None:
    found = outcomes(model_type, stock, tmp_path)
    assert list(found) == METHODS
    assert {name: detail for name, (outcome, detail) in found.items() if outcome != "right"} == {}


@pytest.mark.nightly
def test_phi3_stores_static_methods_as_its_own_factors(stock: Stock, tmp_path: Path) -> None:
    found = outcomes("phi3", stock, tmp_path)
    assert {found[name] for name in ("pi", "yarn")} == {
        ("right", "stock rope_type 'longrope' holding the frequencies themselves")
    }
    assert found["ntk"][0] == "right"
    assert found["dynamic_ntk"][0] == "refused"
    assert "must be one of ['longrope']" in found["dynamic_ntk"][1]


@pytest.mark.nightly
def test_proportional_frequencies_take_a_factor_or_a_base(stock: Stock, tmp_path: Path) -> None:
    found = outcomes("gemma4_text", stock, tmp_path)
    assert [found[name][0] for name in ("pi", "ntk", "yarn", "dynamic_ntk")] == ["right"] * 2 + ["refused"] * 2
    assert "'proportional'" in found["yarn"][1]


def test_rotation_by_another_class_is_not_called_left_off() -> None:
    model = tiny("llama")
    model.model.rotary_emb = type("Turn", (torch.nn.Module,), {})()
    with pytest.raises(IncompatibleError, match=r"it rotates by code of its own \(model.rotary_emb: Turn\)"):
        ctxext.patch(model, "yarn", factor=4.0)


def test_phimoe_takes_what_reaches_its_forward_pass_and_nothing_else() -> None:
    """Its forward pass ignores the buffers and computes frequencies from the config, anew each time."""
    model = tiny("phimoe")
    with pytest.raises(IncompatibleError, match="short_mscale"):
        ctxext.patch(model, "yarn", factor=4.0)
    ctxext.patch(model, "abf", factor=4.0)
    assert model.config.rope_parameters["rope_theta"] > 10000


@pytest.mark.nightly
def test_the_walk_finds_every_causal_type_and_names_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    types = model_types("causal")
    assert len(types) > 150
    assert {"llama", "gemma3_text", "deepseek_v3"} <= set(types)
    line = run.walk_safely("mamba", ["pi", "alibi"])
    assert (line["positions"], line["outcome"]) == ("none", "refused")
    assert "it has no positions at all, so nothing needs extending" in line["reason"]

    def crash(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(run, "check_model", crash)
    line = run.walk_safely("llama", ["pi"])
    assert line["outcome"] == "wrong"
    assert "KeyError" in line["reason"]
    assert "0 right, 0 refused by reason, 1 wrong" in run.summarise([line])


@pytest.mark.slow
def test_a_silent_difference_is_found(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself fails where a model computes what its saved config does not say."""
    model = tiny()
    original = type(model).save_pretrained

    def forgetful(self: transformers.PreTrainedModel, folder: Path, **arguments: object) -> None:
        original(self, folder, **arguments)
        path = Path(folder) / "config.json"
        saved = json.loads(path.read_text())
        saved.pop("rope_scaling", None)  # the same in the form of older readers
        saved["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        path.write_text(json.dumps(saved))

    monkeypatch.setattr(type(model), "save_pretrained", forgetful)
    (finding,) = check_model(model, walked_methods(["pi"]), stock, tmp_path)
    assert finding.outcome == "wrong"
    assert "stock reload: logits differ" in finding.detail


def test_the_walk_finds_layers_seen_wrongly_and_causality_lost(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks themselves fail where what they look at is wrong."""
    monkeypatch.setattr(check, "look", lambda model, paths: Layers(rotating=frozenset({"model.layers.0"})))
    (finding,) = check_model(tiny(), walked_methods(["pi"]), stock, tmp_path)
    assert "layers that rotate" in finding.detail
    monkeypatch.undo()
    answers = iter([(True,), (False,)])
    monkeypatch.setattr(check, "sees_ahead", lambda *_: next(answers))
    (finding,) = check_model(tiny(), walked_methods(["pi"]), stock, tmp_path)
    assert finding.outcome == "wrong"
    assert "tokens no longer see those that come after them" in finding.detail
