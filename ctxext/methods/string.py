"""STRING: distant keys are shifted nearer, out of the badly trained tail of the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ctxext.methods.parameters import require
from ctxext.methods.remap import Piece, PositionMap, RemapMethod, Tokens, near_and_far, require_reach, tokens_of
from ctxext.spec import RopeSpec


@dataclass(frozen=True, kw_only=True)
class STRING(RemapMethod):
    """Keep the positions of the nearest tokens and move all others nearer by one shift.

    Pick it to use a trained window better rather than to leave it: few texts in training are as long as the window, so
    its largest relative positions are the least trained. It extends by less than 2 times. Far tokens keep their order,
    but relative positions between ``local`` and ``shift`` occur twice.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1 and below 2.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all). The authors' code multiplies all scores by 1.143.
        shift: distances below it are kept, and all others shrink by ``shift`` - ``local``. Tokens, or below 1 a share
            of the trained length; None for a third of it, or as much more as the target needs. The authors take 1/4 to
            0.4.
        local: relative position at which distant keys begin, below ``shift``. Tokens, or below 1 a share of the trained
            length. The authors take 32 to 512 tokens.
        exact: True if queries inside the trained window keep all distances, so that texts of up to the trained length
            are computed as by the unextended model, bit for bit; else only texts of ``shift`` tokens are. An exact
            shift helps beyond the trained window only, and not inside it.

    Source: An et al., arXiv:2410.18745, section 4. Authors' code: HKUNLP/STRING@216cc2f, string_for_llama.py. There
        prefill counts the key at distance ``shift`` in both parts and decoding in one; here each key counts once.
    """

    name = "string"
    summary = "shift far tokens nearer, into well-trained positions"
    source = "arXiv:2410.18745"

    shift: Annotated[float | None, Tokens] = None
    local: Annotated[float, Tokens] = 128
    exact: bool = False

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        trained = rope.trained_length
        local = tokens_of("local", self.local, rope, most=trained - 1)
        shift = min(trained, max(trained // 3, local + 1, length - trained + local))
        if self.shift is not None:
            shift = tokens_of("shift", self.shift, rope, most=trained)
        require(local < shift, "local", self.local, f"below shift={shift} tokens")
        remedy = f"Take a larger shift (at most {trained}) or a smaller local."
        require_reach(self.name, length, trained + shift - local, remedy)
        near, far = near_and_far(shift, rope, exact=self.exact)
        return (Piece(region=near), Piece(region=far, query=PositionMap(offset=float(local - shift))))

    @classmethod
    def example(cls: Any, rope: RopeSpec) -> Any:
        return cls(factor=1.5, local=0.0625)
