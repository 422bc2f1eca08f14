"""What filled a cache is remembered with the cache: by an attribute of it, which copies and pickles carry along.

A cache does not show under which positions its keys were computed, and neither does the length it has now: it may have
been cropped, or filled before the model was patched. So every forward pass of a patched model writes down what it
filled the cache with, and the next one compares.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.surgery.edits import Edits

# How transformers calls a cache since 5.24, and before (callers may go on with that); and in layers of older models.
ARGUMENTS = ("cache", "past_key_values", "layer_past")
EXTENSION, FILLED, GUARDS = "_ctxext_extension", "_ctxext_filled", "_ctxext_guards"

NOT_ONE_GRAPH = (
    "ctxext: a dynamic method reads the length of each sequence from the values of position_ids, which one compiled, "
    "exported or traced graph cannot hold. Compile with fullgraph=False, or extend the model by a method that is not "
    "dynamic."
)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def outside_graphs(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Let torch.compile call a function as it is, or give the reason why all of a model cannot be one graph."""
    return functools.partial(torch.compiler.disable, reason=reason)


@dataclass(frozen=True)
class FilledUnder:
    """Under which extension of its model a cache was filled.

    Args:
        identity: what tells this extension from others.
        said: the extension in a few words, for messages.
    """

    identity: str
    said: str


@dataclass(frozen=True)
class Filled:
    """What a dynamic method filled a cache with.

    Args:
        fitted_lengths: per row, the length whose positions its tokens have; one number stands for all rows.
        tokens: what is inside, where generate() saw it.
        expected: what will be inside after the call that generate() is preparing.
    """

    fitted_lengths: tuple[int, ...] = ()
    tokens: Tensor | None = None
    expected: Tensor | None = None

    def of(self, row: int, rows: int) -> int | None:
        """The fitted length of one of ``rows``; None where rows were picked, so that nobody knows which is which."""
        if len(set(self.fitted_lengths)) == 1:
            return self.fitted_lengths[0]
        return self.fitted_lengths[row] if len(self.fitted_lengths) == rows else None


def cache_argument(module: nn.Module) -> str | None:
    """The name under which a module's class takes a cache; None where it takes none."""
    names = _arguments(module)
    return next((name for name in ARGUMENTS if name in names), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call; None without any."""
    return next((arguments[name] for name in ARGUMENTS if arguments.get(name) is not None), None)


def _keys_of(cache: Any) -> Any:
    """The cache of an encoder-decoder model is a pair; its own half is what positions matter for."""
    return getattr(cache, "self_attention_cache", cache)


def filled(cache: Any) -> Filled | None:
    """What is remembered of a cache; None where it is empty or was not filled by a dynamic method."""
    if cache is None or not int(cache.get_seq_length()):
        return None
    found: Filled | None = getattr(_keys_of(cache), FILLED, None)
    return found if found is None or found.fitted_lengths else None


def remember(cache: Any, **changes: Any) -> None:
    """Change what is remembered of a cache."""
    holder = _keys_of(cache)
    setattr(holder, FILLED, replace(getattr(holder, FILLED, None) or Filled(), **changes))


def _returned(output: Any) -> Any:
    """The cache that a decoder made by itself, from what it returned; None where it made none."""
    name = next((name for name in ARGUMENTS if hasattr(output, name)), None)
    if name is not None:
        return getattr(output, name)
    parts = output if isinstance(output, tuple) else ()
    return next((part for part in parts if hasattr(part, "get_seq_length")), None)


def empty(cache: Any) -> None:
    """Empty a cache that grows or that has slots. Before 5.18, transformers' ``reset`` of a growing one only zeroes."""
    cache.reset()
    for layer in _keys_of(cache).layers:
        if isinstance(layer, DynamicLayer):
            layer.keys = layer.values = None
            layer.is_initialized = False
    if int(cache.get_seq_length()):
        raise IncompatibleError(f"A {type(cache).__name__} cannot be emptied, which dynamic methods need.")


@dataclass
class CacheGuard:
    """Hooks around a decoder's forward pass: a cache is continued by what filled it, or refused.

    Args:
        extension: what this model fills caches under.
        place: how many arguments a caller may give before the cache.
        takes_made: whether a cache that nothing filled is taken as it is: a learned prefix.
    """

    extension: FilledUnder
    place: int
    takes_made: bool = False
    _filled: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_filled"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _filled=weakref.WeakSet())  # a copy of the model filled nothing yet

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a cache that something else filled."""
        if torch.compiler.is_compiling():
            return
        cache = self.cache_of(args, kwargs)
        if self.stands(cache):
            return
        found = getattr(_keys_of(cache), EXTENSION, None)
        held = f"This cache of {int(cache.get_seq_length())} tokens was filled"
        if found is not None:
            raise PatchStateError(
                f"{held} while the model was extended by {found.said}. Now it is extended by {self.extension.said}: "
                f"what is cached has other positions. Start with a new cache."
            )
        raise PatchStateError(
            f"{held} by something that left no note, such as this model before it was patched. Now the model is "
            f"extended by {self.extension.said}: what is cached may have other positions. Start with a new cache; to "
            f"use a learned prefix (PEFT's prefix tuning), ctxext.patch the PEFT model and not the model inside it."
        )

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Write down what filled the cache."""
        if torch.compiler.is_exporting():
            return
        cache = _keys_of(self.cache_of(args, kwargs, output))
        if hasattr(cache, "get_seq_length"):
            setattr(cache, EXTENSION, self.extension)
            if not torch.compiler.is_compiling():
                self._filled.add(cache)

    def stands(self, cache: Any) -> bool:
        """Whether a cache may be continued."""
        if not hasattr(cache, "get_seq_length"):
            return True
        holder = _keys_of(cache)
        found = getattr(holder, EXTENSION, None)
        if found == self.extension:
            vars(holder).pop("update", None)  # patched as it was when this cache was filled: it is right again
            return True
        return (found is None and self.takes_made) or not int(cache.get_seq_length())

    def release(self) -> None:
        """The model is no longer extended: what this extension filled refuses to grow."""
        for cache in list(self._filled):
            cache.update = StaleUpdate(cache, self.extension.said)

    def cache_of(self, args: Any, kwargs: dict[str, Any], output: Any = None) -> Any:
        """The cache that the decoder is called with, or else the one that it made and returned; None without any."""
        given = args[self.place] if len(args) > self.place else cache_in(kwargs)
        return _returned(output) if given is None else given


class Filling:
    """A forward pass that fills a cache: what was inside before, and what the positions of this call turn out to be.

    Args:
        cache: what the decoder is called with, if anything.
    """

    def __init__(self, cache: Any) -> None:
        self.before = filled(cache) if hasattr(cache, "get_seq_length") else None
        self.fitted_lengths: list[int] = []
        self._cache = None if cache is None else weakref.ref(_keys_of(cache))  # a pass that fails keeps nothing alive

    def note(self, row: int, fitted_lengths: list[int]) -> None:
        """Note the length whose positions the rows from ``row`` on get."""
        self.spoil()
        self.fitted_lengths[row:] = fitted_lengths

    def spoil(self) -> None:
        """From here on until the pass has ended, the cache may hold keys of both kinds: no length has its positions."""
        cache = None if self._cache is None else self._cache()
        if cache is not None and not self.fitted_lengths:
            remember(cache, fitted_lengths=(0,))


class _CurrentPass(threading.local):
    filling: Filling | None = None


_current = _CurrentPass()


def current_filling() -> Filling | None:
    """The pass of a dynamic method's decoder that this thread is inside of."""
    return _current.filling


class DynamicGuard(CacheGuard):
    """Hooks around a decoder whose positions follow the length of each sequence: they write down that length, too."""

    @outside_graphs(NOT_ONE_GRAPH)
    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a cache that something else filled, and show what filled it to those who compute positions."""
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise IncompatibleError(NOT_ONE_GRAPH)
        super().before(module, args, kwargs)
        _current.filling = Filling(self.cache_of(args, kwargs))

    @outside_graphs(NOT_ONE_GRAPH)
    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Write down what filled the cache."""
        filling, _current.filling = _current.filling, None
        super().after(module, args, kwargs, output)
        cache = self.cache_of(args, kwargs, output)
        if filling is None or not filling.fitted_lengths or not hasattr(cache, "get_seq_length"):
            return
        known = getattr(_keys_of(cache), FILLED, None) or Filled()
        remember(cache, fitted_lengths=tuple(filling.fitted_lengths), tokens=known.expected, expected=None)


@dataclass
class StaleUpdate:
    """Stands in for ``cache.update``, by which every attention layer adds its keys, once the cache fits no more.

    Args:
        cache: the cache.
        said: the extension that filled it.
    """

    cache: Any
    said: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns what transformers' own method does."""
        cache = self.cache
        if int(cache.get_seq_length()):
            raise PatchStateError(
                f"This cache of {int(cache.get_seq_length())} tokens was filled while the model was extended by "
                f"{self.said}, and ctxext.unpatch has undone that: its keys have other positions than the model gives "
                f"now. Start with a new cache."
            )
        vars(cache).pop("update", None)  # emptied since
        return cache.update(*args, **kwargs)


def guard_caches(
    model: PreTrainedModel, extension: FilledUnder, *, dynamic: bool, takes_made: bool, edits: Edits
) -> None:
    """Guard every decoder of a patched model: the innermost models that take a cache.

    Args:
        model: the patched model.
        extension: how it is extended.
        dynamic: whether positions follow the length of each sequence.
        takes_made: whether a cache that nothing filled is taken as it is: a learned prefix.
        edits: the journal.

    Raises:
        IncompatibleError: if it keeps a cache and takes none under a name that is known: unguarded, it would go on
            from one with other positions.
    """
    kind = DynamicGuard if dynamic else CacheGuard
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    taking = {module: name for module in models if (name := cache_argument(module)) is not None}
    unknown = next((module for module in models if "use_cache" in _arguments(module)), None)
    if not taking and unknown is not None:
        raise IncompatibleError(
            f"{type(unknown).__name__}.forward takes use_cache, but no cache named {' or '.join(ARGUMENTS[:2])}. "
            f"ctxext cannot guard the cache of such a model. Install a version of transformers that ctxext was tested "
            f"with."
        )
    guards = []
    for module, name in taking.items():
        if any(inner in taking for inner in module.modules() if inner is not module):
            continue
        guard = kind(extension, _arguments(module).index(name), takes_made)
        edits.hook(module, guard.before, guard.after)
        guards.append(guard)
    edits.set(model, GUARDS, guards)


def guards_of(model: nn.Module) -> list[CacheGuard]:
    """The guards of a patched model."""
    found: list[CacheGuard] = vars(model).get(GUARDS, [])
    return found


def _arguments(module: nn.Module) -> list[str]:
    """Names of what the forward method of a module's class takes, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]
