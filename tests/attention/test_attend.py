"""What stands in for a model's own attention and forward: proven before it is put there, and never silently gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import ctxext
from ctxext.errors import IncompatibleError, PatchStateError
from tests._models import FALCON, logits, qwen2_vl, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH


class Capped(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, cap=5.0, **kwargs)


class CappedLlama(LlamaForCausalLM):
    """A model of somebody's own code, which gives its attention more than llama does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = Capped


@pytest.mark.parametrize("method", ["alibi", "t5_bias", "self_extend"])
def test_what_attention_is_given_and_ctxext_does_not_know_is_refused_by_its_name(method: str) -> None:
    model = CappedLlama(tiny().config)
    with pytest.raises(IncompatibleError, match=f"{method}.* llama: .* computes with cap,"):
        ctxext.patch(model, method, factor=4.0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation_after_alibi_is_refused_and_can_be_taken_back(implementation: str) -> None:
    model = ctxext.patch(tiny(), "alibi", factor=4.0)
    expected = logits(model, tokens())
    model.set_attn_implementation(implementation)
    for _ in range(2):
        with pytest.raises(PatchStateError, match=rf"is now '{implementation}'.*set_attn_implementation\('ctxext'\)"):
            logits(model, tokens())
    model.set_attn_implementation("ctxext")
    assert torch.equal(logits(model, tokens()), expected)


def test_unpatching_after_another_attention_implementation_brings_rotation_back() -> None:
    model = tiny()
    plain = logits(model, tokens())
    ctxext.patch(model, "alibi", factor=4.0).set_attn_implementation("eager")
    ctxext.unpatch(model)
    torch.testing.assert_close(logits(model, tokens()), plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "falcon"])
def test_families_with_alibi_of_their_own_refuse_it_as_well(model_type: str) -> None:
    model = tiny(model_type, **(FALCON if model_type == "falcon" else {}))
    ctxext.patch(model, "alibi", factor=4.0, trained_length=TRAINED_LENGTH)
    model.config._attn_implementation_internal = "eager"
    with pytest.raises(PatchStateError, match="_attn_implementation"):
        logits(model, tokens())


def replica_of(module: nn.Module) -> nn.Module:
    """What ``torch.nn.parallel.replicate`` makes of a module, on one device and with all weights zero."""
    replica: Any = module._replicate_for_data_parallel()
    replica._modules = {name: None if part is None else replica_of(part) for name, part in module._modules.items()}
    replica._parameters = {
        name: None if weight is None else nn.Parameter(torch.zeros_like(weight))
        for name, weight in module._parameters.items()
    }
    replica._buffers = {name: None if part is None else part.clone() for name, part in module._buffers.items()}
    return replica


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("llama", None),
        *(("llama", name) for name in ("yarn", "dynamic_ntk", "dynamic_yarn", "alibi")),
        *((name, "dynamic_pi") for name in ("bloom", "mpt", "falcon")),
    ],
)
def test_a_replica_runs_itself_and_not_the_original(model_type: str, method: str | None) -> None:
    model = tiny(model_type, **(FALCON if model_type == "falcon" else {}))
    if method:
        ctxext.patch(model, method, factor=4.0, trained_length=TRAINED_LENGTH)
    expected = logits(model, tokens())
    replica = replica_of(model)
    decoder = getattr(replica, replica.base_model_prefix)
    assert decoder(tokens(), use_cache=False).last_hidden_state.abs().max() == 0  # its weights are
    assert expected.abs().max() > 1
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, copied in replica.named_parameters(remove_duplicate=False):
        copied.data.copy_(weights[name])
    assert torch.equal(logits(replica, tokens()), expected)
    assert torch.equal(logits(model, tokens()), expected)
    if method:
        ctxext.unpatch(model)
        assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())


def test_a_replica_of_what_accelerate_wrapped_is_refused_by_name() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny()
    add_hook_to_module(model.model, ModelHook())
    ctxext.patch(model, "alibi", factor=4.0)
    with pytest.raises(IncompatibleError, match=r"LlamaModel: nn\.DataParallel cannot copy.*torchrun"):
        replica_of(model)


@pytest.mark.slow
def test_positions_along_several_axes_are_refused_where_they_differ() -> None:
    """An image between the words: height and width are counted beside time."""
    model = ctxext.patch(qwen2_vl(), "alibi", factor=4.0)
    plain = tokens(40)
    assert torch.equal(
        logits(model, plain), logits(model, plain, position_ids=torch.arange(40)[None, None].expand(3, 1, -1))
    )
    image = torch.tensor([[7, *[5] * 16, 8]])
    inputs = torch.cat([tokens(20), image, tokens(20)], dim=1)
    arguments = {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    with pytest.raises(IncompatibleError, match=r"count along 3 axes that differ.*image"):
        logits(model, inputs, mm_token_type_ids=(inputs == 5).long(), **arguments)
