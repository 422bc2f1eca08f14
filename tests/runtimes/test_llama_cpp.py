"""What ``export`` says of llama.cpp and writes for it; and, nightly, what a real one computes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    BloomConfig,
    Exaone4Config,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MistralConfig,
    MptConfig,
    Olmo3Config,
    Qwen2Config,
    Starcoder2Config,
)

from ctxext.checkpoints.export import export, export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.methods import METHODS
from ctxext.runtimes.llama_cpp import verdict
from scripts.llama_cpp_proof import RESULTS, SHAPES, Bench
from scripts.proof import methods_for
from tests._checkpoints import SHAPE, TRAINED
from tests._gguf import write_gguf

PROOFS: list[dict[str, Any]] = json.loads(RESULTS.read_text())["proofs"]
# Where make llama-cpp put the converter.
TREE = os.environ.get("CTXEXT_LLAMA_CPP")


@pytest.mark.parametrize("error", ["AssertionError: ", "KeyError: 'rotary_pct'", "ValueError: no tensor"])
@pytest.mark.parametrize("place", ["line", "form"])
def test_an_error_of_the_small_model_is_told_as_such(error: str, place: str) -> None:
    line = {"fails": error} if place == "line" else {"forms": {"yarn": {"fails": error, "matters": 1.0}}}
    _, reason = verdict(line, "yarn", from_original=False)
    assert f"a small model of ctxext's could not be converted ({error.strip(': ')}); yours may be" in reason


# --- ALiBi that a model has already ----------------------------------------------------------------------------------


def test_alibi_of_its_own_needs_a_length_and_no_more() -> None:
    config = BloomConfig(seq_length=TRAINED)
    extended = extended_config(config, "alibi", factor=4.0)
    after, before = (export_config(extended, to="llama.cpp", served=served) for served in (None, config))
    assert after.exact
    assert before.exact
    assert after.by_flag == {"-c": str(4 * TRAINED), "--flash-attn": "off"}
    assert before.by_flag["--override-kv"] == f"bloom.context_length=int:{4 * TRAINED}"
    made = export_config(extended, to="vllm", served=config)
    assert json.loads(made.by_flag["--hf-overrides"]) == {"seq_length": 4 * TRAINED}
    assert export_config(extended, to="vllm").flags == ("--max-model-len", str(4 * TRAINED))


def test_other_slopes_and_other_families_are_refused() -> None:
    for target in ("vllm", "llama.cpp"):
        with pytest.raises(IncompatibleError, match="not one of rotary positions"):
            export_config(extended_config(BloomConfig(seq_length=TRAINED), "pi", factor=4.0), to=target)
        others = (FalconConfig(alibi=True, max_position_embeddings=TRAINED), MptConfig(max_seq_len=TRAINED))
        for config in others:
            with pytest.raises(IncompatibleError, match=f"the ALiBi of (a )?{config.model_type}"):
                export_config(extended_config(config, "alibi", factor=4.0), to=target)


# --- what the flags leave open ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_windows_that_an_architecture_does_not_have() -> None:
    """Of all that the table calls right, a few architectures there have windows; Qwen2's and StarCoder2's have none."""
    mixed = {"use_sliding_window": True, "max_window_layers": 1}
    arguments: dict[str, Any] = {"method": "yarn", "factor": 4.0}
    for config, seen in (
        (Starcoder2Config(**SHAPE, sliding_window=100), False),
        (Starcoder2Config(**SHAPE, sliding_window=4 * TRAINED), True),  # which no text fills
        (Starcoder2Config(**SHAPE, sliding_window=None), True),
        (Qwen2Config(**SHAPE, sliding_window=100, **mixed), False),
        (Qwen2Config(**SHAPE, sliding_window=100, **(mixed | {"max_window_layers": 2})), True),  # of no layer
        (Olmo3Config(**SHAPE, sliding_window=100, layer_types=["sliding_attention", "full_attention"]), True),
    ):
        kept = {} if "layer_types" in vars(config) else {"sliding_window": "keep"}
        made = export_config(extended_config(config, **arguments, **kept), to="llama.cpp", served=config)
        assert made.exact == seen, (config, made.notes)
        assert any("attends beyond the 100 tokens" in note for note in made.notes) != seen
    for kind in (Starcoder2Config, Qwen2Config):
        config = kind(**SHAPE, sliding_window=100, **(mixed | {"max_window_layers": 0} if kind is Qwen2Config else {}))
        lifted = export_config(
            extended_config(config, **arguments, sliding_window="lift"), to="llama.cpp", served=config
        )
        assert lifted.exact, lifted.notes
        assert not any("window" in note for note in lifted.notes)


def test_a_window_that_llama_cpp_does_not_have_needs_no_lifting() -> None:
    for config, said in (
        (MistralConfig(**SHAPE, sliding_window=100), False),
        (Qwen2Config(**SHAPE, sliding_window=100, use_sliding_window=True, max_window_layers=0), False),
        (Exaone4Config(**SHAPE, sliding_window=100, layer_types=["sliding_attention"] * 2), True),
    ):
        lifted = extended_config(config, method="ntk", factor=4.0, sliding_window="lift")
        made = export_config(lifted, to="llama.cpp", served=config)
        assert any("No flag lifts the sliding window" in note for note in made.notes) == said
        assert made.exact != said


def test_a_config_that_names_its_trained_length_alone_is_served_beyond_it() -> None:
    """YaRN as Qwen's cards say it: the converter writes max_position_embeddings, at which llama-server caps slots."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}
    made = export_config(Qwen2Config(**SHAPE, rope_parameters=rope), to="llama.cpp")
    assert made.by_flag["--override-kv"] == f"qwen2.context_length=int:{4 * TRAINED}"
    assert any("caps its slots" in note for note in made.notes)
    raised = Qwen2Config(**(SHAPE | {"max_position_embeddings": 4 * TRAINED}), rope_parameters=rope)
    made = export_config(raised, to="llama.cpp")
    assert "--override-kv" not in made.flags
    assert not any("--override-kv" in note for note in made.notes)


@pytest.mark.slow
def test_a_model_of_several_parts_is_not_its_text_model() -> None:
    """Its converter may write another architecture (Mistral3's does), or there is none."""
    config = LlavaConfig(text_config=LlamaConfig(**SHAPE).to_dict(), architectures=["LlavaForConditionalGeneration"])
    made = export_config(extended_config(config, "yarn", factor=4.0), to="llama.cpp", served=config)
    assert not made.exact
    assert "--override-kv" not in made.flags
    assert any(f"ARCH.context_length=int:{4 * TRAINED}" in note for note in made.notes)
    assert any("this model type was not tried" in note for note in made.notes)


# --- a file that needs no flags, where no tensor divides -------------------------------------------------------------


def qwen(folder: Path, **keys: Any) -> tuple[Path, Path]:
    """A checkpoint, and a GGUF file with its numbers; what its tensors are does not matter here."""
    Qwen2Config(**SHAPE).save_pretrained(folder / "qwen2")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    return folder / "qwen2", write_gguf(model, folder / "in.gguf", architecture="qwen2", **keys)


def said(path: Path) -> dict[str, Any]:
    import gguf

    fields = gguf.GGUFReader(path).fields.items()
    return {name.partition(".")[2]: one.contents() for name, one in fields if name.startswith("qwen2.")}


@pytest.mark.parametrize(
    ("method", "parameters", "wanted"),
    [
        ("pi", {}, {"type": "linear", "factor": 4.0, "attn_factor": 1.0}),
        ("ntk", {}, {"type": "none", "attn_factor": 1.0}),
        ("yarn", {}, {"type": "yarn", "factor": 4.0, "original_context_length": TRAINED, "attn_factor": 1.0}),
        ("yarn", {"attention_factor": 1.3}, {"type": "yarn", "factor": 4.0, "original_context_length": TRAINED}),
    ],
    ids=["pi", "ntk", "yarn", "yarn, attention_factor"],
)
def test_keys_say_what_flags_would(
    tmp_path: Path, method: str, parameters: dict[str, Any], wanted: dict[str, Any]
) -> None:
    place, source = qwen(tmp_path)
    made = export(
        place, to="llama.cpp", method=METHODS[method].from_dict({"factor": 4.0, **parameters}),
        gguf=(source, tmp_path / "out.gguf"),
    )  # fmt: skip
    assert made.exact
    assert made.flags == ("-c", str(4 * TRAINED))
    found = said(tmp_path / "out.gguf")
    scaling = {name.removeprefix("rope.scaling."): one for name, one in found.items() if "rope.scaling." in name}
    if parameters:  # llama.cpp multiplies its own scale by it
        wanted = wanted | {"attn_factor": pytest.approx(1.3 / 1.138629436)}
    assert scaling == wanted
    base = 10000.0 * (4 ** (16 / 14) if method == "ntk" else 1)
    assert found["rope.freq_base"] == pytest.approx(base)
    assert found["context_length"] == 4 * TRAINED


@pytest.mark.parametrize(
    ("method", "parameters", "message"),
    [
        ("yarn", {"beta_fast": 16.0}, "reads beta_fast and beta_slow from flags only"),
        ("yarn", {"truncate": False}, "keys cannot express this yarn"),
        ("llama3", {}, "keys cannot express this llama3"),
    ],
    ids=["betas", "truncate", "llama3"],
)
def test_what_keys_cannot_say(tmp_path: Path, method: str, parameters: dict[str, Any], message: str) -> None:
    place, source = qwen(tmp_path)
    with pytest.raises(IncompatibleError, match=message):
        export(
            place, to="llama.cpp", method=METHODS[method].from_dict({"factor": 4.0, **parameters}),
            gguf=(source, tmp_path / "out.gguf"),
        )  # fmt: skip


def test_a_tensor_that_would_divide_beside_the_keys(tmp_path: Path) -> None:
    place, source = qwen(tmp_path, rope_freqs=np.ones(8, dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight, which scales positions beside the keys"):
        export(place, to="llama.cpp", method="pi", factor=4.0, gguf=(source, tmp_path / "out.gguf"))
    assert not (tmp_path / "out.gguf").exists()


# --- the measurement -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_a_real_llama_cpp_computes_what_export_calls_exact(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="make llama-cpp brings a llama.cpp for CPUs")
    if TREE is None:
        pytest.skip("CTXEXT_LLAMA_CPP does not name llama.cpp's tree: run make llama-cpp")
    from scripts.llama_cpp_table import Converter

    bench = Bench(shape, tmp_path, Converter(Path(TREE).resolve()))
    found = [proof for name, method in methods_for(shape).items() for proof in bench.prove(name, method)]
    stored = {(p["method"], p["way"]): p["exact"] for p in PROOFS if p["shape"] == shape}
    assert {(proof.method, proof.way): proof.exact for proof in found} == stored, "docs/evidence/runtimes are old"
    for proof in found:
        assert not proof.exact or proof.right, proof
