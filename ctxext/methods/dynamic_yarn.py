"""Dynamic YaRN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ctxext.methods.base import GrowingMethod, RopeMethod
from ctxext.methods.parameters import Positive
from ctxext.methods.yarn import YaRN
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(GrowingMethod, RopeMethod):
    """Leave texts inside the trained window alone, and apply YaRN with as large a factor as a longer text needs.

    Pick it without any training, when short texts must stay exactly as they were; it holds out longer than dynamic NTK.
    Beyond the window a KV cache must be recomputed as the text grows (see ``growth``). Plain transformers has no such
    type.

    A text of S tokens gets the frequencies and the attention scale of ``YaRN(factor=max(S / trained_length, 1))``.

    Args:
        factor: target_length / trained_length: the largest stretch that the model is meant for. It changes no
            frequency, and a longer text still gets the stretch it needs. Dimensionless, at least 1.
        beta_fast: turns in the trained window from which a frequency is kept. Above ``beta_slow``.
        beta_slow: turns in the trained window up to which a frequency is divided by the whole stretch. Above 0.
        truncate: True if the ramp between the two begins and ends at whole indices, see ``YaRN``.
        ramp: quantity in which that ramp is linear, "index" or "turns", see ``YaRN``.
        growth: "exact" follows every token; "doubling" rounds the length up to trained_length times a power of two,
            so that decoding rarely recomputes its cache; "request" takes the length of prompt and ``max_new_tokens``,
            row by row, so that ``generate`` recomputes nothing.

    Source: Peng et al., arXiv:2309.00071, section 3.3.
        Authors' code: jquesnelle/yarn@995db5b, scaled_rope/LlamaDynamicYaRNScaledRotaryEmbedding.py.
    """

    name = "dynamic_yarn"
    summary = "YaRN by what the current text needs, plain inside the trained window"
    source = "arXiv:2309.00071"

    beta_fast: Annotated[float, Positive] = 32.0
    beta_slow: Annotated[float, Positive] = 1.0
    truncate: bool = True
    ramp: Literal["index", "turns"] = "index"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at(1.0)

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return self._at(self.fitted_length(rope.trained_length, length) / rope.trained_length).frequencies(rope, length)

    def _at(self, stretch: float) -> YaRN:
        """Build the static YaRN for one stretch, which also checks the parameters that the two methods share."""
        return YaRN(
            factor=stretch,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            ramp=self.ramp,
        )
