"""What other programs replaced in a model's code, and a twin of the model from the code as transformers has it.

Liger, and trainers that apply it, put Triton kernels into transformers' modules for the whole process. A twin without
memory (on the meta device) must not run those: a kernel would be launched on the address 0 of tensors that have none.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.surgery.rebuild import restoring, without_weights

UNREPLACED = "_ctxext_unreplaced_"  # in front of the name of a module's second copy

# What transformers' own modules are made of. A partial function belongs to whoever made it, so functools is not here.
USUAL = sys.stdlib_module_names - {"functools"} | {"torch", "transformers"}


def original_twin(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Build the model's class from ``config`` without memory, by code in which no other program replaced anything.

    Raises:
        IncompatibleError: something was replaced, and the class is not defined in the module of transformers where.
    """
    twin = without_weights(model, config)
    homes = {base.__module__ for module in twin.modules() for base in type(module).__mro__}
    found = {home: names for home in sorted(homes) if (names := replaced_in(home))}
    if not found:
        return twin
    kind = type(model)
    if set(found) != {kind.__module__}:
        pairs = [pair for names in found.values() for pair in names.items()]
        listed = ", ".join(f"{name} by {program}" for name, program in pairs[:4])
        raise IncompatibleError(
            f"Code that {kind.__name__} is made of was replaced ({listed}), and cannot be tried out without data. "
            f"Extend the model first and apply such kernels afterwards"
        )
    original: type[PreTrainedModel] = getattr(_second_copy(kind.__module__), kind.__name__)
    with torch.inference_mode(False), torch.device("meta"), restoring():
        return original(copy.deepcopy(config))


def replaced_in(home: str) -> dict[str, str]:
    """The functions, classes and methods of a module of transformers that are another program's now.

    Args:
        home: name of the module.

    Returns:
        Their names, each with the package that what stands there comes from.
    """
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
    """What a module holds by name, as transformers has it where another program replaced something in it."""
    return vars(_second_copy(home) if replaced_in(home) else sys.modules[home])


def _code_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield what can be called in a module, and the methods of the neural modules that it defines, by name."""
    for name, value in vars(module).items():
        if callable(value):
            yield name, value
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
            yield from ((f"{name}.{method}", code) for method, code in vars(value).items() if inspect.isfunction(code))


def _package(code: Any) -> str:
    """The package that a function or class comes from, that of its innermost function where it is a partial one."""
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__module__", None) or type(code).__module__).partition(".")[0]


@functools.cache
def _second_copy(home: str) -> ModuleType:
    """A module of transformers executed once more from its file, under a name of its own beside the first."""
    package, _, name = home.rpartition(".")
    alias = f"{package}.{UNREPLACED}{name}"
    spec = importlib.util.spec_from_file_location(alias, sys.modules[home].__file__)
    if spec is None or spec.loader is None:
        raise IncompatibleError(f"The module {home} has no file, so its code before it was replaced cannot be read")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module  # its own classes look for it there
    spec.loader.exec_module(module)
    return module
