"""The journal alone: what it sets, what it brings back, what it refuses."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from ctxext.core.edits import Edits


class Box(nn.Module):
    """One of everything that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.arange(3.0), persistent=True)
        self.register_buffer("passing", torch.arange(3.0), persistent=False)
        self.register_buffer("empty", None)
        self.part = nn.Linear(2, 2)
        self.number = 1
        self.plain = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return x


def snapshot(box: Box) -> dict[str, object]:
    state = {f"state {name}": value.tolist() for name, value in box.state_dict().items()}
    own = {name: value for name, value in vars(box).items() if not name.startswith("_")}
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in own.items()}
    buffers = {name: None if value is None else value.tolist() for name, value in box._buffers.items()}
    return state | plain | buffers | {"names": list(box._buffers), "part": box.part}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("number", 2), ("added", 3), ("forward", "not even callable"), ("part", nn.Identity())),
        *(("plain", torch.ones(5)), ("empty", torch.zeros(2))),
        *(("kept", value) for value in (torch.zeros(3), torch.zeros(4), torch.zeros(3, dtype=torch.float64), None)),
        *(("passing", value) for value in (torch.zeros(3), torch.zeros(7), None)),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.dtype}" if isinstance(value, Tensor) else str(value),
)
def test_set_and_undo(name: str, value: object) -> None:
    box = Box()
    before = snapshot(box)
    edits = Edits()
    edits.set(box, name, value)
    found = getattr(box, name)
    assert found is value or torch.equal(found, value)
    assert edits.lines() == [f"Box.{name}"]
    if isinstance(value, Tensor) and name != "empty":
        assert list(box.state_dict()) == list(Box().state_dict()), "a buffer became persistent, or ceased to be"
    edits.undo()
    assert snapshot(box) == before
    assert edits.lines() == []
    edits.undo()
    assert snapshot(box) == before


def test_a_buffer_keeps_its_storage_and_its_undo_survives_writes_into_it() -> None:
    box = Box()
    storage, edits = box.passing.data_ptr(), Edits()
    edits.set(box, "passing", torch.full((3,), 5.0))
    assert box.passing.data_ptr() == storage
    box.passing.add_(1)
    edits.undo()
    assert box.passing.tolist() == [0.0, 1.0, 2.0]
    assert box.passing.data_ptr() == storage


def test_one_tensor_under_two_names_is_edited_under_one() -> None:
    """transformers' dynamic types put the frequencies of short texts in the place of the current ones."""
    module = nn.Module()
    module.register_buffer("current", torch.zeros(2))
    module.register_buffer("short", module.current)
    edits = Edits()
    edits.set(module, "current", torch.ones(2))
    assert module.short.tolist() == [0, 0]
    edits.set(module, "short", torch.full((2,), 2.0))
    module.register_buffer("current", torch.full((2,), 3.0))  # a long text
    edits.undo()
    assert module.short.tolist() == module.current.tolist() == [0, 0]


def test_undo_is_newest_first() -> None:
    box, edits = Box(), Edits()
    for value in (2, 3, 4):
        edits.set(box, "number", value)
    assert edits.lines() == ["Box.number"]
    edits.undo()
    assert box.number == 1


def test_delete() -> None:
    box, edits = Box(), Edits()
    edits.delete(box, "number")
    edits.delete(box, "never_there")
    assert not hasattr(box, "number")
    edits.undo()
    assert box.number == 1
    assert not hasattr(box, "never_there")


@pytest.mark.parametrize("name", ["passing", "part"])
def test_registered_things_are_not_deleted(name: str) -> None:
    box = Box()
    with pytest.raises(TypeError, match=f"Box.{name} is registered"):
        Edits().delete(box, name)
    assert getattr(box, name) is not None


def test_a_weight_is_replaced_by_the_verb_for_it_and_comes_back_as_the_same_object() -> None:
    box, edits = Box(), Edits()
    old, new = box.weight, nn.Parameter(torch.zeros(3))
    edits.replace_weight(box, "weight", new)
    assert box.weight is new
    assert dict(box.named_parameters())["weight"] is new
    assert edits.lines() == ["Box.weight"]
    edits.undo()
    assert box.weight is old
    assert old.tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match=r"Box\.number is not a weight"):
        edits.replace_weight(box, "number", new)


def test_a_weight_that_comes_back_follows_what_was_cast_and_frozen_since() -> None:
    box, edits = Box(), Edits()
    old = box.weight
    edits.replace_weight(box, "weight", nn.Parameter(torch.zeros(3)))
    box.to(torch.bfloat16).requires_grad_(False)  # an adapter freezes its base
    edits.undo()
    assert box.weight is old
    assert old.dtype is torch.bfloat16
    assert not old.requires_grad


def test_a_copy_of_a_journal_brings_back_a_weight_of_its_own() -> None:
    box, edits = Box(), Edits()
    edits.replace_weight(box, "weight", nn.Parameter(torch.zeros(3)))
    for copied_box, copied in (copy.deepcopy((box, edits)), pickle.loads(pickle.dumps((box, edits)))):
        copied.undo()
        assert copied_box.weight.tolist() == [1.0, 1.0]
        assert isinstance(copied_box.weight, nn.Parameter)
    assert box.weight.tolist() == [0.0, 0.0, 0.0]


def test_weights_are_refused() -> None:
    box = Box()
    with pytest.raises(TypeError, match=r"Box\.weight is a weight"):
        Edits().set(box, "weight", nn.Parameter(torch.zeros(2)))
    assert box.weight.tolist() == [1.0, 1.0]


def test_an_error_in_the_block_undoes_everything() -> None:
    box = Box()
    before = snapshot(box)

    def fail() -> None:
        with Edits() as edits:
            edits.set(box, "number", 7)
            edits.set(box, "passing", torch.zeros(9))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert snapshot(box) == before


def test_a_setter_that_refuses_its_value_leaves_the_old_one() -> None:
    class Strict:
        def __init__(self) -> None:
            self._value = 1

        @property
        def value(self) -> int:
            return self._value

        @value.setter
        def value(self, new: int) -> None:
            if new < 0:
                raise ValueError("negative")
            self._value = new

    owner, edits = Strict(), Edits()
    edits.set(owner, "value", 2)
    with pytest.raises(ValueError, match="negative"):
        edits.set(owner, "value", -1)
    edits.undo()
    assert owner.value == 1


def test_past_validation() -> None:
    owner, edits = SimpleNamespace(value=1), Edits()
    edits.set_unchecked(owner, "value", "a sentence")
    assert owner.value == "a sentence"
    edits.undo()
    assert owner.value == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_is_undone_by_itself(duplicate: Any) -> None:
    box, edits = Box(), Edits()
    edits.set(box, "number", 5)
    edits.set(box, "added", 6)
    edits.set(box, "passing", torch.zeros(9))
    other, others = duplicate((box, edits))
    others.undo()
    assert (other.number, other.passing.tolist(), hasattr(other, "added")) == (1, [0.0, 1.0, 2.0], False)
    assert (box.number, box.passing.shape, box.added) == (5, (9,), 6)


def test_undo_after_a_move_to_meta_and_inside_inference_mode() -> None:
    with torch.inference_mode():
        box, edits = Box(), Edits()
    edits.set(box, "passing", torch.zeros(3))
    edits.undo()
    assert box.passing.tolist() == [0.0, 1.0, 2.0]
    edits.set(box, "passing", torch.zeros(3))
    box.to_empty(device="meta")
    edits.undo()
    assert box.passing.tolist() == [0.0, 1.0, 2.0]


class Twice(nn.Module):
    def forward(self, number: int) -> int:
        return 2 * number


@dataclass
class Plus:
    """Replacement of a forward, around the earlier one where there is one."""

    module: nn.Module
    more: int
    inner: Any = None

    def __call__(self, number: int) -> int:
        inner = self.inner or functools.partial(type(self.module).forward, self.module)
        return int(inner(number)) + self.more


class Tenfold(ModelHook):
    def post_forward(self, module: nn.Module, output: int) -> int:
        return 10 * output


@pytest.mark.parametrize("is_hooked_first", [False, True])
@pytest.mark.parametrize("is_taken_off", [False, True])
def test_a_forward_lies_under_the_hook_of_accelerate(is_hooked_first: bool, is_taken_off: bool) -> None:
    """Which PEFT takes off, and puts on again, where weights are offloaded."""
    module, edits = Twice(), Edits()
    if is_hooked_first:
        add_hook_to_module(module, Tenfold())
    for more in (1, 100):
        edits.set(module, "forward", Plus(module, more, vars(module).get("forward")))
    assert edits.lines() == ["Twice.forward"]
    if not is_hooked_first:
        add_hook_to_module(module, Tenfold())
    assert module(1) == 1030
    if is_taken_off:
        remove_hook_from_module(module)
        assert module(1) == 103
        add_hook_to_module(module, Tenfold())
        assert module(1) == 1030
    edits.undo()
    assert module(1) == 20
    remove_hook_from_module(module)
    assert module(1) == 2


def test_a_forward_that_lay_under_a_hook_is_undone_without_it() -> None:
    module, edits = Twice(), Edits()
    add_hook_to_module(module, Tenfold())
    edits.set(module, "forward", Plus(module, 1, module.forward))
    remove_hook_from_module(module)
    assert module(1) == 3
    edits.undo()
    assert module(1) == 2
    assert "forward" not in vars(module)
