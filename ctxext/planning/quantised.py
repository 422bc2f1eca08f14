"""Quantised weights: find how a checkpoint stores its weights, and count their memory.

Every quantiser names its config fields differently. They are read by their meaning: a number of bits, a size of the
groups that share a scale, or a name such as ``int4`` or ``fp8``. Weights without such a field are counted unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import InvalidParameterError, refuse_unknown
from ctxext.files import JsonObject
from ctxext.methods.parameters import is_number
from ctxext.training.memory import layers_of

NF4 = 4 + 1 / 8 + 32 / (64 * 256)
"""Bits per weight: 4, per 64 weights one scale of 8, per 256 scales a float32 (QLoRA, double quantisation)."""
QUANTISED = {"nf4": NF4}
EXPERTS = {"mxfp4": 4 + 8 / 32}
"""Bits per weight where only experts are quantised: 4, and per 32 weights one scale of 8 bits."""

BITS = frozenset({"bits", "num_bits", "nbits", "w_bit", "wbits", "weight_bits", "w_bits"})
GROUPS = frozenset({"group_size", "q_group_size"})
# Fields that name a format, whose name contains the width.
NAMED = frozenset(
    {"quant_method", "weights", "quant_type", "_type", "fmt", "format", "weight_format", "quant_algo", "forward_dtype"}
)
WIDTH = re.compile(r"(?:u?int|fp|float|nf|bnb_|w)_?(\d+)(?!\d)", re.I)
OF_WEIGHTS = re.compile(r"(?:int|float)(\d+)_?weight", re.I)
# Quantisers whose name says no width and whose config need not.
BY_METHOD = {"awq": 4.0, "eetq": 8.0, "bitnet": 2.0, "bitnet_b158": 2.0, "spqr": 4.0, "fbgemm_fp8": 8.0}
SKIPPED = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude", "exclude_modules", "llm_int8_skip_modules")
FLOATS = 16  # default bits of a scale or a zero point of a group


@dataclass(frozen=True)
class Stored:
    """Storage of the weights of linear layers.

    Args:
        bits: bits of one weight, its share of scales and zero points included; None if the config does not give it.
        skipped: patterns of the names of modules that are stored plain.
        experts_only: True where experts alone are quantised, not linear layers.
    """

    method: str
    bits: float | None
    skipped: tuple[str, ...] = ()
    experts_only: bool = False

    @property
    def trains_packed(self) -> bool:
        """True if LoRA trains on the packed weights; other quantisers unpack the weights first."""
        return self.method == "bitsandbytes"

    @property
    def is_unpacked_in_use(self) -> bool:
        """True if kernels unpack one whole weight at a time, as they do below 8 bits for many tokens."""
        return self.bits is not None and self.bits < 8 and not self.experts_only

    def holds(self, name: str) -> bool:
        """Return whether the module of this name is quantised."""
        return not any(_matches(pattern, name) for pattern in self.skipped)


def stored_as(config: Any) -> Stored | None:
    """Return the storage of a checkpoint's quantised weights; None if they are plain."""
    section = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not section:
        return None
    options: JsonObject = section if isinstance(section, dict) else section.to_dict()
    name = options.get("quant_method")
    method = str(getattr(name, "value", name or "unknown"))
    skipped = tuple(str(pattern) for field in SKIPPED for pattern in options.get(field) or ())
    if method in EXPERTS:
        return Stored(method, EXPERTS[method], skipped, experts_only=True)
    return Stored(method, _bits(options, method), skipped)


def _bits(options: JsonObject, method: str) -> float | None:
    """Compute the bits of one weight from a quantiser's config; return None if no field gives them."""
    if method == "bitsandbytes":
        if not (options.get("load_in_4bit") or options.get("_load_in_4bit")):
            return 8.0 if options.get("load_in_8bit") or options.get("_load_in_8bit") else None
        return NF4 if options.get("bnb_4bit_use_double_quant") else 4 + 32 / 64
    if method == "aqlm":
        size = options.get("in_group_size", 8) * options.get("out_group_size", 1)
        return float(options.get("nbits_per_codebook", 16) * options.get("num_codebooks", 1) / size)
    fields = list(_fields(options))
    numbers = [float(value) for name, value in fields if name in BITS and is_number(value)]
    names = [
        float(match[1])
        for name, value in fields
        if name in NAMED and isinstance(value, str)
        for match in [OF_WEIGHTS.search(value) or WIDTH.search(value)]
        if match
    ]
    width: float | None = next(iter([*numbers, *names]), BY_METHOD.get(method))
    if width is None or not 0 < width <= 8:
        return None
    groups = [value for name, value in fields if name in GROUPS and is_number(value) and value > 0]
    if not groups or width == 8:
        return width
    scales = 8.0 if "fp4" in str(options).lower() else FLOATS + (0.0 if options.get("zero_point") is False else width)
    return width + scales / float(groups[0])


def _fields(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield every field of a config and of its nested parts, except fields of activations and of the cache."""
    if isinstance(options, list):
        for item in options:
            yield from _fields(item)
    if isinstance(options, dict):
        for name, value in options.items():
            if not isinstance(value, dict | list):
                yield name, value
            elif not re.search(r"activation|kv_cache|output", name):
                yield from _fields(value)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    pattern = pattern.strip(".*")
    return bool(pattern) and f".{pattern}." in f".{name}."


def stored_weights(model: PreTrainedModel, stored: Stored, layers: Iterable[nn.Module] | None = None) -> list[Tensor]:
    """Return the quantised weights of some decoder layers, or of all: of linear layers, and experts in one tensor."""
    weights: list[Any] = []
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers_of(model, towers=True) if layers is None else layers:
        for module in layer.modules():
            if not stored.holds(names[id(module)]):
                continue
            transposed = type(module).__name__ == "Conv1D" and stored.method == "bitsandbytes"
            if (transposed or isinstance(module, nn.Linear)) and not stored.experts_only:
                weights.append(module.weight)
            elif stored.method != "bitsandbytes":  # bitsandbytes quantises linear layers only
                weights += [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
    return weights


def packed_weights(
    model: PreTrainedModel, quantisation: str | None, *, training: bool, layers: Iterable[nn.Module] | None = None
) -> tuple[int, int]:
    """Count the bytes that quantisation saves, and the bytes of the largest weight that is unpacked for use.

    ``quantisation`` applies to linear layers on loading, None for the config's; ``layers`` are some decoder layers.
    """
    stored = stored_as(model.config)
    if quantisation is not None:
        refuse_unknown("quantisation", [quantisation], QUANTISED)
        if stored is not None and stored.method != "bitsandbytes":
            raise InvalidParameterError(
                f"The weights of this {model.config.model_type} come quantised ({stored.method}), and transformers "
                f"does not load them as {quantisation}. Leave quantisation out, or plan a checkpoint with plain "
                f"weights."
            )
        stored = Stored("bitsandbytes", QUANTISED[quantisation])
    if stored is None or stored.bits is None or (training and not stored.trains_packed):
        return 0, 0
    weights = stored_weights(model, stored, layers)
    sizes = [weight.nbytes for weight in weights]
    saved = sum(sizes) - int(sum(weight.numel() for weight in weights) * stored.bits / 8)
    return saved, max(sizes, default=0) if stored.is_unpacked_in_use else 0
