"""A callable in the place of a module's ``forward``, that still looks like it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import Any

from torch import nn

from ctxext.errors import IncompatibleError
from ctxext.surgery.edits import Edits

__all__ = ["ForwardOverride", "Replicating", "follow_replicas"]


@dataclass
class ForwardOverride:
    """Stands in for ``module.forward``. An object and not a closure, so that deepcopy and pickle carry it along.

    Args:
        module: whose forward this is.
        inner: its ``forward`` where something else stood in for the class's own before (accelerate's hooks do).
    """

    module: nn.Module
    inner: Any = None

    @property
    def __signature__(self) -> inspect.Signature:
        """The class's own, for those who look which arguments a model takes."""
        full = _signature(type(self.module).forward)
        return full.replace(parameters=list(full.parameters.values())[1:])

    @property
    def __code__(self) -> CodeType:
        """The class's own, for ``torch.export``, which files what it traces under the name and line of ``forward``."""
        code: CodeType = type(self.module).forward.__code__
        return code

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stood here before."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name."""
        if not args:
            return kwargs
        bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        by_name: dict[str, Any] = bound | bound.pop("kwargs", {})
        return by_name


@dataclass
class Replicating:
    """Stands in for ``module._replicate_for_data_parallel``: a replica's stand-ins run on the replica.

    torch copies a module's ``__dict__``, and with it objects that refer to the module they were made for; a replica
    would silently run the original, with the original's weights and on its device.
    """

    module: nn.Module

    def __call__(self) -> nn.Module:
        """Arguments and result of torch's own method."""
        module = self.module
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
        for name, value in list(replica.__dict__.items()):
            if _stands_in(value, module):
                replica.__dict__[name] = _rebound(value, module, replica)
        return replica


def follow_replicas(modules: Iterable[nn.Module], edits: Edits) -> None:
    """Let the replicas that ``nn.DataParallel`` makes of these modules run what stands in for their own methods."""
    for module in modules:
        if any(_stands_in(value, module) for value in module.__dict__.values()):
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


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)
