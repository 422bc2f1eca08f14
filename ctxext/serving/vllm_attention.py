"""Attention in pieces behind vLLM's interface: its paged cache, its requests, ctxext's kernels.

Keys are cached as the model rotated them. A step gathers the keys and values of each request by its block table, and
computes the pieces of its queries. That copies the cache once per layer and step: right, and slow.

Source: vLLM 0.32.0, vllm/v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from ctxext.attention.attend import Backends
from ctxext.attention.remap import HeadPieces
from ctxext.errors import IncompatibleError
from ctxext.kernels import Call, Layout
from ctxext.kernels.pieces import RotationForm, attend_pieces, need_in_pieces
from ctxext.methods.remap import RemapMethod
from ctxext.rotary.stored_form import stored_method
from ctxext.serving.vllm import REMAP


class RemapBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend, with attention in pieces for models whose config holds a remapping."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        model = get_current_vllm_config().model_config
        return RemapImpl if model is not None and hasattr(model.hf_config, REMAP) else CPUAttentionBackendImpl


class RemapImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer in pieces, with the arguments of vLLM's implementation.

    Raises:
        IncompatibleError: if the layer, or the engine around it, needs what pieces do not compute here.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        engine = get_current_vllm_config()
        self.heads = _head_pieces(json.dumps(getattr(engine.model_config.hf_config, REMAP), sort_keys=True))
        self.backends = Backends()
        reason = self._why_not() or _why_not_in(engine, self.heads)
        if reason is not None:
            raise IncompatibleError(f"vLLM does not serve this checkpoint with ctxext's plugin: {reason}")

    def _why_not(self) -> str | None:
        """Return why attention in pieces cannot replace the attention of this layer; None if it can."""
        needs = {
            "ALiBi": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
            "a soft cap of its scores": bool(self.logits_soft_cap),
            "sinks": self.sinks is not None,
            "the keys of another layer": self.kv_sharing_target_layer_name is not None,
            f"attention of the kind {str(self.attn_type)!r}": self.attn_type != "decoder",
            "a cache of 8 bits. Leave --kv-cache-dtype out": self.is_fp8_kv_cache,
        }
        needed = [what for what, is_needed in needs.items() if is_needed]
        return f"a layer needs {needed[0]}." if needed else None

    def do_kv_cache_update(
        self,
        layer: Any,
        key: Float[Tensor, "tokens kv_heads head_dim"],
        value: Float[Tensor, "tokens kv_heads head_dim"],
        kv_cache: Float[Tensor, "blocks kv_heads block both"],
        slot_mapping: Int[Tensor, " slots"],
    ) -> None:
        """Write new keys and values into the cache, side by side; vLLM's own kernels pack them otherwise."""
        filled = (slot_mapping >= 0).nonzero()[:, 0]
        slots, size = slot_mapping[filled].long(), kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat([key[filled], value[filled]], -1)

    def forward(
        self,
        layer: Any,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Float[Tensor, "blocks kv_heads block both"],
        attn_metadata: Any,
        output: Float[Tensor, "tokens heads head_dim"],
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the queries of all requests into ``output``."""
        if output_scale is not None or output_block_scale is not None:
            raise IncompatibleError("Attention in pieces writes no quantised output. Leave such a fusion off.")
        if attn_metadata is None:  # vLLM warms up
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        layouts = vars(attn_metadata).setdefault("ctxext_layouts", {})  # shared by all layers of a step
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            if stop == start:
                continue
            length = lengths[row]
            if row not in layouts:
                layouts[row] = Layout.causal(1, stop - start, length, device=query.device)
            blocks = attn_metadata.block_table[row, : -(-length // kv_cache.shape[2])].long()
            held = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length]
            k, v = held.chunk(2, -1)
            out = self._attend(query[start:stop].transpose(0, 1)[None], k, v, layouts[row])
            output[start:stop] = out[0].transpose(0, 1)
        return output

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Compute the queries of one request; tensors are ``[1, heads, seq, head_dim]``."""
        precise = torch.promote_types(k.dtype, torch.float32)
        pieces = self.heads.turned(layout, precise, form=RotationForm())
        call = Call.of(self.heads.sharpened(q, layout, precise), k, v, layout, scale=self.scale, lse=True)
        return attend_pieces(self.backends.for_(need_in_pieces(call, pieces)), call, pieces)


@functools.lru_cache(maxsize=4)
def _head_pieces(remap: str) -> HeadPieces:
    """Return the pieces of a served config, as JSON; all layers share the object, and so their rotations."""
    method, spec = stored_method(json.loads(remap))
    assert isinstance(method, RemapMethod)
    return HeadPieces.of(method, spec)


def _why_not_in(engine: Any, heads: HeadPieces) -> str | None:
    """Return why a vLLM that was started with these settings cannot serve a remapped model; None if it can."""
    reach = heads.method.target_length(heads.spec.trained_length)
    if engine.model_config.max_model_len > reach:
        return f"--max-model-len {engine.model_config.max_model_len} is beyond its window of {reach} tokens."
    parallel = engine.parallel_config
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "one request on several devices (context parallelism) was not tested. Leave it off."
    if engine.speculative_config is not None:
        return "speculative decoding was not tested. Leave --speculative-config out."
    if engine.kv_transfer_config is not None:
        return "transfer of caches between engines was not tested. Leave --kv-transfer-config out."
    return None
