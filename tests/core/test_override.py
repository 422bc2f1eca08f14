"""Replacements of a module's forward, beside other code that replaces it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.training.loss import chunk_loss
from tests._models import FALCON, tiny, tokens


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@torch.no_grad()
def loss(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=tokens(), labels=tokens()).loss
    return found


def of_the_loss(model: Any) -> Any:
    chunk_loss(model, chunk=16)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "replaced",
    [
        lambda: ctxext.patch(tiny("bloom"), "alibi", factor=4.0),
        lambda: ctxext.patch(tiny("falcon", **FALCON), "pi", factor=4.0),
        lambda: ctxext.patch(tiny(), "dynamic_ntk", factor=4.0, growth="request"),
        lambda: of_the_loss(tiny()),
        lambda: of_the_loss(ctxext.patch(tiny("bloom"), "pi", factor=4.0)),
    ],
    ids=["bloom", "falcon", "request", "loss", "bloom and loss"],
)
def test_a_model_whose_forward_is_replaced_is_what_it_was_once_accelerate_unwraps_it(
    replaced: Any, accelerator: Accelerator
) -> None:
    """It binds what it unwraps to the model, as the function of a class."""
    model = replaced()
    expected = loss(model)
    prepared = accelerator.prepare(model)
    assert loss(prepared) == pytest.approx(expected.item(), rel=0.02)  # in bfloat16
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert torch.equal(loss(unwrapped), expected)
    other = copy.deepcopy(unwrapped)
    for weight in other.parameters():
        weight.data *= 0.5
    assert not torch.equal(loss(other), expected)
    assert torch.equal(loss(unwrapped), expected)


@pytest.mark.slow
def test_an_extension_is_undone_after_accelerate_has_unwrapped_the_model(accelerator: Accelerator) -> None:
    expected = loss(tiny("bloom"))
    model = accelerator.prepare(ctxext.patch(tiny("bloom"), "pi", factor=4.0))
    assert torch.equal(loss(ctxext.unpatch(accelerator.unwrap_model(model, keep_fp32_wrapper=False))), expected)


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize(
    ("model_type", "method"), [("llama", "fire"), ("llama", "fox"), ("gpt2", "tile"), ("bert", "pi")]
)
def test_weights_that_processes_would_not_average_are_refused(model_type: str, method: str) -> None:
    """Each would go on with its own copy of them, after the first step another one."""
    model = tiny(model_type)
    wrapped, before = DistributedDataParallel(model), [id(weight) for weight in model.parameters()]
    with pytest.raises(IncompatibleError, match=r"would not average .* over its processes\. Extend the model first"):
        ctxext.patch(wrapped, method, factor=2.0)
    assert [id(weight) for weight in model.parameters()] == before
    DistributedDataParallel(ctxext.patch(model, method, factor=2.0))


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("method", ["yarn", "self_extend", "alibi"])
def test_a_model_inside_a_data_parallel_one_is_extended(method: str) -> None:
    model, expected = tiny(), loss(ctxext.patch(tiny(), method, factor=2.0))
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    assert torch.equal(loss(ctxext.patch(wrapped, method, factor=2.0)), expected)
