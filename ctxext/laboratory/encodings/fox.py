"""A gate that each token has for all that came before it: scores fall by what was forgotten in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.laboratory.scores import PairScore
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs


@dataclass(frozen=True, kw_only=True)
class FoX(EncodingMethod):
    """Let each token say, per head, how much of all that came before it is forgotten, instead of rotation.

    Pick it to train a model whose attention to the past depends on the text: a head may forget at the end of a sentence
    and keep all else. Each score gets the sum of the logarithms of the gates between key and query, so the method
    works with fused attention kernels, also in 16 bits; only in training do they compute in float32, since sums of
    16-bit gradients would be mostly rounding. The cost: a cache keeps a few more numbers with each key, and gates begin
    half open, so that a model that was trained with rotation begins by seeing a few tokens only. Of the paper's
    architecture this is the forgetting gate. The "Pro" block (output gate, norms, shifted keys and values) is left out,
    since it is not about positions. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the gates do not depend on it.

    Source: Lin et al., arXiv:2503.02130. Authors' code: zhixuan-lin/forgetting-transformer@883f260,
        src/forgetting_transformer/model/forgetting_transformer/modeling_forgetting_transformer.py,
        ForgettingAttentionLayer: separate gates in each layer, one a query head, with weights drawn as in other layers
        and a bias that begins at 0.
    """

    name = "fox"
    summary = "scores decay by learned forget gates between query and key"
    source = "arXiv:2503.02130"
    shared = False
    carries = True
    form = "scores"

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Gates(spec)


class _Gates(Encoding):
    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(spec.num_heads, spec.hidden_size) * spec.embedding_std)
        self.bias = nn.Parameter(torch.zeros(spec.num_heads))

    def carried(self, states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq 1"]:
        """Return the logarithm of each gate, in float32 or float64."""
        gates = F.linear(states, self.weight, self.bias)
        return F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32))).transpose(1, 2)[..., None]

    def score(self, pairs: Pairs) -> PairScore:
        return _Forgotten(pairs)


class _Forgotten(PairScore):
    def __init__(self, pairs: Pairs) -> None:
        assert pairs.carried is not None
        self.pairs, self.weights, self.floats = pairs, (pairs.carried,), 4 * pairs.q.shape[1]

    def rows(self, queries: slice) -> Float[Tensor, "batch heads queries key"]:
        query, key = self.places()
        return (query[:, :, queries, None] - key[:, :, None]).to(self.pairs.dtype)

    def places(self) -> tuple[Tensor, Tensor]:
        """Sum up what has been forgotten so far, from the first key on.

        Of tokens of one document only differences count. In float64: the difference between two tokens far into a text
        is small compared with the sum before both.
        """
        keys = self.pairs.without_padding(self.weights[0]).double().cumsum(2)
        return self.pairs.of_queries(keys)[..., 0], keys[..., 0]
