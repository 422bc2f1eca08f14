"""What an extended config holds that only ctxext can compute with: no other program can go on with it unawares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ctxext
from ctxext.methods import known_methods
from ctxext.methods.encoding import EncodingMethod
from ctxext.methods.remap import RemapMethod
from tests._models import logits, tiny, tokens

OURS = "load it with ctxext.load"


# Methods that stock transformers cannot express on a Llama; these two have no defaults for one of 64 tokens.
OWN = sorted(
    name
    for name, kind in known_methods().items()
    if (issubclass(kind, EncodingMethod | RemapMethod) or name in ("alibi", "dynamic_yarn", "dynamic_pi"))
    and name not in ("dpe", "string")
)


def test_there_are_methods_of_our_own() -> None:
    assert {"self_extend", "alibi", "dynamic_yarn", "t5_bias", "streaming"} <= set(OWN)


def values(entry: Any, name: str) -> list[Any]:
    """Everything that stands under a name, at any depth."""
    if isinstance(entry, list):
        return [found for one in entry for found in values(one, name)]
    if not isinstance(entry, dict):
        return []
    here = [entry[name]] if name in entry else []
    return here + [found for key, one in entry.items() if key != "ctxext" for found in values(one, name)]


def saved(model: Any, directory: Path) -> dict[str, Any]:
    model.save_pretrained(directory)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


@pytest.mark.slow
@pytest.mark.parametrize("method", OWN)
def test_no_base_that_others_could_compute_with(method: str, tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), method, factor=4)
    config = saved(model, tmp_path)
    bases = values(config, "rope_theta") + values(config, "rotary_emb_base")
    assert len(bases) >= 2
    for base in bases:
        assert "ctxext" in base
        with pytest.raises(TypeError):
            1.0 / base ** (torch.arange(0, 8, 2) / 8)
    assert all(OURS in kind for kind in values(config, "rope_type"))
    # vLLM makes a key of all values before it looks at the type (0.32.0, layers/rotary_embedding/__init__.py).
    rope = config["rope_parameters"]
    hash(tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in rope.items()))
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))


def test_of_every_layer_type(tmp_path: Path) -> None:
    config = saved(ctxext.patch(tiny("gemma3_text"), "dynamic_yarn", factor=4), tmp_path)
    rope = config["rope_parameters"]
    assert OURS in rope["full_attention"]["rope_type"]
    assert OURS in rope["full_attention"]["rope_theta"]
    assert rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize("method", ["self_extend", "alibi", "fox"])
def test_what_stock_transformers_says(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctxext.patch(tiny(), method, factor=4).save_pretrained(tmp_path)
    for name in [name for name in ROPE_INIT_FUNCTIONS if name.startswith("ctxext")]:
        monkeypatch.delitem(ROPE_INIT_FUNCTIONS, name)
    with pytest.raises(KeyError, match=OURS):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_trainer_checkpoints_and_merged_models(plain: Path, tmp_path: Path) -> None:
    model = ctxext.patch(AutoModelForCausalLM.from_pretrained(plain), "self_extend", factor=4)
    merged = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).merge_and_unload()
    assert all(OURS in base for base in values(saved(merged, tmp_path / "merged")["rope_parameters"], "rope_theta"))
    Trainer(model, TrainingArguments(tmp_path / "run", use_cpu=True, report_to=[])).save_model(str(tmp_path / "run"))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert all(OURS in base for base in values(config["rope_parameters"], "rope_theta"))
    assert torch.equal(logits(ctxext.load(tmp_path / "run"), tokens()), logits(model.eval(), tokens()))
