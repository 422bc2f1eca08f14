"""Positions of two digits, made of learned rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from ctxext.errors import InvalidParameterError
from ctxext.methods.base import Rows, TableMethod
from ctxext.methods.parameters import Range, require


@dataclass(frozen=True, kw_only=True)
class Hierarchical(TableMethod):
    """Read a position as two digits in base trained_length, and move the row of the second by the row of the first.

    Pick it where short texts must stay as they are: the first trained_length rows are unchanged, every later position
    has a row of its own, and the squared trained length can be reached. Rows beyond the trained length are sums that
    the weights never saw, so that long texts need some training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1, and at most trained_length.
        alpha: share of the first digit, between 0 and 1, not 0.5 (with which two digits could be exchanged). The
            smaller it is, the nearer are rows that are a trained length apart.

    Raises:
        InvalidParameterError: from ``rows``, for a target beyond the squared trained length.

    Source: Su, kexue.fm/archives/7947. Authors' code: bojone/bert4keras@c1ae0dc, bert4keras/layers.py
        (PositionEmbedding, hierarchical).
    """

    name = "hierarchical"
    summary = "keep the learned rows, move them for each further window"
    source = "kexue.fm/archives/7947"

    alpha: Annotated[float, Range(above=0, below=1)] = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha != 0.5, "alpha", self.alpha, "other than 0.5, with which two digits could be exchanged")

    def rows(self, trained: int, target: int) -> Rows:
        if target > trained**2:
            raise InvalidParameterError(
                f"Method {self.name!r} reaches {trained**2:,} positions with two digits of {trained:,} learned rows, "
                f"found a target of {target:,}. Take a target of at most that, or method 'pi' or 'tile'."
            )
        place = torch.arange(target, device="cpu")
        window, within = place // trained, place % trained
        # alpha u_window + (1 - alpha) u_within with u_k = (p_k - alpha p_0) / (1 - alpha), multiplied out.
        share = (window > 0).double() * (self.alpha / (1.0 - self.alpha))
        indices = torch.stack([within, window, torch.zeros_like(place)], dim=1)
        return indices, torch.stack([torch.ones_like(share), share, -share], dim=1)
