"""Clipped RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ctxext.methods.base import RopeMethod
from ctxext.methods.formulas import as_longrope, clipped, plain_inv_freq
from ctxext.methods.parameters import Range
from ctxext.spec import Frequencies, RopeSpec


@dataclass(frozen=True, kw_only=True)
class Clipped(RopeMethod):
    """Slow the slowest frequencies to a stop, and leave the others as they were trained.

    Pick it to train on long texts: pairs that never completed a turn in the trained window then meet few angles that
    they have not seen. Without training it does not extend: at twice the window SmolLM2-135M lost 2 to 4 nats. The
    authors train with it after raising the base, which is ``abf`` with ``clip``; ``yarn`` and ``ntk`` have the
    parameter too. (They call it CoPE; ``cope`` is an older encoding of that name.)

    Args:
        factor: target_length / trained_length; says only which length the model is for, since the frequencies do not
            depend on it. Dimensionless, at least 1.
        clip: number of the slowest pairs that are slowed, from 2 to all: the first of them by nothing, the last to a
            stop, those between along half a wave of a cosine. The authors clip 20 of 64. "auto" clips the pairs that
            turn less than once in the trained window.

    Raises:
        InvalidParameterError: from ``frequencies``, if the model has fewer pairs, or fewer than two for "auto".

    Source: Li et al., arXiv:2602.05258. Authors' code: hrlics/CoPE@ed52ba5, modeling_cope.py. "auto": pull request 1387
        of ml-explore/mlx-lm.
    """

    name: ClassVar[str] = "clipped"
    summary: ClassVar[str] = "slow the slowest frequencies to a stop"
    source: ClassVar[str] = "arXiv:2602.05258"

    clip: Annotated[int | Literal["auto"], Range(least=2, of="pairs")] = "auto"

    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        return Frequencies(clipped(rope, plain_inv_freq(rope), self.clip))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return as_longrope(rope, self.frequencies(rope, rope.trained_length), self.factor)
