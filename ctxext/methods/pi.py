"""Position Interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ctxext.methods.base import BiasMethod, RopeMethod, Rows, TableMethod
from ctxext.methods.formulas import plain_inv_freq, rows_between, trained_slopes
from ctxext.spec import AlibiSpec, Frequencies, PerHead, RopeSpec


@dataclass(frozen=True, kw_only=True)
class PI(RopeMethod, BiasMethod, TableMethod):
    """Squeeze all positions evenly into the trained window.

    Pick it when you will fine-tune (a few hundred steps in its paper; after thirty of ours it was 0.34 nats behind
    YaRN). Without training it degrades every position, short ones included. On an ALiBi model it divides the slopes.
    In a table of learned positions new rows lie between two trained ones, and the last few repeat the last trained
    row.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.

    Source: Chen et al., arXiv:2306.15595, section 2.3; for ALiBi Al-Khateeb et al., arXiv:2310.13017, section 3; for
        tables Zhu et al., arXiv:2404.12096, section 4.1.
        Authors' code: none published; jquesnelle/yarn@995db5b, scaled_rope/LlamaLinearScaledRotaryEmbedding.py; for
        tables dwzhu-pku/LongEmbed, issue 7.
    """

    name = "pi"
    summary = "divide frequencies (or ALiBi slopes, or places in a table) by the factor"
    source = "arXiv:2306.15595"

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(plain_inv_freq(rope) / self.factor)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "linear", "rope_theta": rope.base, "factor": self.factor}

    def slopes(self, alibi: AlibiSpec, length: int) -> PerHead:
        return trained_slopes(alibi) / self.factor

    def rows(self, trained: int, target: int) -> Rows:
        place = torch.arange(target, device="cpu") * trained  # in units of 1 / target, so that none is rounded
        lower = place // target
        rest = (place - lower * target).double() / target
        return rows_between(lower, torch.where(lower < trained - 1, rest, 0.0), trained)
