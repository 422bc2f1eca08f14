"""Every published config: its lengths against its documentation, its frequencies against the published formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ctxext
from ctxext.checkpoints.inspect import Inspection, inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, CtxextError
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.base import Export
from tests._famous import PUBLISHED, Rope, able, famous_checkpoint, famous_config, famous_model
from tests._formulas import Spectrum, spectrum

# Read only with the code that the checkpoint brings along, or by no transformers 5 any more.
REFUSED = {name for name, entry in PUBLISHED.items() if entry.method in ("own code", "outdated")}
# Written before its config class had parts: transformers 5 loses the length, and how much of a head turns.
LOST = {"zai-org/GLM-4.1V-9B-Thinking"}
NATIVE = [name for name in PUBLISHED if name not in REFUSED | LOST]
KINDS = ("linear", "dynamic", "dynamic with alpha", "yarn", "longrope", "llama3")
SCALED = {name for name in NATIVE if PUBLISHED[name].method in KINDS}
# Rotary positions only in layers that have a window: an extension has nothing to do there.
NO_REACH = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "LGAI-EXAONE/EXAONE-4.0-32B",
    "huihui-ai/c4ai-command-r7b-12-2024-abliterated",
}
# DeepSeek's own code multiplies nothing by the temperature of YaRN; transformers says so beside its config class.
UNTEMPERED = {"deepseek-ai/DeepSeek-V4-Flash"}
# transformers 5.24 takes the set for short texts at every length here, and ctxext refuses to extend it.
SHORT_ALONE = {"microsoft/Phi-3.5-MoE-instruct"}
SERVERS = ("vllm", "llama.cpp")
Inspect = Callable[[str], Inspection]


@pytest.fixture(scope="session")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Inspect:
    """What ``ctxext inspect`` says of a published config, without trying the methods; kept."""
    kept: dict[str, Inspection] = {}

    def of(name: str) -> Inspection:
        if name not in kept:
            place = famous_checkpoint(name, tmp_path_factory.mktemp("published") / "model")
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("ctxext.checkpoints.inspect.known_methods", lambda: {})
                patched.setattr("ctxext.checkpoints.export.RUNTIMES", {name: RUNTIMES[name] for name in SERVERS})
                kept[name] = inspect_checkpoint(place)
        return kept[name]

    return of


def test_at_least_sixty_are_the_published_file() -> None:
    sourced = [name for name, entry in PUBLISHED.items() if entry.source is not None]
    assert len(sourced) >= 60
    assert {name for name in PUBLISHED if name.startswith("a form like ")} == PUBLISHED.keys() - set(sourced)
    assert all(entry.documented for entry in PUBLISHED.values())


@pytest.mark.parametrize("name", able(NATIVE))
def test_its_lengths_are_those_of_its_documentation(name: str, inspected: Inspect) -> None:
    found, entry = inspected(name), PUBLISHED[name]
    assert found.trained_length == (None if entry.asked else entry.window)
    assert (found.extended is not None) == (name in SCALED)
    if found.extended is not None and entry.method in ("yarn", "llama3", "longrope"):
        assert f"original_max_position_embeddings={entry.trained}" in found.extended


@pytest.mark.parametrize("name", able(NATIVE))
def test_its_rotation_is_read(name: str, inspected: Inspect) -> None:
    found = [Rope(one.layer_type, one.rope_type, one.base, one.rotary_dim) for one in inspected(name).positions]
    assert found == ([] if name in NO_REACH | SHORT_ALONE else list(PUBLISHED[name].ropes))


@pytest.mark.parametrize("name", able(sorted(SCALED)))
def test_what_servers_are_told(name: str, inspected: Inspect) -> None:
    """Where an export is exact, its flags say the documented length, the base, and the config's own numbers."""
    entry, exports = PUBLISHED[name], inspected(name).exports
    assert exports is not None
    assert exports.keys() == set(SERVERS)
    for target, told in exports.items():
        if isinstance(told, Export) and told.exact:
            flags = told.by_flag
            served = int(flags["--max-model-len" if target == "vllm" else "-c"])
            if entry.asked:
                assert served >= entry.window
                assert any(str(entry.window) in note for note in told.notes) or served == entry.window
            else:
                assert served == entry.window
            if target == "llama.cpp":
                _check_llama_cpp(flags, name)
            elif "--hf-overrides" in flags:
                assert json.loads(flags["--hf-overrides"]).get("max_position_embeddings") == served


def _check_llama_cpp(flags: dict[str, str], name: str) -> None:
    entry, scaling = PUBLISHED[name], raw_rope(famous_config(name), PUBLISHED[name].ropes[-1])
    assert float(flags["--rope-freq-base"]) == entry.ropes[-1].base
    if entry.method in ("linear", "yarn"):
        assert flags["--rope-scaling"] == entry.method
        assert float(flags["--rope-scale"]) == scaling["factor"]
    if entry.method == "yarn":
        assert int(flags["--yarn-orig-ctx"]) == entry.trained
        assert float(flags["--yarn-beta-fast"]) == scaling.get("beta_fast", 32)
        assert float(flags["--yarn-beta-slow"]) == scaling.get("beta_slow", 1)


# Frequencies


def raw_rope(config: dict[str, Any], rope: Rope) -> dict[str, Any]:
    """The rope dict of config.json, with the fields that stand beside it; empty where it has none."""
    text = config.get("text_config", config)
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = found.get(rope.layer_type, found)
    beside = {"max_position_embeddings", "original_max_position_embeddings"}
    return {field: text[field] for field in beside if field in text} | found


def expected(name: str, rope: Rope, length: int) -> Spectrum:
    said = raw_rope(famous_config(name), rope) | {"rope_type": rope.rope_type, "rope_theta": rope.base}
    return spectrum(said | ({"attention_factor": 1.0} if name in UNTEMPERED else {}), rope.rotary_dim, length)


def rotary_of(name: str) -> nn.Module:
    """The rotary module of the text part, as stock transformers builds it."""
    model = famous_model(name, device="meta")
    text = model.config.get_text_config(decoder=True)
    found = [
        module
        for path, module in model.named_modules()
        if path.endswith("rotary_emb") and getattr(module, "config", None) in (text, model.config)
    ]
    return type(found[0])(found[0].config)


def computed(rotary: nn.Module, rope: Rope, length: int) -> Spectrum:
    """What a rotary module does in a text of ``length`` tokens."""
    if rope.rope_type == "longrope":  # it chooses among its sets while it computes
        cos, sin = (one[0].double() for one in rotary(torch.zeros(1), torch.tensor([[0, 1, length - 1]])))
        return Spectrum(torch.atan2(sin[1], cos[1])[: rope.rotary_dim // 2], float(cos[0, 0]))
    prefix = "" if rope.layer_type is None else f"{rope.layer_type}_"
    return Spectrum(getattr(rotary, f"{prefix}inv_freq").double(), getattr(rotary, f"{prefix}attention_scaling"))


@pytest.mark.parametrize("name", able(name for name in NATIVE if PUBLISHED[name].ropes))
def test_its_frequencies_are_those_of_the_formula(name: str) -> None:
    entry, rotary = PUBLISHED[name], rotary_of(name)
    for rope in entry.ropes:
        for length in (entry.trained, entry.window):
            found, want = computed(rotary, rope, length), expected(name, rope, length)
            if name in SHORT_ALONE:
                want = expected(name, rope, entry.trained)
            torch.testing.assert_close(found.inv_freq, want.inv_freq, rtol=4e-6, atol=0)
            assert found.scale == pytest.approx(want.scale, rel=1e-6)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_stock_code_cannot_read_is_refused_by_name(name: str, inspected: Inspect) -> None:
    with pytest.raises(CtxextError, match=r"trust_remote_code|no class|cannot read"):
        inspected(name)


@pytest.mark.parametrize("name", able(sorted(LOST)))
def test_a_length_that_stock_code_loses_is_refused_naming_both(name: str, inspected: Inspect, tmp_path: Path) -> None:
    place = famous_checkpoint(name, tmp_path / "model")
    said = rf"max_position_embeddings={PUBLISHED[name].window} \(built: \d+\), which transformers ignores"
    with pytest.raises(CheckpointError, match=said):
        patch_checkpoint(place, tmp_path / "extended", "yarn", factor=2)
    with pytest.raises(CheckpointError, match=said):
        inspected(name)


@pytest.mark.parametrize("name", able(sorted(SHORT_ALONE)))
def test_what_stock_code_turns_otherwise_is_not_extended(name: str, inspected: Inspect, tmp_path: Path) -> None:
    place, window = famous_checkpoint(name, tmp_path / "model"), PUBLISHED[name].window
    with pytest.raises(CtxextError, match="does not rotate by the frequencies in its buffers"):
        patch_checkpoint(place, tmp_path / "extended", "yarn", factor=2, trained_length=window, sliding_window="lift")
    assert inspected(name).no_positions is not None


@pytest.mark.parametrize("name", able(["tencent/Hunyuan-7B-Instruct"]))
def test_hunyuan_is_extended_from_the_base_that_alpha_gives(name: str) -> None:
    entry, model = PUBLISHED[name], famous_model(name)
    ctxext.patch(model, "pi", factor=2, trained_length=entry.window)
    (rotary,) = (module for path, module in model.named_modules() if path.endswith("rotary_emb"))
    want = expected(name, entry.ropes[0], entry.window).inv_freq / 2
    cos, sin = rotary(torch.zeros(1), torch.tensor([[0, 1, 2 * entry.window - 1]]))
    found = torch.atan2(sin[0, 1].double(), cos[0, 1].double())[: len(want)]
    torch.testing.assert_close(found, want, rtol=4e-6, atol=0)
