"""Positions by accumulated transitions, and a gate by which tokens are forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from ctxext.laboratory.encodings.path import PaTH


@dataclass(frozen=True, kw_only=True)
class PaTHFoX(PaTH):
    """Let every token transform the queries that reach over it, and say how much of what lies before it is forgotten.

    Pick it where ``path`` follows a state but reads badly beyond its training: in the paper the gate of ``fox`` on top
    of transitions reads longest. The cost: the cost of ``path``; and gates begin half open, so that a model that was
    trained with rotation begins by seeing little but the newest tokens. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Says how far the model is meant to read;
            neither transitions nor gates depend on it.
        rank: rank of the projection that makes directions, at least 1.
        strength: first value of every strength ``beta``, above 0 and below 2.

    Source: Yang et al., arXiv:2505.16381, section on PaTH-FoX. Authors' code: fla-org/flash-linear-attention@bc3b101,
        fla/layers/path_attn.py, use_forget_gate; fla/ops/path_attn/naive.py. As there, the sum over gates is multiplied
        by the scale of the scores, ``1 / sqrt(head_dim)``, which ``fox`` does not do.
    """

    name = "path_fox"
    summary = "path, and scores decay by learned forget gates between query and key"
    forgets = True
