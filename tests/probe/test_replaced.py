"""Other programs' kernels in transformers' modules: an extension is proven by code that does not run them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llava import modeling_llava
from transformers.models.qwen3 import modeling_qwen3

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.probe import layers as probe
from ctxext.probe.replaced import replaced_in
from tests._models import logits, tiny, tokens
from tests._products import crossed

METHODS = ("yarn", "self_extend", "alibi", "streaming", "fox")


def kernel(function: Any) -> Any:
    """What computes as ``function``, and takes addresses first, as a launched Triton kernel does."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        assert all(value.data_ptr() for value in args if isinstance(value, Tensor)), "launched on the address 0"
        return function(*args, **kwargs)

    return launch


def with_kernel(base: type[nn.Module]) -> type[nn.Module]:
    """A class of this module in the place of a class of transformers."""
    return type(f"Fast{base.__name__}", (base,), {"forward": kernel(base.forward), "__module__": __name__})


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SEEN", {})


REPLACED = {
    "rotation": (modeling_llama, "apply_rotary_pos_emb", kernel(modeling_llama.apply_rotary_pos_emb)),
    "partial": (
        modeling_llama,
        "apply_rotary_pos_emb",
        functools.partial(kernel(modeling_llama.apply_rotary_pos_emb), unsqueeze_dim=1),
    ),
    "norm": (modeling_llama, "LlamaRMSNorm", with_kernel(modeling_llama.LlamaRMSNorm)),
    "mlp": (modeling_llama, "LlamaMLP", with_kernel(modeling_llama.LlamaMLP)),
    "method": (modeling_llama.LlamaRMSNorm, "forward", kernel(modeling_llama.LlamaRMSNorm.forward)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "what"), crossed(METHODS, list(REPLACED)))
def test_a_kernel_in_the_models_module_changes_nothing(method: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = logits(ctxext.patch(tiny(), method, factor=4), tokens(150))
    monkeypatch.setattr(probe, "_SEEN", {})
    monkeypatch.setattr(*REPLACED[what])
    torch.manual_seed(0)
    model = ctxext.patch(tiny(), method, factor=4)
    assert torch.equal(logits(model, tokens(150)), expected)


@pytest.mark.slow
def test_a_model_that_its_kernels_cannot_run_yet_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is often extended on the CPU and moved afterwards to the device that the kernels are for."""

    def rotate(*_: Any, **__: Any) -> Any:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    expected = logits(ctxext.patch(tiny(), "self_extend", factor=4), tokens(150))
    with monkeypatch.context() as replaced:
        replaced.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
        model = ctxext.patch(tiny(), "self_extend", factor=4)
    assert torch.equal(logits(model, tokens(150)), expected)


def test_other_families_and_what_is_seen_of_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", kernel(modeling_qwen3.apply_rotary_pos_emb))
    model = tiny("qwen3")
    layers = probe.look(model, ["model.rotary_emb"])
    assert layers.failure is None
    assert layers.rotating == {f"model.layers.{index}" for index in range(model.config.num_hidden_layers)}


def test_nothing_is_replaced_in_transformers_itself() -> None:
    for module in (modeling_llama, modeling_qwen3, modeling_llava):
        assert replaced_in(module.__name__) == {}


class OfAnotherModule(LlamaForCausalLM):
    """A model's class beside the module of transformers that its layers come from."""


@pytest.mark.parametrize("method", ["self_extend", "alibi", "t5_bias"])
def test_a_class_without_an_original_is_refused_by_name(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OfAnotherModule(tiny().config).eval()
    monkeypatch.setattr(*REPLACED["norm"])
    with pytest.raises(IncompatibleError, match=r"LlamaRMSNorm by tests\b.*Extend the model first"):
        ctxext.patch(model, method, factor=4)


@pytest.mark.parametrize("method", ["self_extend", "alibi", "t5_bias"])
def test_a_kernel_from_elsewhere_is_not_launched_without_data(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACT2FN, "fast", with_kernel(nn.SiLU))
    model = tiny(hidden_act="fast")
    with pytest.raises(IncompatibleError, match=r"test_replaced.*a kernel outside torch.*Extend the model first"):
        ctxext.patch(model, method, factor=4)


@pytest.mark.slow
def test_attention_takes_its_arguments_in_the_order_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs wrap every registered function, and pass the sixth argument on by position (kvpress)."""
    expected = logits(ctxext.patch(tiny(), "self_extend", factor=4), tokens(150))
    mapping = AttentionInterface._global_mapping
    for name, function in list(mapping.items()):

        def wrapped(
            module: Any, q: Any, k: Any, v: Any, mask: Any, dropout: Any, _inner: Any = function, **kwargs: Any
        ) -> Any:
            return _inner(module, q, k, v, mask, dropout, **kwargs)

        monkeypatch.setitem(mapping, name, wrapped)
    for method in ("self_extend", "alibi", "t5_bias"):
        ctxext.patch(tiny(), method, factor=4)
    assert torch.equal(logits(ctxext.patch(tiny(), "self_extend", factor=4), tokens(150)), expected)
