"""A config that is damaged, outdated or edited by hand: every verb refuses it with a sentence, or is right about it."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ctxext.checkpoints.export import export
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CtxextError
from tests._checkpoints import try_only
from tests._famous import famous_checkpoint, famous_config

BLOOM = "mrm8488/bloom-560m-finetuned-common_gen"
CONFIGS = (
    *("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1", "google/gemma-3-1b-pt"),
    *("microsoft/Phi-3-mini-128k-instruct", "deepseek-ai/DeepSeek-V3", BLOOM),
)
VALUES: list[Any] = [
    *(None, 0, -1, 1, 2, 3.5, -2.5, 1e30, 10**18, float("nan"), float("inf"), 128.0, True, False),
    *("x", "", "4096", [], {}, [1, 2], {"a": 1}),
]
# Fields that positions are read from, or that decide what is built.
TELLING = (
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "hidden_size", "num_attention_heads"),
    *("head_dim", "model_type", "sliding_window", "layer_types", "num_hidden_layers", "num_key_value_heads"),
    *("architectures", "original_max_position_embeddings", "torch_dtype", "dtype", "partial_rotary_factor"),
    *("transformers_version", "vocab_size", "qk_rope_head_dim"),
)
ROPES: list[Any] = [
    {"type": "linear", "factor": 2},
    {"type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": -4.0, "original_max_position_embeddings": 64},
    {"type": "su", "factor": 4},
    {"rope_type": "bogus", "factor": 2},
    {"rope_type": "dynamic", "factor": "2"},
    *({"factor": 2}, {"type": "linear"}, {"rope_type": "llama3", "factor": 8}),
    {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 64},
    *({"rope_type": "default", "rope_theta": base} for base in (-1, 0, 1, "10000")),
    {"rope_type": ["default"], "rope_theta": 1e4},
    *("linear", [1, 2], 4),
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "original_max_position_embeddings": "64"},
    {"rope_type": "longrope", "short_factor": [1], "long_factor": [2], "factor": 2},
    *({"rope_type": own, "rope_theta": 1e4} for own in ("ctxext_rope", "ctxext_unrotated")),
]
EXTENSIONS: list[Any] = [
    *({}, {"format": 1}, {"format": 2}, "yes", 4, [], None, True, {"method": "yarn"}),
    {"format": 1, "method": {"method": "yarn", "factor": 4}, "trained_length": 128},
]


def mutated(seed: int) -> tuple[str, str]:
    """The name of a famous checkpoint, and the text of its config.json with one to three fields damaged."""
    draw = random.Random(seed)
    name = draw.choice(CONFIGS)
    config = famous_config(name)
    config.pop("auto_map", None)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _damage(config, draw)
    text = json.dumps(config)
    return name, text[: draw.randrange(len(text))] if draw.random() < 0.03 else text


def _damage(config: dict[str, Any], draw: random.Random) -> None:
    kind = draw.random()
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if kind < 0.2:
        config[draw.choice(["rope_scaling", "rope_parameters"])] = copy.deepcopy(draw.choice(ROPES))
    elif kind < 0.27:
        config["ctxext"] = copy.deepcopy(draw.choice(EXTENSIONS))
    elif kind < 0.4 and rope and isinstance(rope, dict):
        rope[draw.choice(list(rope))] = copy.deepcopy(draw.choice(VALUES))
    elif kind < 0.55:
        config.pop(draw.choice(list(config)))
    else:
        telling = [field for field in TELLING if field in config]
        field = draw.choice(telling if telling and draw.random() < 0.75 else list(config))
        value = copy.deepcopy(draw.choice(VALUES))
        config[field] = 0 if value == 10**18 and "layers" in field else value  # as many layers are built one by one


def walk(seed: int, directory: Path) -> dict[str, str]:
    """Every verb over one damaged config: what each said, "ok" where it succeeded. Other errors pass through."""
    name, text = mutated(seed)
    source = famous_checkpoint(name, directory / "source")
    (source / "config.json").write_text(text, encoding="utf-8")
    method = "alibi" if name == BLOOM else ("yarn", "ntk", "dynamic_ntk", "pi", "llama3")[seed % 5]
    verbs = {
        "inspect": lambda: inspect_checkpoint(source),
        "patch": lambda: patch_checkpoint(source, directory / "a", method, factor=4),
        "patch from 128": lambda: patch_checkpoint(source, directory / "b", method, factor=4, trained_length=128),
        "export": lambda: export(source, to="vllm", method=method, factor=4),
        "export as it is": lambda: export(source, to="llama.cpp"),
    }
    said = {}
    for verb, run in verbs.items():
        try:
            run()
            said[verb] = "ok"
        except CtxextError as error:
            said[verb] = str(error)
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]  # nothing half-written
    shutil.rmtree(directory)
    return said


@pytest.mark.nightly
@pytest.mark.parametrize("hundred", [0, 100, 200])
def test_a_damaged_config_never_ends_in_a_traceback(
    hundred: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hundred == 200:
        try_only(monkeypatch, "yarn", "alibi")  # two of them see what a damaged config does
    said = [walk(seed, tmp_path / str(seed)) for seed in range(hundred, hundred + 100)]
    refusals = [text for one in said for text in one.values() if text != "ok"]
    assert len(refusals) >= 50
    assert all(len(text) > 20 for text in refusals)  # sentences
