"""Every backend on every layout: within twice a fair error of the float64 oracle, or a clear refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxext.errors import BackendUnavailableError, InvalidParameterError
from ctxext.kernels import BACKENDS, AttentionBackend, Call, Layout
from tests._products import pairwise
from tests.kernels.cases import LAYOUTS, Case, case, error, leave_flex_uncompiled, naive, torchs_own, truth

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BIASED = [pytest.param(True, id="alibi"), pytest.param(False, id="plain")]
ON_CUDA = {"flash", "flash3", "flash4"}
# By day flex is test_flex's.
PLACES = [
    pytest.param(name, "cpu", marks=[pytest.mark.nightly] * (name == "flex"), id=f"{name}-cpu")
    for name in sorted(BACKENDS.keys() - ON_CUDA)
]
PLACES += [
    pytest.param(name, "cuda", marks=pytest.mark.gpu, id=f"{name}-cuda")
    for name in sorted(BACKENDS) * torch.cuda.is_available()
]
everywhere = pytest.mark.parametrize(("name", "device"), PLACES)


@pytest.fixture(autouse=True)
def _plain_flex_on_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Compiling costs 10 s per layout on CPU; test_flex compiles a few, here its bias and mask run uncompiled."""
    if request.node.callspec.params.get("device") != "cuda":
        torch._dynamo.reset()  # which fails to say why it traces a function of fewer tensors again (IndexError, 2.13)
        leave_flex_uncompiled(monkeypatch)


def _on(device: str, case: Case) -> Case:
    slopes = None if case.slopes is None else case.slopes.to(device)
    moved = [x.to(device) for x in (case.q, case.k, case.v, case.grad)]
    return Case(*moved, case.layout.to(torch.device(device)), slopes, case.window, case.scale, case.softcap)


def _how(case: Case) -> dict[str, Any]:
    return {"scale": case.scale, "slopes": case.slopes, "window": case.window, "softcap": case.softcap}


def _run(backend: AttentionBackend, case: Case, *, backward: bool) -> list[torch.Tensor]:
    inputs = case.tensors()
    with torch.set_grad_enabled(backward):
        out = backend(*inputs, case.layout, **_how(case))
        assert out.dtype == case.q.dtype
        return [out.detach(), *(torch.autograd.grad(out, inputs, case.grad) if backward else ())]


def _refuses(backend: AttentionBackend, case: Case, *, backward: bool) -> bool:
    """Whether the backend refuses; then the call must raise with that very reason."""
    with torch.set_grad_enabled(backward):
        call = Call.of(*case.tensors(), case.layout, **_how(case))
    reason = backend.refuses(call.need)
    if reason is None:
        return False
    with pytest.raises(BackendUnavailableError) as caught:
        _run(backend, case, backward=backward)
    assert reason in str(caught.value)
    return True


def _check(backend: AttentionBackend, case: Case) -> None:
    backward = not _refuses(backend, case, backward=True)
    if not backward and _refuses(backend, case, backward=False):
        return
    found = _run(backend, case, backward=backward)
    # On a GPU the fair error is that of torch's own kernel, whose products in float32 are three in TF32.
    right, fair = truth(case, backward=backward), (torchs_own if case.q.is_cuda else naive)(case, backward=backward)
    for what, ours, exact, plain in zip(("out", "dq", "dk", "dv"), found, right, fair, strict=False):
        if exact.norm() == 0:
            assert ours.norm() == 0, what
        else:
            assert error(ours, exact) <= 2 * error(plain, exact), what


@pytest.mark.parametrize(
    ("name", "device", "layout", "biased", "kind", "dtype"),
    pairwise(
        PLACES,
        list(LAYOUTS),
        BIASED,
        [
            *({}, {"window": 5}, {"window": 20}, {"window": 1000}, {"kv_heads": 1}, {"kv_heads": 4}),
            *({"softcap": 0.7}, {"value_dim": 40}, {"value_dim": 96}),
        ],
        DTYPES,
    ),
)
def test_equals_the_oracle(
    name: str, device: str, layout: str, biased: bool, kind: dict[str, Any], dtype: torch.dtype
) -> None:
    _check(BACKENDS[name](), _on(device, case(layout, dtype, biased=biased, **kind)))


@everywhere
def test_a_document_is_alone(name: str, device: str) -> None:
    """Packed documents give what each gives by itself."""
    backend = BACKENDS[name]()
    lengths = [30, 1, 50, 15]
    packed = _on(device, case("packed", torch.float32, biased=True))
    if _refuses(backend, packed, backward=False):
        return
    whole = _run(backend, packed, backward=False)[0]
    for part, q, k, v in zip(*(x.split(lengths, 2) for x in (whole, packed.q, packed.k, packed.v)), strict=True):
        alone = backend(q, k, v, scale=packed.scale, slopes=packed.slopes)
        torch.testing.assert_close(part, alone, rtol=1e-5, atol=2e-6)


@everywhere
def test_padding_changes_nothing(name: str, device: str) -> None:
    """The content of padding, whatever it is, leaves the other tokens alone; padded queries give zeros."""
    backend = BACKENDS[name]()
    padded = _on(device, case("left padded", torch.float32, biased=True))
    if _refuses(backend, padded, backward=False):
        return
    out = _run(backend, padded, backward=False)[0]
    gone = padded.layout.key_documents < 0
    for x in (padded.k, padded.v):
        x.masked_fill_(gone[:, None, :, None], 1e4)
    assert torch.equal(_run(backend, padded, backward=False)[0], out)
    assert out.transpose(1, 2)[gone].abs().max() == 0


@pytest.mark.parametrize("name", sorted(ON_CUDA))
def test_what_needs_cuda_refuses_a_cpu(name: str) -> None:
    assert _refuses(BACKENDS[name](), case("causal", torch.bfloat16, biased=False), backward=False)


@pytest.mark.parametrize(("name", "device"), [*PLACES, *((name, "cpu") for name in sorted(ON_CUDA))])
def test_bad_arguments(name: str, device: str) -> None:
    backend = BACKENDS[name]()
    fine = _on(device, case("causal", torch.float32, biased=True))

    def refused(match: str, *, q=fine.q, k=fine.k, v=fine.v, layout=fine.layout, **changes) -> None:
        options = {"scale": fine.scale, "slopes": fine.slopes} | changes
        with pytest.raises(InvalidParameterError, match=match):
            backend(q, k, v, layout, **options)

    refused("must be \\[batch, heads, seq, head_dim\\]", q=fine.q[0])
    refused("share their batch, q and k head_dim", k=fine.k[..., :32], v=fine.v[..., :32])
    refused("k and v their heads and length", v=fine.v[:, :1])
    refused("must divide", k=fine.k.repeat(1, 2, 1, 1)[:, :3], v=fine.v.repeat(1, 2, 1, 1)[:, :3])
    refused("must not be empty", q=fine.q[:, :, :0])
    refused("share a floating dtype", k=fine.k.double(), v=fine.v.double())
    refused("share a floating dtype", q=fine.q.int(), k=fine.k.int(), v=fine.v.int())
    refused("The layout is for batch 1", layout=Layout.causal(1, 96, device=device))
    refused("scale must be above 0", scale=0.0)
    refused("window must be at least 1", window=0)
    refused("dropout must be in", dropout=1.0)
    refused("softcap must be above 0", softcap=0.0)
    refused("slopes must be float32 or float64 \\[heads\\] = \\[4\\]", slopes=fine.slopes[:2])
    refused("16 bits misplace tokens", slopes=fine.slopes.bfloat16())
    refused("slopes require a gradient", slopes=fine.slopes.clone().requires_grad_())
    if device == "cpu":
        refused("slopes must be finite and at least 0", slopes=-fine.slopes)
        refused("slopes must be finite and at least 0", slopes=fine.slopes * torch.nan)
