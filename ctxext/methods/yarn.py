"""YaRN, with the variants that checkpoints were published with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import EXACT, Clip, blend, clipped, index_that_turns, turns_ramp
from ctxext.methods.parameters import Positive, Range, require
from ctxext.spec import Frequencies, PerPair, RopeSpec


@dataclass(frozen=True, kw_only=True)
class YaRN(RopeMethod):
    """Keep the fast frequencies, divide the slow ones by the factor, and sharpen attention a little.

    Pick it to train, or when another runtime must load the result: of the methods that those support it loses least
    without training, and it needs the fewest steps with it. The defaults come from the published checkpoints
    (authors, Qwen, DeepSeek), whose ramp is not the one printed in the paper.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        beta_fast: turns in the trained window from which a frequency is kept. Above ``beta_slow``.
        beta_slow: turns in the trained window up to which a frequency is divided by the factor. Above 0.
        truncate: round the ends of an index ramp outwards to whole dimensions; gpt-oss does not. No effect on a turns
            ramp.
        ramp: quantity in which the blend is linear. ``"index"`` (every published checkpoint) is the number of the
            dimension, ``"turns"`` (the paper's formula) is the turns in the trained window.
        blend: quantity that the ramp weighs: ``"frequency"`` (every published YaRN), or ``"wavelength"`` (PoSE's code).
        attention_factor: multiplies cos and sin. Above 0; None is ``0.1 ln(divisor) + 1``. It replaces that default, as
            in transformers, and does not multiply it, as in the authors' code.
        mscale: with ``mscale_all_dim``, the attention factor is
            ``(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)`` (DeepSeek). Above 0 or None.
        mscale_all_dim: see ``mscale``. DeepSeek's attention multiplies its softmax scale by this part, which is
            the architecture's business, not a frequency's.
        divisor: divisor of a frequency that is not kept, at least 1; None is ``factor``, as published. Measurements on
            a model may favour a divisor above or below the factor.
        clip: number of the slowest pairs that are slowed along half a wave of a cosine, the last to a stop, at least 2
            (arXiv:2602.05258); "auto" takes the pairs that turn less than once in the trained window, None takes none.

    Raises:
        InvalidParameterError: from ``frequencies`` with an index ramp, if the trained window is shorter than
            ``2 pi beta_slow`` tokens, where that ramp would keep frequencies that it ought to divide.

    Source: Peng et al., arXiv:2309.00071, sections 3.2 and 3.4.
        Authors' code: jquesnelle/yarn@995db5b, scaled_rope/LlamaYaRNScaledRotaryEmbedding.py.
        ``truncate``: openai/gpt-oss@7b58334, gpt_oss/torch/model.py. ``blend="wavelength"``:
        dwzhu-pku/PoSE@a3d4ba8, src/my_modeling_llama.py, ``revised_yarn``. ``mscale``: arXiv:2405.04434, section 3.1.4.
    """

    name = "yarn"
    summary = "keep fast frequencies, divide slow ones, sharpen attention"
    source = "arXiv:2309.00071"
    later = ("divisor", "clip")

    beta_fast: Annotated[float, Positive] = 32.0
    beta_slow: Annotated[float, Positive] = 1.0
    truncate: bool = True
    ramp: Literal["index", "turns"] = "index"
    blend: Literal["frequency", "wavelength"] = "frequency"
    attention_factor: Annotated[float | None, Positive] = None
    mscale: Annotated[float | None, Positive] = None
    mscale_all_dim: Annotated[float | None, Positive] = None
    divisor: Annotated[float | None, Range(least=1)] = None
    clip: Clip = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fast, slow = self.beta_fast, self.beta_slow
        require(fast > slow, "beta_fast", fast, f"above beta_slow ({slow})")
        together = (self.mscale is None) == (self.mscale_all_dim is None)
        require(together, "mscale_all_dim", self.mscale_all_dim, f"given with mscale ({self.mscale}) or not at all")
        alone = self.attention_factor is None or self.mscale is None
        require(alone, "attention_factor", self.attention_factor, "None when mscale is given: it would replace mscale")

    @property
    def attention_scale(self) -> float:
        """Factor on cos and sin, dimensionless."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def stretch(self) -> float:
        """Divisor of a frequency that is not kept, dimensionless: the ``factor`` of plain transformers."""
        return self.factor if self.divisor is None else self.divisor

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        keep = self._index_ramp(rope) if self.ramp == "index" else turns_ramp(rope, self.beta_slow, self.beta_fast)
        inv_freq = blend(rope, self.stretch, keep, wavelengths=self.blend == "wavelength")
        return Frequencies(clipped(rope, inv_freq, self.clip), self.attention_scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        if self.ramp != "index" or self.blend != "frequency" or self.clip is not None:
            return self.as_longrope(rope)
        above = math.nextafter(self.stretch, math.inf)  # where rounding alone keeps the product below the target
        parameters: dict[str, Any] = {
            "rope_type": "yarn",
            "rope_theta": rope.base,
            "factor": max(self.stretch, above, key=lambda factor: math.floor(factor * rope.trained_length)),
            "original_max_position_embeddings": rope.trained_length,
        }
        optional = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
        given = {name: getattr(self, name) for name in optional}
        return parameters | {name: value for name, value in given.items() if value != getattr(YaRN, name)}

    def for_latent_attention(self) -> YaRN:
        plain = self.attention_factor is None and self.mscale is None and self.clip is None
        if not plain or self.ramp != "index" or self.blend != "frequency":  # other forms are stored without mscale
            return self
        return replace(self, mscale=1.0, mscale_all_dim=1.0)

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.stretch) + 1.0

    def _index_ramp(self, rope: RopeSpec) -> PerPair:
        """Compute the share of each frequency that is kept, linear in its index between the two thresholds."""
        slowest = rope.trained_length / (2 * math.pi)
        require(
            self.beta_slow <= slowest, "beta_slow", self.beta_slow, f"at most trained_length / 2 pi ({slowest:.4g})"
        )
        first, last = (index_that_turns(rope, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # These clamps and the guard are the authors' (the last index is rotary_dim - 1 although only half exist), and
        # published checkpoints were trained with them.
        first, last = max(first, 0), min(last, rope.rotary_dim - 1)
        if first == last:
            last += 0.001
        index = torch.arange(rope.rotary_dim // 2, **EXACT)
        return 1 - ((index - first) / (last - first)).clamp(0, 1)
