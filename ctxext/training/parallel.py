"""Check before the first step that the engine which spreads a run over processes can carry it.

Two engines let several processes share a sequence: torch's context parallelism (ring attention) hands keys and values
round; DeepSpeed's Ulysses gives each process all tokens of some heads while attention is computed. Everywhere else a
process sees only the tokens of its shard, and neither engine takes a mask.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ctxext.caches.digest import is_fsdp, is_zero3
from ctxext.caches.records import ATTENTION, Given
from ctxext.core.patching import patched_state
from ctxext.core.scaling import of_layers
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError

CONTEXT = "recipes/accelerate/fsdp2-context-parallel.yaml"


def is_sharded(model: nn.Module) -> bool:
    """Return whether each process holds only a part of the weights: FSDP 2, or DeepSpeed ZeRO-3."""
    return is_fsdp(model) or is_zero3(model)


@contextlib.contextmanager
def gathering(model: nn.Module) -> Iterator[None]:
    """Run a model before DeepSpeed's engine does: ZeRO-3 gathers each module's own weights while it computes."""
    hooks = []
    if is_zero3(model):
        from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-untyped]

        for module in model.modules():
            if weights := list(module.parameters(recurse=False)):
                whole = GatheredParameters(weights)
                hooks.append(module.register_forward_pre_hook(lambda *_, whole=whole: whole.__enter__()))
                hooks.append(module.register_forward_hook(lambda *_, whole=whole: whole.__exit__()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attention_of(subject: Subject) -> str:
    """Return the name of the attention for text; images may go through another one."""
    return str(subject.text._attn_implementation)


def launched_parallelism() -> Any:
    """Return the ``accelerate.ParallelismConfig`` of ``accelerate launch``, all sizes 1 if there is none."""
    from accelerate import ParallelismConfig

    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        return ParallelismConfig()
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)


def require_carried(subject: Subject, accelerator: Any, *, lengths: Collection[int] = (), packed: bool = False) -> None:
    """Refuse a run that its engine would train wrongly, or not at all.

    Raises:
        IncompatibleError: with the reason and what to do instead.
    """
    parallelism = accelerator.parallelism_config
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise IncompatibleError(
            "The first version of FSDP flattens weights, which a loss in chunks and separate learning rates cannot "
            "use. Set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does."
        )
    if plugin is not None and plugin.state_dict_type.name != "FULL_STATE_DICT":
        raise IncompatibleError(
            f"fsdp_state_dict_type {plugin.state_dict_type.name} leaves the adapter in pieces, and no file of it would "
            f"be saved. Set it to FULL_STATE_DICT, as recipes/accelerate/fsdp2.yaml does."
        )
    # Only a table that trains some of its rows hooks a weight itself, and an engine's weight would lack that hook.
    ours = [name for name, weight in subject.model.named_parameters() if weight._backward_hooks]
    if ours and (plugin is not None or accelerator.distributed_type == "DEEPSPEED"):
        raise IncompatibleError(
            f"{ours[0]} is trained row by row, and this engine puts weights of its own in its place. Train a table on "
            f"one process, or under plain data parallelism (recipes/accelerate/ddp.yaml)."
        )
    if parallelism is None:
        return
    size = max(parallelism.cp_size, parallelism.sp_size)
    if size == 1:
        return
    context = parallelism.cp_size > 1
    reason = _why_not_data(size, lengths, packed)
    reason = reason or (_why_not_context(subject) if context else _why_not_ulysses(subject, parallelism))
    if reason is not None:
        engine = "Context parallelism" if context else "DeepSpeed Ulysses"
        raise IncompatibleError(f"{engine} cannot carry this run: {reason}")


def whole_sequence(subject: Subject, inputs: Given) -> Given:
    """Return the arguments that tell a patched model the length of sequences before context parallelism shards them.

    Args:
        inputs: inputs of a forward pass, not sharded yet: the same on all processes that share it.

    Returns:
        Further arguments of the forward pass.

    Raises:
        IncompatibleError: positions are missing or restart, a mask hides something, or a method that follows the length
            would give the rows different positions.
    """
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if not isinstance(positions, Tensor):
        raise IncompatibleError(
            "The batch has no position_ids: every process would count its part of a sequence from 0. Let the data set "
            "give them, as ctxext.training.sequences.TrainingSequences does."
        )
    if bool((positions.diff(dim=-1) <= 0).any()):
        raise IncompatibleError(
            "position_ids restart inside a row, so it holds packed documents, and context parallelism takes no mask to "
            "keep them apart. Give each document a row of its own."
        )
    if isinstance(mask, Tensor) and (mask.ndim > 2 or not bool(mask.all())):
        raise IncompatibleError(
            f"attention_mask {list(mask.shape)} hides tokens, and context parallelism drops masks. Cut sequences to "
            f"one length instead of padding them."
        )
    patched, is_ours = patched_state(subject.model), attention_of(subject) == ATTENTION
    # A static method on a stock attention needs no length: the positions come with the tokens.
    if patched is None or not (patched.method.dynamic or is_ours):
        return {}
    lengths: list[int] = (positions.amax(dim=-1) + 1).tolist()
    fitted_lengths = {patched.method.fitted_length(patched.extension.trained_length, length) for length in lengths}
    if len(fitted_lengths) > 1:
        raise IncompatibleError(
            f"Method {patched.method.name!r} follows the length of each row, and those of this batch are "
            f"{sorted(set(lengths))} tokens long. A shard is given one length only. Set the batch to 1."
        )
    return {"ctxext_length": max(lengths)} | ({"ctxext_sharded": True} if is_ours else {})


def release_attention(subject: Subject) -> None:
    """Remove the hooks of engines that share sequences from attention, once training is over.

    accelerate's hooks drop every mask and treat all attention as causal; DeepSpeed's function takes its input for one
    process's part. Outside of the engine, with a cache, padding or whole sequences, that would be another model.
    """
    for module in subject.model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if "_attach_context_parallel_hooks" in getattr(hook, "__qualname__", ""):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    name = subject.config._attn_implementation
    if getattr(ALL_ATTENTION_FUNCTIONS.get(name), "__module__", "").startswith("deepspeed."):
        del ALL_ATTENTION_FUNCTIONS[name]  # an entry on top of transformers' own


def _why_not_data(size: int, lengths: Collection[int], packed: bool) -> str | None:
    if packed:
        return (
            "it takes no mask, and packed documents need one to keep apart. Set data.positions to consecutive or pose."
        )
    for length in sorted(lengths):
        if length % size:
            return (
                f"sequences of {length:,} tokens cannot be cut into {size} equal parts. Set data.length to a multiple "
                f"of {2 * size}, by which processes that pass keys and values round also get the same work."
            )
    return None


def _why_not_context(subject: Subject) -> str | None:
    patched, attention = patched_state(subject.model), attention_of(subject)
    if attention not in ("sdpa", ATTENTION):
        return (
            f"it replaces torch's scaled_dot_product_attention, and the attention of this model is {attention!r}. Load "
            f"it with attn_implementation='sdpa'."
        )
    if windows := _windows(subject):
        return (
            f"it takes no mask, and layers of type {windows} need one. Let the method lift the windows "
            f"(extension.sliding_window: lift) where every layer has one, or train without it."
        )
    backend = None if patched is None else patched.extension.attention
    if attention == ATTENTION and str(backend).partition("(")[0] not in ("auto", "sdpa"):
        return f"attention backend {backend!r} has no form for a part of a sequence. Take attention='sdpa'."
    if patched is not None and getattr(patched.method, "bias", "exact") != "exact":
        return "bias='stock' reproduces BLOOM's rounding with a dense bias. Take bias='exact'."
    return None


def _why_not_ulysses(subject: Subject, parallelism: Any) -> str | None:
    patched, size = patched_state(subject.model), parallelism.sp_size
    text, attention = subject.text, attention_of(subject)
    asked = parallelism.sp_handler.sp_attn_implementation
    if patched is not None and attention == ATTENTION:
        return f"it knows transformers' own attention only, not ctxext's for {patched.method.name!r}. Take {CONTEXT}."
    if patched is not None and patched.method.dynamic:
        return (
            f"method {patched.method.name!r} follows the length of the text, of which every process knows its part "
            f"only. Take a method that is not dynamic, such as yarn, or {CONTEXT}."
        )
    if attention != asked:
        return (
            f"the attention of this model is {attention!r} and sp_attn_implementation is {asked!r}. Set the latter to "
            f"{attention!r}."
        )
    if attention == "sdpa" and (windows := _windows(subject)):
        return f"it drops masks, and with SDPA layers of type {windows} need one. Take flash_attention_2."
    for heads in of_layers(text, "num_attention_heads"):
        for kv_heads in of_layers(text, "num_key_value_heads"):
            if heads % size or ((kv_heads or heads) % size and size % (kv_heads or heads)):
                return f"{heads} heads and {kv_heads} key heads cannot be shared by {size} processes. Lower sp_size."
    return None


def _windows(subject: Subject) -> list[str]:
    """Return the types of layers that do not see all earlier tokens."""
    kinds = getattr(subject.text, "layer_types", None)
    if kinds is None:
        return ["sliding_attention"] if any(of_layers(subject.text, "sliding_window")) else []
    return sorted(set(kinds) - {"full_attention"})
