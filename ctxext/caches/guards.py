"""Guard the caches of a patched model: refuse to go on from one that was filled under another extension.

Every forward pass of a patched model compares the record on its cache, and writes one.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.utils.import_utils import is_causal_conv1d_available

from ctxext.caches.records import (
    CACHE_ARGUMENTS,
    EXTENSION,
    FILLED,
    FILLING,
    Filled,
    FilledUnder,
    Filling,
    Given,
    about_keys,
    attributes_of,
    cache_in,
    cache_layers,
    cached_tokens,
    current_pass,
    halves,
    is_exporting,
    keys_of,
    outside_graphs,
    owned,
    plain_class,
    remember,
)
from ctxext.core.saved import identity
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.methods.remap import RemapMethod
from ctxext.probe.code import masks_follow_positions

GUARDS = "_ctxext_guards"

NOT_ONE_GRAPH = (
    "ctxext: a dynamic method reads the length of each sequence from the values of position_ids. One compiled, "
    "exported or traced graph cannot do that. Compile with fullgraph=False, or use a method that is not dynamic."
)


def _filled_by(given: Given, output: Any) -> Any:
    """Return the cache of a call: the argument, or else the one in its output, made by the call; None for none."""
    if (cache := cache_in(given)) is not None:
        return cache
    name = next((name for name in CACHE_ARGUMENTS if hasattr(output, name)), None)
    if name is not None:
        return getattr(output, name)
    parts = output if isinstance(output, tuple) else ()
    return next((part for part in parts if hasattr(part, "get_seq_length")), None)


def _mixing(decoder: PreTrainedModel, *, told: bool) -> str | None:
    """Return why documents that lie in one row are not kept apart by all layers of a decoder; None if they are.

    Layers with a state keep them apart if they are ``told`` where each begins, by a kernel alone: what transformers
    computes in its place reads no ``seq_idx``, which version 5.16 does not say.
    """
    config: Any = decoder.config
    layers = DynamicCache(config=config).layers
    kinds = zip(getattr(config, "layer_types", None) or ["recurrent"] * len(layers), layers, strict=False)
    for kind, layer in kinds:
        if hasattr(layer, "update_conv_state") and not (told and is_causal_conv1d_available()):
            without = " without the package causal_conv1d" if told else ""
            return f"layers of type {kind!r} carry a state from one document into the next{without}"
    if config._attn_implementation in ("eager", "sdpa") and not masks_follow_positions(type(decoder)):
        return f"{type(decoder).__name__} makes its attention masks without positions"
    return None


def require_apart(decoder: PreTrainedModel, given: Given) -> None:
    """Raise ``IncompatibleError`` for documents in one row of a call, if a layer does not keep them apart.

    ``given`` holds the arguments of the call by name. ``seq_idx`` tells layers with a state where a document begins.
    """
    positions, mask, cache = given.get("position_ids"), given.get("attention_mask"), cache_in(given)
    if positions is None or isinstance(cache, PagedAttentionCache):
        return
    row = positions if positions.ndim == 2 else positions[0]
    begins = row == 0
    if positions.ndim > 2:  # tokens of one image share a position on the first of several axes
        begins[..., 1:] &= row[..., :-1] > 0
    if begins.shape[-1] == 1 or isinstance(mask, dict):
        return  # generate() prepares masks, and packs nothing
    if (reason := _mixing(decoder, told=given.get("seq_idx") is not None)) is None:
        return
    if isinstance(mask, Tensor) and mask.ndim == 2:
        start = cached_tokens(cache)
        begins = begins & mask[:, start : start + begins.shape[-1]].bool()
    if bool((begins.sum(-1) > 1).any()):
        raise IncompatibleError(
            f"position_ids restart, as for several documents in one row, but {reason}. Give each document a row."
        )


@dataclass
class CacheGuard:
    """Hooks around a decoder's forward pass that refuse a cache filled under another extension.

    A stale cache causes no error by itself: attention would silently mix its keys with keys of other positions.
    ``before`` compares records, ``after`` writes one. In other models a cache refuses by itself: ``owned``.

    Args:
        takes_made: True to accept a cache without a record, once PEFT was seen to learn a prefix.
        released: True once the model is unpatched; another thread may still be reading a text.
        growing: Class that a growing layer becomes, ``HeldLayer`` where attention may rotate and drop its keys.
        lifted: True if the extension lifted sliding windows, which caches made before still have.
    """

    extension: FilledUnder
    names: tuple[str, ...]
    takes_made: bool = False
    released: bool = False
    growing: type[DynamicLayer] = DynamicLayer
    lifted: bool = False
    by_length: ClassVar[bool] = False

    def before(self, module: Any, args: Any, kwargs: Given) -> None:
        """Begin a call under this extension; refuse a cache of another one, and documents that see each other."""
        given = self._given(args, kwargs)
        self._check(module, given)
        cache = None if self.growing is DynamicLayer else keys_of(cache_in(given))
        if cache is not None and not getattr(cache, "is_compileable", True):  # another one is read in one graph
            self._hold(cache)
        self._let(self, given)

    def after(self, module: nn.Module, args: Any, kwargs: Given, output: Any) -> None:
        """End a call, and record on its cache the extension that filled it; a call that failed has no output."""
        given = self._given(args, kwargs)
        self._let(None, given)
        if output is not None:
            self._record(given, output)

    def _let(self, guard: CacheGuard | None, given: Given) -> None:
        """Let the layers that this extension filled take keys for as long as a call of ``guard`` runs."""
        for layer in cache_layers(cache_in(given)):
            if getattr(layer, EXTENSION, None) == self.extension:
                setattr(layer, FILLING, guard)

    def _check(self, module: Any, given: Given) -> None:
        """Refuse a cache that was not filled under this extension, and documents that would see each other.

        A graph compares records alone, and is left for the sentence of a refusal.
        """
        if not torch.compiler.is_compiling():
            require_apart(module, given)
            self._require(module, given)
        elif not (is_exporting() or self.stands(cache_in(given))):
            self._require(module, given)

    @outside_graphs("ctxext: this cache may hold tokens of another extension, which a graph cannot tell.")
    def _require(self, module: Any, given: Given) -> None:
        """Raise ``PatchStateError`` for a cache that was not filled under this extension."""
        cache = cache_in(given)
        if self.lifted and any(getattr(layer, "is_sliding", False) for layer in cache_layers(cache)):
            raise PatchStateError(
                "This cache was made for sliding windows, which the extension has lifted: it would drop keys that are "
                "seen. Start with a new cache."
            )
        if self.stands(cache):
            return
        half = next(half for half in halves(cache) if not self._stands(half))
        recorded, held = getattr(half, EXTENSION, None), about_keys(half)
        if recorded is not None:
            raise PatchStateError(
                f"{held} while the model was extended by {recorded.said}. Now the model is extended by "
                f"{self.extension.said}, which gives other positions. Start with a new cache."
            )
        if _learns_prefix(module):  # PEFT makes a cache of the learned prefix before each call
            self.takes_made = True
            return
        if isinstance(half, PagedAttentionCache):
            raise PatchStateError(
                f"This manager's paged cache is without a record: it began before this {type(module).__name__} was "
                f"extended, or belongs to a model around it. Extend the whole, by ctxext.patch, and start a new one."
            )
        raise PatchStateError(
            f"{held} without a record, as by this model before it was patched. Now the model is extended by "
            f"{self.extension.said}, which may give other positions. Start with a new cache."
        )

    def _record(self, given: Given, output: Any) -> None:
        """Record on the cache the extension that filled it."""
        if not is_exporting():
            self.claim(_filled_by(given, output))

    def claim(self, cache: Any) -> None:
        """Record on a cache, or on each half of one, and on its layers that this extension fills them."""
        for half in halves(cache):
            if hasattr(half, "update"):
                setattr(half, EXTENSION, self.extension)
            layers: Any = getattr(half, "layers", ())
            for index, layer in enumerate(layers):
                if isinstance(layer, CacheLayerMixin):
                    layers[index] = self._own(layer)

    @outside_graphs("ctxext: a growing cache becomes one whose keys can be rotated and dropped.")
    def _hold(self, cache: Any) -> None:
        """Turn the growing layers of a cache into held layers, and the layers that it makes later too."""
        for layer in getattr(cache, "layers", ()):
            if plain_class(layer) is DynamicLayer:
                self._own(layer)
        if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
            cache.layer_class_to_replicate = self.growing

    def _own(self, layer: Any) -> Any:
        """Return a layer that takes keys only under this extension: the same one, but another in a graph."""
        setattr(layer, EXTENSION, self.extension)
        kind = plain_class(layer)
        grown = owned(self.growing if kind is DynamicLayer else kind)
        if not torch.compiler.is_compiling():
            layer.__class__ = grown
        elif type(layer) is not grown:  # a graph changes no class
            plain, layer = layer, object.__new__(grown)
            for name in attributes_of(kind):
                if hasattr(plain, name):
                    setattr(layer, name, getattr(plain, name))
        return layer

    def stands(self, cache: Any) -> bool:
        """Return whether a cache may be continued."""
        return all(map(self._stands, halves(cache)))

    def _stands(self, half: Any) -> bool:
        recorded = getattr(half, EXTENSION, None)
        if recorded == self.extension and not self.released:
            return True  # the model is extended as it was when this cache was filled
        if recorded is None and self.takes_made:
            return True
        if torch.compiler.is_compiling():  # the length of a static cache lies on the device
            layers = (layer for layer in getattr(half, "layers", ()) if isinstance(layer, CacheLayerMixin))
            return not any(layer.is_initialized for layer in layers)  # others have no keys: states, shared ones
        return not about_keys(half)

    def _given(self, args: Any, kwargs: Given) -> Given:
        return dict(zip(self.names, args, strict=False)) | kwargs


def _unless_fitted(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook out of graphs, and skip it where ``generate()`` has done its work before the call."""
    outside = outside_graphs(NOT_ONE_GRAPH)(hook)
    return functools.wraps(hook)(lambda *args: outside(*args) if current_pass.fitted is None else None)


class DynamicGuard(CacheGuard):
    """Cache guard of a decoder whose positions follow the length of each sequence. It records the lengths, too."""

    by_length = True

    @_unless_fitted
    def _check(self, module: nn.Module, given: Given) -> None:
        """Refuse a cache of another extension, and offer its record to the code that computes positions."""
        if is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise IncompatibleError(NOT_ONE_GRAPH)
        super()._check(module, given)
        current_pass.filling = Filling(cache_in(given))

    @_unless_fitted
    def _record(self, given: Given, output: Any) -> None:
        """Record on the cache the extension that filled it, and the lengths to which its rows are fitted."""
        filling, current_pass.filling = current_pass.filling, None
        super()._record(given, output)
        cache = _filled_by(given, output)
        if filling is None or not filling.fitted_lengths or not hasattr(cache, "get_seq_length"):
            return
        known = getattr(keys_of(cache), FILLED, None) or Filled()
        remember(cache, fitted_lengths=tuple(filling.fitted_lengths), tokens=known.expected, expected=None)


def _learns_prefix(decoder: nn.Module) -> bool:
    """Return whether a PEFT model around a decoder learns a prefix, also one that was made after the patch."""
    # Nothing in the decoder leads to it; this is asked once, and before an error.
    wrappers = [held for held in gc.get_objects() if hasattr(type(held), "active_peft_config")]
    learning = [wrapper for wrapper in wrappers if wrapper.active_peft_config.is_prompt_learning]
    return any(decoder is module for wrapper in learning for module in wrapper.modules())


def _guard_caches(work: Work) -> None:
    """Guard every decoder of a patched model: the innermost models that take a cache.

    Raises:
        IncompatibleError: if the model keeps a cache but takes none under a known name. Unguarded, it would continue
            a cache with other positions.
    """
    model, method = work.subject.model, work.method
    under = FilledUnder(repr(identity(model.config.ctxext)), f"{method.name!r} (factor {method.factor:g})")
    kind = DynamicGuard if method.dynamic else CacheGuard
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    arguments = {module: tuple(inspect.signature(type(module).forward).parameters)[1:] for module in models}
    taking = [module for module in models if {*CACHE_ARGUMENTS} & {*arguments[module]}]
    unknown = next((module for module in models if "use_cache" in arguments[module]), None)
    if not taking and unknown is not None:
        raise IncompatibleError(
            f"{type(unknown).__name__}.forward takes use_cache, but no cache named {' or '.join(CACHE_ARGUMENTS[:2])}. "
            f"ctxext cannot guard that cache. Install a version of transformers that ctxext was tested with."
        )
    growing = DynamicLayer
    if isinstance(method, RemapMethod):
        from ctxext.caches.held import HeldLayer as growing
    guards: list[CacheGuard] = []
    work.edits.set(model, GUARDS, guards)  # before the hooks, and so undone after them
    for module in taking:
        if any(inner in taking for inner in module.modules() if inner is not module):
            continue
        guard = kind(under, arguments[module], growing=growing, lifted=work.extension.sliding_window == "lift")
        work.edits.hook(module, guard.before, guard.after)
        guards.append(guard)


def preparing_class(model: Any) -> Any:
    """Return the class that prepares the calls of an extended model's ``generate``: the model's, but for Phi-3's kin.

    These drop the cache at the original length, where positions of stock longrope change. Of what was dropped, some
    versions of transformers compute nothing again: the model goes on from the newest token alone. All else that these
    classes prepare is what every class does.
    """
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    drops = own is not None and "original_max_position_embeddings" in inspect.unwrap(own).__code__.co_names
    return GenerationMixin if drops else type(model)


def _keep_cache(work: Work) -> None:
    """Let ``generate`` go on from its cache at every length, where no position changes with the length."""
    model = work.subject.model
    prepare = functools.partial(GenerationMixin.prepare_inputs_for_generation, model)
    work.edits.set(model, "prepare_inputs_for_generation", prepare)


register(
    Step(
        Moment.MODULES,
        _keep_cache,
        applies=lambda work: not work.method.dynamic and preparing_class(work.subject.model) is GenerationMixin,
    )
)


def guards_of(model: nn.Module) -> list[CacheGuard]:
    """Return the guards of a patched model."""
    guards: list[CacheGuard] = vars(model).get(GUARDS, [])
    return guards


def _release(model: PreTrainedModel) -> None:
    """End the guards of a model before it is unpatched."""
    for guard in guards_of(model):
        guard.released = True


register(Step(Moment.CACHES, _guard_caches, undo=_release))
