"""The journal: the only code in ctxext that mutates a model, and what makes copies of the model follow it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.errors import IncompatibleError

# torch numbers its hooks per process; a name of our own cannot meet the number of another after unpickling.
HOOK: Any = "ctxext"
HOOKS = "forward hooks"
EVERY_MODULE = frozenset(vars(nn.Module()))
"""What torch keeps in the dictionary of every module."""
BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs")


class _Absent(Enum):
    """Marks an attribute that did not exist before; an enum member stays itself through deepcopy and pickle."""

    ABSENT = "absent"


class Edits:
    """Sets attributes and remembers what was there, so that ``undo`` restores it exactly, in reverse order.

    The journal holds data, never closures: ``copy.deepcopy`` and ``pickle`` of a patched model carry it along and
    the copy can be undone by itself. Parameters are replaced by one verb and refused by all others, so that values of
    ``state_dict`` cannot change by accident. Its keys change by one verb, ``attach``, which adds some.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[object, str, object, bool]] = []

    def __enter__(self) -> Edits:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Leave everything as it was if the block failed."""
        if error is not None:
            self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``, or the entry ``name`` of a dict, and remember the old value (or that there was none)."""
        self._entries.append((owner, name, self._current(owner, name), False))
        _assign(owner, name, value)

    def set_unchecked(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name`` past the owner's own validation and properties, and remember what it held itself."""
        self._entries.append((owner, name, owner.__dict__.get(name, _Absent.ABSENT), True))
        owner.__dict__[name] = value

    def delete_unchecked(self, owner: object, name: str) -> None:
        """Delete what ``owner`` itself holds as ``name``, if it does, past its properties, and remember it."""
        if name in owner.__dict__:
            self._entries.append((owner, name, owner.__dict__.pop(name), True))

    def delete(self, owner: object, name: str) -> None:
        """Delete the plain attribute ``owner.name`` if it is there, and remember the old value."""
        if isinstance(owner, nn.Module) and name in (*owner._buffers, *owner._modules):
            raise TypeError(f"{type(owner).__name__}.{name} is registered with its module; set it instead.")
        old = self._current(owner, name)
        if old is not _Absent.ABSENT:
            self._entries.append((owner, name, old, False))
            delattr(owner, name)

    def replace_weight(self, owner: nn.Module, name: str, weight: nn.Parameter) -> None:
        """Put ``weight`` into the place of the parameter ``owner.name``, and remember that very object.

        Raises:
            TypeError: if ``owner`` has no such parameter of its own.
        """
        old = owner._parameters.get(name)
        if old is None:
            raise TypeError(f"{type(owner).__name__}.{name} is no weight; set it instead.")
        self._entries.append((owner, name, old, False))
        owner._parameters[name] = weight

    def attach(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Add ``module`` to ``owner`` under a name that is free, or that it has already; undone by deleting it.

        Raises:
            TypeError: if ``owner`` has something else of that name.
        """
        if getattr(owner, name, module) is not module:
            raise TypeError(f"{type(owner).__name__}.{name} is there already; attach adds, and replaces nothing.")
        self._entries.append((owner, name, _Absent.ABSENT, False))
        owner.add_module(name, module)

    def hook(self, module: nn.Module, before: Any, after: Any) -> None:
        """Call ``before`` and ``after`` around each of a module's forward passes, as torch's hooks with keywords.

        What stands in for ``forward`` knows one module; a hook is handed the replica that runs.
        """
        self._entries.append((module, HOOKS, _Absent.ABSENT, False))
        for (called, with_kwargs), function in ((BEFORE, before), (AFTER, after)):
            getattr(module, called)[HOOK] = function
            getattr(module, with_kwargs)[HOOK] = True

    def undo(self) -> None:
        """Restore everything, newest first. A second call does nothing."""
        while self._entries:
            owner, name, old, unchecked = self._entries.pop()
            if name == HOOKS and isinstance(owner, nn.Module):
                for registry in (*BEFORE, *AFTER):
                    getattr(owner, registry).pop(HOOK, None)
            elif isinstance(owner, nn.Module) and isinstance(old, nn.Parameter):
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
            elif not (isinstance(owner, dict) and name not in owner):  # taken out by others since
                _assign(owner, name, _beside(getattr(owner, name, None), old))

    def lines(self) -> list[str]:
        """One line per edited attribute, oldest first: ``LlamaRotaryEmbedding.inv_freq``."""
        return list(dict.fromkeys(f"{type(owner).__name__}.{name}" for owner, name, *_ in self._entries))

    @staticmethod
    def _current(owner: object, name: str) -> object:
        if isinstance(owner, nn.Module):
            if name in owner._parameters:
                raise TypeError(f"ctxext never edits weights, and {type(owner).__name__}.{name} is one.")
            if name in owner._buffers:
                buffer = owner._buffers[name]
                return None if buffer is None else buffer.clone()  # an edit may overwrite the storage
            if name in owner._modules:
                return owner._modules[name]
            return owner.__dict__.get(name, _Absent.ABSENT)
        if isinstance(owner, dict):
            return owner.get(name, _Absent.ABSENT)
        return getattr(owner, name, _Absent.ABSENT)


def _assign(owner: object, name: str, value: object) -> None:
    """Set an attribute; a buffer keeps its storage where it can, so that compiled code sees the new value."""
    if isinstance(owner, nn.Module) and isinstance(value, Tensor) and name in owner._buffers:
        buffer = owner._buffers[name]
        if value.is_inference():  # a model patched in inference mode is trained and compiled outside of it
            with torch.inference_mode(False):
                value = value.clone()
        if buffer is not None and _can_overwrite(buffer, value) and not _is_shared(owner, name, buffer):
            with torch.no_grad():
                buffer.copy_(value)
        else:
            owner.register_buffer(name, value, persistent=name not in owner._non_persistent_buffers_set)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _can_overwrite(buffer: Tensor, value: Tensor) -> bool:
    same_form = (buffer.shape, buffer.dtype, buffer.device) == (value.shape, value.dtype, value.device)
    return same_form and not buffer.is_meta and not buffer.is_inference()


def _is_shared(owner: nn.Module, name: str, buffer: Tensor) -> bool:
    """Whether the module has the same tensor under another name, as stock dynamic types leave it after a short text."""
    return any(other is buffer for other_name, other in owner._buffers.items() if other_name != name)


def _followed(old: nn.Parameter, current: nn.Parameter | None) -> nn.Parameter:
    """``old`` itself, brought to where the weight that stood in its place was moved, or cast, in the meantime."""
    if current is not None and not current.is_meta and (old.device, old.dtype) != (current.device, current.dtype):
        old.data = old.data.to(current.device, current.dtype)
    return old


def _beside(current: Any, old: object) -> object:
    """Where a tensor was moved to another device since it was recorded, follow it."""
    if isinstance(old, Tensor) and isinstance(current, Tensor) and not current.is_meta and not old.is_meta:
        return old.to(current.device)
    return old


@dataclass
class Replicating:
    """Stands in for ``module._replicate_for_data_parallel``: a replica's stand-ins run on the replica.

    torch copies a module's ``__dict__``, and with it objects that refer to the module they were made for; a replica
    would silently run the original, with the original's weights and on its device.
    """

    module: nn.Module

    def __call__(self) -> nn.Module:
        """Takes and returns what torch's own method does."""
        module = self.module
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
        for name, value in list(replica.__dict__.items()):
            if _stands_in(value, module):
                replica.__dict__[name] = _rebound(value, module, replica)
        return replica


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds in its dictionary beside that which every module has: hooks, weights, parts."""
    return {name: value for name, value in vars(module).items() if name not in EVERY_MODULE}


def follow_replicas(modules: Iterable[nn.Module], edits: Edits) -> None:
    """Let the replicas that ``nn.DataParallel`` makes of these modules run what stands in for their own methods."""
    for module in modules:
        if any(_stands_in(value, module) for value in own_attributes(module).values()):
            edits.set(module, "_replicate_for_data_parallel", Replicating(module))


def _stands_in(value: Any, module: nn.Module) -> bool:
    """Whether ``value`` is one of the objects that ctxext puts into the place of methods of ``module``."""
    return _is_ours(value) and any(getattr(value, field.name) is module for field in fields(value))


def _is_ours(value: Any) -> bool:
    """Whether this is one of ctxext's own records; configs are records too, and some refuse to be read."""
    return is_dataclass(value) and type(value).__module__.partition(".")[0] == "ctxext"


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """``value`` with every reference to ``old`` turned to ``new``; all else is shared."""
    if value is old:
        return new
    if isinstance(value, dict):
        return {key: _rebound(part, old, new) for key, part in value.items()}
    if _is_ours(value):
        bound = copy.copy(value)
        for field in fields(value):
            object.__setattr__(bound, field.name, _rebound(getattr(value, field.name), old, new))
        return bound
    if getattr(value, "__self__", None) is old or old in getattr(value, "args", ()):
        raise IncompatibleError(
            f"nn.DataParallel copies {type(old).__name__}, whose forward was wrapped before ctxext patched it (by "
            f"accelerate, for example), and the copy would run the original. Use one process per device instead "
            f"(torchrun, accelerate launch)."
        )
    return value
