"""Shifted sparse attention: while it is trained, each head sees a group of neighbouring tokens instead of them all.

Half of the heads (of an odd number of key heads, the smaller part) attend within equal groups of the sequence, the
others within groups that begin half a group later, so that what one layer finds in a group the next can hand to its
neighbour. Nothing of it stays in the model: it is measured, saved and used with whole attention. Positions are rotated
into queries and keys before attention is computed, so groups change no position.

Source: LongLoRA, arXiv:2309.12307, section 3.2. Of the authors' two forms (dvlab-research/LongLoRA@d4eb344c5ccc,
llama_attn_replace.py) this is the one for flash-attention, where the first and the last of the later groups are halves.
The other rolls the sequence round, by which the first half group shares a group with the last, and its tokens see the
text's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.attention.attend import attention_layers
from ctxext.caches.call import ATTENTION
from ctxext.core.code import names_of
from ctxext.core.scaling import heads_of, is_windowed, of_layers
from ctxext.core.subject import base_model
from ctxext.errors import IncompatibleError

Attention = Callable[..., tuple[Tensor, Any]]


class ShiftedAttention:
    """Puts shifted sparse attention on a model's layers, for as long as it is asked to.

    Args:
        groups: that a sequence is cut into, at least 2; the authors take 4. Its tokens must be a multiple of twice as
            many.

    Raises:
        IncompatibleError: attention that cannot be cut so: it is ctxext's own, has windows, sinks or capped scores,
            sees what comes later, or has a single key head for all of its heads; with the reason.
    """

    def __init__(self, model: nn.Module, groups: int) -> None:
        base = base_model(model)
        self.groups, self.name = groups, base.config._attn_implementation
        self.layers = attention_layers(base)
        reason = self._why_not(base.config.get_text_config(decoder=True))
        if reason is not None:
            raise IncompatibleError(
                f"Shifted sparse attention cannot train this {base.config.model_type} model: {reason}. Leave out "
                f"training.shifted_groups."
            )

    def _why_not(self, text: Any) -> str | None:
        if self.name == ATTENTION:
            return "its attention is computed by ctxext; take a method that changes frequencies alone, such as yarn"
        if self.name != "sdpa" and not self.name.startswith("flash_attention"):
            return f"its attention is {self.name!r}, and only 'sdpa' and flash-attention take groups without a mask"
        if len(self.layers) != text.num_hidden_layers:
            return "not all of its layers attend through transformers' attention interface"
        if any(map(is_windowed, getattr(text, "layer_types", None) or ())) or any(of_layers(text, "sliding_window")):
            return "it has layers with sliding windows"
        if any(getattr(layer, "sinks", None) is not None for layer in self.layers):
            return "its attention has sinks"
        if getattr(text, "attn_logit_softcapping", None):
            return "it caps attention scores"
        if not all(getattr(layer, "is_causal", True) for layer in self.layers):
            return "its tokens see what comes after them"
        is_one = 1 in of_layers(text, "num_key_value_heads") or heads_of(text)[1] == 1
        return "its heads share one key head, so that they cannot be halved" if is_one else None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Let this model's layers attend in groups, forward and backward; other models stay unchanged."""
        mine = set(map(id, self.layers))
        # The tables in which layers' classes look up attention functions; a model may have a table of its own.
        tables = [names_of(type(layer))["ALL_ATTENTION_FUNCTIONS"] for layer in self.layers]
        before = [
            (table, table._local_mapping.get(self.name)) for table in {id(each): each for each in tables}.values()
        ]
        for table, _ in before:
            table[self.name] = self._instead_of(table[self.name], mine)
        try:
            yield
        finally:
            for table, local in before:
                del table[self.name]  # an entry on top of transformers' own
                if local is not None:
                    table[self.name] = local

    def _instead_of(self, attention: Attention, layers: set[int]) -> Attention:
        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **rest: Any
        ) -> tuple[Tensor, None]:
            if id(module) not in layers:
                return attention(module, query, key, value, attention_mask, **rest)
            self._require_whole(query, key, attention_mask)
            # What else a layer passes on (positions, bounds of packed texts) is about the sequence, not about groups.
            given = {name: rest[name] for name in ("scaling", "dropout") if name in rest}

            def within(part: slice, count: int, *heads: Tensor) -> Tensor:
                """Attend in equal groups: heads [batch, head, token, dim] to [batch, token, head, dim]."""
                batch = len(query)
                folded = [_folded(states[:, :, part], count) for states in heads]
                out = attention(module, *folded, None, **given)[0]
                return out.reshape(batch, -1, *out.shape[2:])

            parts = [
                states.tensor_split([key.shape[1] // 2 * states.shape[1] // key.shape[1]], 1)
                for states in (query, key, value)
            ]
            straight, shifted = zip(*parts, strict=True)
            half = query.shape[2] // (2 * self.groups)
            bounds = ((slice(0, half), 1), (slice(half, -half), self.groups - 1), (slice(-half, None), 1))
            whole = within(slice(None), self.groups, *straight)
            between = torch.cat([within(part, count, *shifted) for part, count in bounds], 1)
            return torch.cat([whole, between], 2), None

        return attend

    def _require_whole(self, query: Tensor, key: Tensor, mask: Any) -> None:
        tokens = query.shape[2]
        if key.shape[2] != tokens:
            raise IncompatibleError(
                f"Shifted sparse attention was given {tokens} queries and {key.shape[2]} keys, so there is a cache. It "
                f"is for training: pass use_cache=False."
            )
        if mask is not None:
            raise IncompatibleError(
                "Shifted sparse attention was given a mask, and its groups take none. Train on sequences of one length "
                "and of one text each."
            )
        if tokens % (2 * self.groups):
            raise IncompatibleError(
                f"{tokens} tokens cannot be cut into {self.groups} groups and those into halves. Take sequences of a "
                f"multiple of {2 * self.groups} tokens."
            )


def _folded(heads: Tensor, groups: int) -> Tensor:
    """Move equal groups of tokens of heads [batch, head, token, dim] into the batch dimension."""
    batch, count, tokens, size = heads.shape
    cut = heads.view(batch, count, groups, tokens // groups, size).transpose(1, 2)
    return cut.reshape(batch * groups, count, tokens // groups, size)
