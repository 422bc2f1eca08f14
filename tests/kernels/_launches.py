"""Launches of the kernels of a step, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ctxext.kernels.pieces import RotationForm

LLAMA = RotationForm()
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TYPES |= {torch.uint8: "*u8", torch.int64: "*i64"}


class Launches(list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]):
    """What is launched instead of kernels: each kernel, its grid, its arguments and its constants."""

    def of(self, kernel: Any) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **constants: self.append((kernel, grid, args, constants))

        return Kernel()


def step(
    dtype: torch.dtype = torch.bfloat16,
    *,
    width: int = 128,
    values: int = 128,
    pairs: int = 64,
    heads: tuple[int, int] = (32, 8),
    tokens: int = 1,
    slots: int = 4096,
    form: RotationForm = LLAMA,
    batch: int = 1,
    near: int = 0,
) -> dict[str, Any]:
    """Return the arguments of a step in two pieces, with everything that a kernel can do, and no memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    far = 2 if near else heads[1]  # key heads that hold all slots; the others hold the ``near`` slots behind these
    others = [empty(batch, heads[1] - far, near, each, dtype=dtype) for each in (width, values)]
    return {
        "q": empty(batch, heads[0], tokens, width, dtype=dtype),
        "k": empty(batch, far, slots, width, dtype=dtype),
        "v": empty(batch, far, slots, values, dtype=dtype),
        "near": (*others, empty(heads[1], dtype=torch.int64)) if near else None,
        "where": empty(1, 2 if near else 1, tokens, slots + near, dtype=torch.uint8),
        "query_turns": (empty(1, 2, tokens, pairs), empty(1, 2, tokens, pairs)),
        "key_turn": (empty(1, slots, pairs), empty(1, slots, pairs)),
        "turned": (False, True),
        "biases": (0.0, -1.0),
        "scale": 0.1,
        "form": form,
        "softcap": 30.0,
        "sinks": empty(heads[0]),
    }


def programs(
    launches: Launches, target: int | str, as_: Sequence[str] = ("i32", "fp32")
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the programs that are launched, compiled for a target, and the constants of each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, _, args, constants in launches:
        options = {"num_warps": constants.pop("num_warps")} if "num_warps" in constants else {}
        signature = {name: _type(value, *as_) for name, value in zip(kernel.arg_names, args, strict=False)}
        fixed = [at for at, parameter in enumerate(kernel.params[: len(args)]) if not parameter.do_not_specialize]
        numbers = [16 if isinstance(value, torch.Tensor) else value for value in args]
        aligned = {(at,): [["tt.divisibility", 16]] for at in fixed if isinstance(numbers[at], int)}
        aligned = {at: how for at, how in aligned.items() if numbers[at[0]] % 16 == 0}
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
        gpu = GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64)
        yield triton.compile(source, gpu, options), constants


def _type(value: torch.Tensor | int | float, integer: str, number: str) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return integer if isinstance(value, int) else number
