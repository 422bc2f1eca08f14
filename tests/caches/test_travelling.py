"""Numbers that travel with keys through the caches of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer

import ctxext
from ctxext.caches.travelling import Travelling
from ctxext.errors import IncompatibleError
from ctxext.methods import known_methods
from ctxext.methods.encoding import ENCODING, EncodingMethod
from tests._models import logits, tiny, tokens

CARRYING = [name for name, cls in known_methods().items() if issubclass(cls, EncodingMethod) and cls.carries]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 6])
def test_what_comes_back_is_what_went_in(dtype: torch.dtype, heads: int) -> None:
    """In 16 bits too, and with its gradient; keys are as if nothing went with them."""
    torch.manual_seed(0)
    cache, all_keys, all_numbers = DynamicCache(), [], []
    for length in (5, 1, 3):
        keys, values = (torch.randn(3, 2, length, 8).to(dtype) for _ in range(2))
        numbers = torch.randn(3, heads, length, 2).mul(30).requires_grad_()
        travels = Travelling(numbers)
        found, found_values = travels.through(cache).update(keys, values, 0)
        all_keys.append(keys)
        all_numbers.append(numbers)
        assert torch.equal(found, torch.cat(all_keys, 2))
        assert found_values.shape == found.shape
        torch.testing.assert_close(travels.numbers, torch.cat(all_numbers, 2), rtol=2e-7, atol=2e-7)
        assert travels.through(cache).get_seq_length() == found.shape[2]
        (up,) = torch.autograd.grad((travels.numbers * 2).sum(), numbers)
        assert torch.equal(up, torch.full_like(numbers, 2))


def test_numbers_of_the_dtype_of_keys_take_no_more_room_than_they_need() -> None:
    cache, keys = DynamicCache(), torch.randn(1, 2, 3, 8).bfloat16()
    Travelling(torch.randn(1, 4, 3, 5).bfloat16()).through(cache).update(keys, keys, 0)
    assert cache.layers[0].keys.shape[-1] == 8 + 2 * 5


def _moved(model: PreTrainedModel, where: float = 0.3) -> PreTrainedModel:
    torch.manual_seed(3)
    for path, weight in model.named_parameters():
        if ENCODING in path:
            weight.data += where * torch.rand_like(weight)
    return model


@pytest.fixture(params=CARRYING)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return _moved(ctxext.patch(tiny(), request.param, factor=4.0))


def _next(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.slow
def test_a_cache_laid_out_for_keys_alone_is_laid_out_anew(model: PreTrainedModel) -> None:
    config, ids = model.config, tokens(30)
    cache = StaticCache(config=config, max_cache_len=40)
    shape = {"batch_size": 1, "num_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    cache.early_initialization(**shape, dtype=torch.float32, device=torch.device("cpu"))
    torch.testing.assert_close(_next(model, ids, cache), logits(model, ids), rtol=1e-4, atol=1e-4)


def test_a_cache_filled_without_them_is_refused() -> None:
    cache, keys = DynamicCache(), torch.randn(1, 2, 3, 8)
    cache.update(keys, keys, 0)
    with pytest.raises(IncompatibleError, match=r"8 dimensions.* have 9\. It was filled by another model, or before"):
        Travelling(torch.randn(1, 2, 3, 1)).through(cache).update(keys, keys, 0)


def test_a_cache_that_rounds_them_is_refused() -> None:
    layer, keys = DynamicLayer(), torch.randn(1, 2, 3, 8)
    layer.__class__ = type("Rounding", (QuantizedLayer,), {"update": DynamicLayer.update})
    with pytest.raises(IncompatibleError, match="A quantized cache would round"):
        Travelling(torch.randn(1, 2, 3, 1)).through(Cache(layers=[layer])).update(keys, keys, 0)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers keeps no keys in 8 bits")
def test_a_cache_that_rounds_them_to_eight_bits_is_refused() -> None:
    layer, keys = cache_utils.Fp8QuantizedLayer(), torch.randn(1, 2, 3, 8)
    with pytest.raises(IncompatibleError, match="A quantized cache would round"):
        Travelling(torch.randn(1, 2, 3, 1)).through(Cache(layers=[layer])).update(keys, keys, 0)


@pytest.mark.slow
def test_trains_with_the_cache_that_transformers_makes(model: PreTrainedModel) -> None:
    """``use_cache`` is on by default in training too: gradients go through the cache as they go past it."""
    ids = tokens(40)
    found = []
    for use in (True, False):
        model(ids, labels=ids, use_cache=use).loss.backward()
        found.append([weight.grad.clone() for weight in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_in_16_bits_decoding_is_as_near_to_one_forward_as_plain_decoding(model: PreTrainedModel) -> None:
    """Gates that were rounded to bfloat16 in the cache would add up to scores that are far off."""
    ids = tokens(120)
    plain = ctxext.patch(tiny(), "nope", factor=4.0)

    def apart(one: PreTrainedModel) -> float:
        one.bfloat16()
        cache = DynamicCache(config=one.config)
        parts = [_next(one, part, cache) for part in ids.split([100, *[1] * 20], 1)]
        return float((torch.cat(parts, 1) - logits(one, ids)).float().norm())

    assert apart(model) <= 2 * apart(plain)
