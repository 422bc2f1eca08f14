"""A point of the referee: a model, a method, how it is called, and what is done to texts in progress.

By day a fixed set of points in which each pair of values meets at least once; at night points from fresh seeds.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests._models import RECENT
from tests.referee import truth
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
    "hierarchical_summary": ("hierarchical_summary", {"factor": 4, "window": 6}),
    "group": ("group", {"factor": 8}),
    "table pi": ("pi", {"factor": 8}),
    "bias pi": ("dynamic_pi", {"factor": 8, "growth": "request"}),
}
LIFTED: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn lifted": ("yarn", {"factor": 4, "sliding_window": "lift"}),
    "self_extend lifted": ("self_extend", {"factor": 4, "window": 16, "sliding_window": "lift"}),
}
FREQUENCIES = list(METHODS)[:8]
REMAPS = [name for name, (method, _) in METHODS.items() if method in (*truth.REMAPS, "retrieval_heads")]
METHODS |= LIFTED
UNWRITTEN = ("path", "fox", "t5_bias", "hierarchical_summary")
SCALABLE = {
    "none": [*METHODS],
    "replace": [name for name in FREQUENCIES + REMAPS if name != "string"],
    "extend": REMAPS,
}
"""Methods by the scaling of a checkpoint, which is left out, replaced by one that reaches as far, or extended."""
ROTARY = [*FREQUENCIES, *REMAPS, "alibi", *UNWRITTEN]
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
    "mistral": [*LIFTED],
    "qwen2_vl": [*FEW, "pi", "dynamic_pi request"],
    "gpt2": ["group", "table pi"],
    "bloom": ["alibi", "bias pi"],
}
"""Kinds of models, and the methods that each takes."""
AT_NIGHT = ("gpt_neox", "stablelm", "phi", "cohere", "glm4", "olmo2", "starcoder2")
"""Kinds that fresh seeds draw besides: rotations in part or in pairs, norms and biases elsewhere, parallel blocks."""

WINDOWED = ("gemma3_text", "gpt_oss", "mistral")

AXES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "method": tuple(METHODS),
    "rows": (1, 2, 3),
    "padding": ("none", "left", "right", "hole", "mostly left"),
    "positions": ("left out", "counted", "ones", "zeros", "slots"),
    "cache": ("given", "of the config", "of the plain config", "made", "static"),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "mode": ("no_grad", "inference", "grad"),
    "backend": ("cpu", "gpu"),
    "adapter": ("none", "before", "after", "merged"),
    "scaled": ("none", "replace", "extend"),
}
KINDS |= {kind: [*FEW, "pi", "rerope leaky"] for kind in AT_NIGHT}
OF_CACHES = {"read": 10, "step": 8, "crop": 6} | dict.fromkeys(("fill", "reorder", "fork", "empty"), 2)
OF_CACHES |= dict.fromkeys(("repeat", "select", "pickle"), 1)
OF_MODELS = dict.fromkeys(("packed", "train", "thread", "raise", "unpatch", "repatch", "other", "twin", "reload"), 1.0)
OF_MODELS |= dict.fromkeys(("config", "cast", "resize", "weights", "autocast"), 0.5)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "length_penalty": 0.0, "output_scores": True},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 7},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {},
    "no cache": {"use_cache": False},
    "embeds": {},
}
"""What generate() is told."""
SLOW = {"batches": 0.3, "compiled": 0.1}
OPERATIONS: dict[str, float] = {**OF_CACHES, "answer": 2, "whole": 2, **OF_MODELS, **SLOW}
OPERATIONS |= dict.fromkeys((f"generate {way}" for way in WAYS), 0.3)
"""What may be done, and how often."""
FORMULAS = ("llama", "qwen2", "qwen3")
NEEDS: dict[str, Callable[[Point], bool]] = {
    **dict.fromkeys(("crop", "repeat"), lambda point: point.cache != "static"),
    "reorder": lambda point: point.rows > 1,
    "select": lambda point: point.rows > 1 and point.cache != "static",
    # A graph that is kept knows the vocabulary of its time.
    **dict.fromkeys(("fork", "pickle", "twin", "resize"), lambda point: point.mode != "grad"),
    "unpatch": lambda point: point.kind in FORMULAS,
    "other": lambda point: point.kind in FORMULAS and point.scaled != "extend",  # by frequencies, too
    "train": lambda point: "float16" not in point.dtype and point.kind in FORMULAS and point.method not in UNWRITTEN,
    "packed": lambda point: point.kind not in ("gpt2", "bloom", "deepseek_v3", "qwen2_vl", *WINDOWED),
    "batches": lambda point: point.kind in ("llama", "qwen3") and point.dtype != "float16",
    "weights": lambda point: point.kind != "gpt2",  # its table has more rows
    # torch refuses float16 and static caches, and rounding chooses other experts.
    "autocast": lambda point: (
        point.dtype != "float16" and point.cache != "static" and point.kind not in ("mixtral", "gpt_oss", "deepseek_v3")
    ),
    # What stock models of older transformers are wrong by themselves after.
    **dict.fromkeys(("generate chunks", "generate assistant"), lambda point: RECENT),
    "empty": lambda point: RECENT or point.kind not in WINDOWED,
}
"""What an operation needs, where not all points have it."""
ALONE = ("train", "unpatch", "repatch", "other", "twin", "reload", "config", "cast", "resize", "weights")
"""Operations that no adapter takes."""


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
    scaled: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "operations", tuple(map(tuple, self.operations)))  # lists in a file

    @property
    def how(self) -> tuple[str, dict[str, Any]]:
        """Name and parameters of the method."""
        return METHODS[self.method]

    @property
    def is_dynamic(self) -> bool:
        """True if positions follow the length of a text."""
        return self.how[0].startswith("dynamic")

    @property
    def limit(self) -> int:
        """Tokens of a row that its method reaches, at most enough for a cache to drop some."""
        return min(int(self.how[1]["factor"] * L), 200) if self.method == "string" or "group" in self.method else 200

    @property
    def fits(self) -> bool:
        """Whether the values mean something together."""
        between, windows = self.padding in ("right", "hole"), self.kind in WINDOWED
        return (
            self.method in KINDS[self.kind]
            and (self.scaled == "none" or (self.kind in FORMULAS and self.method in SCALABLE[self.scaled]))
            and not (self.kind == "qwen2_vl" and self.positions != "counted")  # it counts others by the text before
            and not (between and (windows or self.positions in ("left out", "slots")))  # all of these count slots
            and not ("left" in self.padding and self.rows == 1)  # as long as the longest row is none
            and not (self.kind == "gpt2" and self.positions == "left out" and self.padding != "none")
            and not (self.positions == "slots" and (self.kind == "gpt2" or self.is_dynamic))
            and not ("float16" in self.dtype and self.kind not in ("llama", "qwen3", "gpt2"))
            and (RECENT or self.mode != "inference")  # stock caches of older transformers fail there
            and (self.adapter == "none" or (self.dtype == "float32" and self.kind in (*FORMULAS, "mixtral")))
        )

    @property
    def family(self) -> str:
        """What the cache of the method does: it drops keys, is fitted to a length, is turned, or nothing of these."""
        drops = self.how[0] in ("streaming", "retrieval_heads") and self.cache != "static"
        drops = drops and self.padding not in ("right", "hole")
        return "drops" if drops else "fits" if self.is_dynamic else "turns" if self.method in REMAPS else "keeps"

    def takes(self, operation: str) -> bool:
        """Return whether an operation does something."""
        alone = self.adapter == "none" or operation not in ALONE
        return alone and (operation not in NEEDS or NEEDS[operation](self))


WEIGHTS: dict[str, tuple[int, ...]] = {
    "dtype": (5, 4, 1, 1),
    "adapter": (9, 1, 1, 1),
    "scaled": (8, 1, 1),
    "kind": (6, 3, 2, 1, 1, 2, 2, 1, 1, 1, 1, 1) + (1,) * len(AT_NIGHT),
    "mode": (4, 1, 1),
    "padding": (6, 2, 2, 2, 1),
    "cache": (4, 2, 1, 1, 1),
}


def drawn(seed: int) -> Point:
    """Draw a point; half of them are without padding, and most in a dtype that shows small errors.

    Seeds below 0 draw the points of the day.
    """
    chance, axes = random.Random(seed), AXES if seed < 0 else AXES | {"kind": tuple(KINDS)}
    while True:
        values = {
            name: chance.choices(axis, WEIGHTS.get(name, ())[: len(axis)] or None)[0] for name, axis in axes.items()
        }
        values["method"] = chance.choice(KINDS[values["kind"]])
        names = chance.choices(list(OPERATIONS), list(OPERATIONS.values()), k=chance.randint(2, 9))
        point = Point(seed, tuple((name, chance.randrange(10**6)) for name in ["read", *names]), **values)
        if point.fits:
            return point


def covering(pool: int = 20_000, length: int = 4) -> list[Point]:
    """Return points in which each pair of values that fit together meets, and each operation most of what there is.

    Greedy: of the drawn points with the rarest pair that has not met yet, the one in which most pairs are new. What it
    does are the operations that meet most anew.
    """
    chance, drafts = random.Random(0), [drawn(-1 - number) for number in range(pool)]
    pairs = [frozenset(itertools.combinations([(name, getattr(point, name)) for name in AXES], 2)) for point in drafts]
    counts = Counter(pair for each in pairs for pair in each)
    missing = dict.fromkeys(sorted(counts, key=lambda pair: (counts[pair], pair)))
    points, met = list[Point](), set[Any]()
    while missing:
        rarest = next(iter(missing))
        best = max((at for at in range(pool) if rarest in pairs[at]), key=lambda at: len(missing.keys() & pairs[at]))
        for pair in pairs[best]:
            missing.pop(pair, None)
        point = drafts[best]
        usable = [name for name in OPERATIONS if name not in SLOW and point.takes(name)]
        names = ["fill" if point.family == "drops" or len(points) % 2 else "read"]
        for _ in range(length + 2 * (point.family == "drops")):
            new = {name: _meets(point, names[-1], name) - met for name in chance.sample(usable, len(usable))}
            names.append(max(new, key=lambda name: len(new[name])))
            met |= new[names[-1]]
        points.append(replace(point, operations=tuple((name, chance.randrange(10**6)) for name in names)))
    return points


def _meets(point: Point, before: str, name: str) -> set[Any]:
    """Return what an operation meets: the one before it, the method, and if it changes a cache, what a text has."""
    values = {(point.family, axis, getattr(point, axis), name) for axis in AXES if axis not in ("kind", "method")}
    met = {(before.split()[0], name.split()[0]), (point.family, name)} | (values if name in OF_CACHES else set())
    return met | {(value, name.split()[0]) for value in (point.method, point.kind)}


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
