"""The code that a model's classes are made of, those that somebody typed into a notebook included.

Whoever subclasses a model of transformers has classes whose modules hold neither the names nor the source that those
of transformers hold; both are looked for in the bases.
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
    """A class and those of its bases that are a model's own: neither torch's nor what all of transformers shares."""
    return [base for base in kind.__mro__ if _is_of_a_model(base.__module__)]


def _is_of_a_model(home: str) -> bool:
    package = home.partition(".")[0]
    return (
        package != "torch"
        and package not in sys.stdlib_module_names
        and (package != "transformers" or home.startswith("transformers.models."))
    )


def names_of(kind: type) -> dict[str, Any]:
    """What the modules of a class and of its bases hold by name; the class's own come first."""
    found: dict[str, Any] = {}
    for base in own_bases(kind):
        found = {**vars(sys.modules[base.__module__]), **found}
    return found


def source_of_home(kind: type) -> str:
    """The source of the modules that a class and its bases are defined in."""
    homes = {base.__module__: base for base in own_bases(kind)}
    return "\n".join(map(_source_of_module, homes))


def _source_of_module(home: str) -> str:
    module = sys.modules[home]
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # it was typed in
        made: list[Any] = [
            value for value in vars(module).values() if inspect.isclass(value) or inspect.isfunction(value)
        ]
        return "\n".join(source_of(value) for value in made if value.__module__ == home)


@functools.lru_cache(maxsize=1024)  # Python parses a whole file to find one class in it
def source_of(code: Any) -> str:
    """The source of a class or function; where none is kept, the names, attributes and strings in its code."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # it was typed in, or made by exec
        functions = vars(code).values() if inspect.isclass(code) else [code]
        codes = [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]
        return "\n".join(word for each in codes for word in _words(each))


def _words(code: CodeType) -> Iterator[str]:
    """Names with the attributes that are read of them (``self.out_proj.weight``), attributes set, and strings."""
    chain = ""
    for step in dis.get_instructions(code):
        if chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain += f".{step.argval}"
            continue
        if chain:
            yield chain
        chain = step.argval if step.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")) else ""
        if not isinstance(chain, str):  # two of them at once
            chain = chain[-1]
        if step.opname in ("STORE_ATTR", "LOAD_CONST") and isinstance(step.argval, str):
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words(inner)
