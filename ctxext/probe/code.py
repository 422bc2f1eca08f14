"""Read the code of a model's classes, including classes typed into a notebook.

The module of a class that subclasses a model of transformers has neither the names nor the source of transformers'
module, so both are searched in the bases.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, or_masks


def own_bases(kind: type) -> list[type]:
    """Return a class and its bases, without the bases of torch and the ones that all models of transformers share."""
    return [base for base in kind.__mro__ if _is_of_a_model(base.__module__)]


def _is_of_a_model(home: str) -> bool:
    package = home.partition(".")[0]
    return (
        package != "torch"
        and package not in sys.stdlib_module_names
        and (package != "transformers" or home.startswith("transformers.models."))
    )


def names_of(kind: type) -> Mapping[str, Any]:
    """Return the names in the modules of a class and of its bases; names of the class take precedence.

    The modules are not copied: torch.compile puts names there while it traces, and finds others at its second try.
    """
    return ChainMap(*(vars(sys.modules[base.__module__]) for base in own_bases(kind)))


_ANY_OF = or_masks(causal_mask_function).__code__


def shows_all(mask_function: Callable[..., Any]) -> bool:
    """Return whether a mask function of transformers shows every token to every other.

    Encoders made of decoders (EmbeddingGemma) join the causal rule with one that is true whatever its arguments are.
    """
    if mask_function is bidirectional_mask_function:
        return True
    if getattr(mask_function, "__code__", None) is not _ANY_OF:
        return False
    return any(map(_is_always_true, inspect.getclosurevars(mask_function).nonlocals["mask_functions"]))


def _is_always_true(mask_function: Callable[..., Any]) -> bool:
    """Return whether a mask function is true without any arguments to look at."""
    try:
        with torch.device("cpu"):
            shown = mask_function(None, None, None, None)
            return isinstance(shown, Tensor) and shown.ndim == 0 and bool(shown)
    except (TypeError, AttributeError):
        return False


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


# Some classes choose one of transformers' functions first: ``mask_function = create_causal_mask if ... else ...``.
MASKS = re.compile(r"(?:mask_kwargs = \{|(?:create_\w*(?:causal|bidirectional)_mask|\bmask_function)\((?!\*))([^})]*)")


def masks_follow_positions(kind: type) -> bool:
    """Return whether a decoder hands positions to its masks, which then keep documents of one row apart."""
    made = MASKS.findall(source_of(kind))
    return not made or any("position_ids" in arguments for arguments in made)
