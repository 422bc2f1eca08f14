"""Replace methods of a module by objects, which deepcopy, pickle and replicas of ``nn.DataParallel`` carry along."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import Any

from torch import Tensor, nn

from ctxext.core.edits import own_attributes
from ctxext.core.rebuild import fill_in
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.errors import IncompatibleError


@dataclass
class ForwardOverride:
    """Replacement of ``module.forward``; an object, not a closure, so that deepcopy and pickle carry it along.

    ``inner`` is an earlier replacement of the class's forward (by accelerate's hooks, for example), None without one.
    """

    module: nn.Module
    inner: Any = None

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the class's own forward, for code that looks up the arguments of a model."""
        return _signature(type(self.module).forward)

    @property
    def __code__(self) -> CodeType:
        """Code of the class's own forward; ``torch.export`` records its name and line."""
        code: CodeType = type(self.module).forward.__code__
        return code

    @property
    def __func__(self) -> Any:
        """The replacement as a function of the module, as code wants it that takes methods apart and binds them again.

        accelerate does so where it prepares a model for mixed precision, and calls the function with the module.
        """
        return functools.partial(_called_on, self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the earlier replacement, or else the class's own forward."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        if not args:
            return kwargs
        bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        by_name: dict[str, Any] = bound | bound.pop("kwargs", {})
        return by_name


def _called_on(override: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a replacement as a method of its module, or of a copy that was made of the module since."""
    old = override.module
    return (override if module is old else _rebound(override, old, module))(*args, **kwargs)


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    """Return the signature of a method, without ``self``."""
    full = inspect.signature(forward)
    return full.replace(parameters=list(full.parameters.values())[1:])


@dataclass
class PinnedApply:
    """Replacement of ``module._apply`` that moves tensors between devices but never rounds them.

    ``model.bfloat16()`` would otherwise round ``inv_freq``: 0.7 rad of phase error at position 4096. No checkpoint
    contains them, so they are computed where ``to_empty`` leaves them uninitialised.
    """

    module: nn.Module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply ``fn``, undo a change of floating dtype, and compute buffers that leave the meta device."""
        on_meta = [name for name, buffer in self.module.named_buffers(recurse=False) if buffer.is_meta]

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype != tensor.dtype:
                return tensor.to(device=moved.device)
            return moved

        type(self.module)._apply(self.module, keep_dtype, recurse)  # type: ignore[no-untyped-call]
        uninitialised = [name for name in on_meta if not self.module.get_buffer(name).is_meta]
        if uninitialised:
            fill_in(self.module, uninitialised, self.module.get_buffer(uninitialised[0]).device)
        return self.module


@dataclass
class Replicating:
    """Replacement of ``module._replicate_for_data_parallel`` that binds a replica's replaced methods to the replica.

    torch copies the module's ``__dict__`` alone: the replica would silently run the original module, on its device.
    """

    module: nn.Module

    def __call__(self) -> nn.Module:
        """Replicate the module as torch does, and bind the copy's replaced methods to the copy."""
        module = self.module
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
        for name, value in list(replica.__dict__.items()):
            if _stands_in(value, module) or name == "forward":  # which may be a hook around one
                replica.__dict__[name] = _rebound(value, module, replica)
        return replica


def _follow_replicas(work: Work) -> None:
    """Make ``nn.DataParallel`` replicas of a model run the replaced methods on themselves."""
    for module in work.subject.model.modules():
        if any(_stands_in(value, module) for value in own_attributes(module).values()):
            work.edits.set(module, "_replicate_for_data_parallel", Replicating(module))


def _stands_in(value: Any, module: nn.Module) -> bool:
    """Return whether ``value`` is an object of ctxext that replaces a method of ``module``."""
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


def _require_averaged(work: Work) -> None:
    """Refuse weights of an extension that ``DistributedDataParallel``, around the model already, does not know."""
    for wrapper in work.subject.wrappers:
        known = {id(weight) for weight in getattr(wrapper, "_module_parameters", ())}
        for name, weight in wrapper.module.named_parameters() if known else ():
            if weight.requires_grad and id(weight) not in known and name not in wrapper.parameters_to_ignore:
                raise IncompatibleError(
                    f"{type(wrapper).__name__} around this {work.subject.kind} would not average the gradients of "
                    f"{name} over its processes. Extend the model first, and wrap it then."
                )


register(Step(Moment.REPLICAS, _follow_replicas))
register(Step(Moment.REPLICAS, _require_averaged, applies=lambda work: work.subject.wrappers))
