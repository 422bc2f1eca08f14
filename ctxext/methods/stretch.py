"""A table of positions that is stretched behind its first rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from ctxext.errors import InvalidParameterError
from ctxext.methods.base import Rows, TableMethod
from ctxext.methods.formulas import rows_between
from ctxext.methods.parameters import MOST_TOKENS, Range


@dataclass(frozen=True, kw_only=True)
class Stretch(TableMethod):
    """Keep the first learned rows as they are, and interpolate between the others.

    Pick it for a text encoder whose texts were mostly shorter than its window (CLIP's): the first rows, which are the
    best trained, stay exact, and only the later ones are shared out. It wants fine-tuning.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Rows behind ``keep`` are stretched by more:
            Long-CLIP's 77 to 248 tokens is ``target_length=248``.
        keep: rows that stay. Tokens, at least 0, at most trained_length - 2.

    Raises:
        InvalidParameterError: from ``rows``, if ``keep`` leaves less than two rows to interpolate between.

    Source: Zhang et al., arXiv:2403.15378, section 3.1. Authors' code: beichenzbc/Long-CLIP@3966af9,
        model/longclip.py (load_from_clip); rows behind the last trained one continue its last step, as there.
    """

    name = "stretch"
    summary = "keep the first learned rows, interpolate between the others"
    source = "arXiv:2403.15378"

    keep: Annotated[int, Range(least=0, most=MOST_TOKENS, of="rows")] = 20

    def rows(self, trained: int, target: int) -> Rows:
        if self.keep > trained - 2:
            raise InvalidParameterError(
                f"keep={self.keep} leaves less than two of the {trained:,} learned rows to interpolate between. Take "
                f"keep={max(trained - 2, 0)} or less."
            )
        place = torch.arange(target, device="cpu")
        behind = (place - self.keep).clamp(min=0) * (trained - self.keep)  # in units of 1 / step, so unrounded
        step = target - self.keep
        lower = (behind // step).clamp(max=trained - self.keep - 2)
        rest = (behind - lower * step).double() / step
        kept = place < self.keep
        return rows_between(torch.where(kept, place, self.keep + lower), torch.where(kept, 0.0, rest), trained)
