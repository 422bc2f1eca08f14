"""Run a model on tensors that have shapes and no data, and count the memory that its passes would take.

The activations that a layer keeps depend on its code, on adapters, autocast, checkpointing and the attention kernel,
and no formula holds for two architectures. So the model's own code runs here, one layer of every kind, on torch's fake
tensors, while a dispatch mode counts the bytes of all live storages. Work space inside a kernel is not counted, but is
small in the fused attention kernels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationMixin

from ctxext.caches.held import Reach
from ctxext.caches.prefix import new_cache
from ctxext.caches.records import cache_argument, cache_in
from ctxext.core.edits import Edits
from ctxext.core.scaling import REFUSALS
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError
from ctxext.measuring.forward import last_position
from ctxext.measuring.head import require_head
from ctxext.methods.parameters import checked_tokens
from ctxext.models.unknown import learned_positions
from ctxext.training.loss import Pieces, WithGradients, cross_entropy_and_gradient
from ctxext.training.memory import layers_of

FIRST = 512
"""Tokens of the shortest run from which longer runs are extrapolated: more than a chunk of any layer."""
SAME = 1e-4
"""Share of the bytes of a run by which a curve may bend and still count as straight."""
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


Bounds = dict[int, tuple[Reach, Fraction]]
"""Reach of the key heads that drop keys, and their share of the key heads, by the index of a layer."""


class Taken(NamedTuple):
    """Bytes of a pass.

    Args:
        kept: bytes that all layers keep until the end of the pass, or the backward pass.
        work: peak of temporary bytes on top of ``kept``.
        passing: the part of ``kept`` that the next token frees: keys and values that have left a window.
        spared: the part of ``kept`` that a quantised cache, or one that drops keys, does not take.
        most: the part of ``kept`` that belongs to the layer that keeps the most.
    """

    kept: int
    work: int
    passing: int = 0
    spared: int = 0
    most: int = 0


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of operations, and of the bytes of live storages created under it: now, and at the peak."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.operations = 0
        self._sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Of experts: without data torch knows its shape in bfloat16 alone.
            cast = [arg.bfloat16() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
            result = func(*cast, **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class PassesOn(DynamicCache):  # type: ignore[misc]
    """A cache that keeps nothing. With a cache, transformers does not search the data for packed sequences."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values unchanged."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Return the keys of an indexer unchanged."""
        return indexer_key_states


class DryRun:
    """Passes of one sequence through a model, without data.

    Args:
        model: a causal language model on the meta device, patched or adapted for its run. Its weights become fake
            tensors here, and weights outside its layers are frozen.
        tile: tokens that pass through an MLP at a time; None for all.
        chunk: tokens of a prompt that are read at a time; None for all.
        bits: bits of a number in the cache; None for the dtype's.
        bounds: reach of the key heads that drop keys, and their share of the key heads, by the index of a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        tile: int | None = None,
        chunk: int | None = None,
        bits: float | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        subject = Subject.of(model)
        self.causal, self.text = subject.model, subject.text
        self.dtype, self.tile, self.chunk = dtype, tile, chunk
        self.packing = Fraction(1 if bits is None else bits / (8 * dtype.itemsize))
        self.bounds = bounds or {}
        self._taken: dict[tuple[str, int], Taken] = {}
        self.hidden_bytes: int = self.text.hidden_size * dtype.itemsize
        self.base: Any = self.causal.get_submodule(require_head(self.causal))
        self.layers = layers_of(self.causal)
        self.positions = last_position(subject) or learned_positions(self.causal)
        kinds = [(*_kind(self.text, layer, index), self.bounds.get(index)) for index, layer in enumerate(self.layers)]
        self.kinds = [
            [index for index, other in enumerate(kinds) if index and other == kind] for kind in dict.fromkeys(kinds[1:])
        ]
        self._mode = FakeTensorMode()
        self._outputs: int | None = None
        self._shared: list[Any] = []
        self._before: dict[int, tuple[int, ...]] = {}
        with self._mode:
            _make_fake(model)
        self.causal.enable_input_require_grads()
        self.layers[0].register_forward_hook(self._look)

    def check_positions(self, length: int) -> None:
        """Raise ``IncompatibleError`` for more tokens than a table has positions; fake tensors would not.

        Raises:
            InvalidParameterError: if ``length`` is not a number of tokens.
        """
        checked_tokens("length", length)
        if self.positions is not None and length > self.positions:
            raise IncompatibleError(
                f"This {self.causal.config.model_type} has positions for {self.positions:,} tokens and cannot read "
                f"{length:,}. Plan up to {self.positions:,}."
            )

    def step(self, length: int) -> Taken:
        """Run a forward and a backward pass through the layers; gradients of the weights are not counted."""
        return self._continued(self._step, length)

    def prefill(self, length: int) -> Taken:
        """Run a prompt into an empty cache and compute the logits of its last token; ``kept`` is the cache."""
        return self._continued(self._prefill, length)

    def _step(self, length: int) -> Taken:
        argument = cache_argument(self.base)
        passes_on = {} if argument is None else {argument: PassesOn()}

        def run(live: LiveBytes) -> tuple[int, ...]:
            inputs = _text(length)
            hidden = self.base(input_ids=inputs, use_cache=False, **passes_on)[0]
            kept = live.now
            gradients = [torch.zeros_like(hidden)]
            loss: Tensor = WithGradients.apply(torch.zeros(()), gradients, hidden)  # type: ignore[no-untyped-call]
            del gradients
            del hidden
            loss.backward()  # type: ignore[no-untyped-call]
            return (kept,)

        with self._frozen_embedding():
            return self._over_kinds(run, training=True)

    def _prefill(self, length: int) -> Taken:
        first, argument = max(length - (self.chunk or length), 0), cache_argument(self.causal)
        is_usual = not isinstance(self.causal, GenerationMixin) or self.causal._supports_default_dynamic_cache()

        def run(live: LiveBytes) -> tuple[int, ...]:
            # As generate() does: without a cache, the data is searched for packed sequences.
            inputs, past = _text(length), {argument: new_cache(self.causal)} if argument and is_usual else {}
            if first:  # the chunks before the last one
                cache = cache_in(self.causal(input_ids=inputs[:, :first], use_cache=True, logits_to_keep=1, **past))
                for layer in cache.layers:  # of a view, the tokens outside are gone when the last chunk is read
                    if isinstance(getattr(layer, "keys", None), Tensor):
                        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
                past, live.peak = {str(argument): cache}, live.now
            output = self.causal(input_ids=inputs[:, first:], use_cache=True, logits_to_keep=1, **past)
            held = [value for name, value in output.items() if name != "logits"]
            aside = _beyond_windows(cache_in(output)), self._spared(cache_in(output))
            del output, inputs
            return (live.now if held else 0), *aside

        return self._over_kinds(run, training=False)

    def loss(self, length: int) -> int:
        """Count the head, the loss and their gradients for a chunk, as ``chunk_loss`` computes them."""
        self._know_outputs()
        with self._running(training=True) as live:
            targets = _text(length)
            pieces = Pieces(self.causal, {"input_ids": targets}, targets)
            hidden = pieces.hidden.detach().requires_grad_()
            before = live.peak = live.now
            logits = pieces.logits(hidden)
            _, by_logits = cross_entropy_and_gradient(logits, targets)
            leaves = [weight for weight in self.causal.get_output_embeddings().parameters() if weight.requires_grad]
            torch.autograd.grad(logits, [hidden, *leaves], by_logits)
            return live.peak - before

    def whole_loss(self, length: int) -> int:
        """Count the head, the loss and their gradients for all tokens at once, as the model's class computes them."""
        self._know_outputs()
        with self._frozen_embedding(), self._running(training=True) as live:
            inputs = _text(length)
            loss = self.causal(input_ids=inputs, labels=inputs, use_cache=False).loss
            loss.backward()
            return live.peak

    def _continued(self, run: Callable[[int], Taken], length: int) -> Taken:
        """Return the bytes of ``run`` at a length; extrapolate from shorter runs if a layer loops over the text.

        Such a layer (linear attention in chunks, a state space without its kernel) makes a number of operations that
        grows with the text, so the time of a run would grow with the text. Bytes are a polynomial of the length of at
        most the second degree, at lengths that are multiples of chunks and windows.
        """
        start = FIRST
        bends = [self.tile or 0, self.chunk or 0, *self._windows(), *(reach.bend for reach, _ in self.bounds.values())]
        beyond = [bend for bend in bends if bend < length]
        while any(start <= bend for bend in beyond):
            start *= 2
        step = max(start // 2, self.tile or 0)
        while length > start + 3 * step and self._loops:
            points = [self._known(run, start + index * step) for index in range(3)]
            if not _is_straight(points):
                points.append(self._known(run, start + 3 * step))
            if (taken := _extrapolated(points, (length - start) / step)) is not None:
                return taken
            start, step = 2 * start, 2 * step
        return self._known(run, length)

    def _known(self, run: Callable[[int], Taken], length: int) -> Taken:
        key = (run.__name__, length)
        if key not in self._taken:
            self._taken[key] = run(length)
        return self._taken[key]

    def _windows(self) -> list[int]:
        """Return the windows of layers: lengths at which the growth of their memory changes."""
        sizes = [value for name, value in vars(self.text).items() if re.search(r"window|attention_chunk", name)]
        return [value for value in sizes if isinstance(value, int) and not isinstance(value, bool)]

    def _spared(self, cache: Any) -> int:
        """Count the bytes of keys and values that quantising them, or dropping some, spares."""
        spared = Fraction(0)
        for index, part in _keys_and_values(cache):
            (reach, share), length, held = self.bounds.get(index, (None, 0)), part.shape[-2], Fraction(1)
            if reach is not None and length >= reach.bend:
                held -= share * Fraction(length - (reach.most - reach.spare - 1), length)
            spared += part.nbytes * (1 - held * self.packing)
        return int(spared)

    @functools.cached_property
    def _loops(self) -> bool:
        """True if a layer makes more operations for a longer text."""
        self._know_outputs()
        counts = []
        for length in (FIRST // 2, FIRST):
            firsts = [indices[0] for indices in self.kinds]
            with self._running(0, *firsts, *itertools.chain(*map(self._needed, firsts)), training=False) as live:
                self.base(input_ids=_text(length), use_cache=False)
                counts.append(live.operations)
        return counts[1] > counts[0]

    def _over_kinds(self, run: Callable[[LiveBytes], tuple[int, ...]], *, training: bool) -> Taken:
        """Run the first layer alone, then with one layer of each kind behind it; add up the bytes of all layers."""
        self._know_outputs()

        def taken(*real: int) -> Taken:
            with self._running(0, *real, training=training) as live:
                kept, *aside = run(live)
            return Taken(kept, live.peak - kept, *aside)

        alone = taken()
        peaks, each, passing, spared = {0: alone.work}, [0] * len(self.layers), alone.passing, alone.spared
        for indices in self.kinds:
            needed = self._needed(indices[0])
            without, both = taken(*needed) if needed else alone, taken(*needed, indices[0])
            peaks[indices[-1]] = both.work
            passing += (both.passing - without.passing) * len(indices)
            spared += (both.spared - without.spared) * len(indices)
            for index in indices:
                each[index] = both.kept - without.kept
        # While a layer is at work, later layers keep nothing: not yet, or in a backward pass no longer.
        work = max(peak - sum(each[last + 1 :]) for last, peak in peaks.items())
        return Taken(alone.kept + sum(each), work, passing, spared, max(alone.kept, *each))

    def _needed(self, index: int) -> tuple[int, ...]:
        """Return the layers before one without which it does not run, since it takes what they made (shared keys)."""
        back = 0
        while index not in self._before:
            needed = tuple(range(max(1, index - back), index))
            try:
                with self._running(0, *needed, index, training=False):
                    self.base(input_ids=_text(8), use_cache=False)
                self._before[index] = needed
            except IncompatibleError:
                if back >= index:
                    raise
                back = 2 * back or 1
        return self._before[index]

    @contextlib.contextmanager
    def _frozen_embedding(self) -> Iterator[None]:
        """Leave out the embedding's gradient, which comes when the activations of all layers are gone."""
        weights = [weight for weight in self.causal.get_input_embeddings().parameters() if weight.requires_grad]
        for weight in weights:
            weight.requires_grad_(False)
        yield
        for weight in weights:
            weight.requires_grad_(True)

    @contextlib.contextmanager
    def _running(self, *real: int, training: bool) -> Iterator[LiveBytes]:
        """Run on fake tensors with all layers but ``real`` passing their input on, and count bytes."""
        self.causal.train(training)
        skipped = [layer for index, layer in enumerate(self.layers) if index not in real]
        live = LiveBytes(tensor for part in (self.causal.parameters, self.causal.buffers) for tensor in part())
        autocast = training and self.dtype != torch.float32
        edits = Edits()
        try:
            for layer in skipped:
                edits.set(layer, "forward", self._pass_on)
            mixed = torch.autocast("cpu", dtype=self.dtype, enabled=autocast)
            with self._mode, live, mixed, torch.set_grad_enabled(training):
                yield live
        except UNKNOWN as error:
            raise IncompatibleError(
                f"{type(self.causal).__name__} depends on its data ({str(error).splitlines()[0]:.80}), so its memory "
                f"cannot be planned from its config. Measure a real run instead."
            ) from error
        except CtxextError:
            raise
        except (RuntimeError, LookupError, *REFUSALS) as error:  # of the model's code: learned positions that end
            raise IncompatibleError(
                f"{type(self.causal).__name__} cannot be run without data at this length, or in this dtype: "
                f"{str(error).strip().partition(chr(10))[0]:.160}"
            ) from error
        finally:
            edits.undo()
            self._shared.clear()
            self.causal.zero_grad()

    def _know_outputs(self) -> None:
        """Find out once whether a layer returns hidden states, or a tuple that begins with them."""
        if self._outputs is None:
            with self._running(0, training=False):
                self.base(input_ids=_text(8), use_cache=False)

    def _look(self, layer: nn.Module, args: Any, output: Any) -> None:
        if layer.forward != self._pass_on:
            self._outputs = len(output) if isinstance(output, tuple) else 0

    def _pass_on(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # arguments of all layers, such as a mask, are kept for all of them
            self._shared.append((args, kwargs))
        return (hidden_states, *[None] * (self._outputs - 1)) if self._outputs else hidden_states


def _text(length: int) -> Tensor:
    """Return the ids of a text of this length."""
    return torch.zeros(1, length, dtype=torch.long)


def _is_straight(points: list[Taken]) -> bool:
    return all(
        abs((last - middle) - (middle - first)) <= SAME * max(first, middle, last)
        for first, middle, last in zip(*points[-3:], strict=True)
    )


def _extrapolated(points: list[Taken], place: float) -> Taken | None:
    """Extrapolate from values at equal distances to ``place``, counted in these distances from the first value.

    Three points lie on a straight line; None is the answer if four do not lie on a curve of the second degree.
    """
    straight, continued, beyond = _is_straight(points), [], place - (len(points) - 1)
    for values in zip(*points, strict=True):
        slopes = [after - before for before, after in itertools.pairwise(values)]
        bends = [after - before for before, after in itertools.pairwise(slopes)]
        if not straight and abs(bends[1] - bends[0]) > SAME * max(values):
            return None
        bend = 0 if straight or abs(bends[-1]) <= SAME * max(values) else bends[-1]
        continued.append(round(values[-1] + beyond * slopes[-1] + beyond * (beyond + 1) / 2 * bend))
    return Taken(*continued)


def _beyond_windows(cache: Any) -> int:
    """Count the bytes of a cache outside the views it holds: a windowed layer holds the end of a prompt's tensor.

    transformers cuts a view out of the keys of a pass, so that all of them stay until the next token replaces the view.
    """
    parts = _keys_and_values(cache)
    return sum(part.untyped_storage().nbytes() - part.nbytes for _, part in parts)


def _keys_and_values(cache: Any) -> Iterator[tuple[int, Tensor]]:
    for index, layer in enumerate(getattr(cache, "layers", ())):
        parts = getattr(layer, "keys", None), getattr(layer, "values", None)
        yield from ((index, part) for part in parts if isinstance(part, Tensor))


def _kind(text: Any, layer: nn.Module, index: int) -> tuple[Any, ...]:
    """Return a key that is equal for layers that take the same memory."""
    types = getattr(text, "layer_types", None) or ()
    shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
    return type(layer), types[index] if index < len(types) else None, shapes


def _make_fake(model: nn.Module) -> None:
    """Replace all weights and buffers by fake tensors; shared tensors stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in places:
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = made[id(old)]
