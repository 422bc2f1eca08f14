"""Replace a module's ``forward`` by an object with the same signature and code."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn


@dataclass
class ForwardOverride:
    """Replacement of ``module.forward``; an object, not a closure, so that deepcopy and pickle carry it along.

    Args:
        inner: an earlier replacement of the class's forward (by accelerate's hooks, for example), None without one.
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
