"""One model, many callers: a forward pass of a patched model leaves nothing behind that another could read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ctxext
from ctxext.errors import PatchStateError
from tests._models import FOLLOWING, RECENT, STATIC, by_method, extended, logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

HERE = [*FOLLOWING, ("gemma3_text", {"method": "dynamic_pi", "factor": 4.0})]
following = pytest.mark.parametrize(("model_type", "method"), HERE, ids=by_method)
every = pytest.mark.parametrize(("model_type", "method"), [*HERE, *STATIC], ids=by_method)


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]  # an error in the thread leaves it empty


class Interrupted(TorchDispatchMode):
    """Before every operation of this thread, another thread does all of its work."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += 1
        in_a_thread(self.work)
        return func(*args, **(kwargs or {}))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.slow
@following
def test_a_pass_is_not_disturbed_by_another_of_another_length(model_type: str, method: dict[str, Any]) -> None:
    model = extended(model_type, method)
    ours, theirs = tokens(2 * TRAINED_LENGTH), tokens(TRAINED_LENGTH - 9)
    expected = logits(model, ours)
    with Interrupted(lambda: logits(model, theirs)) as interrupted:
        found = logits(model, ours)
    assert interrupted.times > 50
    assert torch.equal(found, expected)


@following
def test_a_pass_changes_no_buffer_and_no_number(model_type: str, method: dict[str, Any]) -> None:
    model = extended(model_type, method)
    before = buffers(model)
    numbers = {path: dict(vars(module)) for path, module in model.named_modules()}
    logits(model, tokens())
    for key, buffer in buffers(model).items():
        assert torch.equal(buffer, before[key]), key
    for path, module in model.named_modules():
        scalars = {key: value for key, value in numbers[path].items() if isinstance(value, int | float | str)}
        assert {key: vars(module)[key] for key in scalars} == scalars, path


@pytest.mark.slow
@every
def test_patched_or_read_in_inference_mode_then_trained(model_type: str, method: dict[str, Any]) -> None:
    """Tensors that are made in inference mode may not be written, nor saved for a backward pass, outside of it."""
    ids, plain = tokens(), logits(tiny(model_type).double(), tokens())
    expected = ctxext.patch(tiny(model_type).double(), trained_length=TRAINED_LENGTH, **method)
    expected(ids, labels=ids, use_cache=False).loss.backward()
    gradients = [weight.grad for weight in expected.parameters()]
    model = tiny(model_type).double()  # its frequencies are cast, too: patch puts others in their place
    with torch.inference_mode():
        ctxext.patch(model, trained_length=TRAINED_LENGTH, **method)
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        assert all(torch.equal(weight.grad, found) for weight, found in zip(model.parameters(), gradients, strict=True))
        with torch.inference_mode():
            model(tokens(2 * TRAINED_LENGTH + 5), use_cache=False)
    if RECENT:  # 5.17's own longrope makes a buffer of its long frequencies where it first reads a long text
        assert not any(buffer.is_inference() for buffer in model.buffers())
    with torch.inference_mode():
        ctxext.unpatch(model)
    assert torch.equal(logits(model, ids), plain)
    model(ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["yarn", "dynamic_yarn", "self_extend", "alibi", "nope"])
@pytest.mark.parametrize("inner_first", [True, False], ids=["part first", "whole first"])
def test_a_model_inside_another_is_extended_once(first: str, inner_first: bool) -> None:
    whole = tiny()
    parts = (whole.model, whole) if inner_first else (whole, whole.model)
    plain = logits(whole, tokens())
    ctxext.patch(parts[0], first, factor=2)
    extended = logits(whole, tokens(120))
    said = "LlamaModel inside this LlamaForCausalLM" if inner_first else "LlamaForCausalLM around this LlamaModel"
    for second in ("pi", first):
        with pytest.raises(PatchStateError, match=said):
            ctxext.patch(parts[1], second, factor=2, trained_length=TRAINED_LENGTH)
    assert torch.equal(logits(whole, tokens(120)), extended)
    ctxext.unpatch(parts[0])
    assert torch.equal(logits(whole, tokens()), plain)
    ctxext.unpatch(ctxext.patch(parts[1], "pi", factor=2))
