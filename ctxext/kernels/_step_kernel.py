"""One step of decoding on a GPU in two kernels: a few new queries over all keys of a cache, in pieces of positions.

A program walks every n-th block of slots, for all query heads that read one key head. It skips the keys and values of a
block in which no query sees anything, rotates queries and keys in registers as the pieces of the block need it, and
keeps one softmax for all pieces. The second kernel merges the programs by log-sum-exp. The host reads nothing from the
device, so that a CUDA graph can hold a step.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxext.kernels.base import capability_of
from ctxext.kernels.pieces import RotationForm
from ctxext.kernels.regions import MOST_PIECES

PROGRAMS = 512  # four for each processor of a large GPU; the same number everywhere, so the same bits
LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["slots", "settled", "where_row", "where_group", "key_row", "near_from"])
@no_type_check
def _attend(
    q_ptr, k_ptr, v_ptr, where_ptr, query_cos_ptr, query_sin_ptr, key_cos_ptr, key_sin_ptr, out_ptr, lse_ptr,
    slots, settled, scale, cap, bias0, bias1, bias2, bias3, bias4, bias5,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, where_row, where_group, query_row, key_row,
    near_ptr, near_values_ptr, places_ptr, near_row, near_head, near_values_row, near_values_head, near_from,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, PIECES: tl.constexpr,
    TURNED: tl.constexpr,
    CAPPED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    FIRST: tl.constexpr, STEP: tl.constexpr, SECOND: tl.constexpr, REST_FIRST: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PAIRS_UP: tl.constexpr, REST_UP: tl.constexpr, VALUES_UP: tl.constexpr,
):  # fmt: skip
    """Attend to every n-th block of slots: ``LINES`` lines, one for each query of each head, over one key head."""
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    lines = tl.program_id(2) * LINES + tl.arange(0, LINES)
    real, token = lines < SHARED * TOKENS, lines % TOKENS
    scale, cap = tl.full([], scale, tl.float32), tl.full([], cap, tl.float32)  # inductor hands numbers in float64
    pair, rest = tl.arange(0, PAIRS_UP), tl.arange(0, REST_UP)
    value, near = tl.arange(0, VALUES_UP), tl.arange(0, BLOCK)
    wide, head = row.to(tl.int64), head.to(tl.int64)  # offsets may pass 2**31
    q_at = q_ptr + wide * q_row + (head * SHARED + lines // TOKENS)[:, None] * q_head + token[:, None] * q_token
    first, second, q_in = FIRST + pair * STEP, tl.arange(0, 2)[None, :, None], real[:, None] & (pair < PAIRS)[None, :]
    q_pairs = tl.load(q_at[:, :, None] + second * SECOND + first[None, None, :], q_in[:, None, :], 0.0).to(tl.float32)
    w_head, k_from, v_from = head, k_ptr + wide * k_row + head * k_head, v_ptr + wide * v_row + head * v_head
    if SPLIT:
        place = tl.load(places_ptr + head).to(tl.int64)
        w_head = (place < 0).to(tl.int64)
        near_k = near_ptr + wide * near_row + (-1 - place) * near_head - tl.full([], near_from, tl.int64) * k_token
        near_v = near_values_ptr + wide * near_values_row + (-1 - place) * near_values_head
        near_v -= tl.full([], near_from, tl.int64) * v_token
        k_from = tl.where(place < 0, near_k, k_ptr + wide * k_row + place * k_head)
        v_from = tl.where(place < 0, near_v, v_ptr + wide * v_row + place * v_head)
    if REST > 0:
        q_rest = tl.load(q_at + (REST_FIRST + rest)[None, :], real[:, None] & (rest < REST)[None, :], 0.0)
    acc = tl.zeros([LINES, VALUES_UP], tl.float32)
    top, total = tl.full([LINES], -1e30, tl.float32), tl.zeros([LINES], tl.float32)  # finite: differences are numbers
    # No branch around the loads: the next blocks are loaded while this block is multiplied.
    for start in tl.range(tl.program_id(1) * BLOCK, slots, tl.num_programs(1) * BLOCK, num_stages=STAGES):
        slot, far = start + near, tl.full([], start, tl.int64)
        w_at = where_ptr + wide * where_row + w_head * where_group + token[:, None] * slots + slot[None, :]
        piece = tl.load(w_at, real[:, None] & (slot < slots)[None, :], 255).to(tl.int32)
        seen = tl.min(piece, 0) < 255
        k_at = k_from + far * k_token + near[None, :] * k_token
        k_in = seen[None, :] & (pair < PAIRS)[:, None]
        k_a, k_b = tl.load(k_at + first[:, None], k_in, 0.0), tl.load(k_at + (first + SECOND)[:, None], k_in, 0.0)
        v_at = v_from + far * v_token + near[:, None] * v_token + value[None, :]
        v = tl.load(v_at, seen[:, None] & (value < VALUES)[None, :], 0.0)
        shared = tl.zeros([LINES, BLOCK], tl.float32)
        if REST > 0:
            k_rest = tl.load(k_at + (REST_FIRST + rest)[:, None], seen[None, :] & (rest < REST)[:, None], 0.0)
            shared = tl.dot(q_rest, k_rest, shared, input_precision="ieee")
        score = tl.full([LINES, BLOCK], float("-inf"), tl.float32)
        for number in tl.static_range(PIECES):
            chosen = piece == number
            if tl.max(tl.max(chosen.to(tl.int32), 1), 0) > 0:
                turn = (row * query_row + number * TOKENS + token)[:, None] * PAIRS + pair[None, :]
                cos, sin = tl.load(query_cos_ptr + turn, q_in, 1.0), tl.load(query_sin_ptr + turn, q_in, 0.0)
                # Sums, as the compiler would rotate copies of the queries in every warp otherwise.
                a = tl.sum(q_pairs * tl.where(second == 1, -sin[:, None, :], cos[:, None, :]), 1)
                b = tl.sum(q_pairs * tl.where(second == 1, cos[:, None, :], sin[:, None, :]), 1)
                x, y = k_a, k_b
                if (TURNED >> number) % 2 == 1:
                    turn_k = wide * key_row * PAIRS + far * PAIRS + (near[None, :] * PAIRS + pair[:, None])
                    new = k_in & (slot >= settled)[None, :]
                    cos_k, sin_k = tl.load(key_cos_ptr + turn_k, new, 1.0), tl.load(key_sin_ptr + turn_k, new, 0.0)
                    x = (k_a * cos_k - k_b * sin_k).to(k_a.dtype)
                    y = (k_b * cos_k + k_a * sin_k).to(k_a.dtype)
                s = tl.dot(a.to(x.dtype), x, shared, input_precision="ieee")
                s = tl.dot(b.to(y.dtype), y, s, input_precision="ieee") * scale
                if CAPPED:  # tanh, by its continued fraction near 0, where the closed form loses digits
                    z = s * s
                    z = s * (945 + z * (105 + z)) / (945 + z * (420 + z * 15))
                    s = cap * tl.where(tl.abs(s) < 0.8, z, 1 - 2 / (1 + tl.exp(2 * s)))
                bias = bias0 if number == 0 else (bias1 if number == 1 else (bias2 if number == 2 else (
                    bias3 if number == 3 else (bias4 if number == 4 else bias5))))  # fmt: skip
                score = tl.where(chosen, s + tl.full([], bias, tl.float32), score)
        before, top = top, tl.maximum(top, tl.max(score, 1))
        weight, kept = tl.exp2(score - top[:, None]), tl.exp2(before - top)
        total = total * kept + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    line = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (SHARED * TOKENS) + lines
    total = tl.where(total > 0, total, 1.0)
    out_at = out_ptr + line[:, None] * VALUES + value[None, :]
    tl.store(out_at, acc / total[:, None], real[:, None] & (value < VALUES)[None, :])
    tl.store(lse_ptr + line, top + tl.log2(total), real)


@triton.jit(do_not_specialize=["splits"])
@no_type_check
def _merge(
    part_ptr, lse_ptr, sinks_ptr, out_ptr, splits, out_row, out_head, out_token,
    HEADS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr, VALUES: tl.constexpr,
    VALUES_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query of one head by their log-sum-exp, and the sink of the head, which gives nothing."""
    group, line = tl.program_id(0), tl.program_id(1)
    value, head = tl.arange(0, VALUES_UP), group % HEADS * SHARED + line // TOKENS
    acc = tl.zeros([VALUES_UP], tl.float32)
    top, total = tl.full([], -1e30, tl.float32), tl.zeros([], tl.float32)
    if SINKS:
        top, total = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634, total + 1
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        at = (group.to(tl.int64) * splits + split) * (SHARED * TOKENS) + line
        lse = tl.load(lse_ptr + at, split < splits, float("-inf"))
        seen = (lse > -1e30)[:, None] & (value < VALUES)[None, :]
        part = tl.load(part_ptr + at[:, None] * VALUES + value[None, :], seen, 0.0)
        before, top = top, tl.maximum(top, tl.max(lse, 0))
        weight, kept = tl.exp2(lse - top), tl.exp2(before - top)
        total = total * kept + tl.sum(weight, 0)
        acc = acc * kept + tl.sum(part * weight[:, None], 0)
    place = out_ptr + (group // HEADS).to(tl.int64) * out_row + head * out_head + line % TOKENS * out_token + value
    tl.store(place, (acc / total).to(out_ptr.dtype.element_ty), value < VALUES)


def tile_of(
    lines: int, slot_bytes: int, values: int, number_bytes: int, *, before_hopper: bool
) -> tuple[int, int, int, int]:
    """Return the lines, slots of a block, warps and stages of a program that spills no register.

    In float32 a program may keep 24 bytes in memory, and 3,200 where a key has the 576 dimensions of latent attention.

    On CUDA, in 16 bits, two blocks are on their way while one is multiplied. In float32 that would spill 200 bytes.

    Args:
        lines: queries of all heads that share a key head, a power of two.
        slot_bytes: keys and values of one slot.
        values: dimensions of a value, a power of two.
        number_bytes: bytes of one number of a key.
        before_hopper: True for CUDA before compute capability 9.0.
    """
    wide, hip = number_bytes == 4, torch.version.hip is not None
    most, in_block = (16 if wide else 32 if before_hopper else 64), (1 << 14 if hip else 1 << 15)
    if hip and values > 64:
        most = 16
    slots, stages = (32, 1) if wide else (64, 1) if hip else (32, 3)
    lines = max(16, min(most, lines, 8192 // values))
    warps = 4 if lines * slot_bytes <= 8192 or (lines == 16 and hip) else 8
    return lines, min(slots, max(16, 1 << (in_block // slot_bytes).bit_length() - 1)), warps, stages


def _up(length: int) -> int:
    """Return the next power of two, at least the 16 that matrix units take."""
    return max(16, 1 << (length - 1).bit_length())


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: Tensor,
    query_turns: tuple[Tensor, Tensor],
    key_turn: tuple[Tensor, Tensor] | None,
    turned: tuple[bool, ...],
    biases: tuple[float, ...],
    *,
    scale: float,
    form: RotationForm,
    settled: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    near: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend from a few new queries to all slots of a cache, each pair in the form of its piece, without gradients.

    Return ``[batch, heads, tokens, value_dim]``; 0 for a query that sees nothing.

    Args:
        q: queries as the model rotated them, ``[batch, heads, tokens, head_dim]``.
        k: keys as the model rotated them, ``[batch, key heads, slots, head_dim]``.
        v: values, ``[batch, key heads, slots, value_dim]``.
        where: pieces of all pairs, or ``regions.HIDDEN``, uint8 ``[batch or 1, key heads or 1, tokens, slots]``.
        query_turns: cosines and sines of further rotations of queries, ``[batch or 1, pieces, tokens, pairs]``.
        key_turn: cosines and sines of the further rotation of keys, ``[batch or 1, slots, pairs]``.
        turned: truth for each piece whose keys take ``key_turn``.
        biases: constants that pieces add to their scores; at most ``MOST_PIECES`` pieces.
        form: dimensions that rotate; angles already have the direction of ``form.backwards``.
        settled: slots from the start whose keys have ``key_turn`` already.
        softcap: bound of a score before its bias, which ``tanh`` approaches.
        sinks: learned scores, one of each head, that take weight and give nothing.
        near: keys and values of some heads, where ``k`` and ``v`` are the others', and the place of each key head: its
            number in ``k``, or -1 less its number among the near ones. The near slots follow the slots of ``k``, and
            ``where`` has two rows of groups, one for ``k`` and one for ``near``. The pieces of ``near`` never rotate
            keys.
    """
    (batch, heads, tokens, width), slots = q.shape, where.shape[3]
    near_k, near_v, places = near or (k, v, where)
    key_heads = k.shape[1] if near is None else places.shape[0]
    q, k, v, near_k, near_v = [x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v, near_k, near_v)]
    if near is not None and (k.stride(2), v.stride(2)) != (near_k.stride(2), near_v.stride(2)):
        k, v, near_k, near_v = (x.contiguous() for x in (k, v, near_k, near_v))
    where, (query_cos, query_sin) = where.contiguous(), [x.contiguous() for x in query_turns]
    key_cos, key_sin = [x.contiguous() for x in key_turn or query_turns]  # the latter are not read
    shared, values, pairs, rest = heads // key_heads, v.shape[3], query_cos.shape[3], width - 2 * query_cos.shape[3]
    slot_bytes = (2 * _up(pairs) + (_up(rest) if rest else 0) + _up(values)) * k.element_size()
    is_old = q.device.type == "cuda" and capability_of(q.device) < (9, 0)
    sizes_of_slot = slot_bytes, _up(values), k.element_size()
    lines, block, warps, stages = tile_of(_up(shared * tokens), *sizes_of_slot, before_hopper=is_old)
    groups, lots = batch * key_heads, -(-shared * tokens // lines)
    splits = max(1, min(-(-slots // block), PROGRAMS // (groups * lots)))
    parts = q.new_empty(groups, splits, shared * tokens, values, dtype=torch.float32)
    lse = q.new_empty(groups, splits, shared * tokens, dtype=torch.float32)
    out = q.new_empty(batch, tokens, heads, values).transpose(1, 2)  # in the order that layers expect
    where_steps = (x if size > 1 else 0 for x, size in zip(where.stride(), where.shape[:2], strict=False))
    biases = tuple(bias * LOG2E for bias in biases) + (0.0,) * (MOST_PIECES - len(biases))
    sizes = {"HEADS": key_heads, "SHARED": shared, "TOKENS": tokens, "VALUES": values, "VALUES_UP": _up(values)}
    _attend[(groups, splits, lots)](  # the first axis alone takes more than 65,535
        q, k, v, where, query_cos, query_sin, key_cos, key_sin, parts, lse,
        slots, settled, scale / softcap if softcap else scale * LOG2E, (softcap or 0.0) * LOG2E, *biases,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *where_steps,
        len(turned) * tokens if query_cos.shape[0] > 1 else 0, key_cos.shape[1] if key_cos.shape[0] > 1 else 0,
        near_k, near_v, places, *near_k.stride()[:2], *near_v.stride()[:2], k.shape[2], SPLIT=near is not None,
        PIECES=len(turned), TURNED=sum(1 << piece for piece, turns in enumerate(turned) if turns),
        CAPPED=softcap is not None, PAIRS=pairs, REST=rest, REST_FIRST=0 if form.tail else 2 * pairs,
        FIRST=rest if form.tail else 0, STEP=2 if form.interleaved else 1, SECOND=1 if form.interleaved else pairs,
        LINES=lines, BLOCK=block, STAGES=stages, PAIRS_UP=_up(pairs), REST_UP=_up(rest), **sizes,
        num_warps=warps,
    )  # fmt: skip
    _merge[(groups, shared * tokens)](
        parts, lse, q if sinks is None else sinks, out, splits, *out.stride()[:3],
        SINKS=sinks is not None, BLOCK=32, **sizes,
    )  # fmt: skip
    return out
