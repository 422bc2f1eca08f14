"""Arguments for SGLang, against what its rotary classes compute, rewritten here in float64 from sglang 0.5.23."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GemmaConfig, LlamaConfig, MistralConfig

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError
from ctxext.methods import METHODS, Method
from ctxext.serving.vllm import served_config
from tests._checkpoints import SHAPE, TRAINED
from tests._formulas import spectrum
from tests.runtimes._exported import TARGET, VARIANTS, Spectrum, label, same, wanted

# The fields in which SGLang looks for a length before max_position_embeddings (common.py:677).
FIRST = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")


def sglang(config: dict[str, Any], flags: dict[str, str]) -> Spectrum:
    told = json.loads(flags.get("--json-model-override-args", "{}"))
    if "rope_parameters" in told:  # config.py:414: what the files say stays where it is not said anew
        told["rope_parameters"] = config["rope_parameters"] | told["rope_parameters"]
    config = config | told
    rope, longest = config["rope_parameters"], config["max_position_embeddings"]
    kind, factor = rope["rope_type"], rope.get("factor", 1.0)
    stated = next((config[name] for name in FIRST if config.get(name) is not None), longest)
    promised = int(stated * (1 if "original_max_position_embeddings" in rope or kind == "llama3" else factor))
    assert int(flags["--context-length"]) <= promised, "SGLang refuses a longer one"
    if kind in ("linear", "yarn"):
        rows = rope.get("original_max_position_embeddings", longest) * factor
        assert int(flags["--context-length"]) <= rows < 1e9, "its table of positions ends early, or never"
    if kind == "dynamic":
        stretch = factor * (longest * factor) / longest - (factor - 1)
        return (rope["rope_theta"] * stretch ** (16 / 14)) ** (-np.arange(0, 16, 2) / 16), 1.0
    read = {name: value for name, value in rope.items() if name != "attention_factor"}  # which SGLang passes over
    found = spectrum(read | {"max_position_embeddings": longest}, 16, longest)
    return found.inv_freq.numpy(), found.scale * (rope.get("attn_factor", 1) if kind == "yarn" else 1)


@pytest.mark.parametrize("on_disk", [True, False], ids=["extended", "original"])
@pytest.mark.parametrize("method", VARIANTS, ids=label)
def test_sglang_computes_what_the_method_says(llama: Path, method: Method, on_disk: bool) -> None:
    plain = LlamaConfig.from_pretrained(llama)
    extended = extended_config(plain, method)
    served = None if on_disk else plain
    if extended.rope_parameters["rope_type"].startswith("ctxext"):
        with pytest.raises(IncompatibleError, match=f"SGLang cannot run '{method.name}'"):
            export_config(extended, to="sglang", served=served)
        return
    made = export_config(extended, to="sglang", served=served)
    flags = made.by_flag
    assert flags["--context-length"] == str(TARGET)
    found = sglang((extended if on_disk else plain).to_dict(), flags)
    assert same(found, wanted(method, TARGET))
    assert made.exact == same(found, wanted(method, TRAINED))


@pytest.mark.parametrize(
    "said", [{"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.5}], ids=min
)
@pytest.mark.parametrize("own", [{}, {"attention_factor": 1.1}, {"mscale": 0.7, "mscale_all_dim": 0.9}], ids=str)
def test_what_the_files_say_of_another_yarn_is_said_anew(said: dict[str, Any], own: dict[str, float]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}
    plain = LlamaConfig(**SHAPE, rope_parameters=rope | said)
    method = METHODS["yarn"].from_dict({"factor": 8.0} | own)
    extended = extended_config(plain, method, scaling="replace", trained_length=TRAINED)
    made = export_config(extended, to="sglang", served=plain)
    assert made.exact
    assert same(sglang(plain.to_dict(), made.by_flag), wanted(method, 8 * TRAINED))


@pytest.mark.parametrize(("name", "method"), [*zip(FIRST, ("yarn", "ntk", "dynamic_ntk", "pi"), strict=True)])
def test_a_length_beside_the_one_that_transformers_reads_is_raised(name: str, method: str) -> None:
    """Configs of Llama 1 and its kin have max_sequence_length, too; vLLM serves the least of all."""
    plain = LlamaConfig(**SHAPE, **{name: TRAINED})
    extended = extended_config(plain, method, factor=4.0)
    assert getattr(extended, name) == extended.max_position_embeddings
    earlier = copy.deepcopy(extended)
    setattr(earlier, name, TRAINED)
    for config, served in ((extended, None), (plain, plain), (earlier, earlier)):
        flags = export_config(extended, to="sglang", served=served).by_flag
        sglang(config.to_dict(), flags)
        told = json.loads(export_config(extended, to="vllm", served=served).by_flag.get("--hf-overrides", "{}"))
        assert (vars(config) | told)[name] == TARGET
    remapped = served_config(extended_config(plain, "self_extend", factor=4.0), "here")
    assert getattr(remapped, name) == TARGET


@pytest.mark.parametrize("longest", [TRAINED, TARGET])
def test_a_linear_checkpoint_that_names_its_original_length_is_served_whole(longest: int) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}
    config = LlamaConfig(**(SHAPE | {"max_position_embeddings": longest}), rope_parameters=rope)
    flags = export_config(config, to="sglang").by_flag
    assert flags["--context-length"] == str(TARGET)
    sglang(config.to_dict(), flags)  # which asserts that it serves that length


@pytest.mark.slow
def test_dynamic_scaling_beyond_its_factor_is_refused() -> None:
    """The paper's form has the factor 1, and grows with the text; SGLang would run it plain."""
    plain = LlamaConfig(**SHAPE)
    with pytest.raises(IncompatibleError, match=rf"{8 * TRAINED} tokens .* {TRAINED} .*(yarn|ntk)"):
        export_config(extended_config(plain, "dynamic_ntk", factor=1.0, reach=8.0), to="sglang")
    made = export_config(extended_config(plain, "dynamic_ntk", factor=4.0, reach=2.0), to="sglang")
    assert any(f"at {TARGET} tokens" in note for note in made.notes)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "default", "alpha": 100.0},
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=lambda said: said["rope_type"],
)
def test_dynamic_scaling_is_not_merged_into_what_it_does_not_have(said: dict[str, Any]) -> None:
    """SGLang counts no factor beside an original length, and changes the base by alpha alone."""
    plain = LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 10000.0} | said)
    given = {} if said["rope_type"] == "default" else {"scaling": "replace", "trained_length": TRAINED}
    extended = extended_config(plain, "dynamic_ntk", factor=4.0, **given)
    if said["rope_type"] == "linear":
        flags = export_config(extended, to="sglang", served=plain).by_flag
        assert same(sglang(plain.to_dict(), flags), wanted(METHODS["dynamic_ntk"].from_dict({"factor": 4.0}), TARGET))
        return
    kept = "alpha" if "alpha" in said else "original_max_position_embeddings"
    with pytest.raises(IncompatibleError, match=rf"It keeps {kept} of config\.json .* Write a copy"):
        export_config(extended, to="sglang", served=plain)
    assert export_config(extended, to="sglang").by_flag["--context-length"] == str(TARGET)


@pytest.mark.slow
def test_windows_are_not_those_of_the_model() -> None:
    """None of the classes that were read tells its attention of a window."""
    for window, kept in ((100, "keep"), (100, "lift"), (TARGET, None), (None, None)):
        config = MistralConfig(**SHAPE, sliding_window=window)
        made = export_config(extended_config(config, "yarn", factor=4.0, sliding_window=kept), to="sglang")
        assert made.exact == (kept != "keep")
        assert any("attends beyond the 100 tokens" in note for note in made.notes) == (kept == "keep")


@pytest.mark.slow
def test_classes_that_drop_the_scaling_or_were_not_read() -> None:
    plain = GemmaConfig(**SHAPE, head_dim=16)
    for method in ("pi", "yarn"):
        with pytest.raises(IncompatibleError, match="would run this gemma unextended"):
            export_config(extended_config(plain, method, factor=4.0), to="sglang")
    base = export_config(extended_config(plain, "ntk", factor=4.0), to="sglang")
    assert not base.exact
    assert any("was not read" in note for note in base.notes)
