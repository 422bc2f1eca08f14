"""Run by test_step in its own process, in Triton's interpreter: errors of the kernels of a step, as JSON."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from ctxext.kernels import _step_kernel as step_kernel
from ctxext.kernels.pieces import RotationForm
from ctxext.kernels.regions import HIDDEN
from tests.referee import twin

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Dimensions of a head, those of a value, and pairs that rotate: all of a head, a part, odd numbers, latent attention.
WIDTHS = [(32, 32, 16), (64, 64, 32), (128, 128, 64), (64, 32, 8), (48, 32, 16), (40, 24, 12), (96, 64, 16)]
WIDTHS += [(80, 80, 40)]
CHOICES: dict[str, list[Any]] = {
    "dtype": [*DTYPES],
    "pieces": [1, 2, 3],
    "tokens": [1, 3, 8],
    "heads": [(4, 4), (4, 2), (8, 2), (6, 1)],
    "width": WIDTHS,
    "slots": [7, 63, 129, 150, 200],
    "softcap": [None, 5.0, 50.0],
    "settled": [0, 0.3],
    **{
        name: [False, True] for name in ("interleaved", "tail", "sinks", "padded", "blind", "turned", "spread", "split")
    },
}


def drawn(seed: int) -> dict[str, Any]:
    """Return the setting of one seed; the first choices take turns, the others are drawn."""
    draw = random.Random(seed)
    setting = {name: draw.choice(choices) for name, choices in CHOICES.items()}
    setting |= {
        "seed": seed,
        "dtype": [*DTYPES][seed % 3],
        "pieces": 1 + seed // 3 % 3,
        "tokens": [1, 3, 8][seed // 2 % 3],
        "width": WIDTHS[seed % len(WIDTHS)],
    }
    setting["biases"] = [draw.choice([0.0, 0.7, -math.log(4)]) for _ in range(setting["pieces"])]
    # Keys of the last piece are rotated, and perhaps those of others.
    setting["turned"] = [setting["turned"] and draw.random() < 0.5 for _ in setting["biases"][1:]] + [setting["turned"]]
    setting["settled"] = int(setting["settled"] * setting["slots"]) if setting["turned"][-1] else 0
    return setting


class Case:
    """The tensors of a setting; keys and values that no query sees are not numbers."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting, generator = setting, torch.Generator().manual_seed(setting["seed"])
        (width, values, self.pairs), (heads, key_heads) = setting["width"], setting["heads"]
        tokens, slots, pieces = setting["tokens"], setting["slots"], setting["pieces"]
        rows = 2 if setting["padded"] else 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        # Tokens lie before heads in memory, as projections give them.
        shapes = (tokens, heads, width), (slots, key_heads, width), (slots, key_heads, values)
        q, k, v = (normal(2, *shape).to(DTYPES[setting["dtype"]]).transpose(1, 2) for shape in shapes)
        self.q = q * 1.5
        self.sinks = normal(heads) if setting["sinks"] else None
        self.query_angles = normal(2 if setting["spread"] else 1, pieces, tokens, self.pairs) * 3
        self.key_angles = normal(rows, slots, self.pairs) * 3 if setting["turned"][-1] else None
        # The nearest keys are those of the first piece, and so on; the last slots hold nothing yet.
        filled = max(tokens, slots - slots // 5)
        distance = torch.arange(filled - tokens, filled)[:, None] - torch.arange(slots)
        piece = (distance * pieces // filled).clamp(max=pieces - 1)
        piece[:, : setting["settled"]] = pieces - 1  # only a piece with rotated keys reads those that are settled
        self.where = piece.masked_fill(distance < 0, HIDDEN).to(torch.uint8)
        self.where = self.where.repeat(rows, key_heads if setting["split"] else 1, 1, 1)
        if setting["split"]:  # every second key head has no first piece
            odd = self.where[:, 1::2]
            odd[odd == 0] = HIDDEN
        if setting["padded"]:
            self.where[-1, :, :, : slots // 4] = HIDDEN
        if setting["blind"]:
            self.where[0, :, 0] = HIDDEN
        hidden = (self.where == HIDDEN).all(2).expand(2, -1, -1)[..., None]
        self.k, self.v = (x.masked_fill(hidden, math.nan) for x in (k, v))

    def kernels(self) -> Tensor:
        """Return the output of the kernels."""
        return self._attended(step_kernel.attend_rows, self.q, self.k, self.v)

    def truth(self) -> Tensor:
        """Return the output in float64, by the kernels' twin."""
        return self._attended(twin.attend_rows, *(x.nan_to_num().double() for x in (self.q, self.k, self.v)))

    def _attended(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        setting, form = self.setting, RotationForm(self.setting["interleaved"], self.setting["tail"])
        turns = [None if x is None else (x.cos(), x.sin()) for x in (self.query_angles, self.key_angles)]
        how = {"scale": self.q.shape[-1] ** -0.5, "form": form, "settled": setting["settled"]}
        how |= {"softcap": setting["softcap"], "sinks": self.sinks}
        return attend(*tensors, self.where, *turns, tuple(setting["turned"]), tuple(setting["biases"]), **how)


def error(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference, in parts of the norm of the right one."""
    return float((found.double() - right).norm() / right.norm().clamp(min=1e-30))


def widen_bfloat16() -> None:
    """Mend the interpreter of Triton 3.9, whose ``dot`` multiplies the bits of bfloat16 numbers as integers."""
    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain(self, a, b, *others)

    InterpreterBuilder.create_dot = create_dot


def measured(seed: int) -> dict[str, Any]:
    """Return the setting of a seed with the error of the kernels in the last places of a dtype, and what else holds."""
    case = Case(drawn(seed))
    right, found = case.truth(), case.kernels()
    blind = (case.where == HIDDEN).all(-1, keepdim=True)
    shared = found.shape[1] // blind.shape[1]
    blind = blind.repeat_interleave(shared, 1).expand_as(found)
    return case.setting | {
        "places": error(found, right) / torch.finfo(case.q.dtype).eps,
        "dtype of output": str(found.dtype).removeprefix("torch."),
        "repeats": torch.equal(found, case.kernels()) if seed < 3 else True,
        "blind is 0": bool((found[blind] == 0).all()),
        "blind queries": int(blind.sum()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    widen_bfloat16()
    step_kernel.PROGRAMS = 8  # so that a program has several blocks
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(measured(seed)))
