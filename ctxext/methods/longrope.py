"""LongRoPE: searched factors, one per frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import EXACT, NEVER, plain_inv_freq
from ctxext.methods.parameters import Positive, Range, require
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class LongRoPE(RopeMethod):
    """Divide each frequency by a separate factor, from one set for short texts and another for long ones.

    Pick it when you have searched or published factors (Phi-3, Phi-4-mini, MiniCPM). With two different sets, a text
    that grows past the trained length switches sets, and its KV cache must be recomputed once; ``growth="request"`` or
    the same set twice avoids that.

    Args:
        factor: target_length / trained_length; sets the attention scale only. Dimensionless, at least 1.
        short_factor: divisors for texts up to trained_length, one per rotated pair (rotary_dim / 2). Above 0.
        long_factor: divisors for longer texts, as many. Above 0.
        attention_factor: multiplies cos and sin. Above 0; None is ``sqrt(1 + ln(factor) / ln(trained_length))``.
        growth: length that decides between the sets: "exact" counts the tokens so far; "request" counts the prompt
            and ``max_new_tokens``, row by row, so that ``generate`` recomputes nothing.

    Raises:
        InvalidParameterError: from ``frequencies``, if the model has another number of frequencies.

    Source: Ding et al., arXiv:2402.13753, section 3 (its unrotated start tokens are in no published checkpoint and not
        offered here). Authors' code: microsoft/LongRoPE@c9e56aa, rope/longrope.py.
    """

    name = "longrope"
    summary = "divide each frequency by its own searched factor"
    source = "arXiv:2402.13753"

    short_factor: Annotated[tuple[float, ...], Range(above=0, most=NEVER)]
    long_factor: Annotated[tuple[float, ...], Range(above=0, most=NEVER)]
    attention_factor: Annotated[float | None, Positive] = None
    growth: Literal["exact", "request"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"as long as short_factor ({len(self.short_factor)} numbers)"
        require(len(self.short_factor) == len(self.long_factor), "long_factor", self.long_factor, expected)

    @property
    def dynamic(self) -> bool:
        return self.short_factor != self.long_factor

    def fitted_length(self, trained_length: int, length: int) -> int:
        return trained_length + 1 if self.dynamic and length > trained_length else trained_length

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        name = "long_factor" if length > rope.trained_length else "short_factor"
        self._require_fitting(rope, name)
        divisors = torch.tensor(getattr(self, name), **EXACT)
        return Frequencies(plain_inv_freq(rope) / divisors, self._attention_scale(rope))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        self._require_fitting(rope, "long_factor")
        parameters = {
            "rope_type": "longrope",
            "rope_theta": rope.base,
            "factor": self.factor,
            "original_max_position_embeddings": rope.trained_length,
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
        }
        if self.attention_factor is not None:
            parameters["attention_factor"] = self.attention_factor
        return parameters

    @classmethod
    def example(cls, rope: RopeSpec) -> LongRoPE:
        ramp = torch.linspace(0, 1, rope.rotary_dim // 2, **EXACT)
        return cls(factor=4.0, short_factor=tuple((1.1**ramp).tolist()), long_factor=tuple((4.0**ramp).tolist()))

    def _require_fitting(self, rope: RopeSpec, name: str) -> None:
        count, expected = len(getattr(self, name)), f"{rope.rotary_dim // 2} (rotary_dim / 2)"
        require(count == rope.rotary_dim // 2, f"the length of {name}", count, expected)

    def _attention_scale(self, rope: RopeSpec) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor == 1:
            return 1.0
        require(
            rope.trained_length > 1, "trained_length", rope.trained_length, "above 1 unless attention_factor is set"
        )
        return math.sqrt(1 + math.log(self.factor) / math.log(rope.trained_length))
