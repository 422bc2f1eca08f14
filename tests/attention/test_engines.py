"""The engines of remapped attention: each that admits a call computes the same, and few ways lead through them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxext.attention.attend import LayerCall
from ctxext.attention.engines import ENGINES, OWN, PIECES, STEP, RemapAttend
from ctxext.caches.call import holder_of
from ctxext.caches.held import HeldLayer
from tests.referee.point import REMAPS, covering
from tests.referee.walk import TOLERANCE, verdict

NAMES = {OWN: "own", STEP: "step", PIECES: "pieces"}
FEWEST = 300
"""Calls in which two engines are compared, at least."""


def state(held: HeldLayer | None) -> str:
    if held is None:
        return "no growing layer"
    if held.near is not None:
        return "two kinds of heads"
    return "whole" if held.is_whole else "rotated" if held.turned else "few keys"


def alone(by: RemapAttend, layer: LayerCall, held: HeldLayer | None, run: Callable[..., Tensor]) -> Tensor:
    """What an engine computes from a copy of the cached keys, which it may change."""
    held = copy.deepcopy(held)
    return run(by, layer if held is None else layer._replace(k=held.keys, v=held.values), held)


def test_each_engine_that_admits_a_call_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the calls of the referee by day, on the paths of a CPU and of a GPU."""
    outside, ways, compared = RemapAttend._outside, set[tuple[str, str]](), 0

    def each(self: RemapAttend, layer: LayerCall) -> Any:
        nonlocal compared
        held = holder_of(layer.k)
        fits = [engine for engine in ENGINES if engine.why_not(self, layer, held) is None]
        ways.add((NAMES[fits[0]], state(held)))
        documents = layer.mask.layout.query_documents
        # Padding has no output.
        padding = torch.tensor(False) if documents is None else (documents < 0)[:, None, :, None]
        outs = [alone(self, layer, held, engine.run).double().masked_fill(padding, 0) for engine in fits]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layer.q.dtype
        most = TOLERANCE[str(dtype)[6:]] * float(outs[0].abs().max())
        for out in outs[1:]:
            compared += 1
            assert float((out - outs[0]).abs().max()) <= most
        return outside(self, layer)

    monkeypatch.setattr(RemapAttend, "_outside", each)
    points = [point for point in covering() if point.method in REMAPS and point.mode != "grad"]
    assert [verdict(point) for point in points] == [None] * len(points)
    assert compared > FEWEST
    assert 3 < len(ways) <= 16, ways
