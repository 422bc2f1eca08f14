"""The gradient of the loss by what a model rotates by: exact, and the model is afterwards what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctxext
from ctxext.choosing.landscape import PENALTY, Example, Landscape, as_method, require_searchable, vector_of
from ctxext.core.rotary import find_sites
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.measuring.loss import loss_by_position
from ctxext.methods.ntk import NTK
from ctxext.methods.yarn import YaRN
from tests._models import on_recent, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

LENGTH = 4 * TRAINED_LENGTH


def landscape(model: Any, factor: float = 4.0) -> Landscape:
    """The landscape of a plain model, patched for it."""
    sites = find_sites(Subject.of(model), TRAINED_LENGTH)
    ctxext.patch(model, as_method(torch.zeros(sites[0].spec.rotary_dim // 2 + 1, dtype=torch.float64), factor))
    return Landscape(model, sites, factor)


def exact(model_type: str) -> Any:
    """A tiny model that computes in float64 throughout: many classes take their norms in float32 whatever they hold."""
    model = tiny(model_type).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=1e-6, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.detach().clone().numpy().tobytes() for name, value in model.state_dict().items()}


def flags(model: nn.Module) -> list[tuple[bool, bool]]:
    return [(module.training, "forward" in vars(module)) for module in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm", "gpt_neox", "starcoder2"])
def test_the_gradient_is_that_of_central_differences(model_type: str) -> None:
    model = exact(model_type)
    ids = tokens(LENGTH + 1)
    with landscape(model) as found:
        rope = found.sites[0].spec
        vector = vector_of(NTK(factor=4), rope, LENGTH) + 0.01
        value, gradient = found.gradient(vector, [Example.mean(ids)])
        penalty = found._penalty(vector).item()
        assert value == pytest.approx(found.loss(vector, [Example.mean(ids)]) + penalty, abs=1e-12)

        def loss(at: torch.Tensor) -> float:
            """The whole of it written anew: the model's own logits in float64, and the penalty by hand."""
            found.rotation.log_divisors, found.rotation.log_scale = at[:-1], at[-1]
            with torch.no_grad():
                logits = model(ids[:, :-1], use_cache=False).logits[0]
            assert logits.dtype == torch.float64
            plain = rope.base ** -(torch.arange(0, rope.rotary_dim, 2).double() / rope.rotary_dim)
            slow = plain * TRAINED_LENGTH < 2 * torch.pi
            penalty = PENALTY * ((at[:-1][slow] - torch.tensor(4.0).double().log()) ** 2).mean()
            return (F.cross_entropy(logits, ids[0, 1:]) + penalty).item()

        assert loss(vector) == pytest.approx(value, abs=1e-9)
        step = 2e-6  # these random models bend sharply: two pairs of points take their third derivative out
        for unknown in range(len(vector)):
            moved = torch.zeros_like(vector)
            moved[unknown] = step
            near, far = (loss(vector + many * moved) - loss(vector - many * moved) for many in (1, 2))
            difference = (8 * near - far) / (12 * step)
            assert gradient[unknown].item() == pytest.approx(difference, rel=1e-6, abs=1e-6), unknown
        assert gradient[-1].abs() > 1e-5, "the scale matters"
        assert gradient[:-1].abs().max() > 1e-5


def test_weights_of_tokens_are_those_of_their_losses() -> None:
    model = exact("llama")
    ids, weights = tokens(LENGTH + 1), torch.linspace(0, 1, LENGTH).double()[None]
    with landscape(model) as found:
        vector = vector_of(YaRN(factor=4), found.sites[0].spec, LENGTH)
        value = found.loss(vector, [Example(ids, weights)])
        logits = model(ids[:, :-1], use_cache=False).logits[0]
        losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert value == pytest.approx((losses * weights[0]).sum().item(), abs=1e-9)


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "deepseek_v3", on_recent("gemma3_text", reason="longrope on Gemma 3 is refused"), "phi3"],
)
def test_a_vector_reads_as_the_method_that_it_becomes(model_type: str) -> None:
    model, ids = tiny(model_type), tokens(LENGTH + 1)
    with landscape(model) as found:
        vector = vector_of(NTK(factor=3), found.sites[0].spec, LENGTH)
        value = found.loss(vector, [Example.mean(ids)])
    ctxext.unpatch(model)
    ctxext.patch(model, as_method(vector, 4.0))
    assert value == pytest.approx(loss_by_position(model, ids).mean().item(), abs=2e-5)


def test_afterwards_the_model_is_what_it_was() -> None:
    model = tiny(attention_dropout=0.5)
    model.lm_head.weight.requires_grad_(False)
    model.model.layers[0].train()  # as somebody left it
    untouched = copy.deepcopy(model)
    ids = tokens(LENGTH + 1)
    with landscape(model) as found:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        found.gradient(torch.zeros(17, dtype=torch.float64), [Example.mean(ids)])
    ctxext.unpatch(model)
    assert bits(model) == bits(untouched)
    assert flags(model) == flags(untouched)
    assert [one.requires_grad for one in model.parameters()] == [one.requires_grad for one in untouched.parameters()]
    assert all(one.grad is None for one in model.parameters())
    assert torch.equal(model.eval()(ids).logits, untouched.eval()(ids).logits)


def test_it_is_undone_after_an_error_and_works_where_gradients_are_off() -> None:
    model, ids = tiny(), tokens(LENGTH + 1)
    before = flags(model)
    found = landscape(model)
    zeros = torch.zeros(17, dtype=torch.float64)
    patched = flags(model)
    with pytest.raises(RuntimeError), found:
        raise RuntimeError
    assert flags(model) == patched
    with torch.no_grad(), found:
        _, gradient = found.gradient(zeros, [Example.mean(ids)])
    with found, torch.inference_mode():
        _, again = found.gradient(zeros, [Example.mean(ids)])
    assert torch.equal(gradient, again)
    ctxext.unpatch(model)
    assert flags(model) == before


def test_what_cannot_be_searched_is_refused() -> None:
    model = tiny()
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(IncompatibleError, match="quantised"):
        require_searchable(model)
    with torch.inference_mode():
        loaded = tiny()
    with pytest.raises(IncompatibleError, match="inference_mode"):
        require_searchable(loaded)
    require_searchable(tiny())
