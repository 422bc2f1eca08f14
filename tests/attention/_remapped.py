"""Models whose positions are remapped, beside scores of every pair in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ctxext
from ctxext.kernels.pieces import RotationForm
from ctxext.methods import METHODS
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from tests._models import tiny
from tests._remap import spec_of
from tests.walk.tiny import TRAINED_LENGTH

REMAPS = {name: cls for name, cls in METHODS.items() if issubclass(cls, RemapMethod)}
EXACT, SINGLE = 1e-6, 1e-4
"""Largest error in parts of the largest number, in float64; and where transformers computes a part in float32 only."""


class Kind(NamedTuple):
    """What is known of a type from its code: which dimensions rotate, and how many layers reach far, of how many.

    Args:
        far: layers with attention that reach far and rotate.
        attending: all layers with attention.
        form: the dimensions of a head that rotate, and how.
        dtype: of the test; experts know no float64.
        continues: whether transformers continues a cache of the type by several tokens.
        decodes: whether transformers reads with a cache what it reads without one.
        changes: fields of the config.
    """

    far: int = 2
    attending: int = 2
    form: RotationForm = RotationForm()
    dtype: torch.dtype = torch.float64
    continues: bool = True
    decodes: bool = True
    changes: dict[str, Any] = {}  # noqa: RUF012


FOUR = {"num_hidden_layers": 4}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16} | FOUR
FLOAT, NEIGHBOURS, TAIL = torch.float32, RotationForm(interleaved=True), RotationForm(tail=True)


def hybrid(other: str, attention: str = "full_attention") -> Kind:
    return Kind(dtype=FLOAT, continues=False, changes={"layer_types": [other, attention] * 2} | FOUR)


KINDS = {
    "llama": Kind(),
    "glm": Kind(form=NEIGHBOURS),  # of which a part rotates
    "gpt_neox": Kind(),
    "qwen3": Kind(),  # which norms queries and keys
    "cohere": Kind(form=NEIGHBOURS),
    "qwen3_5_text": hybrid("linear_attention"),
    "qwen3_next": hybrid("linear_attention"),
    "granitemoehybrid": hybrid("mamba", "attention"),
    "lfm2_moe": hybrid("conv"),
    "bamba": Kind(1, 1, dtype=FLOAT, decodes=False),
    "gemma3_text": Kind(2, 4, changes=TWO_KINDS),
    "gemma4_text": Kind(2, 4, changes=TWO_KINDS),
    "olmo3": Kind(2, 4, changes=TWO_KINDS),
    "cwm": Kind(2, 4, changes=TWO_KINDS),
    "qwen2": Kind(2, 4, changes=TWO_KINDS | {"use_sliding_window": True}),
    "ministral": Kind(2, 4, changes=TWO_KINDS),
    "smollm3": Kind(2, 4, changes={"no_rope_layers": [1, 0, 1, 0], "layer_types": ["full_attention"] * 4} | FOUR),
    "gpt_oss": Kind(2, 4, dtype=FLOAT, changes=TWO_KINDS),
    # A rotary module for each base, and one that is not used.
    "granite_swa": Kind(dtype=FLOAT, changes={"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    "deepseek_v3": Kind(form=TAIL, dtype=FLOAT),
    "glm4_moe_lite": Kind(form=TAIL, dtype=FLOAT),
    "gemma2": Kind(2, 4, dtype=FLOAT, changes=TWO_KINDS),
    "nanochat": Kind(form=RotationForm(backwards=True)),
    "phi3": Kind(),
    "apertus": Kind(),
}
# One of each structure; the others are like one of these.
DISTINCT = [
    *("glm", "gpt_neox", "qwen3_next", "granitemoehybrid", "gemma3_text", "gemma4_text", "smollm3", "gpt_oss"),
    *("deepseek_v3", "gemma2", "nanochat"),
]
# Windows far below the trained length; what is not named here is the method's own example.
SETTINGS: dict[str, dict[str, Any]] = {
    "self_extend": {"window": 16, "thinning": 0.5},
    "rerope": {"window": 20},
    "dual_chunk": {"chunk": 40, "local": 8},
    "streaming": {"window": 24},
    "retrieval_heads": {"heads": (3,), "sinks": 4, "window": 24},  # of models with windows a group of layer 1
}
SELF_EXTEND = SelfExtend(factor=4, **SETTINGS["self_extend"])
PAIRS: list[tuple[type[RemapMethod], str]] = [
    *((cls, "llama") for cls in REMAPS.values()),
    *((SelfExtend, model_type) for model_type in KINDS if model_type != "llama"),
    *((RetrievalHeads, model_type) for model_type in ("gpt_oss", "deepseek_v3", "gemma3_text", "cwm", "gemma2")),
    *((cls, model_type) for cls in (ReRoPE, DualChunk) for model_type in DISTINCT),
]
NIGHTLY = [pair for pair in PAIRS[len(REMAPS) :] if pair[1] not in DISTINCT or pair[0] in (ReRoPE, DualChunk)]
NIGHTLY += [(RetrievalHeads, model_type) for model_type in ("gpt_oss", "gemma2")]


def name_of(value: Any) -> str | None:
    return value.name if isinstance(value, type) else None


# Every method on a Llama, and Self-Extend on every structure; the others are like one of them.
every_pair = pytest.mark.parametrize(
    ("cls", "model_type"),
    [pytest.param(*pair, marks=[pytest.mark.nightly] * (pair in NIGHTLY)) for pair in PAIRS],
    ids=name_of,
)
every_method = pytest.mark.parametrize("cls", REMAPS.values(), ids=REMAPS)


def model_of(model_type: str) -> PreTrainedModel:
    return tiny(model_type, **KINDS[model_type].changes).to(KINDS[model_type].dtype)


def example(cls: type[RemapMethod], model: PreTrainedModel) -> RemapMethod:
    return replace(cls.example(spec_of(model)), **SETTINGS.get(cls.name, {}))


def extended(cls: type[RemapMethod] = SelfExtend, model_type: str = "llama") -> tuple[PreTrainedModel, RemapMethod]:
    model = model_of(model_type)
    method = example(cls, model)
    return patched(model, method), method


def patched(model: PreTrainedModel, method: RemapMethod = SELF_EXTEND) -> PreTrainedModel:
    return ctxext.patch(model, method, trained_length=TRAINED_LENGTH)


def target(method: RemapMethod) -> int:
    return method.target_length(TRAINED_LENGTH)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


def require_equal(found: Tensor, wanted: Tensor) -> None:
    """Hold an error in parts of the largest number to that of the precision."""
    share = error(found, wanted) / float(wanted.abs().max())
    assert share < (EXACT if found.dtype == torch.float64 else SINGLE), share
