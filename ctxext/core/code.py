"""Read the code of a model's classes, including classes typed into a notebook, and say why no family matches it.

The module of a class that subclasses a model of transformers has neither the names nor the source of transformers'
module, so both are searched in the bases.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, or_masks


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


MASKS = re.compile(r"(?:mask_kwargs = \{|create_\w*causal_mask\((?!\*))([^})]*)")


def masks_follow_positions(kind: type) -> bool:
    """Return whether a decoder hands positions to its masks, which then keep documents of one row apart."""
    made = MASKS.findall(source_of(kind))
    return not made or any("position_ids" in arguments for arguments in made)


def rotates_by_table(model: nn.Module) -> bool:
    """Return whether a model rotates by a table of sinusoids, which other models add to their input."""
    code = names_of(type(model))
    buffers = [name for name, _ in model.named_buffers()] + [name for name, _ in model.named_parameters()]
    verbs = [*code, *(name for module in model.modules() for name in vars(type(module)))]
    return any("embed_positions" in name for name in buffers) and any(name.startswith("apply_rotary") for name in verbs)


TABLE = re.compile(r"pos|wpe")
BUCKETS = re.compile(r"relative_attention_bias|rel_pos_bias")
SOME_POSITION = re.compile(
    r"rotary|alibi|sinus|wpe|relative|rel_|position_?(bias|emb|enc)|embed_pos|pos_?(emb|enc)", re.I
)
ROTATION = re.compile(r"rotary|rope(?![a-z])|^Rot([A-Z]|$)|Rope(?![a-z])|RoPE")
# Names of parts that do not read text.
ELSEWHERE = re.compile(r"vision|visual|image|audio|video", re.I)
# Words by which code of any author computes positions.
ARITHMETIC = re.compile(r"\b(pos|positions?|position_ids|theta|inv_freq|freqs?\w*|cos|sin|polar|slopes?)\b")


def why_absent(model: nn.Module) -> str:
    """Return the likeliest reason why no family matches, from the model's modules and the code of their classes."""
    code = names_of(type(model))
    if rotates_by_table(model):
        return (
            "it rotates by a sinusoid table that its own code computes once, and no field of its config (no "
            "rope_parameters) changes that table in a reload"
        )
    owners = [name for name, value in code.items() if name.endswith("RotaryEmbedding") and "Vision" not in name]
    if rotation := _own_rotation(model):
        return f"it rotates by code of its own ({rotation}), which does not have the form of transformers' rope types"
    if any(hasattr(code[name], "compute_default_rope_parameters") for name in owners):
        return "its code has rotary positions, but this checkpoint's config switches them off"
    if computing := [path for path, module in model.named_modules() if "Sinusoid" in type(module).__name__]:
        return (
            f"it adds sinusoids to its input ({computing[0]}), which its own code computes for each text. No field of "
            f"its config sets the size of a table"
        )
    return (
        _table(model)
        or _none_at_all(model)
        or "it has no rotary embedding in the form of transformers' rope types, and no ALiBi"
    )


def _own_rotation(model: nn.Module) -> str | None:
    """Return the path and class of a module that rotates text by its name; None if there is none."""
    for path, module in model.named_modules():
        name, kind = path.rpartition(".")[2], type(module).__name__
        if (ROTATION.search(name) or ROTATION.search(kind)) and not ELSEWHERE.search(f"{path} {kind}"):
            return f"{path}: {kind}"
    return None


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of positions with a learned vector each; None if the model has no such table."""
    return next((rows for path, module, rows in _tables(model) if _is_learned(path, module)), None)


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding, int]]:
    """Yield each embedding with its path and the number of tokens with a row; the decoder's before the encoder's."""
    stated = getattr(model.config, "max_position_embeddings", None)
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Embedding):
            rows = module.num_embeddings - int(getattr(module, "offset", 0))
            # The first rows of some tables stand for no position.
            yield path, module, stated if isinstance(stated, int) and 0 < stated <= rows else rows


def _is_learned(path: str, module: nn.Embedding) -> bool:
    name = path.rpartition(".")[2]
    return bool(TABLE.search(name)) and not BUCKETS.search(name) and "Sinusoid" not in type(module).__name__


def _table(model: nn.Module) -> str | None:
    """Return the reason for a model with a table of positions or of distances; None without such a table."""
    for path, module, rows in _tables(model):
        name = path.rpartition(".")[2]
        if BUCKETS.search(name):
            return (
                f"it has {module.num_embeddings} buckets of relative distances ({path}), the last of which holds all "
                f"farther distances"
            )
        if _is_learned(path, module):
            return (
                f"it has learned positions, one vector each for {rows:,} tokens ({path}), in an unknown form: no field "
                f"of its config that counts positions sets the size of that table"
            )
    return None


def _none_at_all(model: nn.Module) -> str | None:
    """Return the reason for a model without positions, or with positions in its own code; None for others."""
    kinds: set[Any] = {type(module) for module in model.modules()}  # mypy takes these for unhashable
    own_classes = {
        base for kind in kinds for base in own_bases(kind) if not base.__module__.startswith("transformers.")
    }
    if computing := sorted(base.__name__ for base in own_classes if ARITHMETIC.search(_source_beside(base))):
        return f"its positions are in code of its own (beside {computing[0]}), in a form that ctxext does not know"
    lines = [line for kind in kinds for base in own_bases(kind) for line in source_of(base).splitlines()]
    if any(SOME_POSITION.search(line) for line in lines if not line.lstrip().startswith("@")):  # decorators only offer
        return None
    return "it has no positions at all, so nothing needs extending: only memory and its training limit its texts"


def _source_beside(kind: type) -> str:
    """Return the source of a class, and of the functions of its module, which it may call."""
    functions = [value for value in vars(sys.modules[kind.__module__]).values() if inspect.isfunction(value)]
    beside = [function for function in functions if function.__module__ == kind.__module__]
    return "\n".join(source_of(code) for code in (kind, *beside))
