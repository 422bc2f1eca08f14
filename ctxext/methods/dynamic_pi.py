"""Position Interpolation by the current length."""

from __future__ import annotations

from dataclasses import dataclass

from ctxext.methods.base import BiasMethod, GrowingMethod, RopeMethod
from ctxext.methods.formulas import plain_inv_freq, trained_slopes
from ctxext.spec import AlibiSpec, Frequencies, PerHead, RopeSpec


@dataclass(frozen=True, kw_only=True)
class DynamicPI(GrowingMethod, RopeMethod, BiasMethod):
    """Squeeze positions only as much as the current sequence needs, and not at all inside the trained window.

    Pick it on an ALiBi model without training: it keeps short inputs as they were. On a rotary model prefer
    ``dynamic_yarn``.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            the squeeze itself is current length / trained_length.
        growth: "exact" follows every token; "doubling" rounds the length up to trained_length times a power of two,
            so that decoding rarely recomputes its cache; "request" takes the length of prompt and ``max_new_tokens``,
            row by row, so that ``generate`` recomputes nothing.

    Source: Al-Khateeb et al., arXiv:2310.13017, section 3 (slopes scaled by trained / current length);
        for rotary models jquesnelle/yarn@995db5b, scaled_rope/LlamaDynamicScaledRotaryEmbedding.py.
    """

    name = "dynamic_pi"
    summary = "PI at the current length"
    source = "arXiv:2310.13017"

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(
            plain_inv_freq(rope) / (self.fitted_length(rope.trained_length, length) / rope.trained_length)
        )

    def slopes(self, alibi: AlibiSpec, length: int) -> PerHead:
        return trained_slopes(alibi) / (self.fitted_length(alibi.trained_length, length) / alibi.trained_length)
