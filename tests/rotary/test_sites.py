"""Before anything is patched: live rotary modules compute what their config says, and what methods start from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.rotary.sites import RotaryPlace
from tests._checkpoints import try_only
from tests._models import tiny, tokens
from tests._products import crossed
from tests.walk.tiny import TRAINED_LENGTH

LONG = 4 * TRAINED_LENGTH
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": TRAINED_LENGTH,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}


def rotary_of(model: PreTrainedModel) -> Any:
    return model.model.rotary_emb


def assign_config(model: PreTrainedModel) -> None:
    model.config.rope_parameters = dict(LINEAR)


def assign_base(model: PreTrainedModel) -> None:
    model.config.rope_parameters["rope_theta"] = 500000.0


def halve_slowest(model: PreTrainedModel) -> None:
    rotary_of(model).inv_freq[-1] /= 2


def rescale(model: PreTrainedModel) -> None:
    rotary_of(model).attention_scaling = 1.1


def replace_forward(model: PreTrainedModel) -> None:
    rotary = rotary_of(model)
    rotary.forward = lambda x, position_ids: type(rotary).forward(rotary, x, position_ids // 2)


def hook_positions(model: PreTrainedModel) -> None:
    """Before the module: it is given positions, by name or not, and reads the half of them."""

    def half(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return [part // 2 if part.dtype == torch.long else part for part in args], {
            name: part // 2 if name == "position_ids" else part for name, part in kwargs.items()
        }

    rotary_of(model).register_forward_pre_hook(half, with_kwargs=True)


def hook_output(model: PreTrainedModel) -> None:
    rotary_of(model).register_forward_hook(lambda module, args, output: tuple(1.1 * part for part in output))


CHANGES = [assign_config, assign_base, halve_slowest, rescale, replace_forward, hook_positions, hook_output]


@pytest.mark.parametrize(("change", "kind"), crossed(CHANGES, ["llama", "qwen3"]))
def test_a_live_model_that_is_not_its_config_is_refused(change: Callable[[PreTrainedModel], None], kind: str) -> None:
    model = tiny(kind)
    change(model)
    frequencies, config = rotary_of(model).inv_freq.clone(), model.config.to_dict()
    scaled = {"scaling": "extend"} if change is assign_config else {}
    for method in ("pi", "dynamic_ntk"):
        with pytest.raises(PatchStateError, match=r"RotaryEmbedding of this \w+ differs from its config.*load"):
            ctxext.patch(model, method, factor=2, **scaled)
    assert torch.equal(rotary_of(model).inv_freq, frequencies)
    assert model.config.to_dict() == config


def cast(dtype: torch.dtype) -> Callable[[PreTrainedModel], PreTrainedModel]:
    return lambda model: model.to(dtype)


def after_a_long_text(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model(tokens(LONG)[:1], use_cache=False)
    return model


LEGITIMATE = {
    "bfloat16 and a long text": lambda model: after_a_long_text(model.bfloat16()),
    "bfloat16": cast(torch.bfloat16),
    "float16": cast(torch.float16),
    "float64": cast(torch.float64),
    "a long text": after_a_long_text,
    "a copy": copy.deepcopy,
}
ROPES = {
    "longrope": LONGROPE,
    "a large base": {"rope_type": "default", "rope_theta": 5e8},
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "linear": LINEAR,
}


@pytest.mark.parametrize(("rope", "state"), crossed([*ROPES], [*LEGITIMATE]))
def test_states_that_a_model_may_be_in_are_not(rope: str, state: str) -> None:
    """And it is left as it was: a module that follows the length keeps what the last text made of it."""
    longest = {"longrope": LONG, "linear": LONG}.get(rope, TRAINED_LENGTH)
    model = tiny(rope_parameters=dict(ROPES[rope]), max_position_embeddings=longest)
    model = LEGITIMATE[state](model)
    rotary = rotary_of(model)
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    told = {} if ROPES[rope]["rope_type"] == "default" else {"trained_length": longest}
    ctxext.patch(model, "pi", factor=2, **told)
    ctxext.unpatch(model)
    after = dict(rotary.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_rope_type_that_somebody_registered_is_started_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def thirds(config: Any, device: Any = None, **_: Any) -> tuple[Tensor, float]:
        return 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float32) / 32) / 3, 1.25

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "thirds", thirds)
    model = tiny(rope_parameters={"rope_type": "thirds", "rope_theta": 10000.0})
    ctxext.patch(model, "pi", factor=2)
    plain = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    torch.testing.assert_close(rotary_of(model).inv_freq.double(), plain / 6, rtol=1e-6, atol=0.0)
    assert rotary_of(model).attention_scaling == pytest.approx(1.25)


class OwnCode(LlamaRotaryEmbedding):
    """A rotary module of a model's own."""


class WithKeys(OwnCode):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids * self.config.rope_parameters["rows"])


class WithAnotherCall(OwnCode):
    def forward(self, x: Tensor, height: Tensor, width: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError


class WithAxes(OwnCode):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids[2])


class WithThreeResults(OwnCode):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return (*super().forward(x, position_ids), None)


class WithAnotherConstructor(OwnCode):
    def __init__(self, dim: int = 32, config: Any = None) -> None:
        if config is not None:
            raise ValueError("give dim alone")
        super().__init__(tiny().config)


@pytest.mark.parametrize("kind", [WithKeys, WithAnotherCall, WithAxes, WithThreeResults, WithAnotherConstructor])
def test_rotary_code_that_cannot_be_asked_is_named(kind: Any) -> None:
    model = tiny()
    own = kind() if kind is WithAnotherConstructor else kind(model.config)
    model.model.rotary_emb = own
    for name in ("yarn", "dynamic_ntk", "self_extend"):
        with pytest.raises(IncompatibleError, match=rf"{kind.__name__} .*calls it with positions: \w+Error"):
            ctxext.patch(model, name, factor=2)


def test_inspect_finishes_whatever_rotary_code_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Module, x: Tensor, position_ids: Tensor) -> Any:
        raise KeyError("rows")

    tiny().config.save_pretrained(tmp_path)
    names = ("yarn", "dynamic_ntk", "self_extend", "longrope")
    try_only(monkeypatch, *names)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", fail)
    found = inspect_checkpoint(tmp_path)
    assert found.trained_length == TRAINED_LENGTH
    assert {verdict.method for verdict in found.verdicts if "KeyError: 'rows'" in (verdict.refused or "")} == set(names)


class WithoutFloat64(Tensor):
    """Numbers on a device that has no float64, as MPS, until they are brought to the CPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.double or any(value is torch.float64 for value in (*args, *(kwargs or {}).values())):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype.")
        plain = super().__torch_function__(func, types, args, kwargs)
        return plain.as_subclass(Tensor) if func is Tensor.cpu else plain


@pytest.mark.parametrize("method", ["yarn", "ntk", "pi", "dynamic_ntk"])
def test_the_proofs_ask_no_float64_of_a_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, output = tiny(), RotaryPlace.output
    live = set(model.modules())

    def on_device(place: RotaryPlace, rotary: nn.Module, positions: Tensor) -> tuple[Tensor, ...]:
        kind = WithoutFloat64 if rotary in live else Tensor
        return tuple(part.as_subclass(kind) for part in output(place, rotary, positions))

    monkeypatch.setattr(RotaryPlace, "output", on_device)
    ctxext.patch(model, method, factor=4.0)
