"""Probe a model for the layers that rotate and the layers with a sliding window, by running its code.

A twin of the model on the meta device reads a few tokens that hold no data. The outputs of its rotary modules, its
hidden states and its attention masks carry marks, and marks follow tensors through every operation. A layer in which a
rotary mark meets a hidden state rotates; a layer in which a hidden state meets a windowed mask is windowed. So the
answer comes from the model's code, whatever its config calls the layers.
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

from ctxext.core.rebuild import FAILURES
from ctxext.errors import IncompatibleError
from ctxext.probe.code import shows_all
from ctxext.probe.replaced import original_twin

PROBE = "ctxext_probe"
TOKENS = 8  # enough for every kind of layer: the probe tells windows and chunks by their masks, not by their size

ROTARY, HIDDEN, FULL, WINDOW, TRUE = "rotary", "hidden", "full mask", "windowed mask", "true"
AHEAD = "mask that shows what comes after"

aten = torch.ops.aten


@dataclass(frozen=True)
class Layers:
    """Paths of a decoder's layers, by what these layers do.

    Args:
        rotating: Layers that rotate queries or keys by the model's rotary modules.
        attending: Layers with attention under a mask that transformers makes.
        windowed: Attending layers that look back over a window or a chunk only.
        both_ways: Attending layers in which tokens also see later tokens.
        failure: Reason that kept the probe from running, so that nothing is known of the layers; None if it ran.
    """

    rotating: frozenset[str] = frozenset()
    attending: frozenset[str] = frozenset()
    windowed: frozenset[str] = frozenset()
    both_ways: frozenset[str] = frozenset()
    failure: str | None = None


def look(model: PreTrainedModel, paths: Sequence[str]) -> Layers:
    """Run a twin of ``model`` on a few tokens without data, and return what its layers do.

    The twin depends on the model's class and config alone. Results are cached by both: many methods may be tried.
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
    """Run the decoder of a twin on a few tokens, and return what its layers do."""
    decoder = next(readers_of(twin, paths[0]), None)
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


def readers_of(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules around ``path`` that need tokens and nothing else, from the innermost outwards."""
    while path:
        path = path.rpartition(".")[0]
        module: nn.Module = model.get_submodule(path)
        arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
        required = [arg.name for arg in arguments if arg.default is arg.empty and arg.kind is arg.POSITIONAL_OR_KEYWORD]
        if any(arg.name == "input_ids" for arg in arguments) and required in ([], ["input_ids"]):
            yield module  # a layer that routes by tokens takes input_ids too, but needs hidden states


def forward_without_data(decoder: nn.Module, marks: _Marks | None = None) -> None:
    """Run a decoder on the meta device on a few tokens; answer questions about data as for a plain text."""
    marks, config = marks or _Marks(), getattr(decoder, "config", None)
    arguments: dict[str, Any] = {"use_cache": False}
    with torch.inference_mode(False), torch.no_grad(), torch.device("meta"), _Lists(), marks:
        if reads_an_encoder(decoder):
            width = next(size for name in WIDTHS if (size := getattr(config, name, None)))
            arguments["encoder_hidden_states"] = torch.zeros(1, TOKENS, width)
        try:
            decoder(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), **arguments)
        except FAILURES:
            if not (channels := getattr(config, "num_channels", None)):
                raise
            marks.entered.clear()  # some decoders read several tokens at each position
            decoder(input_ids=torch.zeros(1, TOKENS, channels, dtype=torch.long), **arguments)


def reads_an_encoder(decoder: nn.Module) -> bool:
    """Return whether a decoder's layers attend to the states of an encoder."""
    takes_states = "encoder_hidden_states" in inspect.signature(type(decoder).forward).parameters
    return takes_states and any(getattr(getattr(decoder, "config", None), name, None) for name in WIDTHS)


# Config fields with the width of the encoder's states.
WIDTHS = ("cross_attention_hidden_size", "cross_hidden_size", "hidden_size")


def _watch(twin: nn.Module, paths: Sequence[str], marks: _Marks) -> None:
    """Mark the outputs of the rotary modules, and tell ``marks`` which layer runs."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        marks.entered.pop()

    def mark_output(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors((output,)):
            _mark(tensor, frozenset({ROTARY}))

    for path, module in twin.named_modules():
        if path.rpartition(".")[2].isdigit():
            module.register_forward_pre_hook(lambda module, args, path=path: marks.entered.append(path))
            module.register_forward_hook(leave)
    for path in paths:
        twin.get_submodule(path).register_forward_hook(mark_output)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, also inside lists; torch's tree utilities take much longer."""
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
        return frozenset({HIDDEN})  # a product of weights and tokens is a hidden state
    marks: frozenset[str] = tensor.__dict__.get("_ctxext_marks", frozenset())
    return marks


class _Marks(TorchDispatchMode):
    """Dispatch mode that carries marks from inputs of operations to outputs, and records which marks met in a layer.

    Outputs get the union of the marks of the inputs. But if a hidden state takes part, the running layer gets the
    marks, and the output is a hidden state again: a rotary mark does not spread to later layers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered: list[str] = []
        self.met: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        has_no_data = any(tensor.is_meta for tensor in inputs)
        output = _answer(func, args, kwargs) if has_no_data else func(*args, **kwargs)
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
        """Return the record of those layers that have a rotating layer among their siblings."""
        rotating = {path for path, marks in self.met.items() if ROTARY in marks}
        siblings = {path.rpartition(".")[0] for path in rotating}
        records = {path: marks for path, marks in self.met.items() if path.rpartition(".")[0] in siblings}
        return Layers(
            frozenset(rotating),
            frozenset(path for path, marks in records.items() if marks & {FULL, WINDOW}),
            frozenset(path for path, marks in records.items() if WINDOW in marks and FULL not in marks),
            frozenset(path for path, marks in records.items() if AHEAD in marks),
        )


_ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default}
_BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on meta tensors. Where data decide, ``all`` is true, masks find nothing, and numbers are 0."""
    first = args[0]
    if func is aten._local_scalar_dense.default:
        return (bool if first.dtype is torch.bool else int)(TRUE in _marks_of(first))
    if func is aten.equal.default:
        return True
    if func is aten.nonzero.default:
        return torch.empty(0, first.ndim, dtype=torch.long, device="meta")
    if func is aten.masked_select.default:
        return torch.empty(0, dtype=first.dtype, device="meta")
    if func is aten.bincount.default:
        return torch.empty(max(1, kwargs.get("minlength", 0)), dtype=torch.long, device="meta")
    if func.overloadpacket is aten._grouped_mm:  # requires bfloat16, although the shapes do not depend on it
        return torch.empty(first.shape[0], args[1].shape[-1], dtype=first.dtype, device="meta")
    if func in _BY_INDEX:
        if any(_is_bool(index) for index in args[1]) and func is not aten.index.Tensor:
            return first
        args = (first, [part for index in args[1] for part in _places(index)], *args[2:])
    return func(*args, **kwargs)


def _is_bool(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _places(index: Any) -> list[Any]:
    """Replace an index by a mask by empty indices, one for each dimension of the mask."""
    return [torch.empty(0, dtype=torch.long, device="meta")] * index.ndim if _is_bool(index) else [index]


class _Lists(TorchFunctionMode):
    """Function mode that lists meta tensors as zeros, splits by zeros to the last part, and refuses addresses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and args[0].is_meta:
            raise IncompatibleError(
                f"{_asking()} launches a kernel outside torch, which cannot run without data. Extend the model first, "
                f"and apply such kernels (Liger, for example) afterwards"
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
    """Return the name of the function outside torch and ctxext that called torch or a compiler of kernels."""
    frame: FrameType | None = sys._getframe(1)
    inside = {"ctxext", "jaxtyping", "torch", "triton"}
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in inside:
        frame = frame.f_back
    return "A function" if frame is None else f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **_: Any,
) -> Tensor:
    """Return an empty mask, marked as full, windowed or ahead; registered with transformers as ``ctxext_probe``."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device="meta")
    if local_size is not None:  # mask_function of a chunk (Llama 4) may hold a tensor without data
        _mark(mask, frozenset({WINDOW}))
        return mask
    first = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    # A mask that shows any later token shows the next token too.
    is_ahead = mask_function is not causal_mask_function and (
        shows_all(mask_function) or bool(mask_function(first, first, first, first + 1).all())
    )
    _mark(mask, frozenset({FULL, AHEAD} if is_ahead else {FULL}))
    return mask


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Compute the shapes of attention and nothing else; registered with transformers as ``ctxext_probe``."""
    heads = query.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    scores = query @ key.transpose(2, 3)
    if isinstance(attention_mask, Tensor):
        scores = scores + attention_mask[..., : key.shape[2]]
    return (scores @ value).transpose(1, 2).contiguous(), scores


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
