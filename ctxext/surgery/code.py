"""Read the code of a model's classes, including classes typed into a notebook.

The module of a class that subclasses a model of transformers has neither the names nor the source of transformers'
module, so both are searched in the bases.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any


def own_bases(kind: type) -> list[type]:
    """Return a class and its bases, without those of torch and those that all models of transformers share."""
    return [base for base in kind.__mro__ if _is_of_a_model(base.__module__)]


def _is_of_a_model(home: str) -> bool:
    package = home.partition(".")[0]
    return (
        package != "torch"
        and package not in sys.stdlib_module_names
        and (package != "transformers" or home.startswith("transformers.models."))
    )


def names_of(kind: type) -> dict[str, Any]:
    """Return the names in the modules of a class and of its bases; those of the class take precedence."""
    names: dict[str, Any] = {}
    for base in own_bases(kind):
        names = {**vars(sys.modules[base.__module__]), **names}
    return names


def source_of_home(kind: type) -> str:
    """Return the source of the modules that define a class and its bases."""
    homes = {base.__module__: base for base in own_bases(kind)}
    return "\n".join(map(_source_of_module, homes))


def _source_of_module(home: str) -> str:
    module = sys.modules[home]
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # the code was typed in
        definitions: list[Any] = [
            value for value in vars(module).values() if inspect.isclass(value) or inspect.isfunction(value)
        ]
        return "\n".join(source_of(value) for value in definitions if value.__module__ == home)


@functools.lru_cache(maxsize=1024)  # Python parses a whole file to find a class in it
def source_of(code: Any) -> str:
    """Return the source of a class or function; without one, the names, attributes and strings in its code."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # the code was typed in, or made by exec
        functions = vars(code).values() if inspect.isclass(code) else [code]
        codes = [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]
        return "\n".join(word for each in codes for word in _words(each))


def _words(code: CodeType) -> Iterator[str]:
    """Yield names with attributes that are read (``self.out_proj.weight``), attributes that are set, and strings."""
    chain = ""
    for step in dis.get_instructions(code):
        if chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain += f".{step.argval}"
            continue
        if chain:
            yield chain
        chain = step.argval if step.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")) else ""
        if not isinstance(chain, str):  # a double instruction has two names
            chain = chain[-1]
        if step.opname in ("STORE_ATTR", "LOAD_CONST") and isinstance(step.argval, str):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words(inner)
