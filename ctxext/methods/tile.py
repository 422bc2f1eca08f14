"""A table of positions laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ctxext.methods.base import Rows, TableMethod
from ctxext.methods.formulas import EXACT


@dataclass(frozen=True, kw_only=True)
class Tiling(TableMethod):
    """Repeat the learned rows from the first on, as often as the target needs.

    Pick it for a masked model or an encoder that you will train further: every row is one that the weights know, texts
    of up to the trained length are computed exactly as before, and neighbours stay neighbours except where one copy
    ends and the next begins. Without training, tokens a whole trained length apart cannot be told apart.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.

    Source: Beltagy et al., arXiv:2004.05150, section 5. Authors' code: allenai/longformer@caefee6,
        scripts/convert_model_to_long.ipynb, which leaves the rows for padding unset and needs whole copies; here they
        are kept, and the last copy may end early.
    """

    name = "tile"
    summary = "repeat the learned rows from the first on"
    source = "arXiv:2004.05150"

    def rows(self, trained: int, target: int) -> Rows:
        return (torch.arange(target, device="cpu") % trained)[:, None], torch.ones(target, 1, **EXACT)
