"""Plan from a config how much memory a length takes, in training and in use, and which length fits a memory.

Weights, adapters, their gradients and the optimizer are counted on a model on the meta device; the activations of
tokens are counted in a dry run of one layer of every kind (``dry_run.py``). ``scripts/check_plan.py`` compares plans
with measured peaks.
"""

from __future__ import annotations

import copy
import numbers
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ctxext.attention.engines import RemapAttend
from ctxext.caches.prefix import why_no_prefix
from ctxext.checkpoints.carried import plain_config
from ctxext.checkpoints.classes import meta_model
from ctxext.checkpoints.load import attached
from ctxext.core.saved import saved_extension, saved_method
from ctxext.core.scaling import FOLLOWING, rope_dicts, rope_follows_length, scaling_of, stated_length
from ctxext.core.subject import Subject, text_of
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods import known_methods
from ctxext.methods.encoding import EncodingMethod
from ctxext.methods.parameters import checked_tokens, require
from ctxext.methods.remap import RemapMethod
from ctxext.models.bloom import TRAINED_LENGTH as BLOOM_LENGTH
from ctxext.models.drafts import draft_heads
from ctxext.planning.dry_run import Bounds, DryRun
from ctxext.planning.quantised import packed_weights, stored_as
from ctxext.rope_types import GUARD
from ctxext.training.memory import Memory, layers_of

STEP = 256
"""Step in tokens between planned lengths."""
LIMIT = 2**27
"""Longest length, in tokens, that is searched."""
CACHE_BITS = {8: 8 + 16 / 32, 4: 4 + 16 / 32}
"""Bits of a number in a cache: 32 share a scale of 16 bits (llama.cpp), 64 a scale and a zero point (transformers)."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Bytes that one sequence takes on the device at its peak.

    Args:
        adapters: trained weights, in float32.
        optimizer: AdamW's two moments of the trained weights.
        kept: activations that all layers keep for the backward pass: their inputs, with checkpointing.
        cache: keys and values of all layers, in windowed layers those inside the window.
        passing: keys and values before the windows, which stay until the first token behind the prompt.
        layer: activations of the one layer that is at work, of the largest kind.
        loss: logits, loss and gradients of a chunk of tokens, and the gradient of the hidden states.
        prompts: keys and values of two such texts, which ``ctxext serve`` keeps of earlier requests where it may; not
            part of ``total``.
        host: activations kept in the host's memory, not part of ``total``.
        draft: weights of draft heads, which a server adds for multi-token prediction; not part of ``total``.
        draft_cache: keys and values of draft heads; not part of ``total``.
    """

    length: int
    weights: int
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    cache: int = 0
    passing: int = 0
    layer: int = 0
    loss: int = 0
    prompts: int = 0
    host: int = 0
    draft: int = 0
    draft_cache: int = 0

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the length."""
        return self.weights + self.adapters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak: a layer and the loss are never at work at the same time."""
        return self.fixed + self.kept + self.cache + self.passing + max(self.layer, self.loss)


@dataclass(frozen=True)
class Plan:
    """Memory by length: of a step of LoRA training, or of a prompt read in one pass and everything decoded after it.

    Args:
        dequantised: bytes of the largest weight that is unpacked for use; 0 if no weight is quantised.
        advice: remedy where not even a short sequence fits.
        memory: storage of a training step's activations; None for a context in use.
        heads: number of draft heads.
        keeps_prompts: True if a later text that begins alike may go on from the cache of a text.
    """

    run: DryRun
    fixed: Breakdown
    dequantised: int
    advice: str
    memory: Memory | None = None
    heads: int = 0
    keeps_prompts: bool = False

    def at(self, length: int) -> Breakdown:
        """Return the memory of one sequence of ``length`` tokens."""
        self.run.check_positions(length)
        taken = self.run.prefill(length) if self.memory is None else self.run.step(length)
        # The layer at work has all its keys and values, unpacked.
        layer = taken.work + self.dequantised + (taken.most if taken.spared else 0)
        if self.memory is None:
            cache, drafted = taken.kept - taken.passing - taken.spared, int(self.heads * taken.most * self.run.packing)
            more = {"passing": taken.passing, "layer": layer, "draft_cache": drafted}
            more["prompts"] = 2 * cache * self.keeps_prompts
            return replace(self.fixed, length=length, cache=cache, **more)
        hidden, chunk = length * self.run.hidden_bytes, self.memory.loss_chunk
        loss = self.run.whole_loss(length) if chunk is None else self.run.loss(min(chunk, length)) + hidden
        host = len(self.run.layers) * hidden if self.memory.offload else 0
        return replace(self.fixed, length=length, kept=taken.kept - host, layer=layer, loss=loss, host=host)


def plan_training(
    config: Any,
    *,
    memory: Memory | None = None,
    lora_rank: int = 16,
    norms: bool = True,
    embeddings: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    quantisation: str | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Plan a LoRA step as ``recipes/finetune.py`` takes it: one sequence, mixed precision, AdamW.

    Args:
        config: config of a causal language model, extended or not. Weights that the checkpoint stores quantised are
            counted unpacked, in ``dtype``, unless bitsandbytes stored them: training unpacks them.
        memory: storage of activations; None for ``Memory()``.
        quantisation: storage of the linear layers' weights: nf4, or None for plain.

    Raises:
        InvalidParameterError: for a number outside its range, or ``quantisation`` of weights that are quantised.
        UnknownNameError: for an unknown ``quantisation``.
        IncompatibleError: if the model cannot be trained this way, or its computation depends on data.
    """
    from ctxext.training.lora import attach_lora

    is_rank = isinstance(lora_rank, numbers.Integral) and lora_rank >= 1
    require(is_rank, "lora_rank", lora_rank, "a whole number, at least 1")
    model = without_weights(config, dtype, trust_remote_code)
    weights, dequantised, advice = _weights(model, quantisation, training=True)
    model = attach_lora(model, rank=int(lora_rank), norms=norms, embeddings=embeddings)
    memory = memory or Memory()
    replace(memory, offload=False).apply(model)  # nothing is moved where there is nothing to move
    trained = _bytes(weight for weight in model.parameters() if weight.requires_grad)
    fixed = Breakdown(length=0, weights=weights, adapters=trained, gradients=trained, optimizer=2 * trained)
    return Plan(DryRun(model, dtype, memory.mlp_tile), fixed, dequantised, advice, memory)


def plan_serving(
    config: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
    quantisation: str | None = None,
    cache_bits: int | None = None,
    prompt_chunk: int | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Plan the memory of a context in use; other arguments and errors as for ``plan_training``. Weights stay packed.

    A remapping method is counted by its cache, its layer at work by the plain model's.

    Args:
        cache_bits: bits of a number in a quantised cache, 8 or 4; scales are counted too. None for ``dtype``.
        prompt_chunk: tokens of a prompt that are read at a time, ``prefill_chunk_size`` of ``generate``; None for all.

    Raises:
        InvalidParameterError: for other ``cache_bits``, or a ``prompt_chunk`` below 1.
    """
    require(cache_bits in (None, *CACHE_BITS), "cache_bits", cache_bits, "8 or 4, or None for the dtype's")
    if prompt_chunk is not None:
        checked_tokens("prompt_chunk", prompt_chunk)
    model = without_weights(config, dtype, trust_remote_code)
    weights, dequantised, advice = _weights(model, quantisation, training=False)
    subject = Subject.of(model)
    heads, draft = _draft_heads(subject, quantisation)
    fixed = Breakdown(length=0, weights=weights, draft=draft)
    bits, bounds = cache_bits and CACHE_BITS[cache_bits], _bounds(config, trust_remote_code)
    run = DryRun(model, dtype, chunk=prompt_chunk, bits=bits, bounds=bounds)
    saved = saved_extension(config, "the config")
    follows = rope_follows_length(text_of(config)) if saved is None else saved_method(saved).dynamic
    keeps = cache_bits is None and not follows and why_no_prefix(subject) is None
    return Plan(run, fixed, dequantised, advice, heads=heads, keeps_prompts=keeps)


def longest(plan: Plan, budget: int) -> Breakdown:
    """Find the longest sequence that fits into ``budget`` bytes, in steps of 256 tokens, within its positions.

    Raises:
        InvalidParameterError: if not even 256 tokens fit; the message gives their memory.
    """
    most = min(plan.run.positions or LIMIT, LIMIT)
    low = high = plan.at(min(STEP, most))
    if low.total > budget:
        raise InvalidParameterError(
            f"{low.length} tokens take {low.total / 2**30:.3g} GiB, {low.fixed / 2**30:.3g} GiB of it for the weights "
            f"and their optimizer; found {budget / 2**30:.3g} GiB. {plan.advice}"
        )
    before = low
    while high.total <= budget:
        if high.length >= most:
            return high
        # Extrapolate from the last two lengths: a dry run of tiled MLPs far beyond the end takes long.
        before, low = low, high
        growth = (low.total - before.total) / max(low.length - before.length, 1)
        ahead = (budget - low.total) / growth if growth > 0 else LIMIT
        steps = int(min(ahead, 15 * low.length, most - low.length)) // STEP
        high = plan.at(min(low.length + max(steps, 1) * STEP, most))
    halve = False
    while high.length - low.length > STEP:  # bytes are nearly linear in tokens: interpolate, now and then halve
        share = 0.5 if halve else (budget - low.total) / (high.total - low.total)
        steps = int(share * (high.length - low.length)) // STEP
        middle = plan.at(min(max(low.length + steps * STEP, low.length + STEP), high.length - STEP))
        halve = not halve and steps > 0
        low, high = (middle, high) if middle.total <= budget else (low, middle)
    return low


def reach_of(config: Any) -> int | None:
    """Return the window in tokens that a config gives, its extension included; None if the config gives none."""
    saved = saved_extension(config, "the config")
    if saved is not None:
        return int(saved["target_length"])
    scaling = scaling_of(config)
    if scaling is not None:
        return scaling.window
    text = text_of(config)
    others = [getattr(text, name, None) for name in ("max_seq_len", "seq_length")]
    others.append(BLOOM_LENGTH if text.model_type == "bloom" else None)  # published without one
    return stated_length(text) or next((length for length in others if isinstance(length, int)), None)


def without_weights(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, with the attention of its config."""
    require(isinstance(dtype, torch.dtype), "dtype", dtype, "a dtype of torch, such as torch.bfloat16")
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
        raise IncompatibleError(
            f"A {config.model_type} is not a plain causal language model, and memory is planned for those only. Plan "
            f"its language model alone."
        )
    if (saved := saved_extension(config, "the config")) is not None:
        method = saved_method(saved)  # refuses two extended sides
        if isinstance(method, EncodingMethod):
            raise IncompatibleError(
                f"Memory is not planned for method {method.name!r}, whose attention takes more than the plain model's. "
                f"Measure a real run instead."
            )
    model = meta_model(
        _plainly_rotated(config),
        auto_class=AutoModelForCausalLM,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
    )
    return model if saved_extension(model.config, "the config") is None else attached(model, "the config")


def _bounds(config: Any, trust_remote_code: bool) -> Bounds:
    """Find the layers in which the method of an extended config drops keys that no later token sees."""
    saved = saved_extension(config, "the config")
    if saved is None or not issubclass(known_methods()[saved["method"]["method"]], RemapMethod):
        return {}
    model = meta_model(config, auto_class=AutoModelForCausalLM, trust_remote_code=trust_remote_code)
    model, bounds = attached(model, "the config"), Bounds()
    for index, layer in enumerate(layers_of(model)):
        for attend in (getattr(module, "_ctxext_attend", None) for module in layer.modules()):
            if isinstance(attend, RemapAttend) and attend.drops and attend.reach is not None:
                near = None if attend.heads is None else attend.heads.near
                bounds[index] = attend.reach, Fraction(len(near.numbers), near.total) if near else Fraction(1)
    return bounds


def _draft_heads(subject: Subject, quantisation: str | None) -> tuple[int, int]:
    """Count the draft heads, and their bytes: each is a decoder layer, a projection of two states, three norms."""
    model, hidden = subject.model, subject.text.hidden_size
    heads, layer = draft_heads(model.config), layers_of(model)[-1]
    saved, _ = packed_weights(model, quantisation, training=False, layers=[layer])
    return heads, heads * (_bytes(layer.parameters()) - saved + (2 * hidden + 3) * hidden * model.dtype.itemsize)


def _plainly_rotated(config: Any) -> Any:
    """Copy a config and make its frequencies static, so that computing them needs no data.

    A field that keeps stock transformers out holds its original value again, as after a config is read from a file.
    """
    saved = saved_extension(config, "the config")
    rotates = saved is not None and "rope_parameters" in saved["original"]
    config = plain_config(config, saved) if saved is not None and rotates else copy.deepcopy(config)
    text = text_of(config)
    if not hasattr(text, "hidden_size"):
        raise IncompatibleError(
            f"The config of this {config.model_type} names no hidden_size, by which memory is planned. Measure a real "
            f"run instead."
        )
    if rotates:  # a live model's config names the attention that ctxext gave it
        text._attn_implementation_internal = None
    elif saved is not None:
        vars(text).update({name: value for name, value in saved["original"].items() if vars(text).get(name) == GUARD})
    for _, rope in rope_dicts(text):
        if rope.get("rope_type") in FOLLOWING:
            rope["rope_type"] = "default"
    return config


def _weights(model: PreTrainedModel, quantisation: str | None, *, training: bool) -> tuple[int, int, str]:
    """Count the bytes of all weights, and of the largest that is unpacked; find a remedy where nothing fits."""
    saved, dequantised = packed_weights(model, quantisation, training=training)
    stored, advice = stored_as(model.config), "Allow more, or take a smaller model: its weights are quantised already."
    if quantisation is None and stored is None:
        advice = "Allow more, or quantise (--quantisation nf4)."
    elif training and stored is not None and not stored.trains_packed:
        advice = "Allow more, or train the plain checkpoint that it was quantised from (there, --quantisation nf4)."
    return _bytes(model.parameters()) - saved, dequantised, advice


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
