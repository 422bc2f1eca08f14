"""The journal of edits: the only code in ctxext that mutates a model; copies of the model carry it along."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# torch numbers hooks per process. After unpickling, a number could meet another hook's; this name cannot.
HOOK: Any = "ctxext"
HOOKS = "forward hooks"
EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names that torch keeps in the dictionary of every module."""
HOOKED = "_old_forward"
"""Attribute of a module with a hook of accelerate: the forward that the hook calls."""
BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class _Absent(Enum):
    """Marker for an attribute that did not exist; an enum member keeps its identity through deepcopy and pickle."""

    ABSENT = "absent"


class Entry(NamedTuple):
    """One edit: the old value of ``owner.name``, and how it was changed.

    Args:
        unchecked: True for an entry of the owner's dictionary, past validation.
        written: dtype of a tensor that was set.
    """

    owner: Any
    name: str
    old: object
    unchecked: bool = False
    written: torch.dtype | None = None


class Edits:
    """A journal that sets attributes and records their old values; ``undo`` restores them in reverse order.

    The journal holds data, never closures: copies of a patched model carry it along, and can be undone by themselves.
    Only ``replace_weight`` changes values of ``state_dict``, and only ``attach`` adds keys to it.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __enter__(self) -> Edits:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Undo every edit if the block failed."""
        if error is not None:
            self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, or the entry ``name`` of a dict, and record the old value or its absence."""
        if name == "forward" and isinstance(owner, nn.Module) and HOOKED in vars(owner):
            self._set_under_hook(owner, value)
            return
        written = value.dtype if isinstance(value, Tensor) else None
        self._entries.append(Entry(owner, name, self._current(owner, name), written=written))
        _assign(owner, name, value)

    def _set_under_hook(self, owner: Any, value: Any) -> None:
        """Replace the forward that a hook of accelerate calls, and that is put back where PEFT takes the hook off."""
        old = vars(owner)[HOOKED]
        old = _Absent.ABSENT if getattr(old, "__func__", None) is type(owner).forward else old
        self._entries.append(Entry(owner, "forward", old))
        if getattr(value, "inner", None) is owner.forward:
            value.inner = None if old is _Absent.ABSENT else old
        setattr(owner, HOOKED, value)

    def set_unchecked(self, owner: object, name: str, value: object) -> None:
        """Write ``owner.__dict__[name]``, past validation and properties of the owner, and record the old entry."""
        self._entries.append(Entry(owner, name, owner.__dict__.get(name, _Absent.ABSENT), unchecked=True))
        owner.__dict__[name] = value

    def delete_unchecked(self, owner: object, name: str) -> None:
        """Delete ``owner.__dict__[name]``, if present, past properties of the owner, and record the old entry."""
        if name in owner.__dict__:
            self._entries.append(Entry(owner, name, owner.__dict__[name], unchecked=True))
            owner.__dict__.pop(name)

    def delete(self, owner: object, name: str) -> None:
        """Delete the plain attribute ``owner.name``, if present, and record its old value or its absence."""
        if isinstance(owner, nn.Module) and name in (*owner._buffers, *owner._modules):
            raise TypeError(f"{type(owner).__name__}.{name} is registered with its module; set it instead.")
        old = self._current(owner, name)
        self._entries.append(Entry(owner, name, old))
        if old is not _Absent.ABSENT:
            delattr(owner, name)

    def replace_weight(self, owner: nn.Module, name: str, weight: nn.Parameter) -> None:
        """Replace the parameter ``owner.name`` by ``weight``, and record the old parameter object itself.

        Raises:
            TypeError: if ``owner`` itself has no such parameter.
        """
        if (old := owner._parameters.get(name)) is None:
            raise TypeError(f"{type(owner).__name__}.{name} is not a weight. Call set() instead.")
        self._entries.append(Entry(owner, name, old))
        owner._parameters[name] = weight

    def replace_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Replace weights of a model under all their names; a value that is a parameter is used itself."""
        names = dict(model.named_parameters(remove_duplicate=False))
        for name, value in weights.items():
            old = names[name]
            with torch.inference_mode(False):
                new = value.clone() if value.is_inference() else value
                new = new if isinstance(new, nn.Parameter) else nn.Parameter(new, requires_grad=old.requires_grad)
            for alias in [alias for alias, weight in names.items() if weight is old]:  # tied, or shared by two modules
                path, _, leaf = alias.rpartition(".")
                self.replace_weight(model.get_submodule(path), leaf, new)

    def attach(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Add ``module`` to ``owner`` under a free name, or under the name that it already has; undo deletes it.

        Raises:
            TypeError: if ``owner`` has another attribute of that name.
        """
        if getattr(owner, name, module) is not module:
            raise TypeError(f"{type(owner).__name__}.{name} exists already, and attach() replaces nothing.")
        self._entries.append(Entry(owner, name, _Absent.ABSENT))
        owner.add_module(name, module)

    def hook(self, module: nn.Module, before: Any, after: Any) -> None:
        """Call ``before`` and ``after`` around each forward pass, as torch hooks with keywords, on replicas too.

        After a pass that failed, the output that ``after`` receives is None.
        """
        self._entries.append(Entry(module, HOOKS, _Absent.ABSENT))
        for (called, *settings), function in ((BEFORE, before), (AFTER, after)):
            getattr(module, called)[HOOK] = function
            for setting in settings:
                getattr(module, setting)[HOOK] = True

    def undo(self, *, keep: int = 0) -> None:
        """Restore old values, newest first, but for the ``keep`` oldest; after an interrupt, call this again."""
        while len(self._entries) > keep:
            # Restore, then forget: an interrupt in between repeats the restoration, instead of losing an entry.
            self._restore(*self._entries[-1])
            self._entries.pop()

    def _restore(self, owner: Any, name: str, old: object, unchecked: bool, written: torch.dtype | None) -> None:
        """Restore an old value; doing so twice is as good as once."""
        if name == HOOKS:
            for registry in (*BEFORE, *AFTER):
                getattr(owner, registry).pop(HOOK, None)
        elif name == "forward" and isinstance(owner, nn.Module) and HOOKED in vars(owner):  # perhaps put on since
            setattr(owner, HOOKED, type(owner).forward.__get__(owner) if old is _Absent.ABSENT else old)
        elif isinstance(owner, nn.Module) and isinstance(old, nn.Parameter):
            # The old object itself, because optimizers and tied weights hold on to it.
            owner._parameters[name] = _followed(old, owner._parameters.get(name))
        elif unchecked:
            if old is _Absent.ABSENT:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = old
        elif old is _Absent.ABSENT:
            if isinstance(owner, dict):
                owner.pop(name, None)
            elif self._current(owner, name) is not _Absent.ABSENT:
                delattr(owner, name)
        elif not (isinstance(owner, dict) and name not in owner):  # other code has removed the entry since
            _assign(owner, name, _beside(getattr(owner, name, None), old, written))

    def lines(self) -> list[str]:
        """Return one line per edited attribute, oldest first: ``LlamaRotaryEmbedding.inv_freq``."""
        return list(dict.fromkeys(f"{type(owner).__name__}.{name}" for owner, name, *_ in self._entries))

    @staticmethod
    def _current(owner: object, name: str) -> object:
        if isinstance(owner, nn.Module):
            if name in owner._parameters:
                raise TypeError(f"{type(owner).__name__}.{name} is a weight. Replace it by replace_weight().")
            if name in owner._buffers:
                buffer = owner._buffers[name]
                return None if buffer is None else buffer.clone()  # _assign may overwrite the storage
            return owner._modules.get(name, owner.__dict__.get(name, _Absent.ABSENT))
        if isinstance(owner, dict):
            return owner.get(name, _Absent.ABSENT)
        return getattr(owner, name, _Absent.ABSENT)


def _assign(owner: object, name: str, value: object) -> None:
    """Set an attribute; keep the storage of a buffer where possible, so that compiled code sees the new value."""
    if isinstance(owner, nn.Module) and isinstance(value, Tensor) and name in owner._buffers:
        buffer = owner._buffers[name]
        if value.is_inference():  # a model patched in inference mode may be trained or compiled outside of it
            with torch.inference_mode(False):
                value = value.clone()
        # transformers leaves dynamic types with two names for one tensor: writing into it would change both.
        is_shared = sum(tensor is buffer for tensor in owner._buffers.values()) > 1
        can_hold = buffer is not None and not (is_shared or buffer.is_meta or buffer.is_inference())
        form = (value.shape, value.dtype, value.device)
        if buffer is not None and can_hold and (buffer.shape, buffer.dtype, buffer.device) == form:
            with torch.no_grad():
                buffer.copy_(value)
        else:
            owner.register_buffer(name, value, persistent=name not in owner._non_persistent_buffers_set)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _followed(old: nn.Parameter, current: nn.Parameter | None) -> nn.Parameter:
    """Return ``old`` itself, moved, cast and frozen as its replacement has been in the meantime."""
    if current is not None and not current.is_meta and (old.device, old.dtype) != (current.device, current.dtype):
        old.data = old.data.to(current.device, current.dtype)
    if current is not None and old.requires_grad != current.requires_grad:
        old.requires_grad_(current.requires_grad)
    return old


def _beside(current: Any, old: object, written: torch.dtype | None) -> object:
    """Return ``old``, on the device to which the current tensor has been moved since, and cast as that one was."""
    if isinstance(old, Tensor) and isinstance(current, Tensor) and not current.is_meta and not old.is_meta:
        return old.to(current.device, old.dtype if current.dtype is written else current.dtype)
    return old


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the entries of a module's dictionary, without the ones that every module has (hooks, weights, parts)."""
    return {name: value for name, value in vars(module).items() if name not in EVERY_MODULE}


def replaced_forward(module: nn.Module) -> Any:
    """Return what has replaced a module's forward, under a hook of accelerate if it has one; None for nothing."""
    return vars(module).get(HOOKED, vars(module).get("forward"))
