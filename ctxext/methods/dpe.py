"""DPE: Self-Extend with groups of another size for each frequency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ctxext.errors import refuse_unknown
from ctxext.methods.parameters import WholeTokens, require
from ctxext.methods.remap import Piece, PositionMap, RemapMethod, Tokens, near_and_far, tokens_of
from ctxext.spec import RopeSpec

# Tokens per group for each eighth of the frequencies, fastest first, all for a window of 1024 tokens and 128K of text.
PUBLISHED = {
    "llama-3-8b": (2, 8, 2, 8, 32, 32, 32, 4),
    "llama-3.1-8b": (2, 32, 32, 2, 2, 2, 2, 1),
    "mistral-7b-v0.2": (4, 16, 2, 16, 32, 16, 16, 2),
    "qwen2.5-7b": (2, 16, 8, 8, 32, 8, 2, 4),
}


@dataclass(frozen=True, kw_only=True)
class DPE(RemapMethod):
    """Keep the positions of the nearest tokens; beyond a window, group tokens, with one group size per frequency.

    Pick it where group sizes were searched for your checkpoint: each frequency is stretched only as far as a search for
    needles showed to be necessary. Texts of up to the trained length are computed as by the unextended model, bit
    for bit. Inside a group, a frequency does not tell the order of far tokens.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. Only says how far the model is meant to read:
            no bound on relative positions follows from searched sizes, since some are 1.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all).
        groups: tokens that share a position, at least 1 each, fastest frequency first: one size for each pair of
            rotated dimensions, or fewer sizes for equal parts of the pairs; or the name of published sizes:
            "llama-3-8b", "llama-3.1-8b", "mistral-7b-v0.2", "qwen2.5-7b".
        window: distances below it are kept. Tokens, or below 1 a share of the trained length.
        exact: True if queries inside the trained window keep all distances, so that texts of up to the trained length
            are computed as by the unextended model, bit for bit; else only texts of ``window`` tokens are. The
            authors' code has no such option.

    Source: Lu et al., arXiv:2504.18857. Authors' code: LuLuLuyi/DPE@46b85de, dpe_for_llama.py, and the sizes
        of config/dpe_config.yaml (its README prints other ones for Llama 3). There prefill divides the window by a
        group without rounding where decoding rounds; here it is rounded down.
    """

    name = "dpe"
    summary = "keep near positions, group far tokens by a size per frequency"
    source = "arXiv:2504.18857"

    groups: Annotated[str | tuple[int, ...], WholeTokens]
    window: Annotated[float, Tokens] = 1024
    exact: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.groups, str):
            refuse_unknown("name of published groups of method 'dpe'", [self.groups], PUBLISHED)

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        window = tokens_of("window", self.window, rope, most=rope.trained_length - 1)
        sizes = PUBLISHED[self.groups] if isinstance(self.groups, str) else self.groups
        pairs = rope.rotary_dim // 2
        expected = f"as many as rotated pairs of dimensions, {pairs}, or a number that divides it"
        require(pairs % len(sizes) == 0, "groups", f"{len(sizes)} of them", expected)
        each = tuple(size for size in sizes for _ in range(pairs // len(sizes)))
        offsets = tuple(float(window - window // size) for size in each)
        near, far = near_and_far(window, rope, exact=self.exact)
        query = PositionMap(group=each, offset=offsets)
        return (Piece(region=near), Piece(region=far, query=query, key=PositionMap(group=each)))

    @classmethod
    def example(cls: Any, rope: RopeSpec) -> Any:
        return cls(factor=4.0, window=0.25, groups=(8,) * (rope.rotary_dim // 2))
