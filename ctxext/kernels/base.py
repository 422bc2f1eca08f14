"""The contract of a backend: one way to compute attention with positions.

Layout of tensors is ``[batch, heads, seq, head_dim]``. Keys and values may have fewer heads (GQA): query head ``h``
reads key head ``h // (heads / kv_heads)``. Values may have another width, as in latent attention (DeepSeek); the output
has theirs. The result of every backend is::

    score(i, j) = cap(scale * q_i . k_j)  -  slopes[h] * distance(i, j)
    out_i       = sum over visible j of softmax_j(score(i, j)) * v_j,      0 where nothing is visible

The ``Layout`` defines which keys are visible, and the distance of two tokens. Slopes are constants without a gradient.
``cap(x)`` is ``softcap * tanh(x / softcap)`` with a soft cap (Gemma 2), else ``x``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ctxext.errors import BackendUnavailableError, InvalidParameterError
from ctxext.kernels.blocks import QKV, Output, OutputAndLse, PartRule, score_blocks
from ctxext.kernels.layout import Layout


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


HAS_TRITON = importlib.util.find_spec("triton") is not None and any(
    os.environ.get("CC") or shutil.which(name) for name in ("cc", "gcc", "clang")
)
"""Availability of Triton, which builds its launchers with a C compiler."""


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device; Triton is imported only where they do."""
    return HAS_TRITON and device.type == "cuda" and capability_of(device) >= (8, 0)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which operations on this device keep the dtype of their inputs.

    Autocast casts the inputs of matrix products and of fused attention, so it would silently narrow a tensor that was
    widened to float32 on purpose. Code that widens tensors enters this context. Backward passes run outside of it, so a
    hand-written one enters it again.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


@dataclass(frozen=True, kw_only=True)
class Need:
    """The requirements of an attention call, without its tensors; a backend answers them by ``why_not``.

    Args:
        key_length: keys per row, unfilled cache slots included.
        encoded: True if an encoding computes the call with the backend's help.
        order: ``"consecutive"``: blocks of plain causal attention with positions in steps of one; ``"increasing"``:
            such blocks with other steps; ``"free"``: anything else; ``"external"``: an engine decides
            (``Layout.shard``).
        blocks: True if the call is more than one plain causal block: padding, packing, unfilled slots.
        window: tokens that a query sees to each visible side, itself included; None for all.
        softcap: bound of the scores, above 0; None for none.
        value_dim: last dimension of v, where it differs from ``head_dim``; else None.
        lse: True if the call returns the log-sum-exp of the scores too, to be merged with others (``with_lse``).
        sees: ``"past"``, or ``"both"`` if tokens see later tokens as well.
    """

    device: str = "cpu"
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    heads: int = 1
    kv_heads: int = 1
    query_length: int = 1
    key_length: int = 1
    training: bool = False
    biased: bool = False
    encoded: bool = False
    order: Literal["consecutive", "increasing", "free", "external"] = "consecutive"
    blocks: bool = False
    window: int | None = None
    dropout: float = 0.0
    softcap: float | None = None
    value_dim: int | None = None
    compiling: bool = False
    lse: bool = False
    sees: Literal["past", "both"] = "past"

    @property
    def width(self) -> int:
        """Last dimension of q, k and v for a kernel that wants it equal: the larger of the two."""
        return max(self.head_dim, self.value_dim or 0)

    @property
    def cached(self) -> bool:
        """True if the call has more keys than queries, as with a cache."""
        return self.query_length != self.key_length


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One attention call: tensors, layout and weighting. ``Call.of`` checks its arguments and makes one.

    Args:
        q: ``[batch, heads, query, head_dim]``.
        k: ``[batch, kv_heads, key, head_dim]``, ``kv_heads`` divides ``heads``.
        v: values, ``[batch, kv_heads, key, value_dim]``; the output has their last dimension.
        scale: factor of ``q . k``; above 0.
        slopes: ``[heads]``, score lost per token of distance, at least 0; float32 or float64; None for no bias.
        window: tokens that a query sees, itself included, at least 1; None for all.
        dropout: probability that a weight is dropped, in [0, 1).
        softcap: bound c of the scores, which become ``c * tanh(score / c)``, as in Gemma 2; above 0; None for none.
        need: the requirements, by which a backend is chosen.
    """

    q: Float[Tensor, "batch heads query head_dim"]
    k: Float[Tensor, "batch kv_heads key head_dim"]
    v: Float[Tensor, "batch kv_heads key value_dim"]
    layout: Layout
    scale: float
    slopes: Float[Tensor, " heads"] | None
    window: int | None
    dropout: float
    softcap: float | None
    need: Need

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout | None = None,
        *,
        scale: float,
        slopes: Tensor | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        lse: bool = False,
    ) -> Call:
        """Check the arguments of the class, and make a call of them; without a layout it is ``Layout.causal``.

        ``lse`` marks the call as one of several that will be merged.

        Raises:
            InvalidParameterError: if arguments contradict each other or lie outside their range.
        """
        _require_tensors(q, k, v)
        if layout is None:
            layout = Layout.causal(q.shape[0], q.shape[2], k.shape[2], device=q.device)
        _require_arguments(q, k, layout, scale=scale, slopes=slopes, window=window, dropout=dropout, softcap=softcap)
        # Kernels read the numbers of a head side by side. Few of them look whether these lie so.
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        # A window that hides nothing would exclude the backends without windows.
        if window is not None and layout.consecutive and window >= layout.key_length:
            window = None
        order: Literal["consecutive", "increasing", "free", "external"] = "free"
        if layout.external_causality:
            order = "external"
        elif layout.spans is not None:
            order = "consecutive" if layout.consecutive else "increasing"
        need = Need(
            device=q.device.type,
            capability=capability_of(q.device) if q.device.type == "cuda" else None,
            dtype=q.dtype,
            head_dim=q.shape[-1],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            query_length=q.shape[2],
            key_length=k.shape[2],
            training=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
            biased=slopes is not None,
            order=order,
            blocks=not layout.whole,
            window=window,
            dropout=dropout,
            softcap=softcap,
            value_dim=None if v.shape[-1] == q.shape[-1] else v.shape[-1],
            compiling=torch.compiler.is_compiling(),
            lse=lse,
            sees=layout.sees,
        )
        return cls(
            q=q,
            k=k,
            v=v,
            layout=layout,
            scale=scale,
            slopes=slopes,
            window=window,
            dropout=dropout,
            softcap=softcap,
            need=need,
        )

    @property
    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys and values with a head for each query head."""
        k, v = expand_heads(self.q.shape[1], self.k, self.v)
        return k, v

    @property
    def evened(self) -> Call:
        """The call with the last dimensions of q, k and v padded with zeros to the largest of them."""
        q, k, v = evened(self.q, self.k, self.v)
        return replace(self, q=q, k=k, v=v, need=replace(self.need, head_dim=q.shape[3], value_dim=None))


class AttentionBackend(ABC):
    """One way to compute attention, without state, so that layers can share it."""

    name: ClassVar[str]
    summary: ClassVar[str]
    encodes: ClassVar[bool] = False
    """True if the backend helps encodings, which weigh queries and keys in their own way."""
    softcaps: ClassVar[bool] = False
    """True if the backend supports soft caps."""

    def why_never(self) -> str | None:
        """Return why this process cannot use the backend at all, such as a missing package; else None."""
        return None

    @abstractmethod
    def why_not(self, need: Need) -> str | None:
        """Return None if this backend serves ``need``, else the reason, in words that a user can act on."""

    def refuses(self, need: Need) -> str | None:
        """Return why the backend cannot serve ``need``: a limit of all backends, or ``why_not``; else None."""
        if need.lse and type(self).with_lse is AttentionBackend.with_lse:
            return "it does not return the log-sum-exp, which attention in pieces needs."
        if need.lse and need.order == "external":
            return "attention in pieces needs all keys, and an engine around a sharded layout holds only some."
        if need.encoded and not self.encodes:
            return "it does not support the score of this encoding. 'sdpa' and 'reference' do."
        if need.encoded and need.order == "external":
            return "a score needs all keys, and an engine around a sharded layout holds only some."
        if need.softcap is not None and not self.softcaps:
            return "it has no soft cap of scores."
        return self.why_not(need)

    def bands(self, need: Need) -> bool:
        """Return whether ``with_lse`` takes a ``window``, and causal calls with more keys than queries."""
        return False

    def fuses(self, need: Need) -> bool:
        """Return whether ``gradients`` is one fused kernel, which writes no weights out."""
        return False

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> OutputAndLse:
        """Compute attention without positions, and the log-sum-exp of each query's scores.

        Returns:
            The output, and the log-sum-exp in float32 (float64 for float64 tensors). A query that sees nothing has an
            output of 0 and a log-sum-exp of minus infinity. Neither carries a gradient: see ``gradients``.
        """
        raise NotImplementedError

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, rule: PartRule) -> QKV:
        """Return gradients of q, k and v of a call of ``with_lse`` that was merged with others.

        This form materialises the weights of some queries at a time. A backend with a fused form overrides it, and
        ``fuses``.

        Args:
            out: the *merged* output of these queries.
            lse: their *merged* log-sum-exp.
        """
        # exp(score - merged lse) is the weight of a pair in the whole softmax, not only in this part. From there on it
        # is the usual backward of attention: d score = weight * (d out . v - sum over all parts of d out . out).
        wide = lse.dtype
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        share = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # queries that see nothing have no weights
        for block in score_blocks(q, k, rule):
            here, there, by_key_head = block.here, block.there, block.by_key_head
            up, weights = by_key_head(grad[here].to(wide)), by_key_head((block.scores - lse[here][..., None]).exp())
            slope = weights * (up @ v[there].to(wide).transpose(-1, -2) - by_key_head(share[here])) * rule.scale
            if rule.softcap is not None:
                slope *= 1 - (by_key_head(block.scores) / rule.softcap).clamp(min=-1).square()
            dq[here] = (slope @ k[there].to(wide)).view_as(q[here])
            dk[there] += slope.transpose(-1, -2) @ by_key_head(q[here].to(wide))
            dv[there] += weights.transpose(-1, -2) @ up
        return dq, dk, dv

    @abstractmethod
    def attend(self, call: Call) -> Output:
        """Compute a call that this backend serves; only ``run`` calls this."""

    def run(self, call: Call) -> Tensor:
        """Compute a call in q's dtype, autocast or not: ``[batch, heads, query, value_dim]``.

        Raises:
            BackendUnavailableError: if this backend cannot serve the call; the message has the reason.
        """
        reason = self.refuses(call.need)
        if reason is not None:
            raise BackendUnavailableError(f"Attention backend {self.name!r} cannot serve this call: {reason}")
        with without_autocast(call.q.device):
            return self.attend(call)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout | None = None, **how: Any) -> Tensor:
        """Compute ``Call.of`` these arguments; raise the errors of ``Call.of`` and ``run``."""
        return self.run(Call.of(q, k, v, layout, **how))


def expand_heads(heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Repeat key or value heads so that each query head has one; return a tensor itself if it has one already."""
    return tuple(
        x if x.shape[1] == heads else x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
        for x in tensors
    )


def evened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the last dimension of tensors with zeros to the largest of them, for kernels that want it equal."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _require_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v belong together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise InvalidParameterError(f"q, k and v must be [batch, heads, seq, head_dim], found {shapes}.")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidParameterError(
            f"q, k, v must share their batch, q and k head_dim, k and v their heads and length, found {shapes}."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidParameterError(f"The number of key heads must divide that of query heads, found {shapes}.")
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise InvalidParameterError(f"q, k and v must not be empty, found {shapes}.")
    is_number = q.is_floating_point() and q.dtype.itemsize > 1
    if not is_number or not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise InvalidParameterError(
            f"q, k and v must share a floating dtype of 16 bits or more and a device, found "
            f"{q.dtype}/{k.dtype}/{v.dtype} on {q.device}/{k.device}/{v.device}."
        )


def _require_arguments(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    *,
    scale: float,
    slopes: Tensor | None,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> None:
    """Raise unless the arguments fit q and k; read values of tensors only if that costs no device sync."""
    if (layout.batch, layout.query_length, layout.key_length) != (q.shape[0], q.shape[2], k.shape[2]):
        raise InvalidParameterError(
            f"The layout is for batch {layout.batch}, {layout.query_length} queries, {layout.key_length} keys; found "
            f"q {tuple(q.shape)} and k {tuple(k.shape)}."
        )
    if layout.query_positions.device != q.device:
        raise InvalidParameterError(f"The layout is on {layout.query_positions.device}, q on {q.device}.")
    if not 0 < scale < torch.inf:
        raise InvalidParameterError(f"scale must be above 0 and finite, found {scale}.")
    if window is not None and window < 1:
        raise InvalidParameterError(f"window must be at least 1 token, found {window}.")
    if not 0 <= dropout < 1:
        raise InvalidParameterError(f"dropout must be in [0, 1), found {dropout}.")
    if softcap is not None and not 0 < softcap < torch.inf:
        raise InvalidParameterError(f"softcap must be above 0 and finite, found {softcap}.")
    if slopes is None:
        return
    if slopes.shape != (q.shape[1],) or slopes.dtype not in (torch.float32, torch.float64):
        raise InvalidParameterError(
            f"slopes must be float32 or float64 [heads] = [{q.shape[1]}] (16 bits misplace tokens), "
            f"found {slopes.dtype} {tuple(slopes.shape)}."
        )
    if slopes.requires_grad:
        raise InvalidParameterError("slopes require a gradient, but are constants here. Pass slopes.detach().")
    if slopes.device != q.device:
        raise InvalidParameterError(f"slopes are on {slopes.device}, q on {q.device}.")
    # On a GPU a look at the values would wait for all its work, and a graph or a fake tensor has no values.
    readable = slopes.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(slopes, FakeTensor)
    if readable and not layout.memo(
        "slopes", lambda: bool((slopes >= 0).all() & slopes.isfinite().all()), owner=slopes
    ):
        raise InvalidParameterError(f"slopes must be finite and at least 0, found {slopes.tolist()}.")
