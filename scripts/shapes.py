"""Shapes of published models, for benchmarks with random weights."""

from __future__ import annotations

import copy

import torch
from transformers import BloomConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "llama-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
    ),
    "llama-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "bloom-560m": BloomConfig(vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16),
}


def two_layers(dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Two layers of SmolLM2-135M's shape, with few words: attention is what is measured."""
    config = copy.deepcopy(SHAPES["smollm2"])
    config.num_hidden_layers, config.vocab_size = 2, 256
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype).eval()
