"""NTK-by-parts interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ctxext.methods.base import RopeMethod
from ctxext.methods.llama3 import Llama3
from ctxext.methods.parameters import Positive, require
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class NTKByParts(RopeMethod):
    """Keep the frequencies that turn often in the trained window, divide the ones that hardly turn, blend between.

    Pick it to study YaRN without its temperature, in the form of the paper; for use, take YaRN. Plain transformers
    expresses it exactly as ``llama3`` with other thresholds.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        alpha: turns in the trained window at or below which a frequency is divided by the factor. Above 0.
        beta: turns in the trained window at or above which a frequency is kept. Above ``alpha``.

    Source: Peng et al., arXiv:2309.00071, section 3.2.
        Authors' code ramps in the dimension index instead: jquesnelle/yarn@995db5b,
        scaled_rope/LlamaYaRNScaledRotaryEmbedding.py (that form is ``YaRN(ramp="index", attention_factor=1.0)``).
    """

    name = "ntk_by_parts"
    summary = "keep fast frequencies, divide slow ones; linear in turns"
    source = "arXiv:2309.00071"

    alpha: Annotated[float, Positive] = 1.0
    beta: Annotated[float, Positive] = 32.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta > self.alpha, "beta", self.beta, f"above alpha ({self.alpha})")

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return self._as_llama3().frequencies(rope, length)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return self._as_llama3().rope_parameters(rope)

    def _as_llama3(self) -> Llama3:
        """Return the method under which transformers knows these thresholds."""
        return Llama3(factor=self.factor, low_freq_factor=self.alpha, high_freq_factor=self.beta)
