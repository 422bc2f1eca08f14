"""The scaling of Llama 3.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import blend, turns_ramp
from ctxext.methods.parameters import Positive, require
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class Llama3(RopeMethod):
    """Divide the frequencies that turn less than once in the trained window, keep those above four turns.

    Pick it for a Llama 3 base model that you train on long text, or to match a published Llama 3.1, 3.2 or 3.3
    checkpoint (factors 8 and 32, trained length 8192). It is NTK-by-parts with a much narrower blend.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        low_freq_factor: turns in the trained window at or below which a frequency is divided by the factor. Above 0.
        high_freq_factor: turns in the trained window at or above which a frequency is kept. Above ``low_freq_factor``.

    Source: Grattafiori et al., arXiv:2407.21783, section 3.4.2; the formula is only in the code.
        Authors' code: meta-llama/llama-models@a9c89c4, models/llama3/model.py, ``apply_scaling``.
    """

    name = "llama3"
    summary = "NTK-by-parts between one and four turns, as Llama 3.1"
    source = "arXiv:2407.21783"

    low_freq_factor: Annotated[float, Positive] = 1.0
    high_freq_factor: Annotated[float, Positive] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        require(high > low, "high_freq_factor", high, f"above low_freq_factor ({low})")

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(blend(rope, self.factor, turns_ramp(rope, self.low_freq_factor, self.high_freq_factor)))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "rope_theta": rope.base,
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": rope.trained_length,
        }
