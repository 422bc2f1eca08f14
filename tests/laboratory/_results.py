"""Results of made-up numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctxext.laboratory.result import LabReading, LabResult, blocks_of

BLOCKS = len(blocks_of(64)) - 1
SEEDS, WINDOWS = 3, 10


def noise(*shape: int, seed: int = 0, size: float = 0.01) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nested(values: Tensor) -> Any:
    return tuple(nested(one) if one.ndim else one.item() for one in values)


def reading(task: str, name: str, scores: Tensor, kind: str = "encoding", **more: Any) -> LabReading:
    """What a subject, or one with an extension, came to in a task."""
    subject, _, extension = name.partition(" + ")
    cost = {"parameters": 1, "steps": 1, "seconds": 1.0, "seeds": tuple(range(SEEDS))}
    measured = {"scores": nested(scores), "truncated": (), "order": ()} | more
    return LabReading(task=task, subject=subject, kind=kind, extension=extension, **cost, **measured)


def of_text(
    name: str, loss: float, *, order: float = 0.5, truncated: float = 9.0, size: float = 0.01, seed: int = 0
) -> LabReading:
    more = {"truncated": nested(truncated + noise(SEEDS, WINDOWS, 3, seed=seed + 1))}
    more["order"] = nested(order + noise(SEEDS, WINDOWS, seed=seed + 2))
    scores = loss + noise(SEEDS, WINDOWS, BLOCKS, seed=seed, size=size)
    return reading("text", name, scores, **({} if " + " in name else more))


def of_parity(name: str, inside: float, beyond: float, *, kind: str = "encoding") -> LabReading:
    shares = torch.tensor([inside, inside, beyond, beyond, beyond]).double()
    return reading("parity", name, shares + noise(SEEDS, WINDOWS, 5), kind)


def result_of(*readings: LabReading) -> LabResult:
    rest: dict[str, Any] = {"documents": (), "text_sha256": "", "seconds": 1.0, "provenance": {}}
    return LabResult(preset="quick", settings={"length": 64}, readings=readings, **rest)
