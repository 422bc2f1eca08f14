"""The flash-attn packages: version 2 with native float32 ALiBi slopes, versions 3 and 4 with ALiBi columns.

The packages are detected by their installed metadata, and imported only when one runs.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import install_line
from ctxext.kernels.base import AttentionBackend, Call, Need, evened
from ctxext.kernels.blocks import QKV, Output, OutputAndLse, PartRule
from ctxext.kernels.columns import COLUMNS, with_columns
from ctxext.kernels.layout import Layout


def _says(name: str, file: str, word: str) -> bool:
    """Return whether a file of an installed package, which is not imported, holds a word."""
    spec = importlib.util.find_spec(name)
    folders = [] if spec is None else spec.submodule_search_locations or [str(Path(spec.origin or "").parent)]
    return any(word in path.read_text(encoding="utf-8") for folder in folders if (path := Path(folder, file)).is_file())


# A build of one's own, or the wheel of PyPI, which holds no more than the forward pass in bfloat16 without windows.
FORWARD_ONLY = "fa3_fwd_interface"
FLASH3 = next(filter(importlib.util.find_spec, ("flash_attn_interface", FORWARD_ONLY)), "flash_attn_interface")
INSTALLED: dict[str, bool] = {
    # The compiled extension, not the Python package: version 4 installs into the same package without it.
    "flash": importlib.util.find_spec("flash_attn_2_cuda") is not None,
    # Before 2025-08-29 it returned the log-sum-exp always, and took no such argument.
    "flash3": _says(FLASH3, f"{FLASH3}.py", "return_attn_probs"),
    # Version 2 overwrites these files by older ones if it is installed after version 4, and pip does not say so.
    "flash4": _says("flash_attn", "cute/interface.py", "return_lse"),
}
"""Availability of the three packages, looked up once, so that ``why_not`` is cheap and can be compiled."""


# Since version 2.7 the backward pass of version 2 is an operator by itself, with a window of two numbers.
TAKES_PARTS = not INSTALLED["flash"] or _says("flash_attn", "flash_attn_interface.py", "window_size_left: int")


WithArguments = tuple[Tensor, Tensor, Tensor, Mapping[str, Any]]
"""q, k and v, and further arguments of a kernel."""


class _FlashFamily(AttentionBackend):
    """Base of the three versions, which take 16-bit tensors on CUDA, and blocks of plain attention."""

    module: ClassVar[str]
    install: ClassVar[str]
    major: ClassVar[tuple[int, ...]]
    reads_cache: ClassVar[bool]
    softcaps = True
    takes_latent: ClassVar[bool] = False  # queries of 192 and values of 128 dimensions, as in DeepSeek's models
    asks_lse: ClassVar[str] = "return_attn_probs"  # the keyword by which a call returns the log-sum-exp too

    def why_never(self) -> str | None:
        return None if INSTALLED[self.name] else f"not installed: {self.install}."

    def why_not(self, need: Need) -> str | None:
        if need.device != "cuda":
            return f"flash-attn runs on CUDA only, found {need.device!r}."
        if (never := self.why_never()) is not None:
            return never
        if need.capability is not None and need.capability[0] not in self.major:
            return f"its kernels are for compute capability {self.major}.x, found {need.capability}."
        if need.dtype not in (torch.float16, torch.bfloat16):
            return f"its kernels are for float16 and bfloat16, found {need.dtype}."
        if need.order == "free":
            return "positions do not increase in blocks, and its causality goes by index. 'sdpa' and 'flex' can."
        if need.order == "increasing" and need.window is not None:
            return "its window counts indices, but positions do not step by one. 'sdpa' and 'flex' count positions."
        if need.order == "external" and (need.window is not None or need.cached):
            return "a sharded layout is square and has no window."
        if need.softcap is not None and need.dropout:
            return "with a soft cap it has no attention dropout. Load the model with attention_dropout=0.0."
        return self.lacks(need)

    @abstractmethod
    def lacks(self, need: Need) -> str | None:
        """Return why this version, beyond the limits of the family, cannot serve ``need``; else None."""

    def attend(self, call: Call) -> Output:
        causal = call.layout.sees == "past"
        options = _options(PartRule(call.scale, causal, softcap=call.softcap, window=call.window))
        q, k, v = evened(call.q, call.k, call.v)
        q, k, v, extra = self.with_bias(replace(call, q=q, k=k, v=v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, seq, heads, head_dim], the packages' own layout
        module = importlib.import_module(self.module)
        options |= extra
        filled = cache_lengths(call.layout) if self.reads_cache and not call.dropout else None
        if filled is not None and not call.need.training:
            options.pop("dropout_p", None)
            lengths = call.layout.memo(
                "cache lengths", lambda: torch.tensor(filled, dtype=torch.int32, device=call.q.device)
            )  # once for all layers, because the copy to the device synchronises
            # It splits the cache over blocks of keys, because a few queries alone do not fill a GPU.
            out = _tensor(module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options))
        else:
            out = _call(module, q, k, v, call.layout, options)
        return out.transpose(1, 2)[..., : call.v.shape[3]]

    def bands(self, need: Need) -> bool:
        return True

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, rule: PartRule) -> OutputAndLse:
        assert rule.mask is None, "why_not refuses layouts that need one"
        value_dim = v.shape[3]
        if not (self.takes_latent and (q.shape[3], value_dim) == (192, 128)):
            q, k, v = evened(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        function = importlib.import_module(self.module).flash_attn_func
        out, lse = function(q, k, v, **_options(rule), **{self.asks_lse: True})[:2]
        return out.transpose(1, 2)[..., :value_dim], lse

    @abstractmethod
    def with_bias(self, call: Call) -> WithArguments:
        """Return the tensors and the keyword arguments with which this version gets slopes and dropout."""


class Flash(_FlashFamily):
    """flash-attn 2: ALiBi inside the kernel, in float32, at almost no cost.

    Pick it on CUDA whenever it is installed. It counts distance by index, so positions must step by one. Where tokens
    see the past only, it adds slope times position, not times distance (csrc/flash_attn/src/alibi.h of 2.8.3): of the
    steepest slopes a weight is off by 4e-3 at 128K tokens, and by 5e-2 at 1M.
    """

    name = "flash"
    summary = "flash-attn 2 with native float32 ALiBi slopes"
    module = "flash_attn.flash_attn_interface"
    install = install_line("flash")
    # Version 2.6 brought them.
    softcaps = not INSTALLED["flash"] or _says("flash_attn", "flash_attn_interface.py", "softcap")
    reads_cache = True
    major = (8, 9, 10, 12)  # targets of setup.py in 2.8.3: 80, 90, 100, 120

    def lacks(self, need: Need) -> str | None:
        if torch.version.hip is not None and (need.softcap is not None or need.window is not None):
            return "on ROCm some of its kernels pass over soft caps and windows without a word. 'flex' has both."
        if need.width > 256 or need.width % 8:
            return f"head_dim must be a multiple of 8 up to 256, found {need.width}."
        if need.biased and need.order != "consecutive":
            return "its ALiBi counts distance by index, but positions do not step by one. 'sdpa' uses positions."
        return None

    def fuses(self, need: Need) -> bool:
        return TAKES_PARTS

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, rule: PartRule) -> QKV:
        if not TAKES_PARTS:
            return super().gradients(q, k, v, out, lse, grad, rule)
        assert rule.mask is None, "why_not refuses layouts that need one"
        widths, even = (q.shape[3], v.shape[3]), evened(q, k, v, grad.to(q.dtype), out.to(q.dtype))
        inputs = [x.transpose(1, 2) for x in even]
        grads = [x.new_empty(x.shape) for x in inputs[:3]]
        # It calls the log-sum-exp of a query that sees nothing plus infinity, so that all of its weights are 0.
        lse = lse.float().masked_fill(lse == -torch.inf, torch.inf).contiguous()
        importlib.import_module(self.module)._flash_attn_backward(
            inputs[3],
            *inputs[:3],
            inputs[4],
            lse,
            *grads,
            dropout_p=0.0,
            softmax_scale=rule.scale,
            causal=rule.causal,
            window_size_left=-1 if rule.window is None else rule.window - 1,
            window_size_right=-1 if rule.window is None else 0,
            softcap=rule.softcap or 0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq[..., : widths[0]], dk[..., : widths[0]], dv[..., : widths[1]]

    def with_bias(self, call: Call) -> WithArguments:
        slopes = None if call.slopes is None else call.slopes.float()
        return call.q, call.k, call.v, {"dropout_p": call.dropout, "alibi_slopes": slopes}


class _Columned(_FlashFamily):
    """Base of versions without ALiBi: eight columns carry it, so positions inside a block may have any steps."""

    takes_latent = True

    def lacks(self, need: Need) -> str | None:
        if need.biased and need.sees == "both":
            return "its ALiBi columns cannot express a distance to both sides. 'sdpa' can."
        if need.biased and need.softcap is not None:
            return "a soft cap would bend the ALiBi columns, which are part of the scores. 'flex' can."
        wide = need.width + (COLUMNS if need.biased else 0)
        if need.width % 8 or wide > self.widest_for(need):
            why = f" ({COLUMNS} of them carry ALiBi, which this version has no kernel for)" if need.biased else ""
            return f"head dimensions must be multiples of 8 up to {self.widest_for(need)}, found {wide}{why}."
        if need.dropout:
            return "it has no attention dropout. Load the model with attention_dropout=0.0."
        return None

    @abstractmethod
    def widest_for(self, need: Need) -> int:
        """Return the widest head that the kernels take on the device."""

    def with_bias(self, call: Call) -> WithArguments:
        return (call.q, call.k, call.v, {}) if call.slopes is None else (*with_columns(call), {})


class Flash3(_Columned):
    """flash-attn 3, with the fastest kernels on Hopper, its only target; ALiBi as columns."""

    name = "flash3"
    summary = "flash-attn 3 (Hopper), ALiBi as columns"
    module = FLASH3
    install = f"{install_line('flash3')}, or build today's hopper folder of Dao-AILab/flash-attention"
    reads_cache = True
    major = (9,)

    def lacks(self, need: Need) -> str | None:
        if self.module == FORWARD_ONLY and (need.window or need.training or need.dtype != torch.bfloat16):
            return "the build of PyPI (fa3-fwd) has no windows, float16 or gradients. Build flash-attn 3 itself."
        return super().lacks(need)

    def widest_for(self, need: Need) -> int:
        return 256

    def bands(self, need: Need) -> bool:
        return self.module != FORWARD_ONLY  # which has no windows


class Flash4(_Columned):
    """flash-attn 4 (CuTe), a pure Python wheel that compiles at first use; ALiBi as columns."""

    name = "flash4"
    summary = "flash-attn 4 (CuTe), ALiBi as columns"
    module = "flash_attn.cute.interface"
    install = "pip install --pre flash-attn-4, after flash-attn"  # only pre-releases so far
    reads_cache = False
    asks_lse = "return_lse"
    major = (8, 9, 10, 11, 12)

    def lacks(self, need: Need) -> str | None:
        if need.training and need.capability is not None and need.capability[0] == 8:
            return "its backward needs compute capability 9.0 or later."
        return super().lacks(need)

    def widest_for(self, need: Need) -> int:
        major = need.capability[0] if need.capability is not None else 0
        # Besides all sizes up to 128, Blackwell has kernels of two shapes (_validate_head_dims of 4.0.0b36).
        shape = (need.head_dim, need.value_dim or need.head_dim)
        is_shape = (need.lse and shape == (192, 128)) or (not need.training and shape == (256, 256))
        return 256 if major == 9 else shape[0] if is_shape and major in (10, 11) else 128


def _options(rule: PartRule) -> dict[str, Any]:
    """Return the arguments of a kernel by which all versions call a rule."""
    options: dict[str, Any] = {"softmax_scale": rule.scale, "causal": rule.causal}
    if rule.window is not None:
        options["window_size"] = (rule.window - 1, 0 if rule.causal else rule.window - 1)
    if rule.softcap is not None:
        options["softcap"] = rule.softcap
    return options


def cache_lengths(layout: Layout) -> list[int] | None:
    """Return the number of keys per row if the layout is a cache filled from the front, with all queries at its end."""
    if layout.spans is None or layout.external_causality or layout.query_length == layout.key_length:
        return None
    lengths = [0] * layout.batch
    for rows, query, key in layout.spans:
        if query != (0, layout.query_length) or key[0] != 0:
            return None
        lengths[slice(*rows)] = [key[1]] * (rows[1] - rows[0])
    return lengths if all(lengths) else None


def _call(
    module: ModuleType, q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: dict[str, Any]
) -> Float[Tensor, "batch query heads head_dim"]:
    """Run the plain kernel if one block covers everything, else the kernel for packed tokens of every span."""
    if layout.whole or layout.external_causality:
        return _tensor(module.flash_attn_func(q, k, v, **options))
    tokens = layout.memo("flash tokens", lambda: token_indices(layout))
    q_index, k_index, q_starts, k_starts, q_longest, k_longest = tokens
    out = torch.zeros_like(q.flatten(0, 1))
    if q_longest:
        packed = module.flash_attn_varlen_func(
            q.flatten(0, 1)[q_index],
            k.flatten(0, 1)[k_index],
            v.flatten(0, 1)[k_index],
            cu_seqlens_q=q_starts,
            cu_seqlens_k=k_starts,
            max_seqlen_q=q_longest,
            max_seqlen_k=k_longest,
            **options,
        )
        out = out.index_copy(0, q_index, _tensor(packed))
    return out.view(q.shape)


def _tensor(result: Any) -> Tensor:
    """Return the output; some versions also return the log-sum-exp."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def token_indices(
    layout: Layout,
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " keys"], Int[Tensor, " starts"], Int[Tensor, " starts"], int, int]:
    """Return the arguments of the varlen kernel: flattened tokens of every span, span starts, longest lengths.

    Returns:
        Indices of queries and of keys into ``[batch * seq]``, their ``cu_seqlens`` (int32, one more than there are
        sequences), and the longest query and key sequence in tokens.
    """
    device = layout.query_positions.device
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    for rows, query, key in layout.spans or ():
        for row in range(*rows):
            queries.append(torch.arange(*query, device="cpu") + row * layout.query_length)
            keys.append(torch.arange(*key, device="cpu") + row * layout.key_length)
    q_sizes, k_sizes = ([len(x) for x in parts] for parts in (queries, keys))
    empty = [torch.empty(0, dtype=torch.long, device="cpu")]
    return (
        torch.cat(queries or empty).to(device),
        torch.cat(keys or empty).to(device),
        F.pad(torch.tensor(q_sizes, device="cpu").cumsum(0), (1, 0)).to(device, torch.int32),
        F.pad(torch.tensor(k_sizes, device="cpu").cumsum(0), (1, 0)).to(device, torch.int32),
        max(q_sizes, default=0),
        max(k_sizes, default=0),
    )
