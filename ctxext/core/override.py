"""Replace methods of a module by objects, which deepcopy and pickle carry along: ``forward`` and ``_apply``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.core.rebuild import restoring


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


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    """Return the signature of a method, without ``self``."""
    full = inspect.signature(forward)
    return full.replace(parameters=list(full.parameters.values())[1:])


@dataclass
class PinnedApply:
    """Replacement of ``module._apply`` that moves tensors between devices but never rounds them.

    ``model.bfloat16()`` would otherwise round ``inv_freq``: 0.7 rad of phase error at position 4096. No checkpoint
    contains frequencies. On a model from the meta device, ``to_empty`` leaves them uninitialised without a word, so
    they are computed then.
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
            with restoring(), torch.device("cpu"), torch.no_grad():
                computed = type(self.module)(self.module.config)
                for name in uninitialised:
                    self.module.get_buffer(name).copy_(computed.get_buffer(name))
        return self.module
