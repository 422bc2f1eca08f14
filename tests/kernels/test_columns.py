"""The columns are the bias: the bound of their docstring, at up to 128K tokens, in every precision."""

from __future__ import annotations

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.kernels import Layout
from ctxext.kernels.columns import COLUMNS, HALF_RANGE, alibi_columns, layout_columns
from ctxext.kernels.reference import Reference
from ctxext.kernels.sdpa import Sdpa

SCALE = 64**-0.5
SLOPES = torch.tensor([2**-0.5, 0.25, 2.0**-8], dtype=torch.float64)
BITS = {torch.bfloat16: 32, torch.float16: 44, torch.float32: 44}


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("length", [1024, 131072])
def test_inner_product_is_the_bias_up_to_the_stated_bound(dtype: torch.dtype, length: int) -> None:
    """Exact arithmetic on the columns: what is left is only what the pieces cannot hold."""
    places = torch.linspace(0, length - 1, 97).long()[None]
    options = {"scale": SCALE, "dtype": dtype, "origin": length // 2}
    queries = alibi_columns(places, SLOPES, side="query", **options).double()
    keys = alibi_columns(places, SLOPES, side="key", **options).double()
    bias = SCALE * queries @ keys.transpose(-1, -2)
    right = -SLOPES[:, None, None] * (places[0][:, None] - places[0][None, :])
    bound = 2 * SLOPES * (length // 2) * 2.0 ** -BITS[dtype]
    if dtype == torch.float16:  # pieces end at 2^-25 below
        bound = bound + 2 * SCALE * HALF_RANGE * 2.0**-25
    assert ((bias[0] - right).abs() <= bound[:, None, None] * (1 + 1e-9)).all()
    assert queries.shape[-1] == COLUMNS
    assert bias.diagonal(dim1=-2, dim2=-1).abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("length", [2048, 131072])
def test_attention_is_as_exact_as_with_a_dense_float32_bias(dtype: torch.dtype, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 6, 64, generator=generator).to(dtype)
    k, v = (torch.randn(1, 3, length, 64, generator=generator).to(dtype) for _ in range(2))
    places = torch.linspace(length // 2, length - 1, 6).long()[None]
    layout = Layout.of(places, torch.arange(length)[None])
    right = Reference()(q.double(), k.double(), v.double(), layout, scale=SCALE, slopes=SLOPES)
    dense = Sdpa(dense_rows=6)(q, k, v, layout, scale=SCALE, slopes=SLOPES)
    columns = Sdpa(dense_rows=0)(q, k, v, layout, scale=SCALE, slopes=SLOPES)
    for head in range(3):
        fair = (dense[:, head].double() - right[:, head]).norm()
        assert (columns[:, head].double() - right[:, head]).norm() <= 2 * fair


def test_an_offset_of_all_positions_changes_nothing() -> None:
    """Centring is exact in integers, so positions may start anywhere."""
    near, far = (Layout.of(torch.arange(64)[None] + at, torch.arange(64)[None] + at) for at in (0, 10**9))
    columns = (layout_columns(x, SLOPES, scale=SCALE, dtype=torch.bfloat16) for x in (near, far))
    for one, other in zip(*columns, strict=True):
        assert torch.equal(one, other)


def test_shards_build_the_columns_of_the_whole() -> None:
    places = torch.arange(64)[None]
    order = torch.cat([torch.arange(0, 16), torch.arange(48, 64)])
    options = {"scale": SCALE, "dtype": torch.bfloat16, "side": "key", "origin": 32}
    whole = alibi_columns(places, SLOPES, **options)
    assert torch.equal(alibi_columns(places[:, order], SLOPES, **options), whole[:, :, order])


def test_what_no_token_stands_at_is_finite() -> None:
    documents = torch.tensor([[-1, 0, 0]])
    places = torch.tensor([[2**62, 0, 1]])
    layout = Layout.of(places, places, documents, documents)
    for columns in layout_columns(layout, SLOPES, scale=SCALE, dtype=torch.float16):
        assert columns.isfinite().all()


def test_half_range_is_checked() -> None:
    places = torch.tensor([[0, 10**8]])
    with pytest.raises(InvalidParameterError, match=r"float16 ALiBi columns reach \d+ tokens .* Use bfloat16"):
        layout_columns(Layout.of(places, places), SLOPES, scale=SCALE, dtype=torch.float16)


def test_unknown_dtype() -> None:
    with pytest.raises(InvalidParameterError, match=r"float8_e4m3fn"):
        alibi_columns(torch.arange(4)[None], SLOPES, scale=1.0, dtype=torch.float8_e4m3fn, side="key")
