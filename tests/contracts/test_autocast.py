"""What is widened to float32 on purpose stays so under autocast: every method with ctxext's attention, every backend.

Autocast casts what matrix products and fused attention are given, also where somebody has just widened it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctxext
from ctxext.attention.alibi import AlibiAttend
from ctxext.attention.attend import Backends, LayerCall
from ctxext.attention.encodings import EncodingAttend
from ctxext.attention.engines import RemapAttend
from ctxext.attention.remap import HeadPieces
from ctxext.caches.layout_mask import LayoutMask
from ctxext.caches.travelling import Travelling
from ctxext.kernels import BACKENDS, Call, Layout, flex, named
from ctxext.kernels.pieces import RotationForm
from ctxext.methods import BiasMethod, known_methods
from ctxext.methods.base import Method
from ctxext.methods.encoding import ENCODING, EncodingMethod
from ctxext.methods.remap import RemapMethod
from ctxext.spec import AlibiSpec, RopeSpec
from ctxext.training.lora import attach_lora
from tests._encodings import SCALE, SPEC, carried_by, encoding_of
from tests._models import logits, tiny, tokens
from tests.kernels.cases import case

KINDS = EncodingMethod | RemapMethod | BiasMethod
ATTENDING = {name: cls for name, cls in known_methods().items() if issubclass(cls, KINDS)}
ENCODINGS = [name for name, cls in ATTENDING.items() if issubclass(cls, EncodingMethod)]
ROPE = RopeSpec(rotary_dim=SPEC.head_dim, base=10000.0, trained_length=64)
LENGTH = 160  # what a token has forgotten grows with the text, and so does what rounding makes of it

by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Layer:
    """The attention of one layer with a method, the weights of its encoding among its inputs."""

    def __init__(self, method: Method) -> None:
        self.method, self.owner = method, nn.Module()
        torch.manual_seed(0)
        heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
        self.inputs = [torch.randn(1, count, LENGTH, SPEC.head_dim, dtype=torch.float64) for count in heads]
        self.carried: Tensor | None = None
        if isinstance(method, EncodingMethod):
            encoding = encoding_of(method)
            self.owner.add_module(ENCODING, encoding)
            self.carried = carried_by(encoding, 1, LENGTH, SPEC.hidden_size) if method.carries else None

    def attend(self, backend: str) -> Any:
        """What a patched model's layer calls."""
        method, backends = self.method, Backends(backend)
        if isinstance(method, EncodingMethod):
            return EncodingAttend(self.owner, backends)
        if isinstance(method, RemapMethod):
            far = HeadPieces.of(method, ROPE)
            return RemapAttend(method=method, far=far, form=RotationForm(), backends=backends, implementation="sdpa")
        assert isinstance(method, BiasMethod)
        return AlibiAttend(method, AlibiSpec(SPEC.num_heads, ROPE.trained_length), backends)

    def run(self, backend: str, dtype: torch.dtype, autocast: torch.dtype | None, layout: Layout) -> list[Tensor]:
        """The output and its gradients by q, k, v and, in one, what the encoding is made of; in float64."""
        self.owner.to(dtype)
        inputs = [part.to(dtype).requires_grad_() for part in self.inputs]
        wanted, mask = [*inputs, *self.owner.parameters()], LayoutMask(layout)
        if self.carried is not None:
            # A linear layer has made them, in the dtype of its products.
            wanted.append(self.carried.detach().to(autocast or dtype).requires_grad_())
            mask = mask.carrying(Travelling(wanted[-1]))
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out = self.attend(backend)(LayerCall(*inputs, mask, self.owner, SCALE))
        torch.manual_seed(1)
        grad = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
        found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
        own = [part.flatten().double() for part in found[3:] if part is not None]
        return [out.detach().double(), *(part.double() for part in found[:3]), *([torch.cat(own)] if own else [])]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """In parts of the right value's size."""
    return [float((part - right).norm() / right.norm()) for part, right in zip(found, exact, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENDING)
def test_attention_under_autocast_errs_as_in_sixteen_bits(name: str) -> None:
    """Queries and keys in float32, as Trainer(bf16=True) has them, forward and backward, against float64."""
    layer = Layer(ATTENDING[name].example(ROPE))
    for layout in (Layout.causal(1, LENGTH), Layout.packed([LENGTH - 50, 1, 49])):
        exact = layer.run("reference", torch.float64, None, layout)
        for dtype in (torch.bfloat16, torch.float16):
            naive = errors(layer.run("reference", dtype, None, layout), exact)
            for backend in ("sdpa", "reference"):
                found = errors(layer.run(backend, torch.float32, dtype, layout), exact)
                ratios = [size / allowed for size, allowed in zip(found, naive, strict=True)]
                assert all(ratio <= 2 for ratio in ratios), (backend, dtype, ratios)


@by_dtype
@pytest.mark.parametrize("name", sorted(BACKENDS))
@pytest.mark.parametrize("layout", ["causal", "left padded", "packed", "chunked prefill", "decode"])
def test_a_backend_computes_in_the_dtype_of_its_tensors(
    layout: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever autocast would make of them: bit for bit, and so are the gradients."""
    monkeypatch.setattr(flex, "_compiled", lambda _: flex.flex_attention)
    one, backend = case(layout, torch.float32, biased=True), named(name)
    inputs, outcomes = one.tensors(), []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            call = Call.of(*inputs, one.layout, scale=one.scale, slopes=one.slopes)
            if backend.refuses(call.need):
                continue
            for enabled in (False, True):
                with torch.autocast("cpu", dtype, enabled=enabled):
                    out = backend.run(call)
                outcomes.append([out, *(torch.autograd.grad(out, inputs, one.grad) if grad else ())])
    for plain, cast in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert all(torch.equal(*pair) for pair in zip(plain, cast, strict=True))


@pytest.mark.parametrize("name", ["alibi", "self_extend"])
def test_a_model_in_float32_errs_as_one_in_sixteen_bits(name: str) -> None:
    """What Trainer(bf16=True) does: rotation leaves queries and keys in float32, and values are in bfloat16."""
    ids, model = tokens(96), ctxext.patch(tiny(), name, factor=4.0)
    exact = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids, labels=ids, use_cache=False)
    found.loss.backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    fair = logits(ctxext.patch(tiny(), name, factor=4.0).bfloat16(), ids)
    assert (found.logits.float() - exact).norm() <= 2 * (fair.float() - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_recipe_takes_a_step(name: str) -> None:
    """A bfloat16 model, an adapter whose own weights are float32, autocast: as the recipe trains."""
    torch.manual_seed(0)
    model = attach_lora(ctxext.patch(tiny().bfloat16(), name, factor=4.0), rank=2, embeddings=False).train()
    ids = tokens(80)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    trained = {path: weight for path, weight in model.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in trained.values())
