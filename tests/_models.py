"""Tiny random models for all tests, built as the walk over every architecture builds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2VLConfig,
)

import ctxext
from ctxext.methods import METHODS, BiasMethod, Method, RopeMethod
from ctxext.methods.longrope import LongRoPE
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

# The newest transformers that ctxext is developed on; a few tests meet defects of older ones, each named there.
RECENT = Version(transformers.__version__) >= Version("5.23")


def on_recent(*values: Any, reason: str) -> Any:
    """Values of a test's parameters that older transformers skip, with the reason that is shown."""
    return pytest.param(*values, marks=pytest.mark.skipif(not RECENT, reason=f"before transformers 5.23 {reason}"))


# One of each structure that the contract names: what its config needs to be told.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "deepseek_v3": {},
}

# Every method that a rotary model takes, the retrofit included.
FOR_LLAMA: dict[str, type[Method]] = {
    name: cls for name, cls in METHODS.items() if issubclass(cls, RopeMethod | BiasMethod)
}

# What follows the length of a text, on models of each structure, and what does not.
LONGROPE = LongRoPE(short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, factor=4.0)
FOLLOWING: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"method": "dynamic_ntk", "factor": 4.0}),
    ("llama", {"method": "dynamic_yarn", "factor": 4.0, "growth": "doubling"}),
    ("llama", {"method": LONGROPE}),
    ("llama", {"method": "dynamic_pi", "factor": 4.0}),
    ("bloom", {"method": "dynamic_pi", "factor": 4.0}),
]
STATIC: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"method": "yarn", "factor": 4.0}),
    ("llama", {"method": "alibi", "factor": 4.0}),
    ("bloom", {"method": "alibi", "factor": 4.0}),
]


def by_method(value: Any) -> str | None:
    """What pytest calls a case."""
    named = value["method"] if isinstance(value, dict) else None
    return getattr(named, "name", named)


def extended(model_type: str, method: dict[str, Any]) -> PreTrainedModel:
    """A random model of a type with one of these methods."""
    return ctxext.patch(tiny(model_type), trained_length=TRAINED_LENGTH, **method)


def tiny(model_type: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a type, trained for 64 tokens, in evaluation mode; ``changes`` are fields of its config."""
    return tiny_model(tiny_config(model_type, **(MODELS.get(model_type, {}) | changes)), seed)


def byte_model() -> LlamaForCausalLM:
    """A random Llama, trained for 512 tokens, that reads what the tokenizer of bytes gives; its losses differ a lot."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def bert(kind: Any = BertForMaskedLM, **changes: Any) -> Any:
    """A random BERT, trained for 64 tokens, with room for a mask and padding beside the tokenizer of bytes.

    Args:
        kind: what is built on it.
        changes: fields of its config.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": TRAINED_LENGTH, "pad_token_id": 259}
    sizes["initializer_range"] = 0.3  # its losses differ a lot
    return kind(kind.config_class(**(sizes | changes))).eval()


def qwen2_vl() -> PreTrainedModel:
    """A random Qwen2-VL, trained for 64 tokens, in which token 5 stands for a part of an image."""
    torch.manual_seed(0)
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": TRAINED_LENGTH}
    text |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "initializer_range": 0.3}
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    )
    return model.eval()


def trained_for(model: LlamaForCausalLM, length: int) -> LlamaForCausalLM:
    """Make a Llama with plain positions what it would be had it been built for so many tokens."""
    model.config.max_position_embeddings = length
    rotary = model.model.rotary_emb
    rotary.max_seq_len_cached = rotary.original_max_seq_len = length
    return model


def tokens(length: int = 3 * TRAINED_LENGTH, rows: int = 1) -> Tensor:
    """Random tokens, none of them special; the first row of more rows is the only row of one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(40, 128, (rows, length), generator=generator)


@torch.no_grad()
def logits(model: Any, inputs: Tensor, **arguments: Any) -> Tensor:
    """Logits of one forward pass without a cache."""
    result: Tensor = model(inputs, use_cache=False, **arguments).logits
    return result


@torch.no_grad()
def both_sides(model: Any, length: int = 6 * TRAINED_LENGTH) -> Tensor:
    """Logits of an encoder-decoder that reads a text and writes it; twice what T5's last bucket holds."""
    result: Tensor = model(input_ids=tokens(length), decoder_input_ids=tokens(length)).logits
    return result


FALCON = {"alibi": True, "new_decoder_architecture": False, "multi_query": False}


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    small = {"vocab_size": 300, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**(small | changes))).eval()
