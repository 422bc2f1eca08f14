"""Flags for other runtimes, checked against those runtimes' own formulas, rewritten here in float64.

vLLM's are those of 0.33.0 (vllm/model_executor/layers/rotary_embedding), llama.cpp's those of the copy that
llama_cpp_python 0.3.36 vendors (conversion/base.py, src/llama-context.cpp, ggml-cpu/ops.cpp).
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import shutil
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import ctxext
from ctxext.checkpoints.export import export, export_config, read_extended
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.load import extended_config
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.cli.app import app
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError, UnknownNameError
from ctxext.files import read_json
from ctxext.measuring.readings import named_method
from ctxext.methods import METHODS, Method
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.llama_cpp import TABLE, flags_of, verdict
from ctxext.runtimes.vllm import CLASSES, REMAPPED
from ctxext.runtimes.vllm import TABLE as VLLM_TABLE
from tests._checkpoints import SHAPE, TRAINED, try_only
from tests._formulas import spectrum
from tests._models import on_recent, tiny
from tests._products import pairwise
from tests.runtimes._exported import TARGET, VARIANTS, Spectrum, label, same, wanted
from tests.walk.tiny import tiny_config

LLAMA3: dict[str, Any] = {"to": "llama.cpp", "method": "llama3", "factor": 4.0}
LENGTH_OF = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "-c"}
# One method of each form that flags say.
BY_FORM = {form: METHODS[name].from_dict({"factor": 4.0}) for form, name in (("default", "ntk"), ("linear", "pi"))}
BY_FORM["yarn"] = METHODS["yarn"].from_dict({"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0})


def llama_cpp(flags: dict[str, str], gguf: dict[str, Any]) -> Spectrum:
    """What llama.cpp computes for command line flags over GGUF metadata (keys without the architecture's prefix)."""
    overrides = dict(item.split("=", 1) for item in flags.get("--override-kv", "").split(",") if item)
    gguf = gguf | {key.partition(".")[2]: float(value.partition(":")[2]) for key, value in overrides.items()}
    base = float(flags.get("--rope-freq-base", gguf.get("rope.freq_base", 10000.0)))
    factor = float(flags.get("--rope-scale", gguf.get("rope.scaling.factor", 1.0)))
    kind = flags.get("--rope-scaling", gguf.get("rope.scaling.type", "linear"))
    stored = gguf.get("rope.scaling.original_context_length", gguf["context_length"])
    rope = {"type": kind, "rope_theta": base, "factor": factor}
    rope["original_max_position_embeddings"] = float(flags.get("--yarn-orig-ctx", stored))
    # src/llama-context.cpp:116: the flags or hparams, which src/llama-model.cpp never fills from the GGUF.
    rope |= {
        f"beta_{name}": float(flags[f"--yarn-beta-{name}"])
        for name in ("fast", "slow")
        if f"--yarn-beta-{name}" in flags
    }
    found = spectrum(rope, 16)
    return found.inv_freq.numpy(), found.scale * (gguf.get("rope.scaling.attn_factor", 1.0) if kind == "yarn" else 1.0)


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


@pytest.mark.parametrize("method", VARIANTS, ids=label)
def test_vllm_needs_a_copy_and_the_plugin_of_what_only_ctxext_computes(llama: Path, method: Method) -> None:
    """What vLLM itself computes of all else, tests/runtimes/test_vllm.py has."""
    extended = extended_config(LlamaConfig.from_pretrained(llama), method)
    is_own = extended.rope_parameters["rope_type"].startswith("ctxext")
    if is_own and method.name not in REMAPPED:
        with pytest.raises(IncompatibleError, match=method.name):
            export_config(extended, to="vllm")
        return
    made = export_config(extended, to="vllm")
    assert RUNTIMES["vllm"].needs_copy(extended) == any("ctxext's plugin" in note for note in made.notes) == is_own
    assert is_own or made.exact == same(wanted(method, TARGET), wanted(method, TRAINED))


@pytest.mark.parametrize("method", VARIANTS, ids=label)
def test_llama_cpp_computes_what_the_method_says(llama: Path, method: Method) -> None:
    """From a GGUF of the extended checkpoint, and from one of the original with the flags; both or a refusal.

    What flags do not say is for a copy of the file; what is in that, test_into_gguf.py tests.
    """
    plain = LlamaConfig.from_pretrained(llama)
    extended = extended_config(plain, method)
    kind = extended.rope_parameters["rope_type"]
    if kind == "dynamic" or kind.startswith("ctxext"):
        with pytest.raises(IncompatibleError, match=r"llama\.cpp"):
            export_config(extended, to="llama.cpp")
        return
    after, before = (export_config(extended, to="llama.cpp", served=served) for served in (None, plain))
    assert after.by_flag["-c"] == before.by_flag["-c"] == str(TARGET)
    by_copy = ["--gguf IN.gguf OUT.gguf" in made.notes[0] for made in (after, before)]
    one_set = kind != "longrope" or extended.rope_parameters["short_factor"] == extended.rope_parameters["long_factor"]
    if kind == "llama3":  # baked into a tensor by the converter, which no flag replaces
        assert (after.exact, before.exact) == (True, True)
        assert by_copy == [False, True]
        return
    if kind == "longrope" or extended.rope_parameters.get("truncate") is False:  # its converter loses them
        assert (after.exact, before.exact) == (one_set, one_set)
        assert by_copy == [True, True]
        return
    assert by_copy == [False, False]
    assert f"llama.context_length=int:{TARGET}" in before.by_flag["--override-kv"]
    gguf, original, silent = converted(extended.to_dict()), converted(plain.to_dict()), {"context_length": TARGET}
    assert after.exact == before.exact
    for made, file in ((after, gguf), (before, original), (before, gguf), (after, silent)):
        is_same = same(llama_cpp(made.by_flag, file), wanted(method, TARGET))
        assert is_same == made.exact, "flags say it all, never twice"


@pytest.mark.parametrize("sharpening", [0.0, 0.2])
def test_vllm_is_told_no_rotation_in_a_form_that_it_starts_with(llama: Path, sharpening: float) -> None:
    extended = extended_config(LlamaConfig.from_pretrained(llama), "nope", factor=4, sharpening=sharpening)
    made = export_config(extended, to="vllm")
    rope = json.loads(made.by_flag["--hf-overrides"])["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["short_factor"] == rope["long_factor"] == [1e30] * 8
    assert rope["short_mscale"] == rope["long_mscale"] == pytest.approx(math.sqrt(1 + sharpening * math.log(4)))
    assert any("does not start" in note for note in made.notes) == (sharpening == 0)
    assert extended.rope_parameters["rope_type"] == ("longrope" if sharpening else "linear"), "the files stay"


@pytest.mark.slow
def test_what_stops_all_rotation_promises_no_length(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor of 1e30 in a config that has lost its ctxext entry is no extension by 1e30."""
    extended = extended_config(LlamaConfig.from_pretrained(llama), "nope", factor=4)
    del extended.ctxext
    extended.save_pretrained(tmp_path)
    for target in ("vllm", "llama.cpp"):
        assert export(tmp_path, to=target).by_flag[LENGTH_OF[target]] == str(TARGET)
    try_only(monkeypatch, "yarn")
    found = inspect_checkpoint(tmp_path)
    assert found.longest == found.trained_length == TARGET


@pytest.mark.parametrize("name", ["self_extend", "rerope"])
def test_a_refusal_names_the_self_extend_that_llama_cpp_has_itself(llama: Path, name: str) -> None:
    extended = extended_config(LlamaConfig.from_pretrained(llama), METHODS[name].from_dict({"factor": 2.0}))
    with pytest.raises(IncompatibleError, match="would write a GGUF without the extension") as refused:
        export_config(extended, to="llama.cpp")
    assert ("--grp-attn-n GROUP --grp-attn-w WINDOW" in str(refused.value)) == (name == "self_extend")


def test_flags_that_cannot_say_it_all_are_not_exact(checkpoints: dict[str, Path]) -> None:
    """What a converter bakes into a tensor of the extended checkpoint is not in a GGUF of the original."""
    made = export(checkpoints["mistral"], **LLAMA3, sliding_window="keep")
    assert not made.exact
    assert "convert that one" in made.notes[0]


@pytest.mark.parametrize("name", ["LlamaConfig", "GemmaConfig", "CohereConfig"])
@pytest.mark.parametrize("method", BY_FORM.values(), ids=label)
def test_exact_is_what_the_flags_make_of_the_gguf(name: str, method: Method) -> None:
    """Converters of Gemma and Cohere write neither base nor scaling; what Llama's says of YaRN's betas is not read."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = getattr(transformers, name)(**SHAPE, head_dim=16, rope_parameters=plain)
    extended = extended_config(config, method)
    made = export_config(extended, to="llama.cpp")
    gguf = converted(extended.to_dict()) if name == "LlamaConfig" else {"context_length": TARGET}
    assert made.exact
    assert same(llama_cpp(made.by_flag, gguf), wanted(method, TARGET))


# What the converter of llama_cpp_python 0.3.36 wrote for tiny checkpoints and a real llama.cpp computed from it.
TYPES = json.loads(TABLE.read_text())["types"]
CONVERTED = {name: line for name, line in TYPES.items() if line.get("forms")}
SILENT = ("cohere", "cohere2_moe", "dbrx", "gemma", "gemma2", "phi", "stablelm")  # no scaling in their GGUF


def test_the_table_of_llama_cpp_is_one() -> None:
    assert len(CONVERTED) > 40
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma", "stablelm", "cohere"):
        for form in ("default", "linear", "yarn", "yarn_attention"):
            assert verdict(TYPES[name], form, from_original=False) == (True, ""), (name, form)
    for name in SILENT:
        yarn = TYPES[name]["forms"]["yarn"]["gguf"]
        assert yarn.get("rope.scaling.type") in (None, "none"), name
    assert TYPES["nemotron"]["forms"]["yarn"]["gguf"]["rope.scaling.type"] == "linear"
    assert verdict({}, "yarn", from_original=False)[0] is None
    assert verdict(TYPES["llama"], "llama3", from_original=True)[0] is False
    told, _ = verdict(TYPES["deepseek_v2"], "linear", from_original=False)
    assert told is False, "it scales attention for linear too"


@pytest.mark.parametrize(("form", "method"), BY_FORM.items())
def test_flags_say_what_the_gguf_does_not(form: str, method: Method) -> None:
    """Where a real llama.cpp was right, our flags over the GGUF of its converter mean the method's frequencies."""
    flags = flags_of(read_extended(extended_config(LlamaConfig(**SHAPE), method)))
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    proven = [name for name, line in CONVERTED.items() if verdict(line, form, from_original=False)[0] is True]
    assert len(proven) > 25
    for name in proven:
        gguf = CONVERTED[name]["forms"][form]["gguf"] | {"context_length": TARGET}
        frequencies, scale = llama_cpp(told, gguf)
        assert np.allclose(frequencies, wanted(method, TARGET)[0], rtol=2e-6, atol=0), name
        assert abs(scale - wanted(method, TARGET)[1]) < 1e-6 or "rope.scaling.yarn_log_multiplier" in gguf, name
    for name in set(CONVERTED) - set(proven):
        found = CONVERTED[name]["forms"][form]
        error, said = found.get("extended"), f"{name} is right and not said to be"
        assert not isinstance(error, float) or not error < 1e-3 * found["matters"], said


@pytest.mark.parametrize("method", ["yarn", "ntk", "pi"])
@pytest.mark.parametrize(("kind", "stays"), [("llama3", True), ("linear", False)])
def test_a_tensor_in_the_gguf_of_the_original_acts_beside_flags(kind: str, stays: bool, method: str) -> None:
    """The converter writes llama3 as rope_freqs.weight, which no flag takes off."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": TRAINED}
    plain = LlamaConfig(**(SHAPE | {"max_position_embeddings": TARGET}), rope_parameters=rope)
    extended = extended_config(plain, method, factor=8.0, trained_length=TRAINED, scaling="replace")
    made = export_config(extended, to="llama.cpp", served=plain)
    assert made.exact
    assert any("convert that one; the flags are for that GGUF" in note for note in made.notes) == stays
    assert any("for a GGUF of the original checkpoint." in note for note in made.notes) != stays


def test_longrope_of_phi3_is_baked_by_the_converter() -> None:
    factors = [1.0 + index for index in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": factors}
    lengths = {"max_position_embeddings": TARGET, "original_max_position_embeddings": TRAINED}
    config = transformers.Phi3Config(**(SHAPE | lengths), rope_parameters=rope, pad_token_id=0)
    made = export_config(config, to="llama.cpp")
    assert made.by_flag["-c"] == str(TARGET)
    assert not made.exact
    assert any("long_factor once" in note for note in made.notes)
    assert not any("bakes the attention factor" in note for note in made.notes)


def test_layer_types_and_composite_configs(checkpoints: dict[str, Path]) -> None:
    made = export(checkpoints["gemma3"], to="vllm", method="yarn", factor=4.0)
    assert shlex.split(made.told) == list(made.flags), "a line for a shell"
    rope = json.loads(made.by_flag["--hf-overrides"])["rope_parameters"]
    assert rope["full_attention"]["rope_type"] == "yarn"
    assert rope["sliding_attention"]["rope_type"] == "default"
    text = transformers.Gemma3TextConfig.from_pretrained(checkpoints["gemma3"])
    whole = transformers.Gemma3Config(text_config=text.to_dict())
    extended = transformers.Gemma3Config(text_config=extended_config(text, "yarn", factor=4.0).to_dict())
    extended.ctxext = extended.text_config.ctxext
    made = export_config(extended, to="vllm", served=whole)
    overrides = json.loads(made.by_flag["--hf-overrides"])
    assert list(overrides) == ["text_config"]
    assert overrides["text_config"]["max_position_embeddings"] == TARGET


@pytest.mark.slow
def test_gemma4_factor_is_refused_and_another_base_is_not() -> None:
    """Both runtimes build proportional frequencies from the base alone and would serve a factor as if it were 1."""
    shape = SHAPE | {"head_dim": 16, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma4TextConfig(**shape, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    assert config.rope_parameters["full_attention"]["rope_type"] == "proportional"
    for target in ("vllm", "llama.cpp"):
        with pytest.raises(IncompatibleError, match="would run this gemma4_text unextended"):
            export_config(extended_config(config, "pi", factor=4.0), to=target)
    other = extended_config(config, "abf", factor=4.0)
    assert export_config(other, to="vllm", served=config).by_flag["--max-model-len"] == str(TARGET)
    base = other.rope_parameters["full_attention"]["rope_theta"]
    flags = export_config(other, to="llama.cpp", served=config).by_flag
    assert float(flags["--rope-freq-base"]) == pytest.approx(base)


LONG = {"short_factor": [4.0] * 8, "long_factor": [4.0] * 8}


def other(name: str) -> Any:
    """A tiny config of a type whose class in vLLM does not pass the rope parameters on as they are."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return tiny_config(name, **{"gpt_oss": plain}.get(name, {}))


@pytest.mark.parametrize(
    ("name", "method", "refused"),
    [
        ("deepseek_v3", "pi", "turns rope_type 'linear' into DeepSeek's YaRN"),
        ("deepseek_v3", "llama3", "turns rope_type 'llama3' into DeepSeek's YaRN"),
        ("deepseek_v2", "longrope", "turns rope_type 'longrope' into DeepSeek's YaRN"),
        ("deepseek_v3", "yarn", None),
        ("deepseek_v2", "ntk", None),
        on_recent("dbrx", "yarn", "reads its base from a field of its own", reason="dbrx takes no initializer_range"),
        on_recent("dbrx", "ntk", "reads its base from a field of its own", reason="dbrx takes no initializer_range"),
        ("gpt_oss", "pi", "always computes YaRN"),
        ("gpt_oss", "ntk", "always computes YaRN"),
        ("gpt_oss", "yarn", None),
        ("minicpm3", "yarn", "does not apply mscale_all_dim"),
        ("minicpm3", "pi", None),
    ],
)
def test_vllm_classes_that_compute_something_else_are_refused(name: str, method: str, refused: str | None) -> None:
    plain = other(name)
    parameters = LONG if method == "longrope" else {}
    extended = extended_config(plain, method, factor=4.0, **parameters)
    if refused:
        with pytest.raises(IncompatibleError, match=f"{name} with other positions.*{refused}"):
            export_config(extended, to="vllm", served=plain)
        return
    assert export_config(extended, to="vllm", served=plain).exact


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pi", "llama3", "nope", "dynamic_ntk", "yarn divisor=3"])
def test_vllm_has_positions_of_several_axes_for_some_rope_types_alone(method: str) -> None:
    """Its runner makes a row of positions for each axis, and the other classes take them for so many more tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
    config = tiny_config("qwen3_5_text", rope_parameters=rope | {"mrope_section": [1, 1, 2]})
    extended = extended_config(config, named_method(method, 4.0), trained_length=TRAINED)
    with pytest.raises(IncompatibleError, match=r"qwen3_5_text .*mrope_section.* ntk, abf or a yarn without"):
        export_config(extended, to="vllm", served=config)
    for served in ("yarn", "ntk"):
        made = export_config(extended_config(config, served, factor=4.0), to="vllm", served=config)
        assert made.exact == (served == "ntk")
        assert any("ramp by four times the trained length" in note for note in made.notes) == (served == "yarn")


@pytest.mark.nightly
def test_an_encoder_decoder_has_no_flags(tmp_path: Path) -> None:
    config = tiny_config("t5gemma", architectures=["T5GemmaForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    for target in RUNTIMES:
        with pytest.raises(IncompatibleError, match="no runtime here has flags for that"):
            export(tmp_path, to=target, method="yarn", factor=4.0)


@pytest.mark.nightly
def test_a_text_model_inside_a_part_is_told_there() -> None:
    text = SHAPE | {"pad_token_id": 0, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    config = transformers.Qwen2_5OmniConfig(thinker_config={"text_config": text})
    config.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    extended = extended_config(config, "yarn", factor=4.0)
    told = json.loads(export_config(extended, to="vllm", served=config).by_flag["--hf-overrides"])
    assert told["thinker_config"]["text_config"]["max_position_embeddings"] == TARGET
    with pytest.raises(IncompatibleError, match=r"qwen2_5_omni.*thinker_config\.text_config.*Write a copy"):
        export_config(extended, to="sglang", served=config)
    assert export_config(extended, to="sglang").by_flag == {"--context-length": str(TARGET)}


@pytest.mark.nightly
def test_a_model_of_several_parts_is_not_proven_by_its_text_model() -> None:
    config = transformers.LlavaConfig(text_config=LlamaConfig(**SHAPE).to_dict())
    config.architectures = ["LlavaForConditionalGeneration"]
    for target, flag in (("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")):
        made = export_config(extended_config(config, "yarn", factor=4.0), to=target, served=config)
        assert not made.exact
        assert any("for llava was not" in note for note in made.notes)
        assert list(json.loads(made.by_flag[flag])) == ["text_config"]


def test_vllm_gpt_oss_gets_the_keys_that_it_insists_on() -> None:
    made = export_config(extended_config(other("gpt_oss"), "yarn", factor=4.0), to="vllm")
    rope = json.loads(made.by_flag["--hf-overrides"])["rope_parameters"]
    assert {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}.items() <= rope.items()


def test_every_vllm_class_that_changes_the_config_is_known() -> None:
    types = json.loads(VLLM_TABLE.read_text())["types"]
    changing = {name for name, line in types.items() if line.get("otherwise")}
    not_exact = {"deepseek_v4", "dots3_note", "dots3_note_text"}
    assert changing - set(CLASSES) == not_exact, "these say so"
    assert {"dbrx", "deepseek_v2", "deepseek_v3", "gpt_oss", "mimo_v2_flash", "longcat_flash", "axk1"} <= changing
    for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "stablelm"):
        assert types[name]["class"].startswith("model_executor/models/"), name
        assert not types[name]["otherwise"], name


def test_vllm_without_a_class_of_its_own_is_not_called_exact() -> None:
    made = export_config(extended_config(transformers.DiffLlamaConfig(**SHAPE), "yarn", factor=4.0), to="vllm")
    assert not made.exact
    assert any("no class of its own for diffllama" in note for note in made.notes)


def test_a_lifted_window_reaches_vllm_and_needs_no_flag_of_llama_cpp(checkpoints: dict[str, Path]) -> None:
    arguments: dict[str, Any] = {"method": "yarn", "factor": 4.0, "sliding_window": "lift"}
    overrides = json.loads(export(checkpoints["mistral"], to="vllm", **arguments).by_flag["--hf-overrides"])
    assert overrides["sliding_window"] is None
    for kind in ("qwen2", "qwen3"):  # vLLM sets each field by itself, and then reads the number alone
        config = tiny_config(kind, use_sliding_window=True, sliding_window=32, max_window_layers=0)
        extended = extended_config(config, "yarn", factor=4.0, sliding_window="lift")
        told = json.loads(export_config(extended, to="vllm", served=config).by_flag["--hf-overrides"])
        assert (told["use_sliding_window"], told["sliding_window"]) == (False, None)
    made = export(checkpoints["mistral"], to="llama.cpp", **arguments)
    assert made.exact, "the llama architecture there has no windows"
    assert not any("window" in note or "--gguf" in note for note in made.notes), "so flags say it all"


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, TARGET),
        ({"rope_type": "yarn", "factor": 4.0}, TARGET),
        *(({"rope_type": kind, "factor": 4.0}, TRAINED) for kind in ("yarn", "linear", "dynamic")),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_checkpoints_that_others_extended(rope: dict[str, Any], longest: int) -> None:
    rope = rope | {"rope_theta": 10000.0}
    if rope["rope_type"] in ("llama3", "yarn"):
        rope |= {"original_max_position_embeddings": TRAINED}
    config = LlamaConfig(**(SHAPE | {"max_position_embeddings": longest}), rope_parameters=rope)
    made = export_config(config, to="vllm")
    assert made.by_flag["--max-model-len"] == str(TARGET)
    assert any("does not say which length" in note for note in made.notes) == (rope["rope_type"] == "linear")


def test_a_product_that_is_no_whole_number_is_not_rounded_up() -> None:
    """vLLM and SGLang refuse more than max_position_embeddings times the factor."""
    rope = {"rope_type": "linear", "factor": 3.3, "rope_theta": 10000.0}
    config = LlamaConfig(**SHAPE, rope_parameters=rope)
    assert TRAINED * 3.3 % 1 > 0.5
    for target, flag in LENGTH_OF.items():
        assert export_config(config, to=target).by_flag[flag] == str(int(TRAINED * 3.3))


@pytest.mark.parametrize(("target", "flag"), [("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")])
def test_a_factor_of_null_is_told(target: str, flag: str) -> None:
    """Stock transformers takes the ratio of the lengths; the others would multiply by None."""
    rope = {"rope_type": "yarn", "factor": None, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}
    config = LlamaConfig(**(SHAPE | {"max_position_embeddings": TARGET}), rope_parameters=rope)
    made = export_config(config, to=target)
    assert json.loads(made.by_flag[flag])["rope_parameters"]["factor"] == 4.0


def test_too_few_factors_are_a_sentence(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    lengths = {"max_position_embeddings": TARGET}
    config = LlamaConfig(**(SHAPE | lengths), rope_parameters=rope | {"original_max_position_embeddings": TRAINED})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot build the positions of a llama.*Compare config\.json"):
        export(tmp_path, to="vllm")


def test_a_package_that_a_model_needs_is_named() -> None:
    if find_spec("timm") is not None:
        pytest.skip("timm is installed, which gemma3n needs")
    config = tiny_config("gemma3n", architectures=["Gemma3nForConditionalGeneration"])
    with pytest.raises(CheckpointError, match=r"cannot build a gemma3n here: .*pip install timm"):
        extended_config(config, "yarn", factor=4.0)


@pytest.mark.slow
def test_a_config_edited_beside_its_ctxext_entry_is_noticed(llama: Path, tmp_path: Path) -> None:
    """By export and inspect as by load: its entry says 4, its rope parameters 8."""
    patch_checkpoint(llama, tmp_path / "long", "yarn", factor=4.0)
    path = tmp_path / "long" / "config.json"
    written = json.loads(path.read_text())
    export(tmp_path / "long", to="vllm")
    for name in written.keys() & {"rope_parameters", "rope_scaling"}:  # the second is for older readers
        written[name]["factor"] = 8.0
    path.write_text(json.dumps(written))
    for target in ("vllm", "llama.cpp"):
        with pytest.raises(CheckpointError, match=r"contradicts itself.*'factor': 4\.0.*'factor': 8\.0"):
            export(tmp_path / "long", to=target)
    with pytest.raises(CheckpointError, match="contradicts itself"):
        inspect_checkpoint(tmp_path / "long")


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_what_the_extension_in_the_files_changed_is_told_too(to: str, tmp_path: Path) -> None:
    """Its lifted windows were kept by the new one, and stayed lifted in the other program."""
    plain = transformers.MistralConfig(**SHAPE, sliding_window=100, architectures=["MistralForCausalLM"])
    extended_config(plain, "yarn", factor=2.0, sliding_window="lift").save_pretrained(tmp_path)
    given: dict[str, Any] = {"to": to, "method": "ntk", "factor": 4.0, "trained_length": TRAINED}
    told = {
        choice: json.loads(export(tmp_path, **given, sliding_window=choice).flags[1]) for choice in ("keep", "lift")
    }
    assert told["keep"]["sliding_window"] == 100
    assert "sliding_window" not in told["lift"]
    assert told["keep"]["rope_parameters"] == told["lift"]["rope_parameters"]


@pytest.mark.parametrize("to", RUNTIMES)
def test_files_that_only_ctxext_reads_are_written_anew(to: str, llama: Path, tmp_path: Path) -> None:
    """Another program refuses them, whatever its arguments say."""
    patch_checkpoint(llama, tmp_path / "old", "self_extend", factor=2)
    made = export(tmp_path / "old", to=to, method="yarn", factor=4.0, trained_length=TRAINED)
    patched = f"ctxext patch {tmp_path}/old NEW --method yarn --factor 4.0 --trained-length {TRAINED} && "
    assert made.command.startswith(patched)
    assert json.dumps("rope_parameters") not in made.command


def test_model_in_memory_and_adapter_directory(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(PatchStateError, match="not extended"):
        export(model, to="vllm")
    ctxext.patch(model, "yarn", factor=4.0)
    assert export(model, to="vllm").flags == ("--max-model-len", str(TARGET))
    with pytest.raises(InvalidParameterError, match="as it is patched"):
        export(model, to="vllm", method="yarn")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match=r"^This PeftModel has an adapter\. .* model\.merge_and_unload\(\)"):
        export(adapted, to="vllm")
    assert export(adapted.merge_and_unload(), to="vllm").flags == ("--max-model-len", str(TARGET))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        export(tmp_path, to="vllm")


@pytest.mark.parametrize(
    ("place", "given", "error", "words"),
    [
        ("llama", {"to": "vlm"}, UnknownNameError, "Did you mean 'vllm'"),
        ("llama", {"to": "vllm"}, PatchStateError, "nothing to export"),
        ("missing", {"to": "vllm"}, CheckpointError, "no such directory"),
        ("gemma3", LLAMA3, IncompatibleError, "loses rope_type 'llama3'.*yarn"),
    ],
)
def test_bad_input(
    place: str, given: dict[str, Any], error: type[Exception], words: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        export(checkpoints.get(place, tmp_path / place), **given)


@pytest.mark.usefixtures("_any_types")
def test_numbers_of_numpy_and_a_pipeline(llama: Path) -> None:
    """vLLM needs a copy of what flags would leave behind, and the command that writes it names each argument."""
    given: dict[str, Any] = {"to": "vllm", "method": "self_extend"}
    expected = export(llama, **given, target_length=TARGET)
    assert expected.first
    assert export(llama, **given, target_length=np.int64(TARGET)).first == expected.first
    halves = export(llama, **given, factor=Fraction(5, 2)).first
    assert halves[halves.index("--factor") + 1] == "2.5"
    model = ctxext.patch(AutoModelForCausalLM.from_pretrained(llama), "yarn", factor=4.0)
    holder = SimpleNamespace(model=model, tokenizer=None)
    assert export(holder, to="vllm").flags == export(model, to="vllm").flags
    for no_model in (None, 5):
        with pytest.raises(IncompatibleError, match=r"^ctxext extends transformers models; found (NoneType|int)\."):
            export(no_model, to="vllm")


@pytest.mark.parametrize("given", [{"factor": 8.0}, {"target_length": 512}, {"ramp": "turns"}, {"trained_length": 64}])
def test_arguments_of_a_method_without_one_are_refused(given: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """They were passed over, and the flags were those of the extension that is there."""
    model = ctxext.patch(AutoModelForCausalLM.from_pretrained(llama), "yarn", factor=4.0)
    model.save_pretrained(tmp_path)
    for extended in (model, tmp_path):
        with pytest.raises(InvalidParameterError, match=rf"^{next(iter(given))}=.* belongs to a method; without one"):
            export(extended, to="vllm", **given)
        assert export(extended, to="vllm", factor=None).flags == ("--max-model-len", str(TARGET))


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize("gguf", ["in.gguf", Path("in.gguf"), ("in.gguf",), ("a", "b", "c")])
def test_a_gguf_file_alone_names_no_copy(gguf: Any, llama: Path) -> None:
    said = "^gguf must be two paths, of a GGUF file and of the copy to write"
    with pytest.raises(InvalidParameterError, match=said):
        export(llama, to="llama.cpp", method="yarn", factor=2, gguf=gguf)


@pytest.mark.parametrize(
    ("config", "method", "to", "words"),
    [
        (transformers.DiffLlamaConfig(**SHAPE), "yarn", "llama.cpp", "has no class for"),
        (tiny_config("cohere", hidden_size=64), "longrope", "vllm", "cannot run longrope on this cohere"),
    ],
)
def test_types_that_a_runtime_has_no_class_or_no_form_for(config: Any, method: str, to: str, words: str) -> None:
    extended = extended_config(config, method, factor=4.0, **(LONG if method == "longrope" else {}))
    with pytest.raises(IncompatibleError, match=words):
        export_config(extended, to=to)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "to"), pairwise([True, False], list(RUNTIMES)))
def test_what_no_field_says_to_others_is_refused(to: str, saved: bool, tmp_path: Path) -> None:
    """A Phi-3 in pieces keeps its rope as it was: by that, a runtime would read it as the plain model."""
    model = ctxext.patch(tiny("phi3"), "self_extend", factor=4.0, trained_length=TRAINED)
    if saved:
        ctxext.save(model, tmp_path / "long")
    with pytest.raises(IncompatibleError, match="Only ctxext reads 'self_extend' from the config of this phi3"):
        export(tmp_path / "long" if saved else model, to=to)


def test_the_config_that_flags_are_for_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config whose native length its vendor raised made the flags of yesterday wrong."""
    place = shutil.copytree(llama, tmp_path / "llama")
    yesterday, config = export(place, to="vllm", method="yarn", factor=2), (place / "config.json").read_bytes()
    assert f"of SHA-256 {hashlib.sha256(config).hexdigest()[:12]}..." in str(yesterday)
    (place / "config.json").write_bytes(config + b"\n")
    assert export(place, to="vllm", method="yarn", factor=2).config_sha256 != yesterday.config_sha256
    model = AutoModelForCausalLM.from_pretrained(llama)
    ctxext.patch(model, "yarn", factor=2)
    monkeypatch.chdir(tmp_path)
    for name in ("CHECKPOINT", "NEW"):  # which stand for a model in memory and a copy to be written
        shutil.copytree(llama, tmp_path / name)
    assert export(model, to="vllm").config_sha256 == ""
    assert export(place, to="mlx-lm", method="yarn", factor=2).config_sha256 == ""


def test_the_command_that_writes_a_copy_runs(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ctxext patch` has no option for the backend of attention, which no other program runs."""
    monkeypatch.chdir(tmp_path)
    given = {"method": "self_extend", "factor": 4, "attention": "reference", "window": 0.25, "exact": False}
    words = export(llama, to="vllm", **given).first
    written = CliRunner().invoke(app, words[1:])
    assert written.exit_code == 0, written.output
    saved = read_json(tmp_path / "NEW" / "config.json")["ctxext"]["method"]
    assert (saved["factor"], saved["window"], saved["exact"]) == (4.0, 0.25, False)


@pytest.mark.parametrize("to", ["vllm", "sglang", "mlx-lm"])
def test_a_model_with_images_is_served_as_a_copy(to: str) -> None:
    """`ctxext serve` takes the class that an extended checkpoint was saved from, and causal ones otherwise."""
    parts = {"text_config": LlamaConfig(**SHAPE), "architectures": ["LlavaForConditionalGeneration"]}
    plain = transformers.LlavaConfig(**parts)
    extended = extended_config(plain, "self_extend", factor=4.0)
    with pytest.raises(IncompatibleError, match=r"Serve a copy \(ctxext patch\) with ctxext serve"):
        export_config(extended, to=to, served=plain)
    with pytest.raises(IncompatibleError, match="Serve it with ctxext serve"):
        export_config(extended, to=to)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [transformers.LlamaForSequenceClassification, transformers.LlamaForCausalLM])
def test_a_refusal_names_a_program_that_runs_the_model(kind: Any) -> None:
    """`ctxext serve` takes what writes text."""
    model = ctxext.patch(kind(tiny_config("llama", architectures=[kind.__name__])), "self_extend", factor=4)
    is_causal = kind is transformers.LlamaForCausalLM
    way = "Serve it with ctxext serve" if is_causal else r"Run it with transformers, by ctxext\.load"
    for target in ("mlx-lm", "sglang"):
        with pytest.raises(IncompatibleError, match=f"{way} otherwise\\."):
            export(model, to=target)
