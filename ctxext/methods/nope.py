"""No positions: the rotation of a trained model is dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import NEVER, plain_inv_freq
from ctxext.methods.parameters import Range
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class NoPE(RopeMethod):
    """Drop the rotation at every position: the causal mask alone then tells the order of tokens.

    Pick it to recalibrate a causal model without positions (DroPE): train the model at its *old* length for a small
    part of its original training (0.5 to 5 percent in the paper), and then extend it, since no position is left that it
    has never seen. Without that training the method breaks the model, short texts included: every weight has learned
    from rotated queries and keys. An encoder has no causal mask to tell the order, and is refused.

    Args:
        factor: target_length / trained_length; says which length the model is for, and with ``sharpening`` sets the
            temperature. Dimensionless, at least 1: 1 for the recalibration, more for reading further afterwards.
        sharpening: c in ``1 + c ln(factor)``, which multiplies attention scores, since a softmax over more keys is
            flatter. Dimensionless, at least 0; the authors choose it by the loss at the longer length, after training.

    Source: Kazemnejad et al., arXiv:2305.19466 (models trained without positions); for dropping positions of a
        trained model Gelberg et al., arXiv:2512.12167. Authors' code: SakanaAI/DroPE@260a8bb,
        custom_models/attention.py, which holds cos at 1 and sin at 0 in further classes; here any runtime that divides
        frequencies by a factor loads the result.
    """

    name = "nope"
    summary = "no rotation at all; useless until it is trained so"
    source = "arXiv:2512.12167"
    needs_training = True

    sharpening: Annotated[float, Range(least=0)] = 0.0

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        # On cos and sin, which queries and keys are both multiplied by: its square reaches the scores.
        scale = math.sqrt(1 + self.sharpening * math.log(self.factor))
        return Frequencies(torch.zeros_like(plain_inv_freq(rope)), scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        if self.frequencies(rope, rope.trained_length).attention_scale != 1:
            return self.as_longrope(rope)
        return {"rope_type": "linear", "rope_theta": rope.base, "factor": NEVER}
