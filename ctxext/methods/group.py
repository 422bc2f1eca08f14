"""Neighbouring positions that share a learned row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ctxext.methods.base import Rows, TableMethod
from ctxext.methods.formulas import EXACT


@dataclass(frozen=True, kw_only=True)
class Group(TableMethod):
    """Let neighbouring positions share one learned row, as many as the factor.

    Pick it to compare with ``pi``: every row is one that the weights know, and the order of distant tokens is kept.
    The order inside a group is lost, in short texts too. Without training the authors saw no clear difference.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Where it is not a whole number, groups differ
            in size by one.

    Source: Zhu et al., arXiv:2404.12096, section 4.1 (grouped positions). Authors' code: dwzhu-pku/LongEmbed@033dc4a,
        src/encoder_model.py.
    """

    name = "group"
    summary = "neighbouring positions share a learned row"
    source = "arXiv:2404.12096"

    def rows(self, trained: int, target: int) -> Rows:
        return (torch.arange(target, device="cpu") * trained // target)[:, None], torch.ones(target, 1, **EXACT)
