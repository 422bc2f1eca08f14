"""The config.json of famous checkpoints as they are published, at sizes that a model of them builds in no time.

Each entry of ``famous.json`` names its source: the file in a public repository at a commit, or the page of the hub that
shows it. Copies are named after the repository that they lie in. The position fields are what the file says, to the
letter, missing fields included: rope dicts, bases, lengths, head dimensions, windows, layer kinds, ``auto_map``,
``architectures``, dtypes, ``transformers_version``. Cut are the sizes alone: layers (as few as show every kind of
layer), heads (the size of a head stays), hidden and intermediate sizes, vocabulary and token ids, experts, low ranks,
vision towers, most quantization. "A form like ..." has no source: its file was not to be had, and it was written down
from memory. What the documentation of a model says of its lengths is in ``documented``, written by hand.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests._models import RECENT


class Rope(NamedTuple):
    """One set of rotary frequencies, as the documentation of a model and its config have it."""

    layer_type: str | None
    rope_type: str
    base: float
    rotary_dim: int


class Published(NamedTuple):
    """A published config and what is known of it.

    Args:
        source: where the file is; None for a form that was written down from memory.
        documented: what the documentation of the model says of its lengths.
        method: how its positions are made and scaled.
        trained: tokens that its weights knew before the scaling.
        window: tokens that it reads with the scaling.
        asked: whether published configs of this form mean one length or another, so that ctxext asks.
        ropes: the frequencies that reach beyond a sliding window, or all if none do.
        config: the file.
    """

    source: str | None
    documented: str
    method: str
    trained: int
    window: int
    asked: bool
    ropes: tuple[Rope, ...]
    config: dict[str, Any]


def _read() -> dict[str, Published]:
    entries = json.loads(Path(__file__).with_name("famous.json").read_text(encoding="utf-8"))
    return {
        name: Published(**entry | {"ropes": tuple(Rope(*rope) for rope in entry["ropes"])})
        for name, entry in entries.items()
    }


PUBLISHED = _read()
FAMOUS: dict[str, dict[str, Any]] = {name: entry.config for name, entry in PUBLISHED.items()}


# What the oldest supported transformers, from 5.16 on, do otherwise than the newest with the config as it is published.
LATER = {
    "openbmb/MiniCPM3-4B": "its latent attention asks longrope for a factor, which this config does not have",
    "google/gemma-3-1b-pt": "its longrope by layer type fails at the second long text",
    "google/gemma-3-4b-it": "its longrope by layer type fails at the second long text",
    "allenai/Olmo-3.1-32B-Instruct": "its longrope by layer type fails at the second long text",
    "MiniMaxAI/MiniMax-M2.5": "it rotates whole heads, and ctxext refuses its rotary_dim by name",
    "zai-org/GLM-4.1V-9B-Thinking": "it reads what later ones lose of this config",
    "a form like decapoda-research/llama-7b-hf": "it does not save the pad_token_id of -1",
}


def able(names: Iterable[str], kept: Collection[str] = FAMOUS) -> list[Any]:
    """``names`` as cases: skipped, saying why, where transformers cannot serve them; nightly where not ``kept``."""
    reasons = {name: _why_not(name) for name in names}
    return [
        pytest.param(
            name, marks=[pytest.mark.skip(reason or "")] * bool(reason) + [pytest.mark.nightly] * (name not in kept)
        )
        for name, reason in reasons.items()
    ]


def _why_not(name: str) -> str | None:
    model_type = FAMOUS[name]["model_type"]
    if model_type not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no {model_type}"
    return None if RECENT or name not in LATER else f"transformers {transformers.__version__}: {LATER[name]}"


def famous_config(name: str) -> dict[str, Any]:
    """The raw ``config.json`` of a checkpoint."""
    return copy.deepcopy(FAMOUS[name])


def famous_model(name: str, *, device: str = "cpu", **changes: Any) -> PreTrainedModel:
    """A random model built from the published config by the class that it names, natively, in evaluation mode.

    Args:
        name: one of ``FAMOUS``.
        device: "meta" for a model without weights.
        **changes: fields of the raw config.
    """
    raw = famous_config(name) | changes
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    named = getattr(transformers, (raw.get("architectures") or [""])[0], None)
    causal = type(config) in AutoModelForCausalLM._model_mapping
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        if named is not None:
            model: PreTrainedModel = named._from_config(config)
        else:  # a class of remote code, or one that was renamed since
            model = (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    return model.eval()


def famous_checkpoint(name: str, directory: Path, *, weights: bool = False) -> Path:
    """A checkpoint directory with the published ``config.json`` to the letter.

    Args:
        name: one of ``FAMOUS``.
        directory: where it is made.
        weights: random weights that can be loaded; else one tensor stands for all. Random weights are not quantised,
            so ``quantization_config`` is left out with them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    raw = famous_config(name)
    if weights:
        raw.pop("quantization_config", None)
        famous_model(name, quantization_config=None).save_pretrained(directory)
    else:
        save_file({"w": torch.zeros(1)}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    length = raw.get("max_position_embeddings", 2048)
    settings = {"model_max_length": length, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
