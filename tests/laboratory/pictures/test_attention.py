"""Shares of attention by distance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ctxext
from ctxext.laboratory.pictures.attention import attention_of, by_distance, edges_of
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods.yarn import YaRN
from tests._checkpoints import save_with_tokenizer
from tests._models import tiny, tokens


def test_attention_by_distance() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.0, 0.4]])  # queries at 3 and 4 of 5
    edges = edges_of(5)
    assert edges == (0, 1, 2, 3, 4, 5)
    shares = by_distance(weights, edges)
    torch.testing.assert_close(shares, torch.tensor([0.65, 0.25, 0.3, 0.2, 0.0, 0.6]) / 2)
    assert edges_of(100) == (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    assert float(by_distance(torch.softmax(torch.randn(3, 2, 7, 40), -1), edges_of(40)).sum()) == pytest.approx(6.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["self_extend", "yarn"])
def test_attention_that_a_block_hands_on_is_counted_once(method: str) -> None:
    """Blocks of Bamba return the weights of their attention as well."""
    changes = {"num_hidden_layers": 3, "attn_layer_indices": [0, 2]}
    model, ids = tiny("bamba", **changes), tokens(20)
    plain = attention_of(model, ids, 4)
    extended = attention_of(ctxext.patch(model, method, factor=4.0, trained_length=64), ids, 4)
    assert plain.shape == extended.shape == (2, model.config.num_attention_heads, 4, 20)
    torch.testing.assert_close(plain.sum(-1), torch.ones_like(plain.sum(-1)))
    if method == "self_extend":
        torch.testing.assert_close(extended, plain, atol=1e-4, rtol=0)


def test_attention_ahead_is_as_far_as_attention_back() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).expand(4, 4)  # of an encoder
    shares = by_distance(weights, edges_of(4))
    torch.testing.assert_close(shares, torch.tensor([0.9, 1.4, 0.9, 0.4, 0.4]) / 4)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [20, 24, 39])
def test_attention_beyond_the_trained_length_begins_at_the_trained_length(trained: int, tmp_path: Path) -> None:
    """Wherever it lies between half octaves: without an edge there, the bins beyond it began at a later one."""
    place = save_with_tokenizer(tiny(vocab_size=300, initializer_range=0.5, max_position_embeddings=trained), tmp_path)
    request = PictureRequest(checkpoint=str(place), text="the cat saw the dog and the dog ran on in rain", length=40)
    picture = picture_of(YaRN(factor=4.0), request)
    ids = request.tokens(str(request.text))[0][:, :40]
    shares = []
    for model in (request.load(YaRN(factor=4.0)), request.load()):
        weights = attention_of(model, ids, 40)[..., 1:]  # the first token has a separate bin
        apart = torch.arange(40)[:, None] - torch.arange(1, 40)
        shares.append(float((weights * (apart >= trained)).sum(-1).mean()))
    extended, plain = shares
    assert f"{extended:.0%} of attention goes beyond the {trained} trained with yarn" in picture.sentence
    assert picture.sentence.endswith(f"{plain:.0%} without")
    picture.save(tmp_path / "attention.png")
