"""Replicas of ``nn.DataParallel``: the objects that replace methods of a module are bound to each of its copies."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from ctxext.core.edits import own_attributes
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.errors import IncompatibleError


@dataclass
class Replicating:
    """Replacement of ``module._replicate_for_data_parallel`` that binds a replica's replaced methods to the replica.

    torch copies the module's ``__dict__``, and with it objects that refer to the original module. Unbound, a replica
    would silently run the original module, with its weights and on its device.
    """

    module: nn.Module

    def __call__(self) -> nn.Module:
        """Replicate the module as torch does, and bind the copy's replaced methods to the copy."""
        module = self.module
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
        for name, value in list(replica.__dict__.items()):
            if _stands_in(value, module):
                replica.__dict__[name] = _rebound(value, module, replica)
        return replica


def _follow_replicas(work: Work) -> None:
    """Make ``nn.DataParallel`` replicas of a model run the replaced methods on themselves."""
    for module in work.subject.model.modules():
        if any(_stands_in(value, module) for value in own_attributes(module).values()):
            work.edits.set(module, "_replicate_for_data_parallel", Replicating(module))


def _stands_in(value: Any, module: nn.Module) -> bool:
    """Return whether ``value`` is an object that ctxext put in place of a method of ``module``."""
    return _is_ours(value) and any(getattr(value, field.name) is module for field in fields(value))


def _is_ours(value: Any) -> bool:
    """Return whether ``value`` is a dataclass of ctxext; configs are dataclasses too, and some refuse to be read."""
    return is_dataclass(value) and type(value).__module__.partition(".")[0] == "ctxext"


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """Return ``value`` with every reference to ``old`` replaced by ``new``; everything else is shared."""
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
            f"{type(old).__name__}: nn.DataParallel cannot copy this module, because its forward was wrapped before "
            f"ctxext patched it (by accelerate, for example). The copy would run the original. Use one process per "
            f"device instead (torchrun, accelerate launch)."
        )
    return value


register(Step(Moment.REPLICAS, _follow_replicas))
