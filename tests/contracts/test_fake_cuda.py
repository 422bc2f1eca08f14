"""Whole patched models on a GPU that is not there: nothing stays behind on the CPU, no dtype changes on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ctxext
from ctxext.kernels import step
from ctxext.kernels.pieces import _Differentiable
from ctxext.laboratory.near_far import _WithFar
from tests._fake_cuda import CUDA, load_guard, on_fake_cuda
from tests._models import on_recent, tiny
from tests._products import some
from tests.contracts._fake_device import LENGTH, MODELS, patched, set_capability

BOTH = [torch.bfloat16, torch.float32]
# One method of each kind on a Llama, which a loss is computed with; every model and method is read.
OF_EACH_KIND = {"yarn", "dynamic_ntk", "alibi", "self_extend", "t5_bias", "path", "fox", "learned"}


@pytest.fixture(autouse=True, scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(autouse=True, params=some(BOTH, torch.bfloat16))
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    set_capability((9, 0), monkeypatch)
    monkeypatch.setattr(step, "_rows", lambda q, k, v, *_, **__: q.new_empty(*q.shape[:3], v.shape[3]))
    kind: torch.dtype = request.param
    return kind


def require(logits: Tensor, rows: int, length: int, dtype: torch.dtype) -> None:
    assert (logits.device, logits.dtype) == (CUDA, dtype)
    assert logits.shape[:2] == (rows, length)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "name"), MODELS)
def test_it_reads_padded_rows_and_goes_on(model_type: str, name: str, dtype: torch.dtype) -> None:
    model = patched(model_type, name, dtype)
    with on_fake_cuda(model), torch.no_grad():
        tokens = torch.full((2, LENGTH), 7, device=CUDA)
        mask = torch.ones_like(tokens)
        mask[0, :5] = 0
        read = model(tokens, attention_mask=mask, use_cache=True)
        require(read.logits, 2, LENGTH, dtype)
        for new in (1, 2):
            seen = torch.cat([mask, mask.new_ones(2, new)], 1)
            read = model(tokens[:, :1], attention_mask=seen, past_key_values=read.past_key_values)
            require(read.logits, 2, 1, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        on_recent(*model, reason="OPT asks whether its mask is all ones")
        if model[0] == "opt"
        else pytest.param(*model, marks=[pytest.mark.nightly] * (model[0] == "llama" and model[1] not in OF_EACH_KIND))
        for model in MODELS
    ],
)
def test_it_computes_a_loss_with_a_gradient(model_type: str, name: str, dtype: torch.dtype) -> None:
    """The backward pass itself is the engine's, which wants a real GPU."""
    model = patched(model_type, name, dtype).train()
    with on_fake_cuda(model):
        tokens = torch.full((2, LENGTH), 7, device=CUDA)
        read = model(tokens, labels=tokens, use_cache=False)
        require(read.logits, 2, LENGTH, dtype)
        assert read.loss.requires_grad
        assert read.loss.device == CUDA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "name", "length"), [(_Differentiable, "self_extend", LENGTH), (_WithFar, "t5_bias", 8 * LENGTH)]
)
def test_own_backward_passes(
    function: type[torch.autograd.Function], name: str, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's engine wants a real GPU, so they are called by hand, right behind the forward pass."""
    gradients: list[tuple[Any, Any]] = []

    def both(*inputs: Any) -> Tensor:
        context: Any = SimpleNamespace()
        context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
        out: Tensor = function.forward(context, *inputs)
        gradients.extend(zip(inputs, function.backward(context, torch.ones_like(out)), strict=True))
        return out

    monkeypatch.setattr(function, "apply", both)
    model = patched("llama", name, dtype).train()
    with on_fake_cuda(model):
        model(torch.full((1, length), 7, device=CUDA), use_cache=False)
    found = [(given, gradient) for given, gradient in gradients if gradient is not None]
    assert len(found) >= 3 * model.config.num_hidden_layers
    for given, gradient in found:
        assert (gradient.shape, gradient.dtype, gradient.device) == (given.shape, given.dtype, CUDA)


class _Kernels(TorchDispatchMode):
    """Which fused kernels were called by their own names, with how many dimensions of a head."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: set[tuple[str, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_")
        if name in ("flash_attention", "efficient_attention"):
            self.called.add((name, args[0].shape[3]))
        return func(*args, **kwargs or {})


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float16], indirect=True)
@pytest.mark.parametrize(
    ("name", "capability", "head_dim", "kernel"),
    [
        *((name, (7, 5), 32, "efficient_attention") for name in ("self_extend", "t5_bias", "alibi")),
        *((name, (8, 0), 32, "flash_attention") for name in ("self_extend", "t5_bias", "alibi")),
        ("t5_bias", (8, 0), 36, None),
    ],
)
def test_no_kernel_is_called_that_refuses_the_device_or_the_head(
    name: str,
    capability: tuple[int, int],
    head_dim: int,
    kernel: str | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those below torch's own function check neither: flash attention wants Ampere and multiples of 8, and stops."""
    set_capability(capability, monkeypatch)
    model = ctxext.patch(tiny(head_dim=head_dim).to(dtype), name, factor=4.0)
    with on_fake_cuda(model), torch.no_grad(), _Kernels() as kernels:
        tokens = torch.full((1, (8 if name == "t5_bias" else 2) * LENGTH), 7, device=CUDA)  # its far keys begin there
        read = model(tokens, use_cache=True)
        model(tokens[:, :20], past_key_values=read.past_key_values)
    assert {called for called, _ in kernels.called} <= {kernel}
    assert all(size % 8 == 0 for _, size in kernels.called)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOTH, indirect=True)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)], ids=str)
def test_grouped_heads_do_not_cost_the_fused_kernel(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Efficient attention knows none: torch would write out all scores, where flash attention does not serve."""
    set_capability(capability, monkeypatch)
    model = ctxext.patch(tiny(num_key_value_heads=2).to(dtype), "sinusoidal", factor=4.0)
    is_for_flash = dtype == torch.bfloat16 and capability >= (8, 0)
    grouped, real = set(), torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> Tensor:
        grouped.add(options["enable_gqa"])
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with on_fake_cuda(model), torch.no_grad():
        model(torch.full((1, LENGTH), 7, device=CUDA))
    assert grouped == {is_for_flash}


@pytest.mark.slow
def test_what_stays_on_the_cpu_is_noticed(dtype: torch.dtype) -> None:
    model = patched("llama", "yarn", dtype)
    with on_fake_cuda(model):
        model.model.norm.weight = nn.Parameter(torch.ones(model.config.hidden_size))
        with pytest.raises(RuntimeError, match="cpu"):
            model(torch.full((1, 8), 7, device=CUDA))
