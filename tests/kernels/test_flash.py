"""flash-attn cannot run here: a stub with its signatures computes what its documentation says, from plain tensors."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from ctxext.errors import install_line
from ctxext.kernels import Call, Layout, Need, flash, select
from ctxext.kernels.blocks import PartRule
from ctxext.kernels.flash import FORWARD_ONLY, INSTALLED, Flash, Flash3, Flash4, cache_lengths, token_indices
from ctxext.kernels.reference import Reference
from tests.kernels import flash_program
from tests.kernels.cases import LAYOUTS, case, error, naive, truth

READY = Need(device="cuda", capability=(9, 0), dtype=torch.bfloat16, head_dim=64)
CALLS: list[str] = []
# What the real functions take, in every version since the oldest that is supported (flash_signatures.py).
VERSIONS = json.loads(Path(__file__).with_name("flash_attn.json").read_text())["functions"]
REAL = {
    backend: {name: [one["signature"] for one in versions] for name, versions in functions.items()}
    for backend, functions in VERSIONS.items()
}


def _dense(q, k, v, *, softmax_scale, causal, window_size=(-1, -1), alibi_slopes=None, softcap=0.0) -> Tensor:
    """[seq, heads, head_dim], causal from the bottom right corner."""
    assert window_size == (-1, -1) or window_size[1] == (0 if causal else window_size[0])
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    return flash_program.forward(q, k, v, alibi_slopes, softmax_scale, causal, *window_size, softcap)[0]


def _func(q, k, v, dropout_p=0.0, **options) -> Tensor:
    CALLS.append("plain")
    return torch.stack([_dense(*row, **options) for row in zip(q, k, v, strict=True)])


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, **options) -> Tensor:
    CALLS.append("varlen")
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    q_sizes, k_sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(q_sizes), max(k_sizes)) == (max_seqlen_q, max_seqlen_k)
    rows = zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True)
    return torch.cat([_dense(*row, **options) for row in rows])


def _kvcache(q, k_cache, v_cache, *, cache_seqlens, **options) -> Tensor:
    CALLS.append("kvcache")
    assert cache_seqlens.dtype == torch.int32
    rows = zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True)
    return torch.stack([_dense(a, b[:n], c[:n], **options) for a, b, c, n in rows])


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    for backend in (Flash, Flash3, Flash4):
        stub = ModuleType(backend.module)
        for name, function in {"flash_attn_func": _func, "flash_attn_varlen_func": _varlen}.items():
            setattr(stub, name, function if backend is Flash else _without_alibi(function, pair=backend is Flash4))
        if backend.reads_cache:
            stub.flash_attn_with_kvcache = _kvcache if backend is Flash else _without_alibi(_kvcache, pair=False)
        for name, function in list(vars(stub).items()):
            if name.startswith("flash_attn_"):
                setattr(stub, name, _as_real(function, REAL[backend.name][name]))
        monkeypatch.setitem(INSTALLED, backend.name, True)
        parts = backend.module.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, backend.module, stub)


def _as_real(function, signatures: list[dict[str, list[str]]]):
    def call(*args, **options):
        for names, needed, keywords in (one.values() for one in signatures):
            assert len(args) <= len(names)
            assert set(options) <= set(names[len(args) :]) | set(keywords)
            assert set(needed) <= set(names[: len(args)]) | set(options)
        return function(*args, **options)

    return call


def _without_alibi(function, *, pair: bool):
    def call(q, k, v, *rest, **options):
        assert not {"alibi_slopes", "dropout_p"} & set(options)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        out = function(q, k, v, *rest, **options)
        return (out, None) if pair else out

    return call


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("biased", [True, False], ids=["alibi", "plain"])
@pytest.mark.parametrize("window", [None, 20], ids=["all", "window"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [Flash(), Flash3(), Flash4()], ids=lambda b: b.name)
def test_arguments_mean_what_the_call_asked(
    backend, layout: str, window: int | None, biased: bool, training: bool
) -> None:
    """Nothing is served that is not right: a window counts positions, whatever the indices are."""
    one = case(layout, torch.bfloat16, biased=biased, window=window)
    call = Call.of(one.q, one.k, one.v, one.layout, scale=one.scale, slopes=one.slopes, window=window)
    there = {"device": "cuda", "capability": (9, 0), "training": training}
    reason = backend.why_not(Need(**(vars(call.need) | there)))
    if reason is not None:
        has_columns = biased and layout.startswith("both ways") and backend.name != "flash"
        assert has_columns or layout.endswith(("permuted", "skipping positions", "ways, skipping"))
        return
    inputs = one.tensors()
    with torch.set_grad_enabled(training):
        out = backend.attend(Call.of(*inputs, one.layout, scale=one.scale, slopes=one.slopes, window=window))
    found = [out.detach()]
    if training and CALLS:
        found += torch.autograd.grad(out, inputs, one.grad)
    for ours, exact, plain in zip(found, truth(one), naive(one), strict=False):
        assert error(ours, exact) <= 2 * error(plain, exact) if exact.norm() else ours.norm() == 0


@pytest.mark.parametrize("backend", [Flash(), Flash3()], ids=lambda b: b.name)
@pytest.mark.parametrize("learns", ["q", "k", "v"])
def test_a_gradient_for_one_of_the_three_is_not_lost(backend, learns: str) -> None:
    """The kernel that reads a cache has no backward: what learns, be it the values alone, goes another way."""
    one = case("static cache", torch.bfloat16, biased=False)
    inputs = {name: getattr(one, name).requires_grad_(name == learns) for name in "qkv"}
    call = Call.of(*inputs.values(), one.layout, scale=one.scale)
    assert call.need.training
    out = backend.attend(call)
    assert "kvcache" not in CALLS
    assert torch.autograd.grad(out, inputs[learns], one.grad)[0].norm() > 0
    with torch.no_grad():
        assert not Call.of(*inputs.values(), one.layout, scale=one.scale).need.training


def test_which_entry_point() -> None:
    def calls(layout: str, *, training: bool) -> list[str]:
        CALLS.clear()
        one = case(layout, torch.bfloat16, biased=True)
        with torch.set_grad_enabled(training):
            Flash().attend(Call.of(*one.tensors(), one.layout, scale=1.0, slopes=one.slopes))
        return list(CALLS)

    assert calls("causal", training=False) == ["plain"]
    assert calls("packed", training=True) == ["varlen"]
    assert calls("decode", training=False) == calls("static cache decode", training=False) == ["kvcache"]
    assert calls("chunked prefill", training=True) == ["plain"]
    assert calls("padded decode", training=False) == ["varlen"]
    assert calls("nothing but padding", training=False) == []


def test_window_and_dropout_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    package = sys.modules[Flash.module]
    monkeypatch.setattr(package, "flash_attn_func", lambda q, k, v, **options: (seen.update(options), q)[1])
    one = case("causal", torch.bfloat16, biased=False, kv_heads=4)
    Flash().attend(Call.of(*one.tensors(), one.layout, scale=0.5, window=8, dropout=0.25))
    asked = {"softmax_scale": 0.5, "causal": True, "window_size": (7, 0), "dropout_p": 0.25, "alibi_slopes": None}
    assert seen == asked


def test_token_indices_of_padding_and_packing() -> None:
    layout = Layout.padded(torch.tensor([[False, True, True], [True, True, True], [False, False, False]]))
    queries, keys, q_starts, k_starts, q_longest, k_longest = token_indices(layout)
    assert queries.tolist() == keys.tolist() == [1, 2, 3, 4, 5]
    assert q_starts.tolist() == k_starts.tolist() == [0, 2, 5]
    assert (q_longest, k_longest) == (3, 3)


def test_cache_lengths() -> None:
    assert cache_lengths(Layout.cached(2, 1, 8, filled=5)) == [5, 5]
    assert cache_lengths(Layout.causal(2, 8)) is None
    keep = torch.tensor([[True, True, True, True], [False, True, True, True]])
    assert cache_lengths(Layout.padded(keep, query=1)) is None


LATENT = {"head_dim": 192, "value_dim": 128, "lse": True}
TWO = {"flash_attn_2_cuda.py": ""}
OLD = "def flash_attn_func(q, k, v): ..."
NEW = "def flash_attn_func(q, k, v, softcap, return_attn_probs, return_lse): ..."


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, (False, False, False, True, "flash_attn_interface")),
        (TWO | {"flash_attn/flash_attn_interface.py": OLD}, (True, False, False, False, None)),
        # Version 2 installed after version 4.
        (
            TWO | {"flash_attn/flash_attn_interface.py": NEW, "flash_attn/cute/interface.py": OLD},
            (True, False, False, True, None),
        ),
        ({"flash_attn/cute/interface.py": NEW}, (False, False, True, True, None)),
        ({"flash_attn/__init__.py": "1 / 0", "flash_attn/cute/interface.py": NEW}, (False, False, True, True, None)),
        ({"flash_attn_interface.py": NEW}, (False, True, False, True, "flash_attn_interface")),
        ({"flash_attn_interface.py": OLD}, (False, False, False, True, "flash_attn_interface")),
        ({"fa3_fwd_interface.py": NEW}, (False, True, False, True, FORWARD_ONLY)),
    ],
)
def test_which_packages_are_seen(files: dict, found: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their files, none of which is imported."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in [name for name in sys.modules if name.startswith(("flash_attn", "fa3_fwd"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("ctxext.kernels.another_flash", flash.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *seen, name = found
    assert [*module.INSTALLED.values(), module.Flash.softcaps] == seen
    assert name is None or module.Flash3.module == name


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        (Flash, {"device": "cpu"}, "CUDA only"),
        (Flash, {"dtype": torch.float32}, "float16 and bfloat16, found torch.float32"),
        (Flash, {"head_dim": 264}, "multiple of 8 up to 256, found 264"),
        (Flash, {"head_dim": 100}, "multiple of 8 up to 256, found 100"),
        (Flash, {"capability": (7, 5)}, r"found \(7, 5\)"),
        (Flash, {"order": "free"}, "causality goes by index"),
        (Flash, {"order": "increasing", "biased": True}, "positions do not step by one"),
        (Flash, {"order": "increasing", "window": 8}, "window counts indices"),
        (Flash3, {"order": "increasing", "window": 8}, "window counts indices"),
        (Flash4, {"order": "increasing", "window": 8, "biased": True}, "window counts indices"),
        (Flash, {"capability": (11, 0)}, r"found \(11, 0\)"),
        (Flash, {"order": "external", "biased": True}, "positions do not step by one"),
        (Flash3, {"capability": (8, 0)}, "compute capability"),
        (Flash3, {"head_dim": 256, "biased": True}, "8 of them carry ALiBi"),
        (Flash3, {"dropout": 0.1}, "no attention dropout"),
        (Flash4, {"capability": (8, 0), "training": True}, "backward needs compute capability 9.0"),
        (Flash4, {"capability": (10, 0), "head_dim": 128, "biased": True}, "up to 128, found 136"),
        (Flash4, {**LATENT, "capability": (10, 0), "lse": False}, "up to 128, found 192"),
        (Flash4, {"capability": (10, 0), "head_dim": 256, "training": True}, "up to 128, found 256"),
        (Flash4, {"capability": (12, 0), "head_dim": 256}, "up to 128, found 256"),
        (Flash4, {"capability": (10, 0), "head_dim": 256, "biased": True}, "up to 256, found 264"),
        (Flash4, {"capability": (10, 0), "head_dim": 248}, "up to 128, found 248"),
        (Flash4, {**LATENT, "capability": (10, 0), "biased": True}, "up to 192, found 200"),
        (Flash4, {**LATENT, "capability": (8, 0)}, "up to 128, found 192"),
        (Flash, {"hip": "6.3", "softcap": 50.0, "capability": (9, 4)}, "on ROCm"),
        (Flash, {"hip": "6.3", "window": 8, "capability": (9, 0)}, "on ROCm"),
        (Flash, {"softcap": 50.0, "dropout": 0.1}, "attention_dropout"),
        *((backend, {"softcap": 50.0, "biased": True}, "cap") for backend in (Flash3, Flash4)),
        (Flash3, {"module": FORWARD_ONLY, "window": 8}, "fa3-fwd"),
        (Flash3, {"module": FORWARD_ONLY, "training": True}, "fa3-fwd"),
        (Flash3, {"module": FORWARD_ONLY, "dtype": torch.float16}, "fa3-fwd"),
    ],
)
def test_why_not(backend, change: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = dict(change)
    monkeypatch.setattr(torch.version, "hip", change.pop("hip", None))
    monkeypatch.setattr(backend, "module", change.pop("module", backend.module))
    assert backend().why_not(READY) is None
    with pytest.raises(AssertionError, match=reason):
        assert backend().why_not(Need(**(vars(READY) | change))) is None


@pytest.mark.parametrize(
    ("backend", "change"),
    [
        *(
            (Flash4, shape | {"capability": capability})
            for shape in (LATENT, {"head_dim": 256}, {"head_dim": 256, "lse": True, "softcap": 30.0})
            for capability in ((9, 0), (10, 0), (11, 0))
        ),
        *((backend, {"softcap": 50.0}) for backend in (Flash3, Flash4)),
        (Flash, {"order": "increasing"}),
        (Flash3, {"order": "increasing", "biased": True}),  # by columns
    ],
)
def test_what_has_a_kernel(backend, change: dict) -> None:
    assert backend().refuses(replace(READY, **change)) is None


@pytest.mark.parametrize(
    ("backend", "install"),
    [
        (Flash, re.escape(install_line("flash"))),
        (Flash3, r"\[flash3\].*hopper"),
        (Flash4, "pip install --pre flash-attn-4"),
    ],
)
def test_what_is_not_installed_says_how_to(backend, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALLED, backend.name, False)
    with pytest.raises(AssertionError, match=f"not installed: .*{install}"):
        assert backend().why_not(READY) is None


@pytest.mark.parametrize("backend", [Flash, Flash3, Flash4], ids=lambda b: b.name)
def test_the_log_sum_exp_is_asked_for_by_its_real_name(backend) -> None:
    assert all(backend.asks_lse in one["names"] for one in REAL[backend.name]["flash_attn_func"])
    assert backend.reads_cache == ("flash_attn_with_kvcache" in REAL[backend.name])


@pytest.mark.parametrize("kind", [{"softcap": 0.7}, {"value_dim": 40}, {"value_dim": 96}], ids=str)
@pytest.mark.parametrize("layout", ["causal", "packed", "decode"])
@pytest.mark.parametrize("backend", [Flash(), Flash3(), Flash4()], ids=lambda b: b.name)
def test_soft_caps_and_values_of_another_width(backend, layout: str, kind: dict) -> None:
    """Versions 2 to 4 cap the scores themselves, and get values as wide as keys."""
    one = case(layout, torch.bfloat16, biased=True, **kind)
    how = {"scale": one.scale, "slopes": one.slopes, "softcap": one.softcap}
    if one.softcap is not None and backend.name != "flash":
        how["slopes"], one = None, replace(one, slopes=None)  # a cap would bend columns
    with torch.no_grad():
        out = backend.attend(Call.of(one.q, one.k, one.v, one.layout, **how))
    right, fair = truth(one, backward=False)[0], naive(one, backward=False)[0]
    assert error(out, right) <= 2 * error(fair, right)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("width", "value_dim"), [(64, 64), (64, 40), (192, 128)])
@pytest.mark.parametrize("backend", [Flash(), Flash3(), Flash4()], ids=lambda b: b.name)
def test_the_log_sum_exp_is_that_of_capped_scores(
    backend, width: int, value_dim: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of latent attention stay as narrow as they are where kernels take them."""

    def stub(q, k, v, *, softmax_scale, causal, softcap=0.0, return_attn_probs=False, return_lse=False):
        assert return_attn_probs or return_lse
        CALLS.append(v.shape[-1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = Reference().with_lse(q, k, v, PartRule(softmax_scale, causal, softcap=softcap or None))
        return out.transpose(1, 2), lse, None

    real = _as_real(stub, REAL[backend.name]["flash_attn_func"])
    monkeypatch.setattr(sys.modules[backend.module], "flash_attn_func", real)
    q, k = torch.randn(2, 1, 4, 9, width).bfloat16()
    v = torch.randn(1, 4, 9, value_dim).bfloat16()
    rule = PartRule(0.2, causal=True, softcap=softcap)
    found, wanted = (which.with_lse(q, k, v, rule) for which in (backend, Reference()))
    for ours, right in zip(found, wanted, strict=True):
        assert torch.equal(ours, right)
    is_narrow = (width, value_dim) == (192, 128) and backend.name != "flash"
    assert CALLS[0] == (value_dim if is_narrow else width)


def _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, **options) -> None:
    """What the packages' kernels compute out of an lse and an output that are given, written into dq, dk and dv."""
    assert {x.dtype for x in (dout, q, k, v, out)} == {q.dtype}
    assert softmax_lse.dtype == torch.float32
    assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out, dq, dk, dv))
    assert softmax_lse.is_contiguous()
    assert (options["dropout_p"], options["alibi_slopes"]) == (0.0, None)
    left, right = options["window_size_left"], options["window_size_right"]
    assert right == (-1 if left == -1 else 0)
    how = options["softmax_scale"], options["causal"], left, right, options["softcap"]
    flash_program.bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, None, 0.0, *how)


@pytest.mark.parametrize("older", [False, True], ids=["2.7", "2.6"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_dim", [64, 40])
@pytest.mark.parametrize(
    "rule", [{"causal": True}, {}, {"causal": True, "window": 5}, {"causal": True, "softcap": 0.7}]
)
def test_gradients_of_a_part_are_fused(rule, value_dim: int, kind: torch.dtype, older: bool, monkeypatch) -> None:
    """Of a part that was merged with others, so that its weights sum to less than 1; one query saw nothing."""
    versions = REAL["flash"]["_flash_attn_backward"]
    real = _as_real(_backward, [one for one in versions if "window_size_left" in one["names"]])  # since 2.7
    monkeypatch.setattr(sys.modules[Flash.module], "_flash_attn_backward", None if older else real, raising=False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, *size).to(kind) for size in ((4, 7, 64), (2, 9, 64), (2, 9, value_dim)))
    out, lse = Reference().with_lse(q, k, v, rule := PartRule(0.2, **rule))
    lse, out, grad = lse + torch.rand(lse.shape), out * 0.7 + 0.1, torch.randn(out.shape)
    lse[1, 2, 3], grad[1, 2, 3] = -torch.inf, 0.0
    merged = out.to(kind), lse, grad.to(kind)
    monkeypatch.setattr(flash, "TAKES_PARTS", not older)
    assert Flash().fuses(READY) is not older
    found, expected = (backend.gradients(q, k, v, *merged, rule) for backend in (Flash(), Reference()))
    for ours, right in zip(found, expected, strict=True):
        assert ours.shape == right.shape
        assert torch.allclose(ours.double(), right.double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("need", "chosen"),
    [
        ({}, "sdpa"),
        ({"head_dim": 256}, "flash"),
        ({"softcap": 50.0}, "flash"),
        ({"order": "free"}, "sdpa"),
        ({"training": False}, "flash3"),
        ({"lse": False}, "flash"),
    ],
)
def test_training_in_pieces_takes_a_fused_backward(need, chosen: str) -> None:
    """Where torch has none, flash-attn's: no GPU has shown that yet."""
    backend, _ = select("auto", replace(READY, **{"training": True, "lse": True} | need))
    assert backend.name == chosen


@pytest.mark.parametrize("backend", [Flash(), Flash3(), Flash4()], ids=lambda b: b.name)
def test_a_part_of_more_keys_than_queries_has_its_window(backend, monkeypatch) -> None:
    """By the packages' own rule: the newest key and ``left`` ones before it, aligned to the last key."""
    given = {}

    def function(q, k, v, *rest, **options):
        given.update(options)
        return q, q[..., 0].transpose(1, 2)

    real = _as_real(function, REAL[backend.name]["flash_attn_func"])
    monkeypatch.setattr(sys.modules[backend.module], "flash_attn_func", real)
    q, k = torch.zeros(1, 2, 6, 64), torch.zeros(1, 1, 9, 64)
    assert backend.bands(READY)
    out, lse = backend.with_lse(q, k, k, PartRule(1.0, causal=True, window=5))
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert given["causal"]
    assert given["window_size"] == (4, 0)
    monkeypatch.setattr(Flash3, "module", FORWARD_ONLY)
    assert not Flash3().bands(READY), "the build of PyPI gets no windows"
