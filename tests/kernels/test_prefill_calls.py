"""The calls that one layer makes to read a text on a GPU: few kernels, and arguments that mean what was asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ctxext.kernels import Call, Layout, base, named, sdpa
from ctxext.kernels.pieces import attend_pieces
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec
from tests._fake_cuda import CUDA, load_guard
from tests.kernels.cases import turned

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 32768, 32, 8, 128
ROPE = RopeSpec(HEAD_DIM, 5e5, 8192)
INV_FREQ = ROPE.base ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
ATTENTION = ("aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward")


class Calls(TorchDispatchMode):
    """Counts the operators that start a kernel, and keeps the arguments of those that compute attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[str] = Counter()
        self.attention: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func._schema.name, func(*args, **kwargs or {})
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and not name.startswith("prim::") and name not in ("aten::empty_like", "aten::promote_types"):
            self.counted[name] += 1
        if name in ATTENTION:
            self.attention.append((name, args, kwargs or {}))
        return out


@pytest.fixture(autouse=True, scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (base, sdpa):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _layer(method: RemapMethod, new: int = LENGTH, heads: int = HEADS) -> Calls:
    """The calls of a layer behind the first one, for the last ``new`` tokens; angles are those of the first layer."""
    q = torch.empty(1, heads, new, HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
    k = torch.empty(1, KV_HEADS, LENGTH, HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
    layout = Layout.causal(1, new, LENGTH, device=CUDA)
    pieces = turned(method.pieces(ROPE, LENGTH), layout, INV_FREQ.to(CUDA), torch.float32)
    call = Call.of(q, k, k, layout, scale=0.1, lse=True)
    attend_pieces(named("sdpa"), call, pieces)
    calls = Calls()
    with calls:
        attend_pieces(named("sdpa"), call, pieces)
    return calls


class Case(NamedTuple):
    """At most so many calls: all, and those of attention. Tiles made 297, 297, 280 and 32, 28, 31."""

    method: RemapMethod
    calls: int
    attention: int


CASES = {
    "self_extend": Case(SelfExtend(factor=4), 12, 4),
    "dual_chunk": Case(DualChunk(factor=4), 40, 12),
    "streaming": Case(Streaming(factor=4), 10, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_layer_reads_a_text_by_few_calls(name: str) -> None:
    pytest.importorskip("triton")
    calls = _layer(CASES[name].method)
    assert calls.counted.total() <= CASES[name].calls, calls.counted
    assert len(calls.attention) <= CASES[name].attention


@pytest.mark.parametrize("new", [LENGTH, 3000, 1])
def test_arguments_say_the_region(new: int) -> None:
    """By the rule of the kernels: query i sees keys i + keys - queries - left to i + keys - queries."""
    calls = _layer(SelfExtend(factor=4, window=1000, sinks=0), new)
    pairs = 0
    for name, args, how in calls.attention:
        token = 2 if name == ATTENTION[0] else 1
        queries, keys, heads = args[0].shape[token], args[1].shape[token], args[0].shape[3 - token]
        causal = args[8] if token == 1 else len(args) > 4 and args[4]
        window = how.get("window_size_left", keys) + 1
        assert keys >= queries
        seen = (min(i + keys - queries + 1, window) for i in range(queries))
        pairs += heads * (sum(seen) if causal else queries * keys)
    assert pairs == HEADS * (new * (LENGTH - new) + new * (new + 1) // 2)
    assert len(calls.attention) <= 4


def test_longer_texts_take_their_heads_in_turn() -> None:
    """Rotated queries and the output of a part have at most as many rows as 32 heads of 32,768 tokens."""
    calls = _layer(SelfExtend(factor=4), heads=4 * HEADS)
    rows = [x[0].shape[1] * x[0].shape[2] for name, x, _ in calls.attention if name == ATTENTION[0]]
    assert max(rows) <= HEADS * LENGTH
    assert len(calls.attention) == 4 * CASES["self_extend"].attention
