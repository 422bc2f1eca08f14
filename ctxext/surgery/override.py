"""A callable in the place of a module's ``forward``, that still looks like it."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn


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
        return _signature(type(self.module).forward)

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


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    """Of a method, without ``self``."""
    full = inspect.signature(forward)
    return full.replace(parameters=list(full.parameters.values())[1:])
