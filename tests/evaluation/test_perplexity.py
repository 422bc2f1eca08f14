"""Loss by position against the plain full-logits computation, the truncation baseline by hand, paired differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.forward import check_token_ids
from ctxext.measuring.loss import loss_by_position, loss_while, truncated_loss
from tests._models import byte_model, tiny

# Two fp32 evaluations of the same function that differ in the blocking of their matrix products.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# What comes between the layers and the logits differs from family to family.
FAMILIES = {
    "llama": {},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "phi": {},
}


def plain_loss(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The definition, written out: minus the log of the probability of the token that comes next."""
    with torch.no_grad():
        probabilities = model(input_ids[:, :-1], use_cache=False).logits.double().softmax(dim=-1)
    return -probabilities.gather(2, input_ids[:, 1:, None]).squeeze(2).log().float()


@pytest.mark.parametrize("chunk", [1, 7, 89, 4096])
def test_equals_the_full_logits_at_every_position(model: LlamaForCausalLM, input_ids: Tensor, chunk: int) -> None:
    found = loss_by_position(model, input_ids, chunk=chunk)
    assert found.shape == (2, 89)
    torch.testing.assert_close(found, plain_loss(model, input_ids), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_respects_what_each_family_does_after_its_layers(family: str) -> None:
    config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    input_ids = torch.randint(0, 64, (1, 40))
    torch.testing.assert_close(loss_by_position(model, input_ids, chunk=16), plain_loss(model, input_ids), **CLOSE)


@pytest.mark.parametrize("method", ["yarn", "self_extend", "dynamic_ntk"])
def test_a_text_is_read_for_as_long_as_somebody_wants_more(method: str) -> None:
    model = byte_model()
    text = torch.randint(0, 256, (1, 1001), generator=torch.Generator().manual_seed(2))
    ctxext.patch(model, method, factor=2)
    whole = loss_by_position(model, text)[0]
    looks: list[int] = []

    def until(stop: int, seen: Tensor) -> bool:
        looks.append(len(seen))
        return len(seen) < stop

    read = loss_while(model, text, piece=256, go_on=lambda seen: until(512, seen))
    assert (looks, len(read)) == ([256, 512], 512)
    assert torch.allclose(read, whole[:512], atol=1e-4)
    looks.clear()
    read = loss_while(model, text, piece=256, go_on=lambda seen: until(2000, seen))
    assert (looks, len(read)) == ([256, 512, 768], 1000)  # nobody is asked where nothing is left
    assert torch.allclose(read, whole, atol=1e-4)


def test_leaves_no_trace(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    before, keys = set(model.__dict__), list(model.state_dict())
    decoder = model.model
    loss_by_position(model, input_ids, chunk=10)
    assert model.model is decoder
    assert set(model.__dict__) == before
    assert list(model.state_dict()) == keys


def test_an_instance_forward_is_not_mistaken_for_the_model(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    """Accelerate replaces `forward` on the instance by one that is bound to the original module."""
    expected = plain_loss(model, input_ids)
    model.forward = model.forward
    torch.testing.assert_close(loss_by_position(model, input_ids, chunk=20), expected, **CLOSE)


def test_peft_wrapped(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    peft = pytest.importorskip("peft")
    plain = loss_by_position(model, input_ids)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    found = loss_by_position(wrapped, input_ids, chunk=20)
    torch.testing.assert_close(found, plain_loss(wrapped, input_ids), **CLOSE)
    assert not torch.allclose(found, plain)
    with wrapped.disable_adapter():
        torch.testing.assert_close(loss_by_position(wrapped, input_ids), plain, **CLOSE)


def test_prompt_learning_is_refused(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(IncompatibleError, match="virtual tokens"):
        loss_by_position(peft.get_peft_model(model, config).eval(), input_ids)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: byte_model().train(), r"model\.eval\(\)"),
        (lambda: byte_model().model, "AutoModelForCausalLM"),
        (lambda: tiny("t5", vocab_size=300), "encoder-decoder"),
        (lambda: Odd(byte_model().config).eval(), "in pieces"),
    ],
)
def test_a_model_without_losses_by_position_is_refused(made: Any, says: str, input_ids: Tensor) -> None:
    with pytest.raises(IncompatibleError, match=says):
        loss_by_position(made(), input_ids)


class Odd(LlamaForCausalLM):
    """A head that bypasses its base model."""

    def forward(self, input_ids: Tensor, **kwargs: object) -> object:
        return super().forward(input_ids[:, :3], **kwargs)


def test_tokens_without_losses_are_refused(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    with pytest.raises(InvalidParameterError, match="chunk"):
        loss_by_position(model, input_ids, chunk=0)
    with pytest.raises(InvalidParameterError, match="2 tokens"):
        loss_by_position(model, input_ids[:, :1])
    with pytest.raises(InvalidParameterError, match="integers"):
        check_token_ids(input_ids.float())


@pytest.mark.parametrize(("window", "stride", "start", "prefix"), [(32, 8, 0, 0), (32, 8, 32, 0), (30, 7, 50, 1)])
def test_truncation_baseline_by_hand(
    model: LlamaForCausalLM, input_ids: Tensor, window: int, stride: int, start: int, prefix: int
) -> None:
    """Every position alone: which tokens may it see, and what does the plain model charge for the next one?"""
    expected = []
    for i in range(start, 89):
        if i < window:
            seen = input_ids[:, : i + 2]
        else:
            stop = min(window + ((i - window) // stride + 1) * stride, 89)
            seen = torch.cat([input_ids[:, :prefix], input_ids[:, stop - window + prefix : i + 2]], dim=1)
            assert window - stride + 1 <= seen.shape[1] - 1 <= window
        expected.append(plain_loss(model, seen)[:, -1])
    found = truncated_loss(model, input_ids, window=window, stride=stride, start=start, prefix=prefix)
    torch.testing.assert_close(found, torch.stack(expected, dim=1), **CLOSE)


@pytest.mark.parametrize(("window", "stride", "prefix"), [(32, None, 0), (30, 7, 1), (20, 20, 0), (64, 3, 2)])
def test_a_start_changes_no_context(
    model: LlamaForCausalLM, input_ids: Tensor, window: int, stride: int | None, prefix: int
) -> None:
    """With or without the tokens before it, a token is predicted from the same ones."""
    whole = truncated_loss(model, input_ids, window=window, stride=stride, prefix=prefix)
    for start in (1, window - 1, window, window + 1, window + 5, 70, 88):
        found = truncated_loss(model, input_ids, window=window, stride=stride, prefix=prefix, start=start)
        torch.testing.assert_close(found, whole[:, start:], **CLOSE)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"window": 0}, "window"),
        ({"window": 8, "stride": 9}, "stride"),
        ({"window": 8, "start": 89}, "start"),
        ({"window": 8, "prefix": 8}, "prefix"),
    ],
)
def test_truncation_refuses(model: LlamaForCausalLM, input_ids: Tensor, arguments: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} must be"):
        truncated_loss(model, input_ids, **arguments)


def test_a_patched_model_is_measured_as_patched(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    plain = loss_by_position(model, input_ids)
    ctxext.patch(model, "pi", factor=2.0)
    patched = loss_by_position(model, input_ids, chunk=20)
    torch.testing.assert_close(patched, plain_loss(model, input_ids), **CLOSE)
    assert not torch.allclose(patched, plain)
    ctxext.unpatch(model)
    assert torch.equal(loss_by_position(model, input_ids), plain)
