"""Which layers of a model rotate, and which of them look back over a window only: seen, not read off a config.

A twin of the model without memory (on the meta device) reads a few tokens that hold no data. What its rotary modules
return is marked, and so are hidden states and the masks of its attention; marks follow tensors through every operation.
A layer in which a rotary mark meets a hidden state rotates; one in which a hidden state meets a windowed mask is
windowed. So the answer is that of the model's own code, whatever its config calls its layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ctxext.errors import IncompatibleError
from ctxext.surgery.rebuild import FAILURES
from ctxext.surgery.replaced import original_twin

PROBE = "ctxext_probe"
TOKENS = 8  # enough for every kind of layer: windows and chunks are told by their masks, not by their size

ROTARY, HIDDEN, FULL, WINDOW, TRUE = "rotary", "hidden", "full mask", "windowed mask", "true"
AHEAD = "mask that shows what comes after"

aten = torch.ops.aten


@dataclass(frozen=True)
class Layers:
    """What the layers of a decoder do, by their paths.

    Args:
        rotating: layers that rotate queries or keys by the model's rotary modules.
        attending: layers with attention under a mask that transformers makes.
        windowed: those of them that look back over a window or a chunk only.
        both_ways: those that see everything in which tokens see others that come after them.
        failure: why the probe could not run; None where it did. Then nothing is known of the layers.
    """

    rotating: frozenset[str] = frozenset()
    attending: frozenset[str] = frozenset()
    windowed: frozenset[str] = frozenset()
    both_ways: frozenset[str] = frozenset()
    failure: str | None = None

    @property
    def whole_and_unrotated(self) -> frozenset[str]:
        """Layers that see everything and have no positions."""
        return self.attending - self.windowed - self.rotating

    @property
    def rotates_in_windows_only(self) -> bool:
        """Whether no distance beyond a window is ever rotated, though other layers see that far."""
        return bool(self.rotating) and self.rotating <= self.windowed and bool(self.whole_and_unrotated)


def look(model: PreTrainedModel, paths: Sequence[str]) -> Layers:
    """Let a twin of ``model`` read a few tokens without data, and watch its layers.

    The twin is built from the model's class and config, so what was seen once of both is not looked for again: with a
    method after the other on a model of many layers, that is most of the time.

    Args:
        model: any model; it is not touched.
        paths: its rotary modules, all of one decoder.
    """
    try:
        key = (type(model), model.config.to_json_string(use_diff=False), tuple(paths))
        if key not in _SEEN:
            if len(_SEEN) == REMEMBERED:
                _SEEN.pop(next(iter(_SEEN)))  # the oldest
            _SEEN[key] = _watched(original_twin(model, model.config).eval(), paths)
        return _SEEN[key]
    except FAILURES as error:
        return Layers(failure=f"{type(error).__name__}: {error}".partition("\n")[0])


REMEMBERED = 64
_SEEN: dict[tuple[type, str, tuple[str, ...]], Layers] = {}


def _watched(twin: PreTrainedModel, paths: Sequence[str]) -> Layers:
    """What the layers of a model without weights do with a few tokens."""
    decoder = reader_of(twin, paths[0])
    if decoder is None:
        return Layers(failure="it reads no tokens")
    for module in decoder.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation_internal = PROBE
    marks = _Marks()
    _watch(twin, paths, marks)
    forward_without_data(decoder, marks)
    return marks.layers()


def reader_of(model: nn.Module, path: str) -> nn.Module | None:
    """The innermost module around ``path`` that reads tokens, which is the decoder; None where nothing does."""
    return next(readers_of(model, path), None)


def readers_of(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules around ``path`` that read tokens and need nothing else, from the innermost outwards."""
    while path:
        path = path.rpartition(".")[0]
        module: nn.Module = model.get_submodule(path)
        arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
        needed = [one.name for one in arguments if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        if any(one.name == "input_ids" for one in arguments) and needed in ([], ["input_ids"]):
            yield module  # a layer that routes by tokens takes input_ids too, but needs hidden states


def forward_without_data(decoder: nn.Module, marks: _Marks | None = None) -> None:
    """Run a decoder that has no memory on a few tokens. What its code asks of data is answered as for a plain text."""
    marks, config = marks or _Marks(), getattr(decoder, "config", None)
    channels = getattr(config, "num_channels", None)  # some read several tokens at each place
    arguments: dict[str, Any] = {"use_cache": False}
    with torch.inference_mode(False), torch.no_grad(), torch.device("meta"), _Lists(), marks:
        if reads_an_encoder(decoder):
            width = next(size for name in WIDTHS if (size := getattr(config, name, None)))
            arguments["encoder_hidden_states"] = torch.zeros(1, TOKENS, width)
        try:
            decoder(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), **arguments)
        except FAILURES:
            if not channels:
                raise
            marks.entered.clear()
            decoder(input_ids=torch.zeros(1, TOKENS, channels, dtype=torch.long), **arguments)


def reads_an_encoder(decoder: nn.Module) -> bool:
    """Whether a decoder's layers attend to what an encoder has read."""
    takes_it = "encoder_hidden_states" in inspect.signature(type(decoder).forward).parameters
    return takes_it and any(getattr(getattr(decoder, "config", None), name, None) for name in WIDTHS)


# Where configs say how wide the encoder's states are.
WIDTHS = ("cross_attention_hidden_size", "cross_hidden_size", "hidden_size")


def _watch(twin: nn.Module, paths: Sequence[str], marks: _Marks) -> None:
    """Mark what the rotary modules return, and let ``marks`` know which layer runs."""

    def enter(path: str) -> Callable[..., None]:
        return lambda module, args: marks.entered.append(path)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        marks.entered.pop()

    def mark_output(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors((output,)):
            _mark(tensor, frozenset({ROTARY}))

    for path, module in twin.named_modules():
        if path.rpartition(".")[2].isdigit():
            module.register_forward_pre_hook(enter(path))
            module.register_forward_hook(leave)
    for path in paths:
        twin.get_submodule(path).register_forward_hook(mark_output)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, those in lists too.

    torch's own walk over trees would take as long as everything else here.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mark(tensor: Tensor, marks: frozenset[str]) -> None:
    if not isinstance(tensor, nn.Parameter):
        tensor.__dict__["_ctxext_marks"] = marks


def _marks_of(tensor: Tensor) -> frozenset[str]:
    if isinstance(tensor, nn.Parameter):
        return frozenset({HIDDEN})  # what weights make of the tokens
    marks: frozenset[str] = tensor.__dict__.get("_ctxext_marks", frozenset())
    return marks


class _Marks(TorchDispatchMode):
    """Carries marks from the inputs of every operation to its outputs, and notes which marks met in which layer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered: list[str] = []
        self.met: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        is_empty = any(tensor.is_meta for tensor in inputs)
        output = _answer(func, args, kwargs) if is_empty else func(*args, **kwargs)
        marks: frozenset[str] = frozenset().union(*map(_marks_of, inputs))
        if HIDDEN in marks:
            if self.entered:
                self.met.setdefault(self.entered[-1], set()).update(marks)
            marks = frozenset({HIDDEN})
        if func in _ALL:
            marks |= {TRUE}
        if marks:
            for tensor in _tensors((output,)):
                _mark(tensor, marks)
        return output

    def layers(self) -> Layers:
        """What was seen, of those layers that stand beside one that rotates."""
        rotating = {path for path, marks in self.met.items() if ROTARY in marks}
        siblings = {path.rpartition(".")[0] for path in rotating}
        seen = {path: marks for path, marks in self.met.items() if path.rpartition(".")[0] in siblings}
        return Layers(
            frozenset(rotating),
            frozenset(path for path, marks in seen.items() if marks & {FULL, WINDOW}),
            frozenset(path for path, marks in seen.items() if WINDOW in marks and FULL not in marks),
            frozenset(path for path, marks in seen.items() if AHEAD in marks),
        )


_ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default}
_GROUPED = {aten._grouped_mm}
_BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on tensors without data; where its result hangs on data, answer as for a plain text.

    Everything holds (``all``), nothing is found (``nonzero``, indexing by a mask), every number is 0.
    """
    first = args[0]
    if func is aten._local_scalar_dense.default:
        value = 1 if TRUE in _marks_of(first) else 0
        return bool(value) if first.dtype is torch.bool else value
    if func is aten.equal.default:
        return True
    if func is aten.nonzero.default:
        return torch.empty(0, first.ndim, dtype=torch.long, device="meta")
    if func is aten.masked_select.default:
        return torch.empty(0, dtype=first.dtype, device="meta")
    if func is aten.bincount.default:
        return torch.empty(max(1, kwargs.get("minlength", 0)), dtype=torch.long, device="meta")
    if func.overloadpacket in _GROUPED:  # insists on bfloat16, which the shapes do not depend on
        return torch.empty(first.shape[0], args[1].shape[-1], dtype=first.dtype, device="meta")
    if func in _BY_INDEX:
        if any(_is_bool(index) for index in args[1]) and func is not aten.index.Tensor:
            return first
        args = (first, [part for index in args[1] for part in _places(index)], *args[2:])
    return func(*args, **kwargs)


def _is_bool(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _places(index: Any) -> list[Any]:
    """An index by a mask as the numbers of the places where it holds: none."""
    return [torch.empty(0, dtype=torch.long, device="meta")] * index.ndim if _is_bool(index) else [index]


class _Lists(TorchFunctionMode):
    """Python lists out of tensors without data: zeros, and what is split by them is given to the last part.

    Their address is given to nobody: a kernel outside torch would be launched on it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and args[0].is_meta:
            raise IncompatibleError(
                f"{_asking()} launches a kernel of its own, which cannot be tried out without data. Extend the model "
                f"first and apply such kernels (Liger and its like) afterwards"
            )
        if func is Tensor.tolist and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").tolist()
        if func is Tensor.split and len(args) > 1 and args[0].is_meta and isinstance(args[1], list | tuple):
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", 0)
            sizes = list(args[1])
            if not any(sizes):
                sizes[-1] = args[0].shape[dim]
            args = (args[0], sizes, *args[2:])
        return func(*args, **(kwargs or {}))


def _asking() -> str:
    """The module whose code asked torch, or a compiler of kernels, for something."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) in {"ctxext", "jaxtyping", "torch", "triton"}:
        frame = frame.f_back
    return "A function" if frame is None else f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **_: Any,
) -> Tensor:
    """Mask function of the name ``ctxext_probe``, in the signature that transformers calls."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device="meta")
    if local_size is not None:  # what says where a chunk begins (Llama 4) may be a tensor without data
        _mark(mask, frozenset({WINDOW}))
        return mask
    first = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    # Whoever sees further ahead sees the next token too.
    is_ahead = mask_function is not causal_mask_function and bool(mask_function(first, first, first, first + 1).all())
    _mark(mask, frozenset({FULL, AHEAD} if is_ahead else {FULL}))
    return mask


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Attention function of the name ``ctxext_probe``: the shapes of attention, and nothing else."""
    heads = query.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    scores = query @ key.transpose(2, 3)
    if isinstance(attention_mask, Tensor):
        scores = scores + attention_mask[..., : key.shape[2]]
    return (scores @ value).transpose(1, 2).contiguous(), scores


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
