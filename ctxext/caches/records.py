"""Say of a cache which extension filled it, in a record on the cache and in the class of its layers.

Neither a cache nor its current length shows with which positions its keys were computed: it may have been cropped, or
filled before the model was patched. So an attribute of the cache names the extension, and copies and pickles carry it
along. Each layer refuses by itself to grow in a call of another model.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import create_causal_mask

from ctxext.errors import IncompatibleError, PatchStateError

# Since transformers 5.24 a layer puts its keys into the paged cache; before that, its attention function did.
PAGED_IN_LAYERS = "cache" in inspect.signature(create_causal_mask).parameters
# Names of the cache argument: since transformers 5.24, before it (still accepted), and in layers of older models.
CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")
ATTENTION = "ctxext"
"""Name of the attention that ctxext computes, as a config has it."""
EXTENSION, FILLED = "_ctxext_extension", "_ctxext_filled"
# Of a cache layer: its class without an owner, where its rows come from, and the guard of the call that runs.
PLAIN, ROWS, FILLING = "_ctxext_plain", "_ctxext_rows", "_ctxext_filling"

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Given = dict[str, Any]  # arguments of a call by name


def outside_graphs(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Keep a function out of torch.compile; ``reason`` explains why the model cannot be one graph."""
    return functools.partial(torch.compiler.disable, reason=reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Return whether torch.export runs. It is asked outside of graphs: traced, torch 2.11 says so of each of them."""
    return torch.compiler.is_exporting()


@dataclass(frozen=True)
class FilledUnder:
    """The extension under which a model fills its caches."""

    identity: str
    said: str


@dataclass(frozen=True)
class Filled:
    """The record of a cache that a dynamic method filled.

    Args:
        fitted_lengths: per row, the length to which the positions of its cached tokens are fitted; one number for
            all rows if they agree.
        expected: the tokens in the cache after the call that generate() is preparing.
    """

    fitted_lengths: tuple[int, ...] = ()
    tokens: Tensor | None = None
    expected: Tensor | None = None

    def pick(self, rows: list[int]) -> Filled:
        """Return the record of some of the rows, in this order."""
        lengths, tokens = self.fitted_lengths, None if self.tokens is None else self.tokens[rows]
        lengths = lengths[:1] if len(set(lengths)) == 1 else tuple(lengths[row] for row in rows)
        return replace(self, fitted_lengths=lengths, tokens=tokens)

    def of(self, row: int, rows: int) -> int | None:
        """Return the fitted length of one of ``rows``; None if the cache has another number of rows."""
        if len(set(self.fitted_lengths)) == 1:
            return self.fitted_lengths[0]
        return self.fitted_lengths[row] if len(self.fitted_lengths) == rows else None


def attends_of(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the layers whose attention ctxext computes, each with the object that computes it."""
    return {layer: vars(layer)["_ctxext_attend"] for layer in model.modules() if "_ctxext_attend" in vars(layer)}


def cache_argument(module: nn.Module) -> str | None:
    """Return the name under which a module's class takes a cache; None if it takes none."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def cache_in(given: Given) -> Any:
    """Return the cache among the arguments of a call; None if there is none."""
    return next((given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None), None)


def cached_tokens(cache: Any) -> int:
    """Count the tokens that a cache holds, 0 without a cache."""
    return 0 if cache is None else int(cache.get_seq_length())


def keys_of(cache: Any) -> Any:
    """Return the cache of self-attention, the half of an encoder-decoder's cache in which positions matter."""
    return getattr(cache, "self_attention_cache", cache)


def halves(cache: Any) -> list[Any]:
    """Return the caches that one holds: of an encoder-decoder two, as the encoder's text has positions too."""
    both = (keys_of(cache), getattr(cache, "cross_attention_cache", None))
    return [half for half in both if half is not None]


def cache_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache, of both halves if it has two."""
    return [layer for half in halves(cache) for layer in getattr(half, "layers", ())]


def about_keys(cache: Any) -> str:
    """Begin a sentence about a cache that may hold keys; return "" for an empty one."""
    if isinstance(cache, PagedAttentionCache):
        return "The paged cache of this manager of continuous batches was filled" if PAGED_IN_LAYERS else ""
    if not hasattr(cache, "get_seq_length"):
        return f"This {type(cache).__name__} has no get_seq_length(), so that it may have been filled"
    tokens = cached_tokens(cache)
    return f"This cache of {tokens} tokens was filled" if tokens else ""


def filled(cache: Any) -> Filled | None:
    """Return the record of a cache; None if the cache is empty or was not filled by a dynamic method."""
    if not cached_tokens(cache):
        return None
    record: Filled | None = getattr(keys_of(cache), FILLED, None)
    if record is None or not record.fitted_lengths:
        return None
    rows = getattr(_first_layer(cache), ROWS, None)
    return record.pick(rows.tolist()) if isinstance(rows, Tensor) and not torch.compiler.is_compiling() else record


def remember(cache: Any, **changes: Any) -> None:
    """Change fields of the record of a cache. Fitted lengths are in the present order of its rows."""
    holder = keys_of(cache)
    setattr(holder, FILLED, replace(getattr(holder, FILLED, None) or Filled(), **changes))
    lengths, layer = changes.get("fitted_lengths", ()), _first_layer(cache)
    if lengths and layer is not None:
        keys = getattr(layer, "keys", None)
        is_elsewhere = keys is not None and keys.ndim < 4  # as where a layer quantizes them: their rows are unknown
        rows = range(len(lengths if keys is None or is_elsewhere else keys))
        setattr(layer, ROWS, None if is_elsewhere and len(lengths) == 1 else rows)  # a tensor once they move


def _first_layer(cache: Any) -> Any:
    """Return the first layer of a cache that holds keys, not a state; None if there is none yet."""
    layers = getattr(keys_of(cache), "layers", ())
    return next((layer for layer in layers if isinstance(layer, CacheLayerMixin)), None)


def empty(cache: Any) -> None:
    """Empty a cache; ``reset`` of a growing one only writes zeros before transformers 5.18."""
    cache.reset()
    for layer in keys_of(cache).layers:
        if isinstance(layer, DynamicLayer):
            layer.keys = layer.values = None
            layer.is_initialized = False
    if cached_tokens(cache):
        raise IncompatibleError(
            f"{type(cache).__name__} keeps its tokens after reset(). Dynamic methods need a cache that can be emptied."
        )


class Filling:
    """A forward pass that fills a cache: its record before, whether it held tokens, and this pass's fitted lengths."""

    def __init__(self, cache: Any) -> None:
        is_cache = hasattr(cache, "get_seq_length")
        self.before = filled(cache) if is_cache else None
        self.continues = is_cache and cached_tokens(cache) > 0
        self.fitted_lengths: list[int] = []
        self._cache = None if cache is None else weakref.ref(keys_of(cache))  # weak: a failed pass keeps none alive

    def note(self, row: int, fitted_lengths: list[int]) -> None:
        """Record the fitted lengths of the rows from ``row`` on."""
        self.spoil()
        self.fitted_lengths[row:] = fitted_lengths

    def spoil(self) -> None:
        """Mark the cache as invalid until the forward pass has ended.

        While the pass runs, some layers hold keys of the new positions and others still of the old ones. If the pass
        fails, the cache stays marked: a fitted length of 0 matches no text.
        """
        cache = None if self._cache is None else self._cache()
        if cache is not None and not self.fitted_lengths:
            remember(cache, fitted_lengths=(0,))


FittedModules = dict[tuple[str, str | None], list[Any]]
"""Rotary modules of a compiled call, one for each row or one for all, by the path and layer type that they replace."""


class _CurrentPass(threading.local):
    """The running pass of a decoder in this thread.

    Args:
        filling: record of the pass of a dynamic method, outside of graphs.
        fitted: rotary modules of such a pass in a graph.
    """

    def __init__(self) -> None:
        self.filling: Filling | None = None
        self.fitted: FittedModules | None = None

    @property
    def continues(self) -> bool:
        """True if the pass goes on from cached keys, which may be fitted to another length."""
        return self.filling is not None and self.filling.continues


current_pass = _CurrentPass()


_OWNED: dict[Any, Any] = {}  # by a class of cache layers, the same with an owner: graphs see no functools.cache


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def owned(kind: Any) -> Any:
    """Return the subclass of a class of cache layers whose objects take keys only from models that filled them.

    A copy of a patched model may be unpatched, and knows none of the caches that the model filled; other caches may
    hold their layers. So each layer refuses to grow outside of a call of a model with the extension that filled it.
    """
    if hasattr(kind, PLAIN):
        return kind
    if kind in _OWNED:
        return _OWNED[kind]

    class Owned(kind):  # type: ignore[misc]
        _layer_type = None  # as long as it is made: transformers registers a class that has one for all new caches

        def update(self, *args: Any, **kwargs: Any) -> Any:
            guard = getattr(self, FILLING, None)
            if guard is None or guard.released:  # Ctrl-C leaves a call without its end
                _leave(self)
                return self.update(*args, **kwargs)
            return super().update(*args, **kwargs)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            _move(self, lambda rows: rows[beam_idx.to(rows.device)])

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            _move(self, lambda rows: rows[indices.to(rows.device)])

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            _move(self, lambda rows: rows.repeat_interleave(repeats))

        def __reduce_ex__(self, protocol: Any) -> Any:
            held = {name: value for name, value in vars(self).items() if name != FILLING}  # of no call
            return _reclaimed, (kind,), held

    del Owned._layer_type
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Owned, name, getattr(kind, name))
    setattr(Owned, PLAIN, kind)
    _OWNED[kind] = Owned
    return Owned


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def attributes_of(kind: Any) -> tuple[str, ...]:
    """Return the names that the code of a class gives attributes, which graphs of torch 2.11 cannot list."""
    methods = [method for base in kind.__mro__ for method in vars(base).values() if inspect.isfunction(method)]
    names = {name for method in methods for name in method.__code__.co_names if not hasattr(kind, name)}
    return (*sorted(names), EXTENSION, ROWS, FILLING)


def plain_class(layer: Any) -> Any:
    """Return the class of a cache layer without an owner."""
    return getattr(layer, PLAIN, type(layer))


def _reclaimed(kind: Any) -> Any:
    """Return a layer without its attributes, which unpickling or a copy adds."""
    return object.__new__(owned(kind))


@outside_graphs("ctxext: an extended model filled this cache, and the model of this call is extended by another.")
def _leave(layer: Any) -> None:
    """Give a layer that was emptied its plain class again.

    Raises:
        PatchStateError: if it holds keys.
    """
    if held := about_keys(layer):
        raise PatchStateError(
            f"{held} while a model was extended by {getattr(layer, EXTENSION).said}. The model of this call is not, as "
            f"after ctxext.unpatch, and gives other positions. Start with a new cache."
        )
    vars(layer).pop(EXTENSION)
    layer.__class__ = plain_class(layer)


def _move(layer: Any, order: Callable[[Tensor], Tensor]) -> None:
    """Keep the numbers that the rows had when the cache was recorded."""
    if (rows := getattr(layer, ROWS, None)) is not None:
        setattr(layer, ROWS, order(rows if isinstance(rows, Tensor) else torch.tensor([*rows], device="cpu")))
