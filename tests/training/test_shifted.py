"""Shifted sparse attention against its definition for every head, and that nothing of it is left after training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.training.lora import attach_lora
from ctxext.training.shifted import ShiftedAttention
from tests._models import logits, tiny, tokens
from tests.training._recipe import losses, recipe, words_of

LENGTH, GROUPS = 48, 3


def seen(length: int, groups: int) -> Tensor:
    """What a query sees, [half of the heads, query, key], from the positions of tokens alone."""
    size, place = length // groups, torch.arange(length)
    whole, between = place // size, (place + size // 2) // size
    causal = place[:, None] >= place
    return torch.stack([causal & (number[:, None] == number) for number in (whole, between)])


def defined(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Attention of [batch, head, token, dim] with a mask for each head; there may be fewer key than query heads."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(repeat, 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    straight = k.shape[1] // 2 // repeat * repeat  # no key head is in both parts
    mask = seen(q.shape[2], groups)[[0] * straight + [1] * (k.shape[1] - straight)]
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def called(model: PreTrainedModel, *heads: Tensor, **how: Any) -> Tensor:
    """What a layer of a model gets for queries, keys and values."""
    shifted = ShiftedAttention(model, GROUPS)
    layer = model.model.layers[0].self_attn
    table = __import__(type(layer).__module__, fromlist=["x"]).ALL_ATTENTION_FUNCTIONS
    with shifted.on():
        attend = table[model.config._attn_implementation]
        found: Tensor = attend(layer, *heads, how.pop("mask", None), scaling=heads[0].shape[-1] ** -0.5, **how)[0]
    return found


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (5, 5)])
@pytest.mark.parametrize("rows", [1, 2])
def test_equals_the_definition_forward_and_backward(q_heads: int, kv_heads: int, rows: int) -> None:
    model = tiny(hidden_size=16 * q_heads, num_attention_heads=q_heads, num_key_value_heads=kv_heads)
    generator = torch.Generator().manual_seed(0)
    heads = [
        torch.randn(rows, count, LENGTH, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (q_heads, kv_heads, kv_heads)
    ]
    found, expected = called(model, *heads), defined(*heads, GROUPS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), heads) for out in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_first_tokens_do_not_see_the_last() -> None:
    """As they would in a group that goes round the end of the sequence; and no token sees a later one."""
    model = tiny()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, LENGTH, 16, generator=generator) for _ in range(3))
    before = called(model, q, k, v)
    for late in (LENGTH - 1, 30, 8):
        other = [part.clone() for part in (k, v)]
        for part in other:
            part[:, :, late] += 1
        changed = (called(model, q, *other) - before).abs().amax((0, 2, 3)) > 0
        assert not changed[:late].any()
        assert changed[late]


def test_what_rolls_the_sequence_round_would_be_found() -> None:
    """The authors' other form: its first tokens see the last ones."""
    half = LENGTH // GROUPS // 2
    mask = seen(LENGTH, GROUPS)[0]
    q, k, v = torch.randn(3, LENGTH, 16, generator=torch.Generator().manual_seed(0))

    def rolled(values: Tensor) -> Tensor:
        turned = [part.roll(-half, 0) for part in (q, k, values)]
        scores = (turned[0] @ turned[1].T).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ turned[2]).roll(half, 0)

    other = v.clone()
    other[-1] += 1
    assert ((rolled(other) - rolled(v)).abs().amax(1) > 0)[:half].any()


def test_the_model_is_whole_afterwards_whatever_happened() -> None:
    model, ids = ctxext.patch(tiny(), "yarn", factor=4.0), tokens(LENGTH)
    config, before = model.config.to_dict(), logits(model, ids)
    shifted = ShiftedAttention(attach_lora(model, rank=2), GROUPS)
    other = tiny()
    alone = logits(other, ids)
    with shifted.on():
        assert not torch.allclose(logits(model, ids), before, atol=1e-3)
        assert torch.equal(logits(other, ids), alone), "a model that nobody asked about"
    assert torch.equal(logits(model, ids), before)
    with pytest.raises(RuntimeError, match="on purpose"), shifted.on():
        raise RuntimeError("on purpose")
    assert torch.equal(logits(model, ids), before)
    assert model.config.to_dict() == config


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_the_recipe_trains_in_groups_and_measures_and_saves_whole_attention(
    checkpointing: str, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths.append(query.shape[2])
        return attention(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    words = ("--merge", "--data.positions", "consecutive", "--memory.checkpointing", checkpointing)
    recipe.finetune(settings(*words, "--training.shifted_groups", "4"))
    assert set(lengths) == {8, 4}, "sequences of 32 tokens: groups of 8, and halves at the ends"
    report = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert report["settings"]["training"]["shifted_groups"] == 4
    ids = tokens(40)
    lengths.clear()
    ours = logits(ctxext.load(tmp_path / "run" / "adapter"), ids)
    stock = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged"), ids)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert set(lengths) == {40}


@pytest.mark.slow
def test_trained_in_groups_its_loss_falls(settings: Any, tmp_path: Path) -> None:
    recipe.finetune(
        settings("--data.positions", "consecutive", "--training.shifted_groups", "2", "--training.steps", "30")
    )
    found = list(losses(tmp_path / "run").values())
    assert sum(found[-5:]) < 0.8 * sum(found[:5])


def test_gradients_with_checkpointing_are_those_without() -> None:
    """What is computed again in the backward pass is computed in groups, too."""
    found = []
    for again in (False, True):
        model, ids = tiny().train(), tokens(LENGTH)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with ShiftedAttention(model, GROUPS).on():
            model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data.positions", "pose"], r"'pose' has distances or documents across"),
        (["--data.positions", "packed"], r"'packed' has distances or documents across"),
        (["--data.length", "36"], "36 tokens cannot be cut into 4 groups .* multiple of 8"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(words: list[str], named: str, settings: Any) -> None:
    with pytest.raises(InvalidParameterError, match=named):
        settings(*words_of({"data.positions": "consecutive"}, *words), "--training.shifted_groups", "4")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: ctxext.patch(tiny(), "alibi", factor=4.0), "computed by ctxext"),
        (lambda: ctxext.patch(tiny(), "self_extend", factor=4.0), "computed by ctxext"),
        (lambda: tiny(num_key_value_heads=1), "its heads share one key head"),
        (lambda: tiny("mistral", sliding_window=16), "sliding windows"),
        (lambda: tiny(attn_implementation="eager"), "'eager'"),
    ],
)
def test_models_it_cannot_train_are_named(model: Any, reason: str) -> None:
    with pytest.raises(IncompatibleError, match=f"cannot train this .* model: .*{reason}.*shifted_groups"):
        ShiftedAttention(model(), 2)


def test_calls_it_cannot_cut_are_refused() -> None:
    model, ids = tiny(), tokens(LENGTH)
    shifted, mask = ShiftedAttention(model, GROUPS), torch.ones_like(ids)
    mask[0, :5] = 0
    with shifted.on(), torch.no_grad():
        with pytest.raises(IncompatibleError, match="given a mask"):
            model(ids, attention_mask=mask, use_cache=False)
        with pytest.raises(IncompatibleError, match=r"44 tokens cannot be cut into 3 groups .* multiple of 6"):
            model(ids[:, :44], use_cache=False)
        past = model(ids, use_cache=True).past_key_values
        with pytest.raises(IncompatibleError, match="1 queries and 49 keys"):
            model(ids[:, :1], past_key_values=past)
