"""Dual Chunk Attention: positions begin again in each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ctxext.methods.parameters import require
from ctxext.methods.remap import Chunks, Piece, PositionMap, RemapMethod, Tokens, tokens_of
from ctxext.spec import RopeSpec


@dataclass(frozen=True, kw_only=True)
class DualChunk(RemapMethod):
    """Cut the text into chunks: positions count inside a chunk, and older chunks are seen from one farthest position.

    Pick it for checkpoints that are deployed with it (Qwen2.5-1M, together with YaRN), and where texts may grow without
    limit. A query sees its chunk unchanged, the last ``local`` tokens of the chunk before at their true distances,
    and older chunks at distances that tell the place of a key in its chunk, but not which chunk is older: a key of an
    older chunk may seem nearer. Texts of up to ``chunk`` + 1 tokens are computed as by the unextended model.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Only says how far the model is meant to read.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all). Qwen2.5-1M was served with "growing", by the length of the whole request.
        chunk: the largest relative position that is used, at most trained_length - 1, which None means. Tokens, or
            below 1 a share of the trained length. The authors take 3/4 of the trained length.
        local: distances below it are kept across the border of a chunk, less than ``chunk`` / 2. Tokens, or below 1 a
            share of the trained length. Positions begin again after ``chunk`` - ``local`` tokens.

    Source: An et al., arXiv:2402.17463, section 3. Authors' code: HKUNLP/ChunkLlama@2add4d7,
        chunkllama_attn_replace.py. There the weights of the merge get no gradient, and cached keys keep the temperature
        of the length that they were cached at; vLLM's form with ``chunk`` = L reaches relative position L.
    """

    name = "dual_chunk"
    summary = "positions begin again in each chunk; older chunks stand far away"
    source = "arXiv:2402.17463"

    chunk: Annotated[float | None, Tokens] = None
    local: Annotated[float, Tokens] = 0.125

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        most = rope.trained_length - 1
        chunk = most if self.chunk is None else tokens_of("chunk", self.chunk, rope, most=most)
        local = tokens_of("local", self.local, rope, most=most)
        require(2 * local < chunk, "local", self.local, f"below half of chunk={chunk} tokens")
        period = chunk - local
        key = PositionMap(period=period)
        return (
            Piece(region=Chunks(period, 0), query=key, key=key),
            Piece(
                region=Chunks(period, 1),
                query=PositionMap(period=period, offset=float(period), ceiling=float(chunk)),
                key=key,
            ),
            Piece(region=Chunks(period, 2, older=True), query=PositionMap(scale=0.0, offset=float(chunk)), key=key),
        )

    def exact_length(self, rope: RopeSpec) -> int:
        return rope.trained_length if self.chunk is None else tokens_of("chunk", self.chunk, rope, most=10**9) + 1
