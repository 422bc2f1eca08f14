"""Dynamic NTK scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from ctxext.methods.base import GrowingMethod, RopeMethod
from ctxext.methods.formulas import ntk_base, plain_inv_freq
from ctxext.methods.parameters import Range
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(GrowingMethod, RopeMethod):
    """Leave texts inside the trained window alone, and raise the base by as much as a longer text needs.

    Pick it without any training, when short texts must stay exactly as they were. Beyond the window a KV cache must be
    recomputed as the text grows (see ``growth``). For training prefer a static method.

    The base of a text of S tokens grows as by NTK with the stretch ``factor * S / L - (factor - 1)``. With
    ``factor=1`` that is S / L, the dynamic NTK of the YaRN paper, which promises no particular length. A larger factor
    overshoots (at S = factor * L the stretch is factor^2 - factor + 1), which helps untrained models; published
    checkpoints with ``{"rope_type": "dynamic", "factor": 2.0}`` mean that, for up to twice the window.

    Args:
        factor: Steepness with which the stretch grows with the length; the same number as ``factor`` in plain
            transformers. Dimensionless, at least 1.
        reach: target_length / trained_length, at least 1; only says which length the model is meant for and changes no
            frequency. None takes ``factor``, so give it with ``factor=1``, which otherwise promises the trained
            window only.
        growth: "exact" follows every token; "doubling" rounds the length up to trained_length times a power of two,
            so that decoding rarely recomputes its cache; "request" takes the length of prompt and ``max_new_tokens``,
            row by row, so that ``generate`` recomputes nothing. Plain transformers cannot express "doubling".

    Raises:
        InvalidParameterError: from ``frequencies``, if only two dimensions rotate.

    Source: emozilla, "Dynamically Scaled RoPE" (2023); Peng et al., arXiv:2309.00071, section 3.3 (factor 1).
        Authors' code: jquesnelle/yarn@995db5b, scaled_rope/LlamaDynamicScaledRotaryEmbedding.py (``ntk``).
    """

    name = "dynamic_ntk"
    summary = "NTK by what the current text needs, plain inside the trained window"
    source = "arXiv:2309.00071"

    reach: Annotated[float | None, Range(least=1)] = None

    @property
    def says_target(self) -> bool:
        return self.reach is not None

    def target_length(self, trained_length: int) -> int:
        reach = self.factor if self.reach is None else self.reach
        return math.floor(trained_length * reach + 1e-6)

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        ratio = self.fitted_length(rope.trained_length, length) / rope.trained_length
        return Frequencies(plain_inv_freq(rope, ntk_base(rope, self.factor * ratio - (self.factor - 1))))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        if self.growth == "doubling":
            return None
        # Transformers reads L from max_position_embeddings, so that key must keep the trained length.
        return {"rope_type": "dynamic", "rope_theta": rope.base, "factor": self.factor}
