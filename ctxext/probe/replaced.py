"""Find code of a model that other programs replaced, and build a twin of the model from transformers' own code.

Liger, and trainers that apply it, put Triton kernels into transformers' modules for the whole process. A twin on the
meta device must not run those: its tensors have no memory, and a kernel would be launched on the address 0.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ctxext.core.rebuild import without_weights
from ctxext.errors import IncompatibleError

UNREPLACED = "_ctxext_unreplaced_"  # prefix of the name of a module's second copy

# Packages of code in transformers' modules. functools is left out: a partial function may be another program's.
USUAL = sys.stdlib_module_names - {"functools"} | {"torch", "transformers"}


def original_twin(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Build the model's class from ``config`` on the meta device, by the code of transformers alone.

    Raises:
        IncompatibleError: if code was replaced in another module than the one that defines the class.
    """
    twin = without_weights(type(model), config)
    homes = {base.__module__ for module in twin.modules() for base in type(module).__mro__}
    replaced = {home: names for home in sorted(homes) if (names := replaced_in(home))}
    if not replaced:
        return twin
    kind = type(model)
    if set(replaced) != {kind.__module__}:
        pairs = [pair for names in replaced.values() for pair in names.items()]
        listed = ", ".join(f"{name} by {program}" for name, program in pairs[:4])
        raise IncompatibleError(
            f"Code of {kind.__name__} was replaced ({listed}), and ctxext cannot try it without data. Extend the model "
            f"first and apply such kernels afterwards"
        )
    original: type[PreTrainedModel] = getattr(_second_copy(kind.__module__), kind.__name__)
    return without_weights(original, config)


def replaced_in(home: str) -> dict[str, str]:
    """Return the code of a module of transformers that another program replaced: each name, and the other package."""
    module = sys.modules.get(home)
    if not home.startswith("transformers.models.") or module is None or UNREPLACED in home:
        return {}
    suspects = {name: _package(value) for name, value in _code_of(module) if _package(value) not in USUAL}
    if not suspects:
        return {}
    originals = dict(_code_of(_second_copy(home)))
    return {
        name: package
        for name, package in suspects.items()
        if name in originals and _package(originals[name]) != package
    }


def original_code(home: str) -> dict[str, Any]:
    """Return the names of a module, with transformers' own code where another program replaced it."""
    return vars(_second_copy(home) if replaced_in(home) else sys.modules[home])


def _code_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the callables of a module, and the methods of the neural modules that it defines, by name."""
    for name, value in vars(module).items():
        if callable(value):
            yield name, value
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
            yield from ((f"{name}.{method}", code) for method, code in vars(value).items() if inspect.isfunction(code))


def _package(code: Any) -> str:
    """Return the package of a function or class, or of the innermost function of a partial function."""
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__module__", None) or type(code).__module__).partition(".")[0]


@functools.cache
def _second_copy(home: str) -> ModuleType:
    """Execute a module of transformers once more from its file, under a second name."""
    package, _, name = home.rpartition(".")
    alias = f"{package}.{UNREPLACED}{name}"
    spec = importlib.util.spec_from_file_location(alias, sys.modules[home].__file__)
    if spec is None or spec.loader is None:
        raise IncompatibleError(f"The module {home} has no file, so ctxext cannot read its code before the replacement")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module  # its classes look for their module there
    spec.loader.exec_module(module)
    return module
