"""Let engines that ask for GPUs run on processes of a CPU, so that their arithmetic can be compared with one process's.

Nothing of theirs is replaced; two doors are opened. accelerate takes FSDP2 and context parallelism only if it believes
that its processes have an accelerator each. torch's ring attention is a template over any kernel that returns a
log-sum-exp; it is registered for the kernels of GPUs, here also for the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
OF_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
SEQUENCE = 2  # of [batch, heads, seq, head_dim]


def admit_processes() -> None:
    """Call it once accelerate's state exists and before an ``Accelerator`` does."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def admit_ring_attention() -> None:
    """Call it before ``context_parallel`` is entered."""
    ring.custom_ops[KERNEL.default] = _forward
    ring.custom_ops[BACKWARD.default] = _backward


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    query, key, value, dropout, causal = [*map(_local, args), 0.0, False][:5]
    options = {"is_causal": causal, "dropout_p": dropout, "scale": kwargs.get("scale")}
    found = ring._templated_ring_attention(
        mesh.get_group(), SEQUENCE, KERNEL, query=query, key=key, value=value, **options
    )
    return tuple(DTensor.from_local(part, mesh, [Shard(SEQUENCE)], run_check=False) for part in found[:2])


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[1].device_mesh
    given = dict(zip(OF_BACKWARD, map(_local, args[:8]), strict=True)) | {"scale": kwargs.get("scale")}
    found = ring._templated_ring_attention_backward(
        mesh.get_group(), SEQUENCE, _kernel_backward, grad_out_name="grad_out", **given
    )
    return tuple(DTensor.from_local(part, mesh, [Shard(SEQUENCE)], run_check=False) for part in found[:3])


def _kernel_backward(*, scale: float | None = None, **given: Any) -> Any:
    return BACKWARD(*(given[name] for name in OF_BACKWARD), scale=scale)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
