"""The Triton kernels of remapped attention as plain torch functions, so that a CPU walks the paths of a GPU.

Each function has the arguments of its kernel's launcher and its contract, written from the docstring and held to the
kernel itself in Triton's interpreter (``test_referee``). ``on_a_gpu`` puts them in the kernels' place.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ctxext.kernels import pieces, step
from ctxext.kernels.regions import HIDDEN


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, tail: bool) -> Tensor:
    """Rotate the first or the last dimensions of ``x`` by angles ``[..., pairs]``, in float64."""
    wide = 2 * cos.shape[-1]
    start = x.shape[-1] - wide if tail else 0
    part = x[..., start : start + wide].double()
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())
    sides = (turned.real, turned.imag)
    new = torch.stack(sides, -1).flatten(-2) if interleaved else torch.cat(sides, -1)
    return torch.cat([x[..., :start].double(), new, x[..., start + wide :].double()], -1)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, tail: bool, back: bool) -> Tensor:
    """Twin of ``_turn_kernel.turn``."""
    return rotated(x, cos, -sin if back else sin, interleaved, tail).to(x.dtype)


def merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor, bias: float) -> None:
    """Twin of ``_merge_kernel.merge``."""
    both = torch.logaddexp(total_lse.double(), lse.double() + bias)
    share = (lse.double() + bias - both).exp().nan_to_num(0.0)[..., None]
    total.copy_(total.double() * (1 - share) + out.double() * share)
    total_lse.copy_(both)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: Tensor,
    query_turns: tuple[Tensor, Tensor],
    key_turn: tuple[Tensor, Tensor] | None,
    turned: tuple[bool, ...],
    biases: tuple[float, ...],
    *,
    scale: float,
    form: Any,
    settled: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    near: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Twin of ``_step_kernel.attend_rows``."""
    slots, how = where.shape[3], (form.interleaved, form.tail)
    group_of = torch.zeros(k.shape[1], dtype=torch.long)
    if near is not None:  # lay the slots of both kinds of heads beside each other, as ``where`` counts them
        near_k, near_v, places = near
        far = k.shape[2]
        wide_k, wide_v = (x.new_zeros(len(x), len(places), slots, x.shape[3]) for x in (k, v))
        for head, place in enumerate(places.tolist()):
            here, own = (slice(0, far), (k, v)) if place >= 0 else (slice(far, slots), (near_k, near_v))
            for wide, part in zip((wide_k, wide_v), own, strict=True):
                wide[:, head, here] = part[:, place if place >= 0 else -1 - place]
        k, v, group_of = wide_k, wide_v, (places < 0).long()
    where = where[:, group_of] if where.shape[1] == 2 and near is not None else where
    shared = q.shape[1] // k.shape[1]
    turned_k = k.double()
    if key_turn is not None:
        cos, sin = (side[:, None, :slots] for side in key_turn)
        length = cos.shape[2]
        turned_k = torch.cat([rotated(k[:, :, :length], cos, sin, *how), turned_k[:, :, length:]], 2)
        turned_k[:, :, :settled] = k[:, :, :settled].double()
    score = torch.full((*q.shape[:3], slots), -math.inf, dtype=torch.float64)
    belongs = where.repeat_interleave(shared if where.shape[1] > 1 else 1, 1)
    for number, (turns, bias) in enumerate(zip(turned, biases, strict=True)):
        queries = rotated(q, *(side[:, number][:, None] for side in query_turns), *how)
        keys = (turned_k if turns else k.double()).repeat_interleave(shared, 1)
        own_score = queries @ keys.transpose(2, 3) * scale
        own_score = own_score if softcap is None else softcap * torch.tanh(own_score / softcap)
        score = torch.where(belongs == number, own_score + bias, score)
    assert bool(((belongs == HIDDEN) | (belongs < len(turned))).all())
    if sinks is not None:
        score = torch.cat([score, sinks.double()[None, :, None, None].expand(*score.shape[:3], 1)], -1)
    weights = score.softmax(-1)[..., :slots].nan_to_num(0.0)
    return (weights @ v.double().repeat_interleave(shared, 1)).to(q.dtype)


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """Choose kernels on a CPU as on a GPU, and compute them by their twins."""
    with contextlib.ExitStack() as stack:
        for module in (pieces, step):
            stack.enter_context(mock.patch.object(module, "runs_triton", return_value=True))
        for name, twin in (
            ("_step_kernel.attend_rows", attend_rows),
            ("_turn_kernel.turn", turn),
            ("_merge_kernel.merge", merge),
        ):
            file, function = name.split(".")
            stack.enter_context(mock.patch.object(importlib.import_module(f"ctxext.kernels.{file}"), function, twin))
        yield
