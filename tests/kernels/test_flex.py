"""The block mask, the window per head with its bound, and one real compilation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

from ctxext.kernels import Call, Layout, Need, flex
from ctxext.kernels.blocks import PartRule
from ctxext.kernels.flex import BLOCK, Flex, block_mask
from ctxext.kernels.reference import Reference
from tests.kernels import cases
from tests.kernels.cases import error

N = 5 * BLOCK - 40
SLOPES = torch.tensor([0.5, 2.0**-6], dtype=torch.float64)


def _keep(*starts: int) -> torch.Tensor:
    return torch.arange(N)[None] >= torch.tensor(starts)[:, None]


def _permuted() -> Layout:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))[None]
    return Layout.of(order, order)


LAYOUTS = {
    "causal": lambda: Layout.causal(2, N),
    "padded": lambda: Layout.padded(_keep(0, 200)),
    "packed": lambda: Layout.packed([100, 1, 300, N - 401]),
    "chunk": lambda: Layout.causal(1, 200, N),
    "static": lambda: Layout.cached(1, 130, N, filled=333),
    "permuted": _permuted,
}


def _blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[batch, heads, query blocks, key blocks], True where listed."""
    listed = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool)
    order = torch.where(torch.arange(indices.shape[-1]) < counts[..., None], indices.long(), indices.shape[-1])
    return listed.scatter(-1, order, True)[..., :-1]


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("name", LAYOUTS)
def test_block_mask_holds_every_visible_pair_and_nothing_hidden(name: str, window: int | None) -> None:
    layout = LAYOUTS[name]()
    mask = block_mask(layout, window)
    visible = layout.visible(window)
    rows, columns = (-(-length // BLOCK) for length in visible.shape[1:])
    padded = torch.zeros(layout.batch, rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    padded[:, : visible.shape[1], : visible.shape[2]] = visible
    tiles = padded.view(layout.batch, rows, BLOCK, columns, BLOCK)
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    partial = _blocks(mask.kv_num_blocks, mask.kv_indices)[:, 0]
    full = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices)[:, 0]
    assert not (partial & full).any()
    assert (some <= (partial | full)).all()
    assert (full <= every).all()
    if name not in ("permuted", "packed") and window is None:  # positions rise with the index: the blocks are exact
        assert torch.equal(partial | full, some)
        assert torch.equal(full, every)


@pytest.mark.nightly
def test_compiled_kernel_and_its_cache() -> None:
    """The compiled CPU kernel is exact, and a second layout of the same shape compiles nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, N, 16, generator=generator) for h in (2, 1, 1))
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    counter = torch._dynamo.utils.counters["stats"]
    graphs = []
    for starts in ((0, 200), (130, 7)):
        layout = Layout.padded(_keep(*starts))
        out = Flex()(q, k, v, layout, scale=0.25, slopes=SLOPES)
        right = Reference()(q.double(), k.double(), v.double(), layout, scale=0.25, slopes=SLOPES)
        assert error(out, right) < 1e-6
        assert out[1, :, : starts[1]].abs().max() == 0
        graphs.append(counter["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.nightly
def test_compiled_soft_cap_over_values_of_another_width() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, N, 16), (1, 1, N, 16), (1, 1, N, 32)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    how = {"scale": 0.25, "slopes": SLOPES, "softcap": 0.7}
    out, right = Flex()(q, k, v, **how), Reference()(q.double(), k.double(), v.double(), **how)
    assert error(out, right) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "limit"), [(["causal"], 2), pytest.param(list(cases.LAYOUTS), 8, marks=pytest.mark.nightly)]
)
def test_many_kinds_of_calls_follow_each_other(layouts: list[str], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles anew for each kind, and stops at its limit, the ninth, unless told otherwise.

    With the settings for CUDA; the code generator, which needs the device, is left out.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    kernel = flex._compiled.__wrapped__("cuda")
    monkeypatch.setattr(flex, "_compiled", lambda _: kernel)
    found = 0
    for name, dtype, biased in itertools.product(layouts, (torch.float32, torch.bfloat16), (True, False)):
        one = cases.case(name, dtype, biased=biased)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=limit):
            call = Call.of(*one.tensors(), one.layout, scale=one.scale, slopes=one.slopes)
            out = Flex().attend(call)
        (right,), (plain,) = cases.truth(one, backward=False), cases.naive(one, backward=False)
        assert error(out, right) <= 2 * error(plain, right) + 1e-6
        found += 1
    assert found > limit


@pytest.mark.parametrize("biased", [True, False], ids=["alibi", "plain"])
@pytest.mark.parametrize("change", [{"softcap": 30.0}, {"scale": 0.3}], ids=["cap", "scale"])
@pytest.mark.nightly
def test_numbers_are_constants_of_the_kernel(change: dict, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a number an input after its second value; its kernels for CUDA cannot take one (torch 2.11)."""
    taken: list[torch.Tensor] = []

    def look(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        taken.extend(x for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 0)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=look))
    torch._dynamo.reset()
    kernel = flex._compiled.__wrapped__("cuda")
    monkeypatch.setattr(flex, "_compiled", lambda _: kernel)
    one = cases.case("causal", torch.float32, biased=biased)
    how = {"scale": one.scale, "softcap": 0.7}
    with torch.no_grad():
        for more in ({}, change):
            Flex().attend(Call.of(*one.tensors(), one.layout, slopes=one.slopes, **how | more))
            Flex().with_lse(*one.tensors(), PartRule(causal=True, **how | more))
    assert not taken


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (Need(training=True), "no backward on CPU"),
        (Need(dropout=0.1), "no attention dropout"),
        (Need(query_length=1, key_length=9), "compiles for about 10 s"),
        (Need(device="mps"), "CPU and CUDA"),
        (Need(dtype=torch.float64), "float32, bfloat16 and float16"),
        (Need(order="external"), "engine around the kernel"),
        (Need(device="cuda", training=True, query_length=130, key_length=130), "Pad the lengths 130 and 130"),
        (Need(device="cuda", head_dim=8), "at least 16, found 8"),
        (Need(device="cuda", value_dim=8), "at least 16, found 8"),
    ],
)
def test_why_not(need: Need, reason: str) -> None:
    assert reason in (Flex().why_not(need) or "")
    assert Flex().why_not(Need(device="cuda", training=True, query_length=256, key_length=256)) is None
