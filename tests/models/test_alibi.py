"""BLOOM, MPT and ALiBi Falcon on ctxext's attention: what they compute, how they decode, how they are saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import MptConfig, MptForCausalLM, PreTrainedModel

import ctxext
from ctxext.errors import BackendUnavailableError, IncompatibleError, InvalidParameterError
from tests._models import FALCON, logits
from tests._models import tokens as random_tokens
from tests._products import crossed
from tests.kernels.cases import leave_flex_uncompiled

TRAINED = 32
LENGTH = 80
TOLERANCE = 1e-4  # float32, logits of size 5

FAMILIES = ["bloom", "mpt", "falcon"]
METHODS = [{"method": name} for name in ("dynamic_pi", "alibi", "pi")] + [
    {"method": "dynamic_pi", "growth": "doubling"}
]
every_pair = pytest.mark.parametrize(("family", "method"), crossed(FAMILIES, METHODS))
every_family = pytest.mark.parametrize("family", FAMILIES)
every_backend = pytest.mark.parametrize("backend", ["sdpa", "reference", "flex"])


@pytest.fixture(autouse=True)
def _plain_flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling costs seconds on CPU; tests/kernels/test_flex.py compiles a few."""
    leave_flex_uncompiled(monkeypatch)


def build(family: str, heads: int = 4, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shared = {"hidden_size": 16 * heads, "vocab_size": 97, "initializer_range": 0.2, "eos_token_id": 96} | changes
    if family == "bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=2, n_head=heads, **shared)).eval()
    if family == "mpt":
        shared["d_model"] = shared.pop("hidden_size")
        return MptForCausalLM(MptConfig(n_layers=2, n_heads=heads, max_seq_len=TRAINED, **shared)).eval()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": heads, "max_position_embeddings": TRAINED}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON, **sizes, **shared)).eval()


def patch(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    return ctxext.patch(model, **({"method": "alibi", "factor": 4, "trained_length": TRAINED} | arguments))


def tokens(length: int = LENGTH, rows: int = 1) -> Tensor:
    return random_tokens(length, rows) % 87 + 3


def stock_logits(family: str, heads: int, ids: Tensor, **arguments: Any) -> Tensor:
    """Stock code in float32; MPT needs its limit raised to read that far at all."""
    model = build(family, heads)
    if family == "mpt":
        model.config.max_seq_len = ids.shape[1]
    return logits(model, ids, **arguments)


@pytest.mark.slow
@every_family
@every_backend
def test_equals_stock_inside_and_beyond_the_window(family: str, backend: str) -> None:
    ours = patch(build(family), attention=backend)
    ids = tokens()
    torch.testing.assert_close(logits(ours, ids), stock_logits(family, 4, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_equals_stock_where_heads_are_no_power_of_two(family: str) -> None:
    ids, ours = tokens(), patch(build(family, 6))
    torch.testing.assert_close(logits(ours, ids), stock_logits(family, 6, ids), atol=TOLERANCE, rtol=0)


def test_falcon_is_exact_where_stock_rounds_its_bias() -> None:
    """Stock Falcon multiplies slope and index in bfloat16 even in a float32 model; slopes of 1, 1/2, ... hide it."""
    ids = tokens(400)
    rounded = stock_logits("falcon", 6, ids)
    ours = logits(patch(build("falcon", 6)), ids)
    exact = logits(patch(build("falcon", 6), attention="reference"), ids)
    torch.testing.assert_close(ours, exact, atol=TOLERANCE, rtol=0)
    assert (rounded - exact).abs().max() > 100 * TOLERANCE


@pytest.mark.slow
@every_pair
@pytest.mark.parametrize("prompt", [24, 70])
def test_decoding_with_a_cache_equals_reading_anew(family: str, method: dict[str, Any], prompt: int) -> None:
    model, ids = patch(build(family), **method), tokens(prompt)
    greedy = ids
    for _ in range(20):
        greedy = torch.cat([greedy, logits(model, greedy)[:, -1:].argmax(-1)], 1)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ways: list[dict[str, Any]] = [{}]
    if family != "mpt":  # its generate() knows neither static caches nor chunks
        ways += [{"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 16}]
    for way in ways:
        out = model.generate(ids, use_cache=True, output_logits=True, return_dict_in_generate=True, **arguments, **way)
        assert torch.equal(out.sequences, greedy), way
        torch.testing.assert_close(out.logits[-1], logits(model, greedy[:, :-1])[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_stock_reproduces_bloom_bit_for_bit_inside_the_window(dtype: torch.dtype) -> None:
    ids = tokens(TRAINED)
    expected = logits(build("bloom").to(dtype), ids)
    model = patch(build("bloom").to(dtype), bias="stock")
    assert torch.equal(logits(model, ids), expected)
    with pytest.raises(IncompatibleError, match="trained window of 32 tokens"):
        logits(model, tokens(TRAINED + 1))


def test_bfloat16_keeps_distances_that_stock_rounds_away() -> None:
    ids = tokens(600)
    exact = logits(build("bloom"), ids)
    stock = logits(build("bloom").bfloat16(), ids).float()
    ours = logits(patch(build("bloom").bfloat16()), ids).float()
    late = slice(500, None)
    assert (ours - exact)[:, late].square().mean() < 0.5 * (stock - exact)[:, late].square().mean()


def test_pi_divides_the_slopes() -> None:
    """Interpolating by 4 what was spread by 4 is reading as before: keys at every fourth position, slopes a fourth."""
    ids = tokens(20)
    spread = logits(patch(build("bloom"), method="pi"), ids, position_ids=4 * torch.arange(20)[None])
    torch.testing.assert_close(spread, logits(build("bloom"), ids), atol=TOLERANCE, rtol=0)


def test_a_backend_that_cannot_serve_is_named_in_the_first_call() -> None:
    with pytest.raises(BackendUnavailableError, match=r"These can: .*sdpa"):
        logits(patch(build("bloom"), attention="flash"), tokens(TRAINED))


def test_a_mask_of_four_dimensions_and_attention_weights_are_refused() -> None:
    model, ids = patch(build("bloom")), tokens(8)
    with pytest.raises(IncompatibleError, match="two-dimensional"):
        logits(model, ids, attention_mask=torch.ones(1, 1, 8, 8))
    with pytest.raises(IncompatibleError, match="no attention weights"):
        logits(model, ids, output_attentions=True)


@every_family
def test_a_mask_shorter_than_the_text_is_refused(family: str) -> None:
    """Stock code takes what it does not cover for padding, or fails on an index."""
    model = patch(build(family), method="alibi", factor=2)
    text = tokens(12)
    for mask in (torch.ones(1, 5, dtype=torch.long), torch.tensor([[0, 1, 1]])):
        said = rf"attention_mask covers {mask.shape[1]} tokens, but the text has 12.*\[batch, 12\]"
        with pytest.raises(InvalidParameterError, match=said):
            model(text, attention_mask=mask)
        cache = model(text[:, :8], use_cache=True).past_key_values
        with pytest.raises(InvalidParameterError, match=said):
            model(text[:, 8:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(("field", "value"), [("alibi_bias_max", 16), ("prefix_lm", True)])
def test_an_mpt_that_transformers_reads_as_another_is_refused(field: str, value: Any) -> None:
    config = MptConfig(d_model=64, n_heads=4, n_layers=1, vocab_size=64, max_seq_len=64, attn_config={field: value})
    with pytest.raises(IncompatibleError, match=rf"attn_config\.{field} of this mpt is {value}"):
        ctxext.patch(MptForCausalLM(config), "alibi", factor=2)
