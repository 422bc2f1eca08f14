"""The one answer to which method to take: README.md, ``ctxext inspect``, ``ctxext methods`` and choices give it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Recommendation:
    """Methods for one wish.

    Args:
        beside: another method that must apply to the model too; None for none.
        trains: True where the method helps only once the model is trained with it.
    """

    wish: str
    methods: tuple[str, ...]
    why: str
    beside: str | None = None
    trains: bool = False

    def __str__(self) -> str:
        others = f" (or {', '.join(self.methods[1:])})" if self.methods[1:] else ""
        return f"{self.methods[0]}{others}, to {self.wish}: {self.why}."


RECOMMENDED = (
    Recommendation(
        "extend without training",
        ("self_extend",),
        "short texts are read as before, and far text is used; ctxext serves it, and vLLM with ctxext's plugin",
    ),
    Recommendation(
        "extend without training for llama.cpp, SGLang, mlx-lm and others",
        ("yarn",),
        "every runtime loads it and it costs nothing to run; short texts are read 0.03 nats worse until it is trained",
    ),
    Recommendation(
        "extend without training with long texts and little memory",
        ("retrieval_heads",),
        "only the heads that copy from far back reach far: a third of the cache, and on a CPU less than half the time",
    ),
    Recommendation(
        "fine-tune for some ten steps",
        ("self_extend",),
        "on code that repeats it ends 0.42 nats below the best truncation, and yarn 0.34",
        trains=True,
    ),
    Recommendation("fine-tune for some hundred steps", ("yarn",), "its paper took 400 steps", trains=True),
    Recommendation("fine-tune on plenty of long text", ("abf", "llama3"), "Code Llama was trained so", trains=True),
    Recommendation("extend BLOOM, MPT, an ALiBi Falcon", ("alibi",), "distances stay exact, in fused kernels"),
    Recommendation(
        "extend an embedding model or another table of positions",
        ("pi", "group", "tile"),
        "but to search documents, untrained, index windows with a vector each: of 100 they find 70, and pi 13",
        beside="tile",
    ),
    Recommendation(
        "train the new rows of a table of positions",
        ("hierarchical",),
        "each new position has a row of its own, and short texts stay as they were; untrained it finds the fewest",
        trains=True,
    ),
)

LONG = 131_072
"""Trained length, in tokens, from which most texts fit without an extension."""

# What leaves texts inside the window as they are.
SPARING = {
    "self_extend": "self_extend changes no bit inside the window",
    "dynamic_yarn": "dynamic_yarn with growth=request stretches only as far as each text needs",
}


def fits_unextended(trained: int, applicable: Collection[str] = SPARING.keys()) -> str:
    """Say what static scaling costs texts of the trained length, and which methods spare them."""
    ways = "; ".join(way for name, way in SPARING.items() if name in applicable)
    return (
        f"Texts of up to {trained:,} tokens need no extension, and static scaling (yarn, pi) costs them quality. "
        "Read them with the plain checkpoint." + (f" To read longer texts too: {ways}." if ways else "")
    )


def to_take(applicable: Collection[str], *, most: int = 2) -> list[Recommendation]:
    """Return the first recommendations, of different methods, that begin with one that applies to a model."""
    first: dict[str, Recommendation] = {}
    for recommendation in RECOMMENDED:
        if {recommendation.methods[0], recommendation.beside or recommendation.methods[0]} <= {*applicable}:
            first.setdefault(recommendation.methods[0], recommendation)
    return list(first.values())[:most]
