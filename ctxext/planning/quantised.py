"""Weights of few bits: how a checkpoint stores its own, and what they take.

Every quantiser says its width in fields of its own. They are read by what they mean: a number of bits, a size of the
groups that share a scale, or a name such as ``int4`` or ``fp8``. Whatever does not say it is counted unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.planning.dry_run import layers_of

NF4 = 4 + 1 / 8 + 32 / (64 * 256)
"""Bits per weight: 4, per 64 weights one scale of 8, per 256 scales a float32 (QLoRA, double quantisation)."""
QUANTISED = {"nf4": NF4}
EXPERTS = {"mxfp4": 4 + 8 / 32}
"""Bits per weight of experts alone, all else plain: per 32 weights one scale of 8 bits."""

BITS = frozenset({"bits", "num_bits", "nbits", "w_bit", "wbits", "weight_bits", "w_bits"})
GROUPS = frozenset({"group_size", "q_group_size"})
# Where a width stands in a name instead. Only these fields are names of a format.
NAMED = frozenset(
    {"quant_method", "weights", "quant_type", "_type", "fmt", "format", "weight_format", "quant_algo", "forward_dtype"}
)
WIDTH = re.compile(r"(?:u?int|fp|float|nf|bnb_|w)_?(\d+)(?!\d)", re.I)
OF_WEIGHTS = re.compile(r"(?:int|float)(\d+)_?weight", re.I)
# Quantisers whose name says no width and whose config need not.
BY_METHOD = {"awq": 4.0, "eetq": 8.0, "bitnet": 2.0, "bitnet_b158": 2.0, "spqr": 4.0, "fbgemm_fp8": 8.0}
SKIPPED = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude", "exclude_modules", "llm_int8_skip_modules")
FLOATS = 16  # a scale or a zero point of a group, where nothing says more


@dataclass(frozen=True)
class Stored:
    """How the weights of linear layers are stored.

    Args:
        method: transformers' name of it.
        bits: of one weight, its share of scales and zero points included; None where the config does not say it.
        skipped: patterns of the names of modules that are stored plain.
        experts_only: whether linear layers are plain and experts are not.
    """

    method: str
    bits: float | None
    skipped: tuple[str, ...] = ()
    experts_only: bool = False

    @property
    def trains_packed(self) -> bool:
        """Whether LoRA is trained on them as they are stored; others are unpacked first."""
        return self.method == "bitsandbytes"

    @property
    def is_unpacked_in_use(self) -> bool:
        """Whether kernels unpack one whole weight at a time, as they do below 8 bits for many tokens."""
        return self.bits is not None and self.bits < 8 and not self.experts_only

    def holds(self, name: str) -> bool:
        """Whether the module of a name is stored so."""
        return not any(_matches(pattern, name) for pattern in self.skipped)


def stored_as(config: Any) -> Stored | None:
    """How a checkpoint's weights are quantised; None where they are plain."""
    found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if not found:
        return None
    said: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    name = said.get("quant_method")
    method = str(getattr(name, "value", name or "unknown"))
    skipped = tuple(str(one) for field in SKIPPED for one in said.get(field) or ())
    if method in EXPERTS:
        return Stored(method, EXPERTS[method], skipped, experts_only=True)
    return Stored(method, _bits(said, method), skipped)


def _bits(said: dict[str, Any], method: str) -> float | None:
    """Bits of one weight, by whatever field says them."""
    if method == "bitsandbytes":
        if not (said.get("load_in_4bit") or said.get("_load_in_4bit")):
            return 8.0 if said.get("load_in_8bit") or said.get("_load_in_8bit") else None
        return NF4 if said.get("bnb_4bit_use_double_quant") else 4 + 32 / 64
    if method == "aqlm":
        size = said.get("in_group_size", 8) * said.get("out_group_size", 1)
        return float(said.get("nbits_per_codebook", 16) * said.get("num_codebooks", 1) / size)
    fields = list(_fields(said))
    numbers = [float(value) for name, value in fields if name in BITS and _is_count(value)]
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
    groups = [value for name, value in fields if name in GROUPS and _is_count(value) and value > 0]
    if not groups or width == 8:
        return width
    scales = 8.0 if "fp4" in str(said).lower() else FLOATS + (0.0 if said.get("zero_point") is False else width)
    return width + scales / float(groups[0])


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fields(said: Any) -> Iterator[tuple[str, Any]]:
    """Every field of a config and of what lies in it, but for those of activations and of the cache."""
    if isinstance(said, list):
        for one in said:
            yield from _fields(one)
    if isinstance(said, dict):
        for name, value in said.items():
            if isinstance(value, dict | list) and not re.search(r"activation|kv_cache|output", name):
                yield from _fields(value)
            elif not isinstance(value, dict | list):
                yield name, value


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    pattern = pattern.strip(".*")
    return bool(pattern) and f".{pattern}." in f".{name}."


def stored_weights(model: PreTrainedModel, stored: Stored) -> list[Tensor]:
    """The weights of the decoder layers that a checkpoint stores so: linear ones, and experts that are one tensor."""
    found = []
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers_of(model):
        for module in layer.modules():
            if not stored.holds(names[id(module)]):
                continue
            if isinstance(module, nn.Linear) and not stored.experts_only:
                found.append(module.weight)
            elif stored.method != "bitsandbytes":  # which takes linear layers alone
                found += [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
    return found


def packed_weights(model: PreTrainedModel, quantisation: str | None, *, training: bool) -> tuple[int, int]:
    """Bytes that few bits save, and of the largest weight that is unpacked to be used.

    Args:
        model: whose weights are all there, unpacked.
        quantisation: what its linear layers are quantised to as it is loaded; None for what its config says.
        training: whether LoRA is trained on it.

    Raises:
        UnknownNameError: an unknown ``quantisation``.
        InvalidParameterError: a ``quantisation`` of weights that come quantised.
    """
    stored = stored_as(model.config)
    if quantisation is not None:
        if quantisation not in QUANTISED:
            raise UnknownNameError.of("quantisation", quantisation, QUANTISED)
        if stored is not None and stored.method != "bitsandbytes":
            raise InvalidParameterError(
                f"The weights of this {model.config.model_type} come quantised ({stored.method}), and transformers "
                f"does not load them as {quantisation}. Leave quantisation out, or plan a checkpoint whose weights are "
                f"plain."
            )
        stored = Stored("bitsandbytes", QUANTISED[quantisation])
    if stored is None or stored.bits is None or (training and not stored.trains_packed):
        return 0, 0
    weights = stored_weights(model, stored)
    sizes = [weight.numel() * weight.element_size() for weight in weights]
    saved = sum(sizes) - int(sum(weight.numel() for weight in weights) * stored.bits / 8)
    return saved, max(sizes, default=0) if stored.is_unpacked_in_use else 0
