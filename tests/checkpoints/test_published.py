"""What config.json says and transformers does not build: named, or refused where the model would be another one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.source import read_any_config
from ctxext.errors import CheckpointError, IncompatibleError, PatchStateError
from ctxext.models.refusals import foreign_fields
from tests._checkpoints import SHAPE, try_only
from tests._models import tiny
from tests.walk.tiny import TRAINED_LENGTH

ORIGINAL = "original_max_position_embeddings"
PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0}
YARN = PLAIN_YARN | {ORIGINAL: 32768}
# ruff: noqa: E501
SMALL = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 32768}
ONE_FOR_EACH = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}
GEMMA3 = SMALL | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 32}
DBRX = {"model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 64, "n_heads": 2, "n_layers": 2}
DBRX |= {"vocab_size": 64, "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 2, "moe_top_k": 1}}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAVA: dict[str, Any] = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
LLAVA |= {"text_config": SMALL | {"model_type": "llama", "rope_theta": 500000.0}, "vision_config": CLIP}
PARAMETERS = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Path]:
    """Write a config.json to the letter, and let inspect try few methods."""
    try_only(monkeypatch, "yarn", "tile", "pi")

    def write(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def without_length(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "max_position_embeddings"}


OTHER_BASE = r"rope_theta=500000\.0 \(built: 10000\.0\)"
# A config.json, the field that transformers loses when it builds a model from it, and what it builds instead.
LOST: dict[str, tuple[dict[str, Any], str]] = {
    "a model card's block beside rope_parameters": (LLAMA | {"rope_parameters": PARAMETERS, "rope_scaling": YARN}, OTHER_BASE),
    "the same, linear": (LLAMA | {"rope_parameters": PARAMETERS, "rope_scaling": {"type": "linear", "factor": 2.0}}, OTHER_BASE),
    "two scalings": (
        LLAMA | {"rope_parameters": PARAMETERS | YARN, "rope_scaling": PARAMETERS | {"rope_type": "linear", "factor": 2.0}},
        r"rope_type='yarn' \(built: 'linear'\)",
    ),
    "a base in a nested field": (DBRX | {"attn_config": {"rope_theta": 500000, "kv_n_heads": 1}}, r"rope_theta=500000"),
    "a base under a name that the class does not read": (LLAMA | {"rotary_emb_base": 1e6}, r"rotary_emb_base=1000000"),
    "two names of the scaling": (LLAMA | {"rope_scaling": YARN | {"type": "linear"}}, r"rope_type='linear' \(built: 'yarn'"),
    "an original length beside the block": (LLAMA | {"rope_scaling": PLAIN_YARN, ORIGINAL: 8192}, rf"{ORIGINAL}=8192 \(built: 32768\)"),
    "a length under another program's name": (without_length(LLAMA) | {"model_max_length": 8192}, r"model_max_length=8192 \(built: 2048\)"),
    "the same of an older class": (without_length(LLAMA) | {"n_positions": 4096}, r"n_positions=4096 \(built: 2048\)"),
    "the same of a trainer": (without_length(QWEN2) | {"max_seq_length": 16384}, r"max_seq_length=16384 \(built: 32768\)"),
    "a length beside the part that reads text": (
        LLAVA | {"text_config": without_length(LLAVA["text_config"]), "max_position_embeddings": 32768},
        r"max_position_embeddings=32768 \(built: 2048\)",
    ),
    "a base beside the part that reads text": (LLAVA | {"rope_theta": 1e6}, r"rope_theta=1000000\.0 \(built: 500000\.0\)"),
    "how many dimensions rotate": (LLAMA | {"rotary_dim": 16}, r"rotary_dim=16 \(built: 32\)"),
    "the same under another name": (QWEN2 | {"rope_emb_dim": 8}, r"rope_emb_dim=8 \(built: 32\)"),
    "the same beside a part": (LLAMA | {"rotary_ndims": 16, "partial_rotary_factor": 0.25}, r"rotary_ndims=16 \(built: 8\.0\)"),
    "a flat block for layer types": (
        GEMMA3 | {"rope_parameters": {"full_attention": PARAMETERS, "sliding_attention": PARAMETERS} | YARN},
        r"rope_type='yarn'",
    ),
}  # fmt: skip


# Rope dicts with a factor, and a type that scales nothing: transformers builds plain positions from them.
IDLE: dict[str, dict[str, Any]] = {
    "no type": LLAMA | {"rope_scaling": {"factor": 4.0}},
    "a type of default": LLAMA | {"rope_scaling": {"type": "default", "factor": 8.0, ORIGINAL: 8192}},
    "tables": LLAMA | {"rope_scaling": {"rope_type": "default", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}},
    "axes of Qwen2.5-VL, YaRN's numbers beside them": {
        **QWEN2,
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6], "factor": 4.0, ORIGINAL: 32768},
    },
}
# All that is refused as config.json is read. To transformers "false" is true, which moves YaRN's ramp.
REFUSED = {name: (config, f"config.json of .* says .*{lost}") for name, (config, lost) in LOST.items()}
REFUSED |= {name: (config, "factor=.* rope_type='default', which scales nothing") for name, config in IDLE.items()}
REFUSED |= {
    f"truncate={value}": (LLAMA | {"rope_scaling": YARN | {"truncate": value}}, "truncate=.* should be true or false")
    for value in ("false", 0, [True])
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_position_field_that_gets_lost_or_says_nothing_is_refused_by_name(
    name: str, written: Callable[..., Path]
) -> None:
    config, words = REFUSED[name]
    place = written(config)

    def export(path: Path) -> Any:
        return ctxext.export(path, to="vllm", method="yarn", factor=2)

    for read in (read_any_config, inspect_checkpoint, export):
        with pytest.raises(CheckpointError, match=words):
            read(place)


GLM = SMALL | {"model_type": "glm", "architectures": ["GlmForCausalLM"], "head_dim": 32}
GLM |= {"pad_token_id": 0, "eos_token_id": 1}
# A config, what it says of the rotated part of its heads of 32 dimensions, and how many of them its class rotates.
SHARES: dict[str, tuple[dict[str, Any], str, int]] = {
    "at the top, as vLLM reads it": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, 16 ", 32),
    "in rope_parameters": (LLAMA | {"rope_parameters": PARAMETERS | {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25, 8 ", 32),
    "GPT-NeoX's name": (QWEN2 | {"rotary_pct": 0.25}, "rotary_pct=0.25, 8 ", 32),
    "StableLM's name": (QWEN2 | {"rope_pct": 0.5}, "rope_pct=0.5, 16 ", 32),
    "flash-attention's name": (LLAMA | {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5, 16 ", 32),
    "a name in a block": (LLAMA | {"attn_config": {"rotary_percent": 0.5}}, "rotary_percent=0.5, 16 ", 32),
    "dimensions in a block": (LLAMA | {"rope": {"rotary_dim": 8}}, "rotary_dim=8, 8 ", 32),
    "llama.cpp's name": (LLAMA | {"n_rot": 8}, "n_rot=8, 8 ", 32),
    "a whole head where the class takes half": (GLM | {"rotary_percentage": 1.0}, "rotary_percentage=1.0, 32 ", 16),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARES)
def test_the_part_of_a_head_that_rotates_is_refused_where_the_class_ignores_it(
    name: str, written: Callable[..., Path]
) -> None:
    config, says, rotated = SHARES[name]
    place = written(config)
    # A number of dimensions at the top is refused as config.json is read.
    with pytest.raises(CheckpointError, match=rf"{says}of the 32 .* rotates {rotated}\.|n_rot=8 \(built: 32\)"):
        inspect_checkpoint(place)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    for method in ("yarn", "abf", "self_extend"):
        with pytest.raises(CheckpointError, match=says.split("=")[0]):
            ctxext.patch(model, method, factor=2)


def test_the_part_of_a_head_that_the_class_reads_is_taken() -> None:
    for config in (GLM, GLM | {"rotary_dim": 16}, GLM | {"partial_rotary_factor": 0.25}, LLAMA | {"rotary_pct": 1.0}):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        assert ctxext.describe(ctxext.patch(model, "abf", factor=2)).target_length > 32768


# A config without its base, and the base that transformers takes.
BASELESS = {
    "no base": (LLAMA | {"rope_parameters": {"rope_type": "default"}}, 10000.0),
    "a scaling without a base": (QWEN2 | {"rope_theta": None, "rope_parameters": YARN}, 10000.0),
    "a class with another default": (
        SMALL | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 32, "num_local_experts": 2,
                 "rope_parameters": {"rope_type": "default"}}, 150000.0),
    "one of two kinds of layers": (
        GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": PARAMETERS}}, 1000000.0),
}  # fmt: skip


@pytest.mark.parametrize("name", BASELESS)
def test_rope_parameters_without_a_base_are_refused(name: str, written: Callable[..., Path]) -> None:
    config, taken = BASELESS[name]
    place = written({field: value for field, value in config.items() if value is not None})
    says = f"rope_parameters without rope_theta, for which transformers takes {taken}"
    with pytest.raises(CheckpointError, match=says):
        inspect_checkpoint(place)
    with pytest.raises(CheckpointError, match=says):
        ctxext.patch(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)), "abf", factor=2)


def test_an_old_scaling_without_a_base_is_noted(written: Callable[..., Path]) -> None:
    """As of Vicuna 16K, written by transformers 4, whose Llama had no other base."""
    place = written(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert "no rope_theta; transformers takes 10000.0" in inspect_checkpoint(place).notes[0]


def test_it_is_refused_on_the_loaded_model_too(written: Callable[..., Path]) -> None:
    """Until somebody puts it right in memory: that is no mistake of the file any more."""
    config, lost = LOST["a model card's block beside rope_parameters"]
    built = AutoConfig.from_pretrained(written(config))
    model = AutoModelForCausalLM.from_config(built)
    with pytest.raises(CheckpointError, match=lost):
        ctxext.patch(model, "pi", factor=2, scaling="extend")
    built.rope_parameters["rope_theta"] = 500000.0
    model = AutoModelForCausalLM.from_config(built)
    ctxext.patch(model, "pi", factor=2, scaling="extend")
    assert ctxext.describe(model).target_length == 262144


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 64}
MODERNBERT = ONE_FOR_EACH | {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}
QWEN3_VL: dict[str, Any] = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
QWEN3_VL["text_config"] = SMALL | {"model_type": "qwen3_vl_text", "head_dim": 32, "rope_theta": 5e6}
# Rope blocks that cannot be read as they are meant, and the way out that is named.
MISWRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "ModernBERT, an old name": (
        MODERNBERT | {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 8192}},
        "says type='yarn' and factor=4.0.* Rename type to rope_type='yarn'",
    ),
    "ModernBERT, linear": (MODERNBERT | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "Rename type to rope_type='linear'"),
    "a table": (SMALL | {"model_type": "bert", "rope_scaling": {"type": "dynamic", "factor": 2}}, "which BertConfig of transformers does not declare"),
    "another table": (GPT2 | {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "which GPT2Config of transformers does not declare"),
    "beside the part that reads text": (QWEN3_VL | {"rope_scaling": YARN}, "Move rope_scaling into text_config"),
    "the same, in the new form": (QWEN3_VL | {"rope_parameters": YARN | {"rope_theta": 5e6, ORIGINAL: None}}, "Move rope_parameters into text_config"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISWRITTEN)
def test_a_block_that_is_not_read_as_it_is_meant_is_refused_with_the_way_out(
    name: str, written: Callable[..., Path]
) -> None:
    config, way_out = MISWRITTEN[name]
    with pytest.raises((CheckpointError, IncompatibleError), match=way_out):
        inspect_checkpoint(written(config))


def test_such_a_factor_is_refused_in_memory() -> None:
    config = LlamaConfig(**SMALL, rope_parameters=PARAMETERS | {"factor": 4.0})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(CheckpointError, match="scales nothing"):
        ctxext.patch(model, "pi", factor=2)
    config.rope_parameters["factor"] = 1.0
    ctxext.patch(model, "pi", factor=2)
    assert ctxext.describe(model).target_length == 65536


# What is written in two ways, or in an old one, and loses nothing.
KEPT: dict[str, dict[str, Any]] = {
    "both forms": LLAMA | {"rope_parameters": PARAMETERS | YARN, "rope_scaling": PARAMETERS | YARN},
    "an old form": LLAMA | {"rope_theta": 500000.0, "rope_scaling": YARN | {"type": "yarn"}},
    "rope_scaling of null": LLAMA | {"rope_parameters": PARAMETERS, "rope_scaling": None},
    "several axes, as Qwen2-VL": {
        **QWEN2,
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    },
    "Gemma 3": GEMMA3 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "a base that is stated twice": LLAMA | {"rope_theta": 500000.0, "rope_parameters": PARAMETERS},
    "a length that another field says, too": LLAMA | {"model_max_length": 1000000, "seq_length": 2048},
    "the length of Llama 1": without_length(LLAMA) | {"max_sequence_length": 2048},
    "as many dimensions as rotate": LLAMA | {"rotary_dim": 16, "partial_rotary_factor": 0.5},
    "every dimension": QWEN2 | {"rotary_dim": 32},
    "Pythia": ONE_FOR_EACH | {"model_type": "gpt_neox", "rotary_emb_base": 20000, "rotary_pct": 0.25},
}


@pytest.mark.parametrize("name", KEPT)
def test_what_loses_nothing_is_read(name: str, written: Callable[..., Path]) -> None:
    assert read_any_config(written(KEPT[name])).model_type == KEPT[name]["model_type"]


LONGROPE = {"type": "longrope", "factor": 4.0, ORIGINAL: 32768, "short_factor": [1.0] * 16, "long_factor": [1.0] * 16}
DUAL = {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192, ORIGINAL: 262144}}
# A config, the field that other programs obey, and which of them.
FOREIGN: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "attn_factor": (QWEN2 | {"rope_scaling": YARN | {"attn_factor": 0.878}}, "attn_factor", ("vllm", "sglang")),
    "extrapolation_factor": (QWEN2 | {"rope_scaling": YARN | {"extrapolation_factor": 0.5}}, "extrapolation_factor", ("vllm", "sglang")),
    "apply_yarn_scaling": (QWEN2 | {"rope_scaling": YARN | {"apply_yarn_scaling": False}}, "apply_yarn_scaling", ("vllm",)),
    "alpha": (QWEN2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 4.0}}, "alpha", ("vllm", "sglang")),
    "dual chunks": (QWEN2 | DUAL | {"max_position_embeddings": 262144, "rope_scaling": YARN | {ORIGINAL: 262144}}, "dual_chunk_attention_config", ("vllm", "sglang")),
    "mscale of longrope": (QWEN2 | {"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "short_mscale", ("vllm", "sglang")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_what_other_programs_obey_is_taken_out(name: str, written: Callable[..., Path], tmp_path: Path) -> None:
    config, field, programs = FOREIGN[name]
    place = written(config)
    found = inspect_checkpoint(place)
    assert any(note.startswith(f"{field}=") for note in found.notes)
    for program in programs:
        published = ctxext.export(place, to=program)
        assert not published.exact
        assert any(note.startswith(f"{field}=") for note in published.notes)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    before = model.config.to_dict()
    ctxext.patch(model, "yarn", factor=4, scaling="extend")
    ctxext.save(model, tmp_path / "long")
    saved = json.loads((tmp_path / "long" / "config.json").read_text())
    assert saved.get("dual_chunk_attention_config") is None
    assert field not in saved["rope_parameters"]
    assert foreign_fields(AutoConfig.from_pretrained(tmp_path / "long")) == []
    ctxext.unpatch(model)
    after = model.config.to_dict()
    assert after["rope_parameters"] == before["rope_parameters"]
    assert after.get("dual_chunk_attention_config") == before.get("dual_chunk_attention_config")


@pytest.mark.slow
def test_chunks_are_taken_out_of_a_plain_checkpoint_and_of_one_that_stays_on_disk(written: Callable[..., Path]) -> None:
    place = written(QWEN2 | DUAL | {"max_position_embeddings": 1010000})
    assert inspect_checkpoint(place).notes[0].startswith("dual_chunk_attention_config={...}")
    for to, flag in (("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")):
        made = ctxext.export(place, to=to, method="yarn", factor=4)
        overrides = json.loads(made.by_flag[flag])
        assert overrides["dual_chunk_attention_config"] is None
        assert overrides["rope_parameters"][ORIGINAL] == 262144


def test_sglang_is_told_what_undoes_keys_that_stay_in_the_files(written: Callable[..., Path]) -> None:
    """It merges an override into what config.json says."""
    place = written(QWEN2 | {"rope_scaling": YARN | {"attn_factor": 0.878}})
    made = ctxext.export(place, to="sglang", method="yarn", factor=8, scaling="replace")
    rope = json.loads(made.by_flag["--json-model-override-args"])["rope_parameters"]
    assert (rope["attn_factor"], rope["factor"]) == (1.0, 8.0)


def test_neutral_values_are_no_news(written: Callable[..., Path]) -> None:
    place = written(QWEN2 | {"rope_scaling": YARN | {"attn_factor": 1.0, "extrapolation_factor": 1}})
    assert [note for note in inspect_checkpoint(place).notes if "need no extension" not in note] == []
    assert ctxext.export(place, to="vllm").exact


BERT = ONE_FOR_EACH | {"max_position_embeddings": 512, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
OWN_CODE = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForMaskedLM": "own.Model"}}
MPT = {"model_type": "mpt", "architectures": ["MptForCausalLM"], "d_model": 64, "n_heads": 2, "n_layers": 2}
MPT |= {"max_seq_len": 2048, "vocab_size": 64}
XLM_ROBERTA = BERT | {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"]}
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "MosaicBERT, DNABERT-2": (BERT | OWN_CODE | {"alibi_starting_size": 512}, "alibi_starting_size=512"),
    "Jina BERT": (BERT | OWN_CODE | {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    "relative keys": (BERT | {"position_embedding_type": "relative_key_query"}, "position_embedding_type='relative_key_query'"),
    "Jina embeddings v3": (XLM_ROBERTA | OWN_CODE | {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}, "position_embedding_type='rotary'"),
    "a GPT-2 that rotates": (GPT2 | {"use_rotary": True}, "use_rotary=True"),
    "a Llama with ALiBi": (LLAMA | {"use_alibi": True}, "use_alibi=True"),
    "a BERT that rotates, in the form of transformers 5": (BERT | {"rope_parameters": PARAMETERS}, f"rope_parameters={PARAMETERS}"),
    "a BERT without positions": (BERT | {"position_embedding_type": "none"}, "position_embedding_type='none'"),
    "the same, as papers call it": (BERT | {"position_embedding_type": "nope"}, "position_embedding_type='nope'"),
    "a BERT with sinusoids": (BERT | {"position_embedding_type": "sinusoidal"}, "position_embedding_type='sinusoidal'"),
    "ALiBi under a shorter name": (BERT | {"pos_emb_type": "alibi"}, "pos_emb_type='alibi'"),
    "rotation under another name": (BERT | {"pos_embedding_type": "rope"}, "pos_embedding_type='rope'"),
    "rotation under a third": (BERT | {"positional_embedding": "rotary"}, "positional_embedding='rotary'"),
    "a table that is off": (BERT | {"use_position_embeddings": False}, "use_position_embeddings=False"),
    "a Llama's ALiBi, pos_emb": (LLAMA | {"pos_emb": "alibi"}, "pos_emb='alibi'"),
    "a Llama's ALiBi, positional_encoding": (LLAMA | {"positional_encoding": "alibi"}, "positional_encoding='alibi'"),
    "a Llama's ALiBi, pos_encoding_type": (LLAMA | {"pos_encoding_type": "ALiBi"}, "pos_encoding_type='ALiBi'"),
    "a Llama's ALiBi in a block": (LLAMA | {"attn_config": {"alibi": True}}, "attn_config.alibi=True"),
    "a Llama that does not rotate": (LLAMA | {"use_rope": False}, "use_rope=False"),
    "a base times ChatGLM's ratio": (LLAMA | {"rope_ratio": 50}, "rope_ratio=50"),
    "a factor of its own": (LLAMA | {"rope_linear_scaling_factor": 4}, "rope_linear_scaling_factor=4"),
    "a shorter factor of its own": (LLAMA | {"rope_factor": 4.0}, "rope_factor=4.0"),
    "an MPT without ALiBi": (MPT | {"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
    "an MPT that rotates": (MPT | {"attn_config": {"alibi": False, "rope": True}}, "attn_config.alibi=False"),
    "an MPT that rotates, too": (MPT | {"attn_config": {"rope": True}}, "attn_config.rope=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_positions_that_the_class_of_transformers_does_not_have_are_refused(
    name: str, written: Callable[..., Path]
) -> None:
    config, field = OTHERWISE[name]
    place = written(config)
    found = inspect_checkpoint(place)
    assert field in (found.no_positions or "")
    assert [verdict.method for verdict in found.verdicts if verdict.refused is None] == []
    assert any("auto_map" in note for note in found.notes) == ("auto_map" in config)
    auto = AutoModelForMaskedLM if "Masked" in str(config.get("architectures")) else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(place))
    with pytest.raises(IncompatibleError, match=re.escape(field)):
        ctxext.patch(model, "pi", factor=2)


@pytest.mark.nightly
def test_what_the_class_reads_or_has_is_taken(written: Callable[..., Path]) -> None:
    for config, method in (
        (BERT | {"position_embedding_type": "absolute"}, "tile"),
        (BERT | OWN_CODE, "tile"),
        (LLAMA | {"position_embedding_type": "rope", "alibi": False}, "yarn"),
        (LLAMA | {"position_embedding_type": "absolute", "use_position_embeddings": False}, "yarn"),
        (LLAMA | {"rope_ratio": 1, "rope_factor": None, "use_rope": True}, "yarn"),
        (BERT | {"use_rope": False, "rope_theta": 10000.0}, "tile"),
        (MPT | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "rope": False, "rope_theta": 10000}}, "pi"),
    ):
        found = inspect_checkpoint(written(config))
        assert method in [verdict.method for verdict in found.verdicts if verdict.refused is None]


def test_a_length_that_was_changed_after_loading_is_asked_about() -> None:
    """As axolotl does, which raises it to the sequence length before a plugin sees the model."""
    model, said = tiny(), rf"trained_length={TRAINED_LENGTH} or trained_length={4 * TRAINED_LENGTH}"
    model.config.max_position_embeddings = 4 * TRAINED_LENGTH
    for method in ("yarn", "alibi", "self_extend"):
        with pytest.raises(PatchStateError, match=said):
            ctxext.patch(model, method, factor=4)
    ctxext.patch(model, "yarn", factor=4, trained_length=TRAINED_LENGTH)
    assert ctxext.describe(model).target_length == 4 * TRAINED_LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 4 * TRAINED_LENGTH])
def test_and_one_that_config_json_does_not_have(length: int, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, max_position_embeddings=length)
    with pytest.raises(PatchStateError, match=rf"its config.json says {TRAINED_LENGTH}"):
        ctxext.patch(model, "yarn", factor=4)
    ctxext.patch(model, "yarn", factor=4, trained_length=TRAINED_LENGTH)
    ctxext.save(model, tmp_path / "long")
    again = ctxext.load(tmp_path / "long")
    assert ctxext.describe(again).trained_length == TRAINED_LENGTH
