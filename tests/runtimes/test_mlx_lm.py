"""What ``export`` says of mlx-lm; and, nightly, what a real one computes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import BloomConfig, GemmaConfig, GPT2Config, LlamaConfig, Phi3Config

import ctxext
from ctxext.checkpoints.export import export, export_config, read_extended
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError
from ctxext.methods import METHODS, Method
from ctxext.runtimes.base import read_table
from ctxext.runtimes.mlx_lm import TABLE, form_of
from scripts.mlx_lm_proof import RESULTS, SHAPES
from scripts.mlx_lm_table import FORMS
from scripts.proof import tiny_of
from tests._checkpoints import SHAPE, TRAINED

PROOFS: list[dict[str, Any]] = json.loads(RESULTS.read_text())["proofs"]
TYPES: dict[str, Any] = read_table(TABLE)["types"]


def of(name: str, **parameters: Any) -> Method:
    return METHODS[name].from_dict({"factor": 4.0, **parameters})


@pytest.mark.slow
def test_every_form_is_told_apart() -> None:
    """The table is asked by what a config says, not by the method that wrote it."""
    half, config = 8, LlamaConfig(**SHAPE)
    same = {"short_factor": (2.0,) * half, "long_factor": (2.0,) * half}
    for form, (name, parameters) in FORMS.items():
        method = of(name, **(same if name == "longrope" else {}), **parameters)
        assert form_of(read_extended(extended_config(config, method))) == form
    assert TYPES["llama"]["forms"].keys() == FORMS.keys()


# --- what export says ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_class_that_reads_the_base_alone_is_refused_for_all_else() -> None:
    config = GemmaConfig(**SHAPE, head_dim=16)
    assert export_config(extended_config(config, "ntk", factor=4.0), to="mlx-lm").exact
    for method in ("pi", "yarn", "llama3"):
        with pytest.raises(IncompatibleError, match=r"would run this gemma with other positions: its class \(mlx_lm/"):
            export_config(extended_config(config, method, factor=4.0), to="mlx-lm")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (of("yarn", attention_factor=1.3), "does not read all of this yarn"),
        (of("yarn", truncate=False), "does not read all of this yarn"),
        (of("self_extend"), "rope_type='ctxext_rope' is unknown to mlx-lm"),
        (of("longrope", short_factor=(1.0,) * 8, long_factor=(2.0,) * 8), "stops on this llama"),
    ],
    ids=["attention", "truncate", "remapping", "longrope"],
)
def test_what_it_does_not_read(method: Method, message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        export_config(extended_config(LlamaConfig(**SHAPE), method), to="mlx-lm")


@pytest.mark.parametrize(
    "said",
    [
        {"mscale": 0.5},
        {"mscale_all_dim": 1.0},
        {"mscale": 0.5, "mscale_all_dim": 0},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"factor": None},
    ],
    ids=str,
)
def test_a_yarn_that_mlx_lm_reads_otherwise_was_not_tried(said: dict[str, Any]) -> None:
    """transformers reads both or neither; mlx-lm (rope_utils.py) takes 1 and 0 for what is missing."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}
    made = export_config(LlamaConfig(**SHAPE, rope_parameters=rope | said), to="mlx-lm")
    assert not made.exact
    assert any("this yarn was not tried on a llama" in note for note in made.notes)


@pytest.mark.slow
def test_two_sets_of_factors_are_one_there() -> None:
    config = Phi3Config(**SHAPE, original_max_position_embeddings=TRAINED, pad_token_id=0)
    two = extended_config(config, of("longrope", short_factor=(1.0,) * 8, long_factor=(2.0,) * 8))
    made = export_config(two, to="mlx-lm")
    assert not made.exact
    assert any("takes long_factor for every text" in note for note in made.notes)
    assert not export_config(extended_config(LlamaConfig(**SHAPE), of("dynamic_ntk")), to="mlx-lm").exact


def test_types_that_do_not_run_or_are_not_known_are_not_proven() -> None:
    unknown = [
        extended_config(transformers.AutoConfig.for_model("mpt"), "alibi", factor=4.0),
        extended_config(BloomConfig(seq_length=TRAINED), "alibi", factor=4.0),
    ]
    for config in unknown:
        with pytest.raises(IncompatibleError, match=r"mlx-lm was not seen to run the ALiBi of a (mpt|bloom)"):
            export_config(config, to="mlx-lm")
    assert "arcee" not in TYPES
    made = export_config(extended_config(transformers.ArceeConfig(**SHAPE), "yarn", factor=4.0), to="mlx-lm")
    assert not made.exact
    assert any("has no class for arcee" in note for note in made.notes)


@pytest.mark.slow
def test_a_window_and_a_model_of_several_parts_were_not_run() -> None:
    mistral = {"sliding_window": TRAINED}
    windowed = extended_config(transformers.MistralConfig(**SHAPE | mistral), "yarn", factor=4.0, sliding_window="keep")
    llava = transformers.LlavaConfig(text_config=LlamaConfig(**SHAPE), architectures=["LlavaForConditionalGeneration"])
    parts = extended_config(llava, "yarn", factor=4.0)
    for config, said in ((windowed, f"sliding window of {TRAINED} tokens"), (parts, "has no class for llava")):
        made = export_config(config, to="mlx-lm")
        assert not made.exact
        assert any(said in note for note in made.notes)
    without = transformers.MistralConfig(**SHAPE, sliding_window=None)
    assert export_config(extended_config(without, "yarn", factor=4.0), to="mlx-lm").exact


@pytest.mark.slow
def test_a_longer_table_needs_no_flag() -> None:
    made = export_config(extended_config(GPT2Config(n_positions=TRAINED), "tile", factor=4.0), to="mlx-lm")
    assert made.flags == ()
    assert not made.exact


# --- which files it reads --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_told_by_files_alone_and_not_by_those_that_keep_it_out(tmp_path: Path) -> None:
    model = tiny_of("llama")
    model.save_pretrained(tmp_path / "plain")
    made = export(tmp_path / "plain", to="mlx-lm", method="yarn", factor=4.0)
    assert made.command == f"ctxext patch {tmp_path}/plain NEW --method yarn --factor 4.0 && mlx_lm.server --model NEW"
    ctxext.patch(model, "yarn", factor=4.0)
    model.save_pretrained(tmp_path / "stock")
    ctxext.save(model, tmp_path / "saved")
    with pytest.raises(IncompatibleError, match=r"may stop on this llama: save_pretrained wrote .*ctxext\.save"):
        export(tmp_path / "stock", to="mlx-lm")
    for made in (export(tmp_path / "saved", to="mlx-lm"), export(model, to="mlx-lm")):
        assert made.exact
        assert made.flags == ()
        assert made.told == "no flags, its files say it all"
    ctxext.save(ctxext.load(tmp_path / "stock"), tmp_path / "again")
    assert export(tmp_path / "again", to="mlx-lm").exact


@pytest.mark.parametrize(
    "kind", [LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config, transformers.ArceeConfig]
)
def test_files_with_the_fields_of_transformers_5_alone(kind: Any, tmp_path: Path) -> None:
    """Classes that read rope_theta and rope_scaling take their own base and no scaling, without a word."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e4, "original_max_position_embeddings": TRAINED}
    config = kind(**SHAPE, rope_parameters=rope, architectures=[kind.__name__.replace("Config", "ForCausalLM")])
    config.save_pretrained(tmp_path)
    if kind in (transformers.Qwen3Config, transformers.ArceeConfig):  # it reads the new fields, or has no such class
        assert export(tmp_path, to="mlx-lm").exact == (kind is transformers.Qwen3Config)
        return
    with pytest.raises(IncompatibleError, match=r"may not read the positions .* Write rope_theta and rope_scaling"):
        export(tmp_path, to="mlx-lm")
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"rope_theta": 5e4, "rope_scaling": rope}))
    assert export(tmp_path, to="mlx-lm").exact


@pytest.mark.nightly
def test_inspect_says_so_too(tmp_path: Path) -> None:
    model = ctxext.patch(tiny_of("llama"), "yarn", factor=4.0)
    model.save_pretrained(tmp_path)
    assert "may stop on this llama" in str((inspect_checkpoint(tmp_path).exports or {})["mlx-lm"])


# --- the measurement -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_a_real_mlx_lm_computes_what_export_calls_exact(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="make mlx-lm brings an mlx-lm for CPUs")
    from scripts.mlx_lm_proof import main

    main(tmp_path / "found.json", shapes=shape, only="")
    found = json.loads((tmp_path / "found.json").read_text())["proofs"]
    stored = {proof["method"]: proof["exact"] for proof in PROOFS if proof["shape"] == shape}
    assert {proof["method"]: proof["exact"] for proof in found} == stored, "docs/evidence/runtimes are old"
    assert all(math.isfinite(proof["error"]) for proof in found if proof["exact"])
