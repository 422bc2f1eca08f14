"""What each method refuses: values that it cannot have, and models, texts and targets that it does not fit.

Values of a wrong type, and numbers that no parameter takes, are those of ``tests/methods/test_parameters.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.methods import known_methods
from ctxext.spec import RopeSpec
from tests._remap import ROPE

SHORT, LONG = (1.0, 1.0, 1.05, 1.1), (1.0, 2.0, 3.5, 6.0)
GIVEN: dict[str, dict[str, Any]] = {
    "longrope": {"short_factor": SHORT, "long_factor": LONG},
    "table": {"inv_freq": (1.0, 0.5)},
}
ALPHA = r"alpha must be (a finite number, above 0 and below 1|other than 0\.5)"
CLIP = "clip must be 'auto', or a whole number of pairs, at least 2, or None, found"
VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("abf", {"base": 1}, "base must be a finite number, above 1, or None, found"),
    ("alibi", {"bias": "rounded"}, "bias must be 'exact' or 'stock', found"),
    ("alibi", {"both_ways": "left"}, "both_ways must be 'symmetric' or 'halves', found 'left'"),
    ("cope", {"places": 1}, "places must be a whole number from 2 to 65,536"),
    ("dpe", {"groups": (2, 0)}, r"groups\[1\] must be a whole number of tokens"),
    ("dpe", {"groups": "llama-3-8B"}, r"llama-3-8B.*Did you mean 'llama-3-8b'"),
    ("dynamic_ntk", {"reach": 0.5}, "reach must be a finite number, at least 1, or None, found"),
    ("dynamic_yarn", {"beta_fast": 0.5}, "beta_fast must be "),
    ("fire", {"width": 0}, "width must be (a|above)"),
    *(("hierarchical", {"alpha": bad}, ALPHA) for bad in (0, 1, 0.5, -0.1)),
    ("llama3", {"high_freq_factor": 1}, r"high_freq_factor must be above low_freq_factor \(1\.0\)"),
    ("longrope", {"short_factor": (1, 0, 1, 1)}, r"short_factor\[1\] must be a finite number, above 0, found 0"),
    ("longrope", {"short_factor": ()}, "short_factor must be a list such as"),
    ("longrope", {"long_factor": (1.0, 2.0)}, r"long_factor must be as long as short_factor \(4 numbers\)"),
    ("longrope", {"attention_factor": 0}, "attention_factor must be a finite number, above 0, or None, found 0"),
    ("nope", {"sharpening": -0.1}, "sharpening must be a finite number, at least 0, found"),
    *(("ntk", {"clip": bad}, f"{CLIP} {bad!r}") for bad in (1, 2.5, "all")),
    ("ntk_by_parts", {"alpha": 0}, r"alpha must be a finite number, above 0, found 0"),
    ("ntk_by_parts", {"beta": 1}, r"beta must be above alpha \(1\.0\), found 1\.0"),
    ("path", {"rank": 0}, "rank must be (a|above)"),
    *(("path", {"strength": bad}, "strength must be (a|above)") for bad in (2.0, 0)),
    ("rerope", {"leak": 1.0}, "leak must be a finite number, at least 0 and below 1"),
    ("retrieval_heads", {"heads": [1, 1]}, r"heads must be different numbers of groups, found \(1, 1\)"),
    ("retrieval_heads", {"heads": [-1]}, r"heads\[0\] must be a whole number, at least 0, found -1"),
    ("retrieval_heads", {"heads": "a.txt"}, "heads must be a list of numbers of groups, or the path of a .json file"),
    *(
        ("retrieval_heads", {"heads": [1], other: 0.2}, f"{other} must be left out where heads lists the groups")
        for other in ("share", "threshold")
    ),
    ("retrieval_heads", {"share": 0.2, "threshold": 0.2}, "share must be left out where threshold is given"),
    ("retrieval_heads", {"share": 0.0}, "share must be a finite number, above 0 and at most 1"),
    ("retrieval_heads", {"leak": 0.5}, "leak must be left out unless far is rerope"),
    (
        "retrieval_heads",
        {"far": "dual_chunk", "far_window": 8},
        "far_window must be left out unless far is .* or rerope",
    ),
    ("retrieval_heads", {"far": "plain", "exact": False}, "factor must be 1 with far='plain'"),
    ("retrieval_heads", {"far": "plain", "factor": 1.0}, "exact must be False with far='plain'"),
    ("retrieval_heads", {"sinks": 0}, "sinks must be a whole number"),
    *(("sandwich", {"dimensions": bad}, "dimensions must be an even number") for bad in (0, 7, 8.0)),
    ("self_extend", {"group": 4, "reach": 32}, "reach must be left out where group is given"),
    ("self_extend", {"group": 0}, "group must be a whole number"),
    ("shaw", {"clip": 0}, "clip must be a whole number of tokens from 1 to 65,536"),
    ("sinusoidal", {"base": 1.0}, "base must be a finite number"),
    ("sinusoidal", {"amplitude": 0.0}, "amplitude must be a finite number"),
    ("streaming", {"sinks": 0}, "sinks must be a whole number"),
    ("stretch", {"keep": 2.0}, "keep must be a whole number of rows, at least 0, found"),
    ("t5_bias", {"buckets": 1}, "buckets must be (a|above)"),
    ("t5_bias", {"max_distance": 16}, "max_distance must be (a|above)"),
    ("table", {"inv_freq": (1.0, -0.5)}, r"inv_freq\[1\] must be a finite number, at least 0, found -0\.5"),
    ("yarn", {"beta_slow": 0}, "beta_slow must be a finite number, above 0, found 0"),
    ("yarn", {"beta_fast": 1}, r"beta_fast must be above beta_slow \(1\.0\), found 1"),
    ("yarn", {"ramp": "linear"}, "ramp must be 'index' or 'turns', found 'linear'"),
    ("yarn", {"attention_factor": 0}, "attention_factor must be a finite number, above 0, or None, found 0"),
    ("yarn", {"mscale": 1.0}, r"mscale_all_dim must be given with mscale \(1\.0\) or not at all, found None"),
    ("yarn", {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1}, "attention_factor must be None when mscale"),
    ("yarn", {"divisor": 0.5}, r"divisor must be a finite number, at least 1, or None"),
]


def of(name: str, parameters: dict[str, Any]) -> Any:
    """A method by 2, unless its parameters say something else."""
    return known_methods()[name](**{"factor": 2} | GIVEN.get(name, {}) | parameters)


@pytest.mark.parametrize(("name", "parameters", "said"), VALUES, ids=str)
def test_values_that_it_cannot_have(name: str, parameters: dict[str, Any], said: str) -> None:
    error: type[Exception] = UnknownNameError if "Did you mean" in said else InvalidParameterError
    with pytest.raises(error, match=said):
        of(name, parameters)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("dpe", {"groups": (2, 2, 2), "window": 8}, "groups must be as many as rotated pairs of dimensions, 4"),
        # vLLM's chunk was never trained.
        ("dual_chunk", {"chunk": 64}, "chunk must be from 1 to 63 tokens"),
        ("dual_chunk", {"chunk": 20, "local": 10}, "local must be below half of chunk=20 tokens, found 10"),
        ("rerope", {"window": 64}, "window must be from 1 to 63 tokens"),
        ("rerope", {"window": 32, "leak": 0.5}, "reaches 95 tokens, found a target of 128.* of at most 0.326316"),
        *(
            ("retrieval_heads", {"heads": (0,), "window": 8, "far_window": 32} | parameters, said)
            for parameters, said in (
                ({"far_window": 64}, "^far_window must be from 1 to 63 tokens"),
                ({"far": "rerope", "far_window": 64}, "^far_window must be from 1 to 63 tokens"),
                ({"reach": 16}, "^reach must be at least far_window=32"),
                ({"group": 2}, "^Method 'retrieval_heads' with .* Take group=4"),
                (
                    {"far": "rerope", "leak": 0.5},
                    "^Method 'retrieval_heads' with .* Take a smaller far_window, or a leak",
                ),
            )
        ),
        ("self_extend", {"window": 65}, "window must be from 1 to 63 tokens"),
        ("self_extend", {"window": 1.5}, "window must be from 1 to 63 tokens"),
        ("self_extend", {"window": 32, "reach": 64}, "reach must be from 1 to 63 tokens"),
        ("self_extend", {"window": 32, "reach": 16}, "reach must be at least window=32"),
        ("self_extend", {"window": 32, "group": 2}, r"reaches 96 tokens, found a target of 128.*group=4"),
        ("string", {"factor": 2.0, "local": 4}, "reaches 124 tokens, found a target of 128.*at most 64"),
        ("string", {"factor": 1.5, "shift": 30, "local": 4}, "reaches 90 tokens, found a target of 96"),
        ("string", {"factor": 1.0, "shift": 8, "local": 8}, "local must be below shift=8 tokens"),
        ("string", {"factor": 1.0, "shift": 65, "local": 8}, "shift must be from 1 to 64 tokens"),
        ("streaming", {"window": 61}, "window must be from 1 to 60 tokens"),
        ("streaming", {"sinks": 64}, "sinks must be below the trained length of 64"),
    ],
    ids=str,
)
def test_positions_that_the_model_was_not_trained_on(name: str, parameters: dict[str, Any], said: str) -> None:
    method = of(name, parameters)
    with pytest.raises(InvalidParameterError, match=said):
        method.pieces(ROPE, method.target_length(ROPE.trained_length))


def test_a_window_leaves_room_for_the_sinks() -> None:
    with pytest.raises(InvalidParameterError, match="window must be from 1 to 60 tokens"):
        of("retrieval_heads", {"factor": 4, "heads": (0,), "window": 61}).exact_length(ROPE)


PAIR = RopeSpec(rotary_dim=2, base=1e4, trained_length=64)
LARGE = RopeSpec(rotary_dim=128, base=1e4, trained_length=4096)
UNTURNED = RopeSpec(rotary_dim=8, base=1e4, trained_length=4096, inv_freq=(0.0,) * 4)
"""As a scaling by a factor without measure leaves them."""


@pytest.mark.parametrize(
    ("name", "parameters", "rope", "said"),
    [
        ("abf", {"factor": 4}, RopeSpec(8, 1e4, 6), "trained_length must be above 2 pi, or base be given, found 6"),
        ("abf", {"factor": 1e6}, RopeSpec(64, 5e5, 8), "factor must be smaller, or base be given"),
        ("abf", {"factor": 1e6, "clip": "auto"}, RopeSpec(64, 1e7, 8), "factor must be smaller, or base be given"),
        ("abf", {"factor": 1e6}, RopeSpec(4, 5e5, 4096, inv_freq=(1.0, 2e-3)), "factor must be smaller, or base"),
        *(
            ("abf", {}, RopeSpec(4, 1e4, 64, inv_freq=trained), "more than a turn of the first pair, or base given")
            for trained in ((0.17, 0.0), (0.05, 1e-4), (0.05, 0.0))
        ),
        ("dynamic_ntk", {}, PAIR, r"rotary_dim must be above 2 .* found 2"),
        ("dynamic_yarn", {}, UNTURNED, "no pair of dimensions turns"),
        ("abf", {"base": 1e4}, RopeSpec(128, 5e5, 8192), r"at least the model's own \(500000\.0\), found 1"),
        ("longrope", {}, LARGE, r"the length of long_factor must be 64 \(rotary_dim / 2\), found 4"),
        ("longrope", {}, RopeSpec(8, 1e4, 1), "trained_length must be above 1 unless attention_factor is set"),
        ("ntk", {}, PAIR, r"rotary_dim must be above 2 .* found 2"),
        ("ntk", {"clip": 17}, RopeSpec(32, 1e4, 4096), r"clip must be at most 16 pairs .rotary_dim / 2., found 17"),
        ("table", {}, LARGE, r"the length of inv_freq must be 64 \(rotary_dim / 2\), found 2"),
        ("yarn", {}, UNTURNED, "no pair of dimensions turns"),
        ("yarn", {"clip": "auto"}, RopeSpec(32, 100.0, 4096), "fewer than two turn less than once in the trained"),
    ],
    ids=str,
)
def test_frequencies_of_models_that_it_does_not_fit(
    name: str, parameters: dict[str, Any], rope: RopeSpec, said: str
) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        of(name, parameters).frequencies(rope, 2 * rope.trained_length)


def test_rows_that_a_table_does_not_have() -> None:
    with pytest.raises(InvalidParameterError, match="reaches 64 positions with two digits of 8 learned rows, found a"):
        of("hierarchical", {"factor": 9}).rows(8, 65)
    with pytest.raises(InvalidParameterError, match="keep=20 leaves less than two of the 16 learned rows to"):
        of("stretch", {}).rows(16, 32)
