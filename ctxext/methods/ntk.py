"""NTK-aware scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import Clip, clipped, ntk_base, plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class NTK(RopeMethod):
    """Raise the base so that the lowest frequency is divided by the factor and the highest stays.

    Pick it where an older runtime knows nothing but a base, for a small factor (about 2): short texts hardly suffer.
    The frequencies in the middle are stretched by less than the factor, so the window that really works is shorter than
    the factor promises.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        clip: number of the slowest pairs that are slowed along half a wave of a cosine, the last to a stop, at least 2
            (arXiv:2602.05258); "auto" takes the pairs that turn less than once in the trained window, None takes none.

    Raises:
        InvalidParameterError: from ``frequencies``, if only two dimensions rotate.

    Source: bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al., arXiv:2309.00071, section 3.1.
        Authors' code: jquesnelle/yarn@995db5b, scaled_rope/LlamaNTKScaledRotaryEmbedding.py.
    """

    name = "ntk"
    summary = "raise the base: the lowest frequency divided by the factor"
    source = "arXiv:2309.00071"
    later = ("clip",)

    clip: Clip = None

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(clipped(rope, plain_inv_freq(rope, ntk_base(rope, self.factor)), self.clip))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        if self.clip is not None:
            return self.as_longrope(rope)
        return {"rope_type": "default", "rope_theta": ntk_base(rope, self.factor)}
