"""A near band merged with plain attention beyond it, against all pairs written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxext.kernels import Call, Layout
from ctxext.laboratory import near_far
from ctxext.laboratory.scores import PairScore
from tests._encodings import attended

SCALE, BAND = 0.4, 5


class NearScore(PairScore):
    """A number by head and distance, the last of them for all far keys; with ``q`` also times the query's first."""

    length = 16

    def __init__(self, table: Tensor, q: Tensor | None = None, *, forbidden: bool = False) -> None:
        self.table, self.q, self.forbidden = table, q, forbidden
        self.weights, self.floats, self.far_from = (table,), 2 * table.shape[0], table.shape[1] - 1

    def rows(self, queries: slice) -> Tensor:
        assert not self.forbidden, "all pairs were asked for"
        distances = torch.arange(self.length)[queries, None] - torch.arange(self.length)
        found = self.table[:, distances.clamp(0, self.table.shape[1] - 1)][None]
        return found if self.q is None else found * self.q[:, :, queries, :1].to(found.dtype)

    def above_far(self) -> Tensor:
        above = (self.table[:, :-1] - self.table[:, -1:])[None, :, None]
        return above if self.q is None else above * self.q[..., :1].to(above.dtype)


def case(length: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(length)
    tensors = [torch.randn(2, heads, length, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    wide = torch.promote_types(dtype, torch.float32)
    return tensors, torch.randn(4, BAND + 1, dtype=wide, requires_grad=True)


def written_out(tensors: list[Tensor], table: Tensor, by_query: bool) -> Tensor:
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    length = q.shape[2]
    distances = torch.arange(length)[:, None] - torch.arange(length)
    added = table.double()[:, distances.clamp(0, BAND)]
    scores = SCALE * q @ k.transpose(-1, -2) + (added * q[..., :1] if by_query else added)
    return scores.masked_fill(distances < 0, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("length", [BAND + 1, 13, 40])
def test_equals_all_pairs_forward_and_backward(length: int, by_query: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_far, "QUERIES", 6)  # several stretches of the band, the last of them shorter
    tensors, table = case(length)
    score = NearScore(table, tensors[0] if by_query else None, forbidden=True)
    layout = Layout.causal(2, length)
    up = torch.randn(2, 4, length, 8, dtype=torch.float64)
    found = attended("sdpa", score, *tensors, layout, scale=SCALE)
    right = written_out(tensors, table, by_query)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    wanted = [*tensors, table]
    for one, other in zip(torch.autograd.grad(found, wanted, up), torch.autograd.grad(right, wanted, up), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    with torch.no_grad():
        found = attended("sdpa", score, *tensors, layout, scale=SCALE)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_is_as_precise_as_its_dtype(dtype: torch.dtype, close: float) -> None:
    tensors, table = case(600, dtype)
    found = attended("sdpa", NearScore(table, forbidden=True), *tensors, Layout.causal(2, 600), scale=SCALE)
    right = written_out(tensors, table, by_query=False)
    assert found.dtype == dtype
    assert (found.double() - right).abs().max() <= close
    up = torch.randn(right.shape, dtype=torch.float64)
    wanted = [*tensors, table]
    theirs = torch.autograd.grad(right, wanted, up)
    for one, other in zip(torch.autograd.grad(found, wanted, up.to(dtype)), theirs, strict=True):
        assert (one.double() - other.double()).abs().max() <= close * other.abs().max()


@pytest.mark.parametrize("window", [None, 300], ids=["near and far", "written out"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 40])
def test_large_scores_are_as_precise_as_small_ones(size: float, dtype: torch.dtype, window: int | None) -> None:
    """Products beyond what float16 holds, and far beyond what bfloat16 tells apart."""
    tensors, table = case(300, dtype)
    tensors = [x.detach() * by for x, by in zip(tensors, (size, size, 1), strict=True)]
    score = NearScore(table, forbidden=window is None)
    score.length = 300
    found = attended("sdpa", score, *tensors, Layout.causal(2, 300), scale=SCALE, window=window)
    assert (found.double() - written_out(tensors, table, by_query=False)).abs().max() <= 3e-2


def test_what_is_no_whole_text_with_far_keys_is_written_out() -> None:
    score = NearScore(torch.zeros(4, BAND + 1))
    asked: list[slice] = []
    rows = score.rows
    score.rows = lambda queries: asked.append(queries) or rows(queries)
    q, k, v = (torch.randn(1, heads, 16, 8) for heads in (4, 2, 2))
    layout = Layout.causal(1, 16)
    attended("sdpa", score, q, k, v, layout, scale=SCALE)
    assert not asked
    packed = Layout.packed([9, 7])
    for where, options in ((layout, {"window": 7}), (packed, {})):
        asked.clear()
        attended("sdpa", score, q, k, v, where, scale=SCALE, **options)
        assert asked
    short = Layout.causal(1, BAND)
    call = Call.of(q[:, :, :BAND], k[:, :, :BAND], v[:, :, :BAND], short, scale=SCALE)
    assert not near_far.has_far_keys(call, BAND)
