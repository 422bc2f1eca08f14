"""What each method refuses: values that it cannot have, and models, texts and targets that it does not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.laboratory.encodings.cope import CoPE
from ctxext.laboratory.encodings.fire import FIRE
from ctxext.laboratory.encodings.path import PaTH
from ctxext.laboratory.encodings.sandwich import Sandwich
from ctxext.laboratory.encodings.shaw import Shaw
from ctxext.laboratory.encodings.sinusoidal import Sinusoidal
from ctxext.laboratory.encodings.t5_bias import T5Bias
from ctxext.methods import Method, RopeMethod
from ctxext.methods.abf import ABF
from ctxext.methods.alibi import ALiBi
from ctxext.methods.dpe import DPE
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.dynamic_ntk import DynamicNTK
from ctxext.methods.dynamic_yarn import DynamicYaRN
from ctxext.methods.hierarchical import Hierarchical
from ctxext.methods.llama3 import Llama3
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.nope import NoPE
from ctxext.methods.ntk import NTK
from ctxext.methods.ntk_by_parts import NTKByParts
from ctxext.methods.remap import RemapMethod
from ctxext.methods.rerope import ReRoPE
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.methods.stretch import Stretch
from ctxext.methods.string import STRING
from ctxext.methods.table import Table
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec
from tests._remap import ROPE

SHORT, LONG = (1.0, 1.0, 1.05, 1.1), (1.0, 2.0, 3.5, 6.0)
GIVEN: dict[type[Method], dict[str, Any]] = {
    LongRoPE: {"short_factor": SHORT, "long_factor": LONG},
    Table: {"inv_freq": (1.0, 0.5)},
}
ALPHA = r"alpha must be (a finite number, above 0 and below 1|other than 0\.5)"
CLIP = "clip must be 'auto', or a whole number of pairs, at least 2, or None, found"
VALUES: list[tuple[type[Method], dict[str, Any], str]] = [
    *(
        (ABF, {"base": bad}, "base must be a finite number, above 1, or None, found")
        for bad in (1, math.nan, "1", True)
    ),
    *((ALiBi, {"bias": bad}, "bias must be 'exact' or 'stock', found") for bad in ("rounded", None, True)),
    *((CoPE, {"places": bad}, "places must be a whole number from 2 to 65,536") for bad in (1, 2.5)),
    (DPE, {"groups": (2, 0)}, r"groups\[1\] must be a whole number of tokens"),
    (DPE, {"groups": "llama-3-8B"}, r"llama-3-8B.*Did you mean 'llama-3-8b'"),
    *(
        (DynamicNTK, {"reach": bad}, "reach must be a finite number, at least 1, or None, found")
        for bad in (0.5, math.nan, "8", True)
    ),
    (DynamicYaRN, {"beta_fast": 0.5}, "beta_fast must be "),
    (DynamicYaRN, {"beta_slow": "1"}, "beta_slow must be "),
    (DynamicYaRN, {"ramp": "linear"}, "ramp must be "),
    *((FIRE, {"width": bad}, "width must be (a|above)") for bad in (0, 2.5)),
    (FIRE, {"threshold": -1}, "threshold must be (a|above)"),
    *((Hierarchical, {"alpha": bad}, ALPHA) for bad in (0, 1, 0.5, -0.1, "0.4", True, None)),
    (Llama3, {"low_freq_factor": -1}, r"low_freq_factor must be a finite number, above 0, found -1"),
    (Llama3, {"high_freq_factor": 1}, r"high_freq_factor must be above low_freq_factor \(1\.0\)"),
    (Llama3, {"high_freq_factor": True}, "high_freq_factor must be a finite number, .* found True"),
    (LongRoPE, {"short_factor": (1, 0, 1, 1)}, r"short_factor\[1\] must be a finite number, above 0, found 0"),
    (LongRoPE, {"long_factor": (1, math.nan, 1, 1)}, r"long_factor\[1\] must be a finite number, above 0, found nan"),
    (LongRoPE, {"long_factor": ("1", 1, 1, 1)}, r"long_factor\[0\] must be a finite number, above 0, found '1'"),
    (LongRoPE, {"long_factor": 4.0}, r"long_factor must be a list such as .* found 4\.0"),
    (LongRoPE, {"short_factor": ()}, "short_factor must be a list such as"),
    (LongRoPE, {"long_factor": (1.0, 2.0)}, r"long_factor must be as long as short_factor \(4 numbers\)"),
    (LongRoPE, {"attention_factor": 0}, "attention_factor must be a finite number, above 0, or None, found 0"),
    *(
        (NoPE, {"sharpening": bad}, "sharpening must be a finite number, at least 0, found")
        for bad in (-0.1, math.nan, "0.1", None, True)
    ),
    *((NTK, {"clip": bad}, f"{CLIP} {bad!r}") for bad in (1, 2.5, "all")),
    (NTKByParts, {"alpha": 0}, r"alpha must be a finite number, above 0, found 0"),
    (NTKByParts, {"alpha": "1"}, "alpha must be a finite number, above 0, found '1'"),
    (NTKByParts, {"beta": 1}, r"beta must be above alpha \(1\.0\), found 1\.0"),
    (NTKByParts, {"beta": math.inf}, "beta must be a finite number"),
    (PaTH, {"rank": 0}, "rank must be (a|above)"),
    *((PaTH, {"strength": bad}, "strength must be (a|above)") for bad in (2.0, 0)),
    (ReRoPE, {"leak": 1.0}, "leak must be a finite number, at least 0 and below 1"),
    (RetrievalHeads, {"heads": [1, 1]}, r"heads must be different numbers of groups, found \(1, 1\)"),
    (RetrievalHeads, {"heads": [-1]}, r"heads\[0\] must be a whole number, at least 0, found -1"),
    (RetrievalHeads, {"heads": "scores.txt"}, "heads must be a list of numbers of groups, or the path of a .json file"),
    (RetrievalHeads, {"heads": [1], "share": 0.2}, "share must be left out where heads lists the groups"),
    (RetrievalHeads, {"heads": [1], "threshold": 0.2}, "threshold must be left out where heads lists the groups"),
    (RetrievalHeads, {"share": 0.2, "threshold": 0.2}, "share must be left out where threshold is given"),
    (RetrievalHeads, {"share": 0.0}, "share must be a finite number, above 0 and at most 1"),
    (RetrievalHeads, {"leak": 0.5}, "leak must be left out unless far is rerope"),
    (RetrievalHeads, {"far": "dual_chunk", "far_window": 8}, "far_window must be left out unless far is .* or rerope"),
    (RetrievalHeads, {"far": "plain", "exact": False}, "factor must be 1 with far='plain'"),
    (RetrievalHeads, {"far": "plain", "factor": 1.0}, "exact must be False with far='plain'"),
    (RetrievalHeads, {"sinks": 0}, "sinks must be a whole number"),
    *((Sandwich, {"dimensions": bad}, "dimensions must be an even number") for bad in (0, 7, 8.0)),
    (SelfExtend, {"group": 4, "reach": 32}, "reach must be left out where group is given"),
    (SelfExtend, {"group": 0}, "group must be a whole number"),
    (SelfExtend, {"thinning": -1}, "thinning must be a finite number from 0 to 1, or None, found -1"),
    (SelfExtend, {"sinks": 1.5}, r"sinks must be a whole number of tokens, at least 0, found 1\.5"),
    (Shaw, {"clip": 0}, "clip must be a whole number of tokens from 1 to 65,536"),
    (Sinusoidal, {"base": 1.0}, "base must be a finite number"),
    *((Sinusoidal, {"amplitude": bad}, "amplitude must be a finite number") for bad in (0.0, "1")),
    (Streaming, {"sinks": 0}, "sinks must be a whole number"),
    *(
        (Stretch, {"keep": bad}, "keep must be a whole number of rows, at least 0, found")
        for bad in (-1, 2.0, "20", True, None)
    ),
    *((T5Bias, {"buckets": bad}, "buckets must be (a|above)") for bad in (1, 3.5)),
    *((T5Bias, {"max_distance": bad}, "max_distance must be (a|above)") for bad in (16, "128")),
    (Table, {"inv_freq": (1.0, math.inf)}, r"inv_freq\[1\] must be a finite number, at least 0, found inf"),
    (Table, {"inv_freq": (1.0, -0.5)}, r"inv_freq\[1\] must be a finite number, at least 0, found -0\.5"),
    (Table, {"inv_freq": "1.0"}, r"inv_freq must be a list such as .* found '1\.0'"),
    *(
        (Table, {"attention_scale": bad}, f"attention_scale must be a finite number, above 0, found {bad}")
        for bad in (math.nan, None)
    ),
    (YaRN, {"beta_slow": 0}, "beta_slow must be a finite number, above 0, found 0"),
    (YaRN, {"beta_fast": 1}, r"beta_fast must be above beta_slow \(1\.0\), found 1"),
    (YaRN, {"beta_fast": "32"}, "beta_fast must be a finite number, .* found '32'"),
    (YaRN, {"truncate": 1}, "truncate must be True or False, found 1"),
    (YaRN, {"ramp": "linear"}, "ramp must be 'index' or 'turns', found 'linear'"),
    (YaRN, {"blend": "period"}, "blend must be 'frequency' or 'wavelength', found 'period'"),
    *(
        (YaRN, {"attention_factor": bad}, f"attention_factor must be a finite number, above 0, or None, found {bad}")
        for bad in (0, True)
    ),
    (YaRN, {"mscale": 1.0}, r"mscale_all_dim must be given with mscale \(1\.0\) or not at all, found None"),
    (YaRN, {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1}, "attention_factor must be None when mscale"),
    (YaRN, {"divisor": 0.5}, r"divisor must be a finite number, at least 1, or None"),
]


@pytest.mark.parametrize(("cls", "parameters", "said"), VALUES, ids=lambda given: getattr(given, "name", str(given)))
def test_values_that_it_cannot_have(cls: type[Method], parameters: dict[str, Any], said: str) -> None:
    error: type[Exception] = UnknownNameError if "Did you mean" in said else InvalidParameterError
    with pytest.raises(error, match=said):
        cls(**{"factor": 4} | GIVEN.get(cls, {}) | parameters)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (DPE(factor=2, groups=(2, 2, 2), window=8), "groups must be as many as rotated pairs of dimensions, 4,"),
        (DualChunk(factor=2, chunk=64), "chunk must be from 1 to 63 tokens"),  # vLLM's, which was never trained
        (DualChunk(factor=2, chunk=20, local=10), "local must be below half of chunk=20 tokens, found 10"),
        (ReRoPE(factor=2, window=64), "window must be from 1 to 63 tokens"),
        (ReRoPE(factor=2, window=32, leak=0.5), "reaches 95 tokens, found a target of 128.* of at most 0.326316"),
        (RetrievalHeads(factor=4, heads=(0,), window=61), "window must be from 1 to 60 tokens"),  # beside the sinks
        (SelfExtend(factor=2, window=65), "window must be from 1 to 63 tokens"),
        (SelfExtend(factor=2, window=1.5), "window must be from 1 to 63 tokens"),
        (SelfExtend(factor=2, window=32, reach=64), "reach must be from 1 to 63 tokens"),
        (SelfExtend(factor=2, window=32, reach=16), "reach must be at least window=32"),
        (SelfExtend(factor=2, window=32, group=2), r"reaches 96 tokens, found a target of 128.*group=4"),
        (STRING(factor=2.0, local=4), "reaches 124 tokens, found a target of 128.*at most 64"),
        (STRING(factor=1.5, shift=30, local=4), "reaches 90 tokens, found a target of 96"),
        (STRING(factor=1.0, shift=8, local=8), "local must be below shift=8 tokens"),
        (STRING(factor=1.0, shift=65, local=8), "shift must be from 1 to 64 tokens"),
        (Streaming(factor=2, window=61), "window must be from 1 to 60 tokens"),
        (Streaming(factor=2, sinks=64), "sinks must be below the trained length of 64"),
    ],
    ids=str,
)
def test_positions_that_the_model_was_not_trained_on(method: RemapMethod, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        method.exact_length(ROPE) if isinstance(method, RetrievalHeads) else method.pieces(
            ROPE, method.target_length(ROPE.trained_length)
        )


PAIR = RopeSpec(rotary_dim=2, base=1e4, trained_length=64)
LARGE = RopeSpec(rotary_dim=128, base=1e4, trained_length=4096)
UNTURNED = RopeSpec(rotary_dim=8, base=1e4, trained_length=4096, inv_freq=(0.0,) * 4)
"""As a scaling by a factor without measure leaves them."""


@pytest.mark.parametrize(
    ("method", "rope", "said"),
    [
        (ABF(factor=4), RopeSpec(8, 1e4, 6), "trained_length must be above 2 pi, or base be given, found 6"),
        (DynamicNTK(factor=2), PAIR, r"rotary_dim must be above 2 .* found 2"),
        (DynamicYaRN(factor=2), UNTURNED, "no pair of dimensions turns"),
        (LongRoPE(**GIVEN[LongRoPE]), LARGE, r"the length of long_factor must be 64 \(rotary_dim / 2\), found 4"),
        (
            LongRoPE(factor=2, **GIVEN[LongRoPE]),
            RopeSpec(8, 1e4, 1),
            "trained_length must be above 1 unless attention_factor is set",
        ),
        (NTK(factor=2), PAIR, r"rotary_dim must be above 2 .* found 2"),
        (NTK(factor=4, clip=17), RopeSpec(32, 1e4, 4096), r"clip must be at most 16 pairs .rotary_dim / 2., found 17"),
        (Table(**GIVEN[Table]), LARGE, r"the length of inv_freq must be 64 \(rotary_dim / 2\), found 2"),
        (YaRN(factor=2), UNTURNED, "no pair of dimensions turns"),
        (YaRN(factor=2, clip="auto"), RopeSpec(32, 100.0, 4096), "fewer than two turn less than once in the trained"),
    ],
    ids=lambda given: getattr(given, "name", str(given)[:20]),
)
def test_frequencies_of_models_that_it_does_not_fit(method: RopeMethod, rope: RopeSpec, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        method.frequencies(rope, 2 * rope.trained_length)


@pytest.mark.parametrize(
    ("method", "trained", "target", "said"),
    [
        (Hierarchical(factor=9), 8, 65, "reaches 64 positions with two digits of 8 learned rows, found a"),
        (Stretch(factor=2), 16, 32, "keep=20 leaves less than two of the 16 learned rows to"),
    ],
    ids=["hierarchical", "stretch"],
)
def test_rows_that_a_table_does_not_have(method: Any, trained: int, target: int, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        method.rows(trained, target)
