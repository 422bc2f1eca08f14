"""Retrieval heads: a few heads read far, all others see the first tokens and the nearest ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ctxext.errors import InvalidParameterError
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.parameters import Range, WholeTokens, require
from ctxext.methods.remap import Band, Piece, RemapMethod, Tokens
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec

SHARE = 0.2
"""Share of the key-value groups that read far, where nothing else is given."""

# The parameters of each far method: this class's name of each, and the far method's own.
FAR: dict[str, dict[str, str]] = {
    "self_extend": {"far_window": "window", "group": "group", "reach": "reach", "thinning": "thinning"},
    "dual_chunk": {"chunk": "chunk", "local": "local"},
    "rerope": {"far_window": "window", "leak": "leak"},
    "plain": {},
}


@dataclass(frozen=True, kw_only=True)
class RetrievalHeads(RemapMethod):
    """Let the heads that retrieve read far by a remapping method; the others see the first and the nearest tokens.

    Pick it first where you will not train and texts are long: few heads copy from far back, and only these need far
    tokens. The others keep positions that they know, and their cache holds the tokens in sight only, so that a long
    text takes less memory than plain attention, and on a CPU less time. A key-value group (a key head, and the query
    heads that read it) reads far if one of its query heads retrieves. No other runtime loads the result.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: "none"; "logn" or "growing" (sharpen the attention of queries beyond the trained length); "yarn"
            (of all). It holds for the heads that read far only, since the others see no more tokens than in training.
        heads: the groups that read far: the .json file of scores that ``ctxext heads`` wrote; a list of their numbers,
            counted from 0 through the attention layers; or None, by which ``ctxext.patch`` scores the model's heads on
            random tokens, as ``ctxext.heads`` does. The config of a patched model holds the numbers.
        share: share of all groups that read far, the best scores first, rounded up. Above 0, at most 1; None for 0.2.
        threshold: score from which a group reads far, instead of ``share``. Above 0, below 1.
        window: the nearest tokens that the other heads see, less than the trained length by ``sinks`` at least.
            Tokens, or below 1 a share of the trained length.
        sinks: number of first tokens of a text that the other heads see, and that ``self_extend`` does not thin out;
            at least 1.
        far: method of the heads that read far: "self_extend", "dual_chunk", "rerope", or "plain". Plain positions save
            work and memory inside the trained window: they need a factor of 1 and ``exact=False``.
        far_window: ``window`` of self_extend or rerope; None for that method's default.
        group: ``group`` of self_extend; None for its default.
        reach: ``reach`` of self_extend; None for its default.
        thinning: ``thinning`` of self_extend; None for its default.
        chunk: ``chunk`` of dual_chunk; None for its default.
        local: ``local`` of dual_chunk; None for its default.
        leak: ``leak`` of rerope; None for its default.
        exact: True if queries inside the trained window see all tokens at their distances, so that texts of up to the
            trained length are read as by the unextended model; else only texts of ``window`` tokens are. A
            short ``chunk`` of dual_chunk makes it fewer tokens.

    Raises:
        InvalidParameterError: for ``share`` or ``threshold`` with a list of numbers, for both, or for a parameter of
            another far method.

    Source: retrieval heads: Wu et al., arXiv:2404.15574. A window for the others, inside the trained length: Xiao et
        al., DuoAttention, arXiv:2410.10819, section 2; authors' code: mit-han-lab/duo-attention. Far positions: Jin et
        al., arXiv:2401.01325. Nobody seems to have joined the two before.
    """

    name = "retrieval_heads"
    summary = "the few heads that retrieve read far, the others see the nearest tokens"
    source = "arXiv:2410.10819"

    heads: Annotated[str | tuple[int, ...] | None, Range(least=0)] = None
    share: Annotated[float | None, Range(above=0, most=1)] = None
    threshold: Annotated[float | None, Range(above=0, below=1)] = None
    window: Annotated[float, Tokens] = 0.75
    sinks: Annotated[int, WholeTokens] = 4
    far: Literal["self_extend", "dual_chunk", "rerope", "plain"] = "self_extend"
    far_window: Annotated[float | None, Tokens] = None
    group: Annotated[int | None, WholeTokens] = None
    reach: Annotated[float | None, Tokens] = None
    thinning: Annotated[float | None, Range(least=0, most=1)] = None
    chunk: Annotated[float | None, Tokens] = None
    local: Annotated[float | None, Tokens] = None
    leak: Annotated[float | None, Range(least=0, below=1)] = None
    exact: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.heads, os.PathLike):
            object.__setattr__(self, "heads", os.fspath(self.heads))
        super().__post_init__()
        is_file = not isinstance(self.heads, str) or self.heads.endswith(".json")
        require(is_file, "heads", self.heads, "a list of numbers of groups, or the path of a .json file of scores")
        if isinstance(self.heads, tuple):
            require(len(set(self.heads)) == len(self.heads), "heads", self.heads, "different numbers of groups")
            object.__setattr__(self, "heads", tuple(sorted(self.heads)))
            for name in ("share", "threshold"):
                require(getattr(self, name) is None, name, getattr(self, name), "left out where heads lists the groups")
        require(self.share is None or self.threshold is None, "share", self.share, "left out where threshold is given")
        for name in sorted({name for names in FAR.values() for name in names}):
            value = getattr(self, name)
            owners = " or ".join(method for method, names in FAR.items() if name in names)
            require(value is None or name in FAR[self.far], name, value, f"left out unless far is {owners}")
        if self.far == "plain":
            require(self.factor == 1, "factor", self.factor, "1 with far='plain': plain positions reach no further")
            require(not self.exact, "exact", self.exact, "False with far='plain': an exact window saves nothing")

    @property
    def far_method(self) -> RemapMethod | None:
        """Method of the heads that read far; None for plain positions."""
        common: dict[str, Any] = {"factor": self.factor, "temperature": self.temperature}
        own = {theirs: getattr(self, name) for name, theirs in FAR[self.far].items() if getattr(self, name) is not None}
        if self.far == "self_extend":
            return SelfExtend(**common, **own, sinks=self.sinks, exact=self.exact)
        if self.far == "rerope":
            return ReRoPE(**common, **own, exact=self.exact)
        return DualChunk(**common, **own) if self.far == "dual_chunk" else None

    @property
    def near_method(self) -> Streaming:
        """Method of the other heads."""
        return Streaming(factor=self.factor, sinks=self.sinks, window=self.window, exact=self.exact)

    def pieces(self, rope: RopeSpec, length: int) -> tuple[Piece, ...]:
        """Return the pieces of the heads that read far; ``near_method`` has the pieces of the others."""
        with self._own_names():
            far = self.far_method
            return (Piece(region=Band()),) if far is None else far.pieces(rope, length)

    def parts(self, rope: RopeSpec, length: int) -> tuple[tuple[object, ...], ...]:
        return (*super().parts(rope, length), (self.near_method.pieces(rope, length), self.heads))

    def exact_length(self, rope: RopeSpec) -> int:
        near = self.near_method.exact_length(rope)
        with self._own_names():
            far = self.far_method
            return near if far is None else min(near, far.exact_length(rope))

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Give the parameters of the far method the names that they have here, in its errors."""
        try:
            yield
        except InvalidParameterError as error:
            said = str(error).replace(repr(self.far), repr(self.name))
            for here, there in FAR[self.far].items():
                said = re.sub(rf"\b{there}\b", here, said)
            raise InvalidParameterError(said) from error

    @classmethod
    def reads_weights(cls, parameters: Mapping[str, Any]) -> bool:
        return not isinstance(parameters.get("heads"), list | tuple)

    @classmethod
    def example(cls: Any, rope: RopeSpec) -> Any:
        return cls(factor=4.0, heads=(0,), window=0.25, exact=False)
