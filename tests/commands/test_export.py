"""Flags for other runtimes, checked against those runtimes' own formulas, rewritten here in float64.

vLLM's are those of 0.33.0 (vllm/model_executor/layers/rotary_embedding), llama.cpp's those of the copy that
llama_cpp_python 0.3.36 vendors (conversion/base.py, src/llama-context.cpp, ggml-cpu/ops.cpp).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHAPE, TRAINED
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

import ctxext
from ctxext._checkpoint import patch_checkpoint
from ctxext._export import export, export_config
from ctxext._load import extended_config
from ctxext.errors import (
    CheckpointError,
    IncompatibleError,
    InvalidParameterError,
    PatchStateError,
    UnknownNameError,
)
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.runtimes.base import Export
from ctxext.spec import RopeSpec

SPEC = RopeSpec(rotary_dim=16, base=10000.0, trained_length=TRAINED)
TARGET = 4 * TRAINED
PLAIN = SPEC.base ** (-np.arange(0, 16, 2) / 16)
Spectrum = tuple[np.ndarray, float]


def yarn_ramp(original: float, fast: float, slow: float, truncate: bool) -> np.ndarray:
    """1 where a frequency is divided, in the indices of pairs."""
    low, high = (16 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(SPEC.base)) for turns in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 15)
    return np.clip((np.arange(8) - low) / max(high - low, 0.001), 0, 1)


def vllm(config: dict[str, Any], made: Export) -> Spectrum:
    """What vLLM 0.33.0 computes for a config.json and these flags."""
    flags = dict(zip(made.flags[::2], made.flags[1::2], strict=True))
    config = config | json.loads(flags.get("--hf-overrides", "{}"))
    longest, serve = config["max_position_embeddings"], int(flags["--max-model-len"])
    rope = config["rope_parameters"]
    kind, factor = rope["rope_type"], rope.get("factor", 1.0)
    promised = longest if kind in ("yarn", "llama3", "longrope") else longest * factor
    assert serve <= promised, "vLLM refuses a --max-model-len above what it derives"
    plain = rope["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    original = rope.get("original_max_position_embeddings")
    if kind == "dynamic":
        stretch = factor * longest / rope.get("max_trained_positions", longest) - (factor - 1)
        return (rope["rope_theta"] * stretch ** (16 / 14)) ** (-np.arange(0, 16, 2) / 16), 1.0
    if kind == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return plain * keep + plain / factor * (1 - keep), 1.0
    if kind == "yarn":
        divided = yarn_ramp(original, rope.get("beta_fast", 32), rope.get("beta_slow", 1), rope.get("truncate", True))
        usual = 0.1 * math.log(factor) + 1
        return plain / factor * divided + plain * (1 - divided), rope.get("attention_factor", usual)
    assert kind == "longrope"
    stretch = longest / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    which = "long" if serve > original else "short"
    return plain / np.array(rope[f"{which}_factor"]), rope.get(f"{which}_mscale", usual)


def llama_cpp(flags: dict[str, str], gguf: dict[str, Any]) -> Spectrum:
    """What llama.cpp computes for command line flags over GGUF metadata (keys without the architecture's prefix)."""
    base = float(flags.get("--rope-freq-base", gguf["rope.freq_base"]))
    plain = base ** (-np.arange(0, 16, 2) / 16)
    factor = float(flags.get("--rope-scale", gguf.get("rope.scaling.factor", 1.0)))
    if flags.get("--rope-scaling", gguf.get("rope.scaling.type", "linear")) == "linear":
        return plain / factor, 1.0
    stored = gguf.get("rope.scaling.original_context_length", gguf["context_length"])
    original = float(flags.get("--yarn-orig-ctx", stored))
    fast, slow = (
        float(flags.get(f"--yarn-beta-{name}", gguf.get(f"rope.scaling.yarn_beta_{name}", default)))
        for name, default in (("fast", 32), ("slow", 1))
    )
    divided = yarn_ramp(original, fast, slow, truncate=True)
    scale = (0.1 * math.log(factor) + 1) * gguf.get("rope.scaling.attn_factor", 1.0)
    return plain / factor * divided + plain * (1 - divided), scale


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that convert_hf_to_gguf.py writes about rope (llama3 and longrope apart, which become tensors)."""
    rope = config["rope_parameters"]
    metadata = {"rope.freq_base": rope["rope_theta"], "context_length": config["max_position_embeddings"]}
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                metadata[f"rope.scaling.yarn_{key}"] = rope[key]
    return metadata


def pairs(made: Export) -> dict[str, str]:
    return dict(zip(made.flags[::2], made.flags[1::2], strict=True))


def wanted(method: Method, length: int) -> Spectrum:
    assert isinstance(method, RopeMethod)
    frequencies = method.frequencies(SPEC, length)
    return frequencies.inv_freq.numpy(), frequencies.attention_scale


def same(found: Spectrum, expected: Spectrum) -> bool:
    return bool(np.allclose(found[0], expected[0], rtol=2e-6, atol=0)) and abs(found[1] - expected[1]) < 1e-6


VARIANTS: list[Method] = [
    *(kind.example(SPEC) for kind in METHODS.values()),
    METHODS["yarn"].from_dict({"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    METHODS["yarn"].from_dict({"factor": 4.0, "truncate": False}),
    METHODS["yarn"].from_dict({"factor": 4.0, "attention_factor": 1.0}),
    METHODS["yarn"].from_dict({"factor": 4.0, "ramp": "turns"}),
    METHODS["longrope"].from_dict({"factor": 4.0, "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}),
    METHODS["ntk_by_parts"].from_dict({"factor": 4.0}),
]


def label(method: Method) -> str:
    extra = {key: value for key, value in method.to_dict().items() if not isinstance(value, list)}
    return "-".join(str(value) for value in extra.values() if value is not None)


@pytest.mark.parametrize("on_disk", [True, False], ids=["extended", "original"])
@pytest.mark.parametrize("method", VARIANTS, ids=label)
def test_vllm_computes_what_the_method_says(llama: Path, method: Method, on_disk: bool) -> None:
    """With the flags printed, for a checkpoint that is extended on disk and for one that is not."""
    plain = LlamaConfig.from_pretrained(llama)
    extended = extended_config(plain, method)
    refused = extended.rope_parameters["rope_type"].startswith("ctxext")
    if refused:
        with pytest.raises(IncompatibleError, match=method.name):
            export_config(extended, to="vllm", served=None if on_disk else plain)
        return
    made = export_config(extended, to="vllm", served=None if on_disk else plain)
    served = (extended if on_disk else plain).to_dict()
    assert pairs(made)["--max-model-len"] == str(TARGET)
    assert same(vllm(served, made), wanted(method, TARGET))
    assert made.exact == same(vllm(served, made), wanted(method, TRAINED))
    if on_disk and made.exact and method.name != "longrope":
        told = [flag for flag in made.flags if flag.startswith("--")]
        needs_scale = "attention_factor" in extended.rope_parameters and extended.rope_parameters["rope_type"] != "yarn"
        assert told == (["--hf-overrides"] if needs_scale else []) + ["--max-model-len"]


@pytest.mark.parametrize("method", VARIANTS, ids=label)
def test_llama_cpp_computes_what_the_method_says(llama: Path, method: Method) -> None:
    """From a GGUF of the extended checkpoint, and from one of the original with the flags; both or a refusal."""
    plain = LlamaConfig.from_pretrained(llama)
    extended = extended_config(plain, method)
    kind = extended.rope_parameters["rope_type"]
    if method.dynamic or kind == "longrope" or kind.startswith("ctxext"):
        with pytest.raises(IncompatibleError, match=r"llama\.cpp"):
            export_config(extended, to="llama.cpp")
        return
    after, before = (export_config(extended, to="llama.cpp", served=served) for served in (None, plain))
    assert after.flags == ("-c", str(TARGET))
    assert before.flags[-2:] == after.flags
    assert after.exact == before.exact
    if kind == "llama3":  # baked into a tensor by the converter, which no flag replaces
        assert before.flags == after.flags
        assert "ctxext patch" in before.notes[0]
        return
    gguf, original = converted(extended.to_dict()), converted(plain.to_dict())
    assert same(llama_cpp(pairs(after), gguf), wanted(method, TARGET)) == after.exact
    assert same(llama_cpp(pairs(before), original), wanted(method, TARGET)) == before.exact
    assert same(llama_cpp(pairs(before), gguf), llama_cpp(pairs(after), gguf)), "the flags replace, never multiply"


def test_llama_cpp_attention_factor_can_be_multiplied_back(llama: Path) -> None:
    method = METHODS["yarn"].from_dict({"factor": 4.0, "attention_factor": 1.3})
    extended = extended_config(LlamaConfig.from_pretrained(llama), method)
    made = export_config(extended, to="llama.cpp")
    assert not made.exact
    note = next(note for note in made.notes if "attn_factor=float:" in note)
    override = float(note.partition("attn_factor=float:")[2].split()[0])
    gguf = converted(extended.to_dict()) | {"rope.scaling.attn_factor": override}
    assert same(llama_cpp({}, gguf), wanted(method, TARGET))


def test_llama3_is_refused_where_the_converter_drops_it(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(IncompatibleError, match=r"gemma3_text it drops it.*yarn"):
        export(checkpoints["gemma3"], to="llama.cpp", method="llama3", factor=4.0)
    assert export(checkpoints["mistral"], to="llama.cpp", method="llama3", factor=4.0, sliding_window="keep").exact


def test_longrope_of_phi3_is_baked_by_the_converter() -> None:
    factors = [1.0 + index for index in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": factors}
    lengths = {"max_position_embeddings": TARGET, "original_max_position_embeddings": TRAINED}
    config = Phi3Config(**(SHAPE | lengths), rope_parameters=rope, pad_token_id=0)
    made = export_config(config, to="llama.cpp")
    assert made.flags == ("-c", str(TARGET))
    assert not made.exact
    assert any("long_factor once" in note for note in made.notes)
    assert not any("bakes the attention factor" in note for note in made.notes)


def test_layer_types_and_composite_configs(checkpoints: dict[str, Path]) -> None:
    from transformers import Gemma3Config, Gemma3TextConfig

    made = export(checkpoints["gemma3"], to="vllm", method="yarn", factor=4.0)
    rope = json.loads(pairs(made)["--hf-overrides"])["rope_parameters"]
    assert rope["full_attention"]["rope_type"] == "yarn"
    assert rope["sliding_attention"]["rope_type"] == "default"
    text = Gemma3TextConfig.from_pretrained(checkpoints["gemma3"])
    whole = Gemma3Config(text_config=text.to_dict())
    extended = Gemma3Config(text_config=extended_config(text, "yarn", factor=4.0).to_dict())
    extended.ctxext = extended.text_config.ctxext
    made = export_config(extended, to="vllm", served=whole)
    overrides = json.loads(pairs(made)["--hf-overrides"])
    assert list(overrides) == ["text_config"]
    assert overrides["text_config"]["max_position_embeddings"] == TARGET


def test_gemma4_factor_is_refused_and_another_base_is_not() -> None:
    """Both runtimes build proportional frequencies from the base alone and would serve a factor as if it were 1."""
    from transformers import Gemma4TextConfig

    shape = SHAPE | {"head_dim": 16, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma4TextConfig(**shape, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    assert config.rope_parameters["full_attention"]["rope_type"] == "proportional"
    for target in ("vllm", "llama.cpp"):
        with pytest.raises(IncompatibleError, match="would run this gemma4_text unextended"):
            export_config(extended_config(config, "pi", factor=4.0), to=target)
    other = extended_config(config, "abf", factor=4.0)
    assert pairs(export_config(other, to="vllm", served=config))["--max-model-len"] == str(TARGET)
    base = other.rope_parameters["full_attention"]["rope_theta"]
    flags = pairs(export_config(other, to="llama.cpp", served=config))
    assert float(flags["--rope-freq-base"]) == pytest.approx(base)


def test_lifted_window_reaches_vllm_and_needs_conversion_for_llama_cpp(checkpoints: dict[str, Path]) -> None:
    arguments: dict[str, Any] = {"method": "yarn", "factor": 4.0, "sliding_window": "lift"}
    overrides = json.loads(pairs(export(checkpoints["mistral"], to="vllm", **arguments))["--hf-overrides"])
    assert overrides["sliding_window"] is None
    notes = export(checkpoints["mistral"], to="llama.cpp", **arguments).notes
    assert any("sliding window" in note for note in notes)


@pytest.mark.parametrize(
    ("rope", "longest", "target"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, TARGET, TARGET),
        ({"rope_type": "yarn", "factor": 4.0}, TARGET, TARGET),
        ({"rope_type": "linear", "factor": 4.0}, TARGET, TARGET),
        ({"rope_type": "dynamic", "factor": 4.0}, TRAINED, TARGET),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_checkpoints_that_others_extended(rope: dict[str, Any], longest: int, target: int) -> None:
    if rope["rope_type"] in ("llama3", "yarn"):
        rope = rope | {"original_max_position_embeddings": TRAINED}
    config = LlamaConfig(
        **(SHAPE | {"max_position_embeddings": longest}), rope_parameters=rope | {"rope_theta": 10000.0}
    )
    assert pairs(export_config(config, to="vllm"))["--max-model-len"] == str(target)


def test_model_in_memory_and_adapter_directory(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(PatchStateError, match="not extended"):
        export(model, to="vllm")
    ctxext.patch(model, "yarn", factor=4.0)
    assert export(model, to="vllm").flags == ("--max-model-len", str(TARGET))
    with pytest.raises(InvalidParameterError, match="as it is patched"):
        export(model, to="vllm", method="yarn")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        export(tmp_path, to="vllm")


def test_bad_input(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'vllm'"):
        export(llama, to="vlm")
    with pytest.raises(PatchStateError, match="nothing to export"):
        export(llama, to="vllm")
    with pytest.raises(CheckpointError, match="no such directory"):
        export(tmp_path / "missing", to="vllm")


def test_verb_is_public() -> None:
    assert ctxext.export is export
    assert ctxext.__all__ == sorted(ctxext.__all__)


def test_result_is_frozen(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "long", "pi", factor=4.0)
    made = export(tmp_path / "long", to="vllm")
    assert dataclasses.is_dataclass(made)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.exact = False  # type: ignore[misc]
