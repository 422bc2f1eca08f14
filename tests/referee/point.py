"""A point of the referee: a model, a method, how it is called, and what is done to texts in progress.

By day a fixed set of points in which each pair of values meets at least once; at night points from fresh seeds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.referee.truth import L

SPLIT = {"factor": 4, "heads": [0, 3], "sinks": 4, "window": 20}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {"factor": 4}),
    "pi": ("pi", {"factor": 2}),
    "ntk": ("ntk", {"factor": 4}),
    "nope": ("nope", {"factor": 2}),
    "dynamic_ntk": ("dynamic_ntk", {"factor": 2}),
    "dynamic_yarn doubling": ("dynamic_yarn", {"factor": 8, "growth": "doubling"}),
    "dynamic_ntk request": ("dynamic_ntk", {"factor": 2, "growth": "request"}),
    "dynamic_pi request": ("dynamic_pi", {"factor": 8, "growth": "request"}),
    "self_extend": ("self_extend", {"factor": 4, "window": 16}),
    "self_extend x8 not exact": ("self_extend", {"factor": 8, "window": 8, "exact": False, "temperature": "yarn"}),
    "self_extend logn": ("self_extend", {"factor": 4, "window": 16, "temperature": "logn"}),
    "rerope": ("rerope", {"factor": 4, "window": 12, "exact": False}),
    "rerope leaky": ("rerope", {"factor": 4, "window": 16, "leak": 0.1}),
    "dual_chunk": ("dual_chunk", {"factor": 4, "chunk": 24, "local": 4}),
    "dual_chunk growing": ("dual_chunk", {"factor": 4, "chunk": 20, "local": 2, "temperature": "growing"}),
    "string": ("string", {"factor": 1.75, "shift": 28, "local": 4}),
    "dpe": ("dpe", {"factor": 4, "window": 8, "groups": [1, 2, 3, 8, 8, 4, 2, 1]}),
    "streaming": ("streaming", {"factor": 4, "sinks": 4, "window": 20}),
    "streaming exact": ("streaming", {"factor": 4, "sinks": 1, "window": 10, "exact": True}),
    "retrieval_heads": ("retrieval_heads", SPLIT),
    "retrieval_heads yarn": ("retrieval_heads", SPLIT | {"temperature": "yarn"}),
    "retrieval_heads dual_chunk": ("retrieval_heads", SPLIT | {"far": "dual_chunk", "chunk": 24, "local": 4}),
    "retrieval_heads not exact": ("retrieval_heads", SPLIT | {"exact": False, "heads": [1, 2]}),
    "alibi": ("alibi", {"factor": 4}),
    "path": ("path", {"factor": 4}),
    "fox": ("fox", {"factor": 4}),
    "t5_bias": ("t5_bias", {"factor": 4}),
    "group": ("group", {"factor": 8}),
    "table pi": ("pi", {"factor": 8}),
    "bias pi": ("dynamic_pi", {"factor": 8, "growth": "request"}),
}
FREQUENCIES = list(METHODS)[:8]
REMAPS = [
    name
    for name in METHODS
    if METHODS[name][0] in ["self_extend", "rerope", "dual_chunk", "string", "dpe", "streaming", "retrieval_heads"]
]
ROTARY = [*FREQUENCIES, *REMAPS, "alibi", "path", "fox", "t5_bias"]
FEW = ["yarn", "dynamic_ntk", "self_extend", "dual_chunk", "streaming", "retrieval_heads"]
KINDS: dict[str, list[str]] = {
    "llama": ROTARY,
    "qwen3": ROTARY,
    "qwen2": FREQUENCIES + REMAPS,
    "mixtral": [*FEW, "retrieval_heads yarn", "alibi"],
    "glm": [*FEW, "rerope leaky"],
    "gemma3_text": FEW,
    "deepseek_v3": ["yarn", "dynamic_ntk", "self_extend", "dual_chunk", "streaming"],
    "gpt_oss": ["self_extend", "dual_chunk", "streaming", "retrieval_heads not exact"],
    "gpt2": ["group", "table pi"],
    "bloom": ["alibi", "bias pi"],
}
"""Kinds of models, and the methods that each takes."""

AXES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "method": tuple(METHODS),
    "rows": (1, 2, 3),
    "padding": ("none", "left", "right", "hole"),
    "positions": ("left out", "counted", "ones", "zeros", "slots"),
    "cache": ("given", "of the config", "made", "static"),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "mode": ("no_grad", "inference", "grad"),
    "backend": ("cpu", "gpu"),
    "adapter": ("none", "before", "after", "merged"),
}
OPERATIONS = {
    "read": 10,
    "step": 8,
    "answer": 2,
    "crop": 6,
    "generate": 3,
    "reorder": 2,
    "repeat": 1,
    "select": 1,
    "fork": 2,
    "pickle": 1,
    "empty": 2,
    "whole": 2,
    "packed": 1,
    "train": 1,
    "thread": 1,
    "raise": 1,
    "unpatch": 1,
    "repatch": 1,
    "other": 1,
    "twin": 1,
    "reload": 1,
    "batches": 0.3,
    "compiled": 0.1,
}
"""What may be done, and how often."""
SLOW = ("batches", "compiled")


@dataclass(frozen=True)
class Point:
    """One walk; ``operations`` are names, each with the seed of what it draws."""

    seed: int
    operations: tuple[tuple[str, int], ...]
    kind: str = "llama"
    method: str = "yarn"
    rows: int = 1
    padding: str = "none"
    positions: str = "counted"
    cache: str = "given"
    dtype: str = "float64"
    mode: str = "no_grad"
    backend: str = "cpu"
    adapter: str = "none"

    @property
    def how(self) -> tuple[str, dict[str, Any]]:
        """Name and parameters of the method."""
        return METHODS[self.method]

    @property
    def is_dynamic(self) -> bool:
        """True if positions follow the length of a text."""
        return self.how[0].startswith("dynamic")

    @property
    def by_request(self) -> bool:
        """True if the length of a text is declared."""
        return self.how[1].get("growth") == "request"

    @property
    def limit(self) -> int:
        """Tokens of a row that its method reaches, at most enough for a cache to drop some."""
        return min(int(self.how[1]["factor"] * L), 150) if self.method == "string" or "group" in self.method else 150

    @property
    def fits(self) -> bool:
        """Whether the values mean something together."""
        counts = (
            self.positions != "left out" or self.padding == "none" or (self.padding == "left" and self.kind != "gpt2")
        )
        slots = self.positions != "slots" or (
            self.padding in ("none", "left") and self.kind != "gpt2" and not self.is_dynamic
        )
        plain = self.adapter == "none" or (
            self.kind in ("llama", "qwen3", "qwen2", "mixtral") and self.dtype == "float32"
        )
        narrow = self.dtype not in ("float16", "bfloat16") or self.kind in ("llama", "qwen3", "gpt2")
        windows = self.padding in ("none", "left") or self.kind not in ("gemma3_text", "gpt_oss")  # which count slots
        return windows and self.method in KINDS[self.kind] and counts and slots and plain and narrow

    def to_dict(self) -> dict[str, Any]:
        """Return what a file keeps."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Point:
        return cls(**saved | {"operations": tuple((name, seed) for name, seed in saved["operations"])})


def drawn(seed: int) -> Point:
    """Draw a point; half of them are without padding, and most in a dtype that shows small errors."""
    chance = random.Random(seed)
    weights = {
        "dtype": (5, 4, 1, 1),
        "adapter": (9, 1, 1, 1),
        "kind": (6, 3, 2, 1, 1, 2, 2, 1, 1, 1),
        "mode": (4, 1, 1),
    }
    weights |= {"padding": (3, 1, 1, 1), "backend": (1, 1), "cache": (4, 2, 1, 1)}
    while True:
        values = {name: chance.choices(axis, weights.get(name))[0] for name, axis in AXES.items()}
        values["method"] = chance.choice(KINDS[values["kind"]])
        names = chance.choices(list(OPERATIONS), list(OPERATIONS.values()), k=chance.randint(2, 9))
        point = Point(seed, tuple((name, chance.randrange(10**6)) for name in ["read", *names]), **values)
        if point.fits:
            return point


def covering(seed: int = 0, tries: int = 60) -> list[Point]:
    """Return points in which each pair of values that fit together meets, and each two operations follow one another.

    Greedy: each point is the one of several drawn ones in which most pairs are new.
    """
    chance = random.Random(seed)
    missing, points = set(_pairs_that_fit()), list[Point]()
    while missing:
        wanted = sorted(missing)
        best = max((_draft(chance, wanted) for _ in range(tries)), key=lambda point: len(missing & {*_pairs_in(point)}))
        missing -= set(_pairs_in(best))
        points.append(best)
    names = _all_pairs([name for name in OPERATIONS if name not in SLOW])
    size = -(-len(names) // len(points))
    return [
        replace(
            point, operations=tuple((name, chance.randrange(10**6)) for name in ["read", *names[at : at + size + 1]])
        )
        for point, at in zip(points, itertools.count(0, size), strict=False)
    ]


def _all_pairs(names: list[str]) -> list[str]:
    """Return a sequence in which each name follows each, itself too, once: a walk over all edges of their graph."""
    left = {name: list(names) for name in names}
    path, sequence = [names[0]], list[str]()
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            sequence.append(path.pop())
    return sequence[::-1]


def _draft(chance: random.Random, missing: list[Any]) -> Point:
    """Draw the values of a point that has one of the missing pairs, in a dtype that shows small errors if it may."""
    while True:
        values = {name: chance.choice(axis) for name, axis in AXES.items()}
        values["dtype"] = chance.choice(("float64", "float32", values["dtype"]))
        values["adapter"] = chance.choice(("none", "none", values["adapter"]))
        point = Point(chance.randrange(10**6), (), **values | dict(chance.choice(missing)))
        if point.fits:
            return point


def _pairs_in(point: Point) -> Iterator[Any]:
    yield from itertools.combinations([(name, getattr(point, name)) for name in AXES], 2)


def _pairs_that_fit() -> Iterator[Any]:
    """Pairs of values that some point has: of 40,000 drawn ones, which is all that occur more than once in a night."""
    for seed in range(40_000):
        yield from _pairs_in(drawn_values(seed))


def drawn_values(seed: int) -> Point:
    """Draw the values of a point without its operations."""
    chance = random.Random(-seed - 1)
    while True:
        values = {name: chance.choice(axis) for name, axis in AXES.items()}
        values["method"] = chance.choice(KINDS[values["kind"]])
        point = Point(seed, (), **values)
        if point.fits:
            return point


def shrunk(point: Point, fails: Callable[[Point], bool]) -> Point:
    """Return a point that still fails with as few operations and as many default values as possible."""
    changed = True
    while changed:
        changed = False
        for at in range(len(point.operations) - 1, -1, -1):
            fewer = replace(point, operations=point.operations[:at] + point.operations[at + 1 :])
            if fewer.operations and fails(fewer):
                point, changed = fewer, True
        for name in AXES:
            usual = replace(point, **{name: Point.__dataclass_fields__[name].default})
            if usual != point and usual.fits and fails(usual):
                point, changed = usual, True
    return point
