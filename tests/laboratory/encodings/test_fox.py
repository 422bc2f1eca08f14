"""FoX against its formula written out, and against what its authors' own reference computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.kernels import Layout
from ctxext.laboratory import scores
from ctxext.laboratory.encodings.fox import FoX
from ctxext.methods.encoding import Encoding, EncodingSpec
from tests._encodings import SCALE, SPEC, attended, case, encoding_of, pairs_of

GOLDEN = Path(__file__).parents[2] / "golden" / "fox.json"


def _written_out(encoding: Encoding, tensors: list[Tensor]) -> Tensor:
    """The same for whole texts, all pairs at once: what is forgotten in between by a product of ones and zeros."""
    q, k, v, states = (tensor.double() for tensor in tensors)
    k, v = (part.repeat_interleave(SPEC.num_heads // SPEC.num_kv_heads, 1) for part in (k, v))
    gates = torch.log(torch.sigmoid(states @ encoding.weight.double().T + encoding.bias.double())).transpose(1, 2)
    at = torch.arange(gates.shape[-1])
    between = (at[None, None] > at[None, :, None]) & (at[None, None] <= at[:, None, None])
    scores = SCALE * q @ k.mT + torch.einsum("bhl,ijl->bhij", gates, between.double())
    return scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ v


def _biased(encoding: Encoding, tensors: list[Tensor]) -> Tensor:
    """As one writes it down in a few lines: sums in float32, and their differences as a bias in q's dtype."""
    q, k, v, states = tensors
    k, v = (part.repeat_interleave(SPEC.num_heads // SPEC.num_kv_heads, 1) for part in (k, v))
    gates = F.linear(states, encoding.weight, encoding.bias).float().transpose(1, 2)
    sums = F.logsigmoid(gates).cumsum(-1)
    at = torch.arange(sums.shape[-1])
    bias = (sums[..., None] - sums[..., None, :]).masked_fill(at > at[:, None], -torch.inf).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=SCALE)


def _attend(name: str, encoding: Encoding, tensors: list[Tensor], layout: Layout) -> Tensor:
    q, k, v, states = tensors
    score = encoding.score(pairs_of(q, k, layout, encoding.carried(states)))
    return attended(name, score, q, k, v, layout)


def _gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    found = torch.autograd.grad(out, wanted, torch.randn(out.shape, dtype=torch.float64).to(out.dtype))
    return [part.double() for part in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_fewer_bits_it_is_as_right_as_attention_written_out_in_them(dtype: torch.dtype) -> None:
    """Kernels that are given columns err at most twice as much as torch's attention with a bias for all pairs."""
    layout = Layout.causal(2, 60)
    encoding = encoding_of(FoX())
    with torch.no_grad():
        for weight in encoding.parameters():
            weight.copy_(weight.to(dtype))
    tensors = case(layout, dtype, states=True)
    names = ["q", "k", "v", "states", "weight", "bias"]
    right = _written_out(encoding, tensors)
    exact = _gradients(right, [*tensors, *encoding.parameters()])
    low = encoding_of(FoX()).to(dtype)
    wanted = [*tensors, *low.parameters()]
    found = {"ours": _attend("sdpa", low, tensors, layout), "plain": _biased(low, tensors)}
    errors = {name: [(out - right).norm()] for name, out in found.items()}
    for name, out in found.items():
        errors[name] += [(x - y).norm() for x, y in zip(_gradients(out, wanted), exact, strict=True)]
    for what, ours, plain in zip(["out", *names], errors["ours"], errors["plain"], strict=True):
        assert ours <= 2 * plain, f"{what}: {ours:.2e} beside {plain:.2e}"


def test_is_what_the_authors_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(GOLDEN.read_text())
    assert stored["provenance"]["commit"] == "883f260c636e87971339749b0d8310004794a5cc"
    for one in stored["cases"]:
        names = ("q", "k", "v", "log_fgate", "dout")
        q, k, v, gates, up = (torch.tensor(one[name], dtype=torch.float64) for name in names)
        wanted = [part.requires_grad_() for part in (q, k, v, gates)]
        layout = Layout.causal(q.shape[0], q.shape[2], k.shape[2])
        if one["seq_start"] is not None:
            keep = torch.arange(k.shape[2]) >= torch.tensor(one["seq_start"])[:, None]
            layout = Layout.padded(keep, query=q.shape[2])
        for name, size in (("reference", None), ("sdpa", None), ("sdpa", 1)):
            monkeypatch.setattr(scores, "BIAS_BYTES", 64 * 2**20 if size is None else 4 * 16 * 16 * 2)
            score = encoding_of(FoX()).score(pairs_of(q, k, layout, gates[..., None]))
            out = attended(name, score, q, k, v, layout, scale=one["scale"])
            found = [out, *torch.autograd.grad(out, wanted, up)]
            for what, part in zip(("out", "dq", "dk", "dv", "dlog_fgate"), found, strict=True):
                right = torch.tensor(one[what], dtype=torch.float64)
                torch.testing.assert_close(part, right, rtol=1e-9, atol=1e-9, msg=lambda said, of=what: f"{of}: {said}")


def test_begins_as_the_paper_says() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 400, "num_heads": 8, "num_kv_heads": 2, "head_dim": 50, "num_layers": 1}
    encoding = FoX().build(EncodingSpec(**sizes, trained_length=8, embedding_std=0.03))
    assert encoding.weight.shape == (8, 400)
    assert abs(encoding.weight.std().item() - 0.03) < 0.002
    assert torch.equal(encoding.bias, torch.zeros(8))


def test_more_forgotten_than_float16_holds_is_refused_in_words_of_the_encoding() -> None:
    layout, sizes = Layout.causal(1, 200), (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    gates = torch.full((1, SPEC.num_heads, 200, 1), -60000.0)  # their sum passes 65504 * 256 * SCALE, 5 million
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (torch.randn(1, heads, 200, SPEC.head_dim).to(dtype) for heads in sizes)
        score = encoding_of(FoX()).score(pairs_of(q, k, layout, gates))
        if dtype == torch.bfloat16:
            assert attended("sdpa", score, q, k, v, layout).isfinite().all()
            continue
        with pytest.raises(InvalidParameterError, match=r"places up to 12,000,000 .* hold 5,030,707\. Use bfloat16"):
            attended("sdpa", score, q, k, v, layout)
