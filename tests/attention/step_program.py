"""Run by test_step_kernel in its own process, in Triton's interpreter: the kernels of a step beside float64, as JSON."""

from __future__ import annotations

import json
import math
import random
import sys
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from ctxext.attention import step_kernel
from ctxext.attention.pieces import RotationForm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Dimensions of a head, those of a value, and pairs that rotate: whole, partial, odd, and latent heads.
WIDTHS = [
    (32, 32, 16),
    (64, 64, 32),
    (128, 128, 64),
    (64, 32, 8),
    (48, 32, 16),
    (40, 24, 12),
    (96, 64, 16),
    (80, 80, 40),
]
HEADS = [(4, 4), (4, 2), (8, 2), (6, 1)]


def drawn(seed: int) -> dict[str, Any]:
    """Return the setting of one seed: every value of a choice appears within a few consecutive seeds."""
    draw = random.Random(seed)
    pieces = 1 + (seed + 1) % 3
    turned = [pieces > 1 and (draw.random() < 0.3) for _ in range(pieces - 1)] + [draw.random() < 0.8]
    slots = draw.choice([7, 63, 129, 150, 200])
    return {
        "seed": seed,
        "dtype": [*DTYPES][seed % 3],
        "width": WIDTHS[seed % len(WIDTHS)],
        "heads": HEADS[seed % len(HEADS)],
        "tokens": [1, 3, 8, 2][seed // 2 % 4],
        "slots": slots,
        "interleaved": draw.random() < 0.4,
        "tail": draw.random() < 0.4,
        "turned": turned,
        "biases": [draw.choice([0.0, 0.7, -math.log(4)]) for _ in range(pieces)],
        "settled": draw.choice([0, slots // 3]) if turned[-1] else 0,
        "softcap": draw.choice([None, None, 5.0, 50.0]),
        "sinks": draw.random() < 0.4,
        "padded": draw.random() < 0.5,
        "blind": draw.random() < 0.3,
        "shared": draw.random() < 0.5,
    }


class Case:
    """The tensors of a setting; what nobody sees is not a number in keys and values."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting, generator = setting, torch.Generator().manual_seed(setting["seed"])
        (width, values, self.pairs), (heads, key_heads) = setting["width"], setting["heads"]
        tokens, slots, pieces, dtype = (
            setting["tokens"],
            setting["slots"],
            len(setting["turned"]),
            DTYPES[setting["dtype"]],
        )
        rows = 1 if setting["shared"] else 2

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        # Tokens before heads in memory, as projections give them.
        self.q, self.k, self.v = (
            (normal(2, length, count, size).to(dtype) * gain).transpose(1, 2)
            for length, count, size, gain in (
                (tokens, heads, width, 1.5),
                (slots, key_heads, width, 1),
                (slots, key_heads, values, 1),
            )
        )
        self.sinks = normal(heads) if setting["sinks"] else None
        self.query_angles = normal(rows, pieces, tokens, self.pairs) * 3
        self.key_angles = normal(rows, slots, self.pairs) * 3 if any(setting["turned"]) else None
        # The nearest keys are those of the first piece, and so on; later slots hold nothing yet.
        filled = max(tokens, slots - slots // 5)
        distance = torch.arange(filled - tokens, filled)[:, None] - torch.arange(slots)
        piece = (distance * pieces // max(filled, 1)).clamp(max=pieces - 1)
        where = piece.masked_fill(distance < 0, step_kernel.HIDDEN).expand(rows, -1, -1).clone()
        if setting["padded"]:
            where[-1, :, : slots // 4] = step_kernel.HIDDEN
        if setting["blind"]:
            where[0, 0] = step_kernel.HIDDEN
        if setting["settled"]:  # only a piece with rotated keys reads those that are settled
            where[:, :, : setting["settled"]].masked_fill_(where[:, :, : setting["settled"]] < pieces - 1, pieces - 1)
        self.where = where.to(torch.uint8)
        hidden = (where == step_kernel.HIDDEN).all(1).expand(2, -1)[:, None, :, None]
        self.k, self.v = (x.masked_fill(hidden, math.nan) for x in (self.k, self.v))

    def kernels(self) -> Tensor:
        """Return the output of the kernels."""
        setting, form = self.setting, RotationForm(self.setting["interleaved"], self.setting["tail"])
        turns = [None if x is None else (x.cos(), x.sin()) for x in (self.query_angles, self.key_angles)]
        how = {"scale": self.q.shape[-1] ** -0.5, "form": form, "settled": setting["settled"]}
        return step_kernel.attend_rows(
            *(self.q, self.k, self.v, self.where, *turns, tuple(setting["turned"]), tuple(setting["biases"])),
            **how,
            softcap=setting["softcap"],
            sinks=self.sinks,
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Compute naive attention in ``dtype``: all scores of every piece, and one softmax with the sink as a column."""
        setting, repeat = self.setting, self.q.shape[1] // self.k.shape[1]
        q, k, v = (x.nan_to_num().to(dtype) for x in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.full((*q.shape[:3], k.shape[2]), -math.inf, dtype=dtype)
        for piece, (turned, bias) in enumerate(zip(setting["turned"], setting["biases"], strict=True)):
            keys = k
            if turned:
                keys = torch.cat(
                    [k[:, :, : setting["settled"]], self._turned(k, self.key_angles)[:, :, setting["settled"] :]], 2
                )
            s = self._turned(q, self.query_angles[:, piece]) @ keys.mT * q.shape[-1] ** -0.5
            if setting["softcap"]:
                s = setting["softcap"] * torch.tanh(s / setting["softcap"])
            scores = torch.where(self.where[:, None] == piece, s + bias, scores)
        if self.sinks is None:
            empty = torch.full((*q.shape[:3], 1), torch.finfo(dtype).min, dtype=dtype)
        else:
            empty = self.sinks.to(dtype)[None, :, None, None].expand(*q.shape[:3], 1)
        return torch.cat([scores, empty], -1).softmax(-1)[..., :-1] @ v

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate ``[batch, heads, tokens, width]`` as complex numbers, computed in float64 and rounded to its dtype."""
        start = x.shape[-1] - 2 * self.pairs if self.setting["tail"] else 0
        wide = x[..., start : start + 2 * self.pairs].double()
        order = torch.arange(2 * self.pairs)
        order = order.view(-1, 2) if self.setting["interleaved"] else order.view(2, -1).T
        pairs = torch.view_as_complex(wide[..., order].contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones(()).double(), angles.double()[:, None]))
        result = x.clone()
        result[..., start + order] = turned.to(x.dtype)
        return result


def error(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference, in parts of the norm of the right one."""
    return float((found.double() - right).norm() / right.norm())


def widen_bfloat16() -> None:
    """Mend the interpreter of Triton 3.9, whose ``dot`` multiplies the bits of bfloat16 numbers as integers."""
    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain(self, a, b, *others)

    InterpreterBuilder.create_dot = create_dot


def measured(seed: int) -> dict[str, Any]:
    """Return the setting of a seed with the errors of kernels and of naive attention, and if two calls are equal."""
    case = Case(drawn(seed))
    right, plain, found = case.dense(torch.float64), case.dense(case.q.dtype), case.kernels()
    blind = (case.where == step_kernel.HIDDEN).all(-1).expand(2, -1)[:, None, :, None].expand_as(found)
    return case.setting | {
        "error": error(found, right),
        "plain": error(plain, right),
        "dtype of output": str(found.dtype).removeprefix("torch."),
        "repeats": torch.equal(found, case.kernels()) if seed < 3 else True,
        "blind is 0": bool((found[blind] == 0).all()),
        "blind queries": int(blind.sum()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    widen_bfloat16()
    step_kernel.PROGRAMS = 12  # so that a program has several blocks
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(measured(seed)))
