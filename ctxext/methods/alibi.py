"""Attention with linear biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ctxext.methods.base import BiasMethod
from ctxext.methods.formulas import alibi_slopes, trained_slopes
from ctxext.methods.parameters import require
from ctxext.spec import AlibiSpec, PerHead


@dataclass(frozen=True, kw_only=True)
class ALiBi(BiasMethod):
    """Replace positions by a score that falls with distance, at one slope per head.

    Pick it on BLOOM, MPT or ALiBi Falcon for exact distances and fused kernels: the mathematics stays what the
    checkpoint was trained with. On a rotary model it takes the place of rotation, and the model needs training. That
    may be an encoder, whose tokens see both ways.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the slopes do not depend on it.
        bias: "exact" computes distances in float32 or better. "stock" rounds as transformers' own code does, for
            parity with it inside the trained window (BLOOM only; full score matrices).
        both_ways: meaning of distance in an encoder (a decoder takes the first only). "symmetric": the same to both
            sides, so that a head cannot tell earlier tokens from later ones. "halves": in the first half of the heads a
            token sees itself and earlier tokens, in the other half itself and later tokens, each half with the slopes
            of half as many heads; needs an even number of heads, and the whole text at once.

    Source: Press et al., arXiv:2108.12409, section 3; for encoders, the author's proposals in
        ofirpress/attention_with_linear_biases#5 ("symmetric", and "nonsymmetric with mask").
        Authors' code: ofirpress/attention_with_linear_biases@4b92f28, fairseq/models/transformer.py.
    """

    name = "alibi"
    summary = "score minus slope times distance"
    source = "arXiv:2108.12409"

    bias: Literal["exact", "stock"] = "exact"
    both_ways: Literal["symmetric", "halves"] = "symmetric"

    @property
    def splits_heads(self) -> bool:
        return self.both_ways == "halves"

    def slopes(self, alibi: AlibiSpec, length: int) -> PerHead:
        if not self.splits_heads:
            return trained_slopes(alibi)
        require(alibi.num_heads % 2 == 0, "both_ways", self.both_ways, f"'symmetric' for {alibi.num_heads} heads")
        return alibi_slopes(alibi.num_heads // 2).repeat(2)
