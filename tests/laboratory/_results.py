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


def of_text(
    name: str, loss: float, *, order: float = 0.5, truncated: float = 9.0, size: float = 0.01, seed: int = 0
) -> LabReading:
    subject, _, extension = name.partition(" + ")
    return LabReading(
        task="text",
        subject=subject,
        kind="encoding",
        extension=extension,
        parameters=1,
        steps=1,
        seconds=1.0,
        seeds=tuple(range(SEEDS)),
        scores=nested(loss + noise(SEEDS, WINDOWS, BLOCKS, seed=seed, size=size)),
        truncated=() if extension else nested(truncated + noise(SEEDS, WINDOWS, 3, seed=seed + 1)),
        order=() if extension else nested(order + noise(SEEDS, WINDOWS, seed=seed + 2)),
    )


def of_parity(name: str, inside: float, beyond: float, *, kind: str = "encoding") -> LabReading:
    shares = torch.tensor([inside, inside, beyond, beyond, beyond]).double()
    scores = shares + noise(SEEDS, WINDOWS, 5)
    subject, _, extension = name.partition(" + ")
    return LabReading(
        task="parity",
        subject=subject,
        kind=kind,
        extension=extension,
        parameters=1,
        steps=1,
        seconds=1.0,
        seeds=tuple(range(SEEDS)),
        scores=nested(scores),
        truncated=(),
        order=(),
    )


def result_of(*readings: LabReading) -> LabResult:
    return LabResult(
        preset="quick",
        settings={"length": 64},
        readings=readings,
        documents=(),
        text_sha256="",
        seconds=1.0,
        provenance={},
    )
