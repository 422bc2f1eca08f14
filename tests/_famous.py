"""The config.json of famous checkpoints as they are published, at sizes that a model of them builds in no time.

Provenance: written down from memory of the published files of the hub repositories that the names say (``NAME with its
documented YaRN`` and ``NAME of April 2024`` are the forms that their model cards and earlier revisions give), as they
were to be had nowhere here. The LongRoPE tables of Phi-3, Phi-4-mini and MiniCPM3 were compared with their copies in
torchtune, KerasHub and MindSpeed. Cut are the sizes alone: layers (as few as show every kind of layer), heads (the size
of a head stays), hidden and intermediate sizes, vocabulary and token ids, experts, low ranks, vision towers. Everything
that says where positions are and how far they reach is kept, missing fields included: rope dicts, bases, lengths, head
dimensions, windows, layer kinds, ``auto_map``, ``architectures``, dtypes, ``transformers_version``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests._models import RECENT

__all__ = ["FAMOUS", "able", "famous_checkpoint", "famous_config", "famous_model"]

FAMOUS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("famous.json").read_text(encoding="utf-8"))


# What the oldest supported transformers, 5.17, cannot do itself with the config as it is published.
LATER = {
    "openbmb/MiniCPM3-4B": "its latent attention asks longrope for a factor, which this config does not have",
    "google/gemma-3-1b-pt": "its longrope by layer type fails at the second long text",
    "google/gemma-3-4b-it": "its longrope by layer type fails at the second long text",
    "allenai/Olmo-3-1025-7B": "its longrope by layer type fails at the second long text",
    "decapoda-research/llama-7b-hf": "it does not save the pad_token_id of -1",
}


def able(names: Iterable[str]) -> list[Any]:
    """``names`` for a test's parameters; those that the installed transformers cannot serve are skipped, saying why."""
    return [
        name if RECENT or name not in LATER else pytest.param(name, marks=pytest.mark.skip(f"5.17: {LATER[name]}"))
        for name in names
    ]


def famous_config(name: str, **changes: Any) -> dict[str, Any]:
    """The raw ``config.json`` of a checkpoint; ``changes`` are fields of it."""
    return copy.deepcopy(FAMOUS[name]) | changes


def famous_model(name: str, *, device: str = "cpu", **changes: Any) -> PreTrainedModel:
    """A random model built from the published config by the class that it names, natively, in evaluation mode.

    Args:
        name: one of ``FAMOUS``.
        device: "meta" for a model without weights.
        **changes: fields of the raw config.
    """
    raw = famous_config(name, **changes)
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


def famous_checkpoint(
    name: str, directory: Path, *, weights: bool = False, without: tuple[str, ...] = (), **changes: Any
) -> Path:
    """A checkpoint directory with the published ``config.json`` to the letter.

    Args:
        name: one of ``FAMOUS``.
        directory: where it is made.
        weights: random weights that can be loaded; else one tensor stands for all. Random weights are not quantised,
            so ``quantization_config`` is left out with them.
        without: fields to leave out.
        **changes: fields of the raw config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    raw = famous_config(name, **changes)
    for field in (*without, *(["quantization_config"] if weights else [])):
        raw.pop(field, None)
    if weights:
        famous_model(name, **changes, quantization_config=None).save_pretrained(directory)
    else:
        save_file({"w": torch.zeros(1)}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    length = raw.get("max_position_embeddings", 2048)
    settings = {"model_max_length": length, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
