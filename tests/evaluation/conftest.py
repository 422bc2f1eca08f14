"""A tiny random model and a byte tokenizer: everything offline, nothing trained."""

from __future__ import annotations

import pytest
import torch
from _tokenizer import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAINED = 512


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(bos=False)


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(bos=True)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TRAINED,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 90), generator=torch.Generator().manual_seed(1))
