"""Run by test_real_flash in its own process: compile the kernels of flash-attn 4 for calls of ctxext, without a GPU.

    python -m tests.kernels.flash4_program sm_90        # or sm_100; prints what came of each call, as JSON

The package compiles by what it reads of fake tensors. Three answers of a driver are put in: a guard of the current
device, the number of processors, and of autograd's engine, which wants a device, the one node that the package writes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ctxext.kernels import Call, Layout, base
from ctxext.kernels.blocks import PartRule
from ctxext.kernels.flash import INSTALLED, Flash4
from tests._fake_cuda import load_guard

CAUSAL, CHUNK, STEP = Layout.causal(2, 128), Layout.causal(2, 64, 128), Layout.causal(2, 1, 300)
PACKED = Layout.packed([60, 1, 67])
CALLS: dict[str, tuple[tuple[int, int, int, int], Layout, dict[str, Any]]] = {
    # (width of keys, of values, heads, of keys), layout, and what else is asked for
    "causal": ((64, 64, 4, 2), CAUSAL, {}),
    "ALiBi": ((64, 64, 4, 2), CAUSAL, {"biased": True}),
    "ALiBi at 128": ((128, 128, 4, 2), CAUSAL, {"biased": True}),
    "window": ((64, 64, 4, 2), CAUSAL, {"window": 20}),
    "soft cap at 256": ((256, 256, 4, 2), CAUSAL, {"softcap": 30.0}),
    "packed": ((64, 64, 4, 2), PACKED, {}),
    "packed ALiBi": ((80, 80, 4, 2), PACKED, {"biased": True}),
    "step": ((128, 128, 8, 2), STEP, {}),
    "step ALiBi": ((64, 64, 8, 8), STEP, {"biased": True}),
    "both ways": ((64, 64, 4, 2), CAUSAL.both_ways, {}),
    "latent": ((192, 128, 4, 4), CAUSAL, {}),
    "part": ((128, 128, 4, 2), CHUNK, {"part": True}),
    "part with a window": ((128, 128, 4, 2), CHUNK, {"part": True, "window": 20}),
    "latent part": ((192, 128, 4, 4), CAUSAL, {"part": True}),
    "gradients": ((64, 64, 4, 2), CAUSAL, {"training": True}),
    "gradients of ALiBi": ((64, 64, 4, 2), CAUSAL, {"training": True, "biased": True}),
    "gradients in a window": ((64, 64, 4, 2), PACKED, {"training": True, "window": 20}),
    "gradients under a soft cap": ((96, 96, 4, 2), CAUSAL, {"training": True, "softcap": 30.0}),
    "gradients of a part": ((64, 64, 4, 2), CAUSAL, {"training": True, "part": True}),
}


def own_nodes(node: Any) -> list[Any]:
    """The nodes of the package in a graph of gradients."""
    written = getattr(node, "_forward_cls", type(node))  # the class that a Function's node was made of
    found = [node] if written.__module__.startswith("flash_attn") else []
    return found + [each for child, _ in node.next_functions if child is not None for each in own_nodes(child)]


def compiled(widths: tuple[int, int, int, int], layout: Layout, asked: dict[str, Any]) -> str:
    """Compile one call and its gradients, and return ``compiled`` or why the backend refuses it."""
    dim, value_dim, heads, kv_heads = widths
    training, part = asked.get("training", False), asked.get("part", False)
    layout = layout.to(torch.device("cuda:0"))

    def tensor(of: int, tokens: int, width: int) -> Tensor:
        shape = (layout.batch, tokens, of, width)
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda:0", requires_grad=training)
        return made.transpose(1, 2)

    queries, keys = layout.query_length, layout.key_length
    q, k, v = tensor(heads, queries, dim), tensor(kv_heads, keys, dim), tensor(kv_heads, keys, value_dim)
    slopes = torch.empty(heads, dtype=torch.float32, device="cuda:0") if asked.get("biased") else None
    how = {"scale": 0.1, "window": asked.get("window"), "softcap": asked.get("softcap")}
    call = Call.of(q, k, v, layout, slopes=slopes, lse=part, **how)
    reason = Flash4().refuses(call.need)
    if reason is not None:
        return reason
    found = Flash4().with_lse(q, k, v, PartRule(causal=True, **how)) if part else (Flash4().attend(call),)
    assert found[0].shape == (layout.batch, heads, queries, value_dim)
    if part:
        assert found[1].shape == (layout.batch, heads, queries)
    if training:
        nodes = own_nodes(found[0].grad_fn)
        assert nodes
        for node in nodes:
            node.apply(*gradients(node))
    return "compiled"


def gradients(node: Any) -> list[Tensor]:
    """What arrives at a node: as its outputs, which its metadata tell."""
    return [torch.empty(tuple(of.shape), dtype=of.dtype, device="cuda:0") for of in node._input_metadata]


def main(target: str) -> dict[str, str]:
    """Compile all calls for a target."""
    import cutlass.utils

    class Device:
        """The processors of an H100."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: 132

    cutlass.utils.HardwareInfo = Device
    with tempfile.TemporaryDirectory() as folder:
        load_guard(Path(folder))
    major = int(target.removeprefix("sm_")) // 10
    INSTALLED["flash4"] = True
    base.capability_of = lambda device: (major, 0)
    told = {}
    for name, (widths, layout, asked) in CALLS.items():
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.set_grad_enabled(asked.get("training", False)),
            warnings.catch_warnings(action="ignore"),
        ):
            told[name] = compiled(widths, layout, asked)
    from flash_attn.cute import interface

    passes = {"forward": interface._flash_attn_fwd, "backward": interface._flash_attn_bwd}
    return told | {name: f"{len(function.compile_cache.cache)}" for name, function in passes.items()}


if __name__ == "__main__":
    arch = sys.argv[1]
    os.environ |= {"FLASH_ATTENTION_ARCH": arch, "CUTE_DSL_ARCH": f"{arch}a", "FLASH_ATTENTION_NUM_SMS": "132"}
    print(json.dumps(main(arch)))
