"""T5's buckets."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from ctxext.laboratory.encodings.t5_bias import T5Bias
from tests._encodings import LAYOUTS, SPEC, check_score, encoding_of, pairs_of


def bucket(distance: int, buckets: int, farthest: int) -> int:
    near = buckets // 2
    if distance < near:
        return distance
    return min(buckets - 1, near + int(math.log(distance / near) / math.log(farthest / near) * (buckets - near)))


def score(weights: dict[str, Tensor], h: int, i: int, j: int, *_: object) -> Tensor:
    return weights["weight"][h, bucket(i - j, 8, 12)]


@pytest.mark.slow
def test_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    check_score(T5Bias(buckets=8, max_distance=12), score, monkeypatch)


def test_is_what_transformers_computes_for_t5() -> None:
    torch.manual_seed(0)
    config = T5Config(d_model=24, num_heads=4, d_kv=6, is_decoder=True)
    stock = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    encoding = encoding_of(T5Bias())
    stock.relative_attention_bias.weight.data = encoding.weight.data.T.clone()
    layout = LAYOUTS["causal"].causal(1, 700)
    q = torch.zeros(1, 4, 700, 6, dtype=torch.float64)
    found = encoding.score(pairs_of(q, q[:, :2], layout)).rows(slice(None))
    expected = stock.compute_bias(700, 700, device=torch.device("cpu"))
    seen = torch.ones(700, 700, dtype=torch.bool).tril()
    assert torch.equal(found[:, :, seen], expected[:, :, seen])


def test_begins_as_t5_does() -> None:
    torch.manual_seed(0)
    weight = T5Bias(buckets=512, max_distance=1024).build(SPEC).weight
    assert weight.shape == (SPEC.num_heads, 512)
    assert weight.std().item() == pytest.approx(SPEC.hidden_size**-0.5, rel=0.1)
