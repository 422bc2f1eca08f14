"""What is tried: formulas, remapping and the grid, each once, and how far each reaches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ctxext.choosing.candidates import CandidateReach, candidates, critical, distinct, grid, short_label
from ctxext.measuring.readings import TIMES, Reading, name_for
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.ntk import NTK
from ctxext.methods.pi import PI
from ctxext.methods.remap import RemapMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.yarn import YaRN
from ctxext.models.rope import fingerprint
from ctxext.spec import RopeSpec

ROPE = RopeSpec(rotary_dim=64, base=1e5, trained_length=8192)


def reading(method: Method) -> Reading:
    assert isinstance(method, RopeMethod)
    name = name_for(method)
    return Reading(name=name, label=name, method=method.to_dict(), fingerprint=fingerprint(method, ROPE))


def test_every_formula_and_the_grid_are_tried_the_published_yarn_first() -> None:
    found = candidates(2.0, ROPE)
    assert found[0] == YaRN(factor=2)
    assert len(set(found)) == len(found)
    plain = {name for name, cls in METHODS.items() if issubclass(cls, RopeMethod) and not issubclass(cls, RemapMethod)}
    entered = {one.name for one in found}
    assert plain - entered == {"table", "nope"}, "what needs numbers of its own, or training"
    remapping = {"self_extend", "rerope", "dual_chunk", "retrieval_heads"}
    assert {one.name for one in found if isinstance(one, RemapMethod)} == remapping
    shares = {(one.share, one.window) for one in found if isinstance(one, RetrievalHeads)}
    assert shares == {(None, 0.75), (0.2, 0.5), (0.1, 0.75), (0.1, 0.5), (0.4, 0.75), (0.4, 0.5)}
    assert {PI(factor=2), PI(factor=3), NTK(factor=3)} <= set(found)
    assert set(grid(2.0)) | set(critical(2.0, ROPE)) <= set(found)


@pytest.mark.parametrize(("factor", "points"), [(2.0, 81), (4.0, 81), (1.2, 54)])
def test_the_grid_is_stock_and_divides_by_one_or_more(factor: float, points: int) -> None:
    found = grid(factor)
    assert len(found) == points
    for one in found:
        form = one.rope_parameters(ROPE)
        assert (form["rope_type"], form["factor"]) == ("yarn", one.stretch)
        assert one.truncate, "llama.cpp rounds the ends of the ramp, whatever it is told"
        assert one.target_length(8192) == int(8192 * factor)
        assert one.attention_scale >= 1
    assert min(one.stretch for one in found) >= 1


def test_the_critical_dimension_lies_where_training_saw_ten_turns_to_one() -> None:
    """LongRoPE2: the factor in full from there on, and before it a base that meets the factor there."""
    found = critical(2.0, ROPE)
    turned = [8192 * 1e5 ** (-2 * index / 64) / (2 * math.pi) for index in range(32)]
    ten, one = (next(index for index, turns in enumerate(turned) if turns <= most) for most in (10, 1))
    places = sorted({one.long_factor.index(2.0) for one in found})
    assert (places[0], places[-1]) == (ten, one)
    assert len(places) == 4
    scales = sorted({one.attention_factor for one in found if one.attention_factor is not None})
    assert scales == pytest.approx([1.0, math.sqrt(1 + math.log(2) / math.log(8192))], abs=1e-6)
    for one in found:
        place = one.long_factor.index(2.0)
        assert one.short_factor == one.long_factor
        base = 1e5 * 2 ** (64 / (2 * place))  # divides the frequency there by 2
        kept = one.frequencies(ROPE, 16384).inv_freq[:place]
        assert kept.tolist() == pytest.approx([base ** (-2 * index / 64) for index in range(place)])
        assert set(one.long_factor[place:]) == {2.0}
        assert one.rope_parameters(ROPE)["rope_type"] == "longrope"
    assert critical(2.0, RopeSpec(rotary_dim=2, base=1e4, trained_length=64)) == []


@pytest.mark.slow
def test_what_rounding_makes_the_same_is_tried_once() -> None:
    few = RopeSpec(rotary_dim=8, base=1e4, trained_length=128)
    found = [replace(reading(one), fingerprint=fingerprint(one, few)) for one in grid(4.0)]
    kept, twins = distinct(found)
    assert len(kept) + sum(map(len, twins.values())) == len(found)
    assert len(kept) < len(found)
    assert len({one.fingerprint for one in kept}) == len(kept)
    dynamic = METHODS["dynamic_yarn"](factor=2)
    assert distinct([reading(YaRN(factor=2)), reading(dynamic)])[1] == {"yarn x2": ("dynamic_yarn",)}


def test_reach_is_of_frequencies_and_not_of_names() -> None:
    yarn, ntk, pi, further = (
        CandidateReach.of(method, ROPE, 16384)
        for method in (YaRN(factor=2), NTK(factor=2), PI(factor=2), YaRN(factor=2, divisor=3))
    )
    assert yarn.covers(ntk)
    assert not ntk.covers(yarn), "NTK divides only the very slowest by the whole factor"
    assert yarn.covers(pi)
    assert further.covers(yarn)
    assert not yarn.covers(further)
    assert (pi.stretch, pi.far) == (pytest.approx(2), pytest.approx(0))
    remapped = CandidateReach.of(SelfExtend(factor=2), ROPE, 16384)
    assert not remapped.is_judged_inside
    assert not remapped.covers(yarn)
    assert not yarn.covers(remapped)
    assert CandidateReach.of(METHODS["dynamic_ntk"](factor=2), ROPE, 16384).dynamic


def test_where_every_frequency_turned_in_training_the_slowest_stands_for_what_is_new() -> None:
    fast = RopeSpec(rotary_dim=8, base=10.0, trained_length=4096)
    found = CandidateReach.of(PI(factor=2), fast, 8192)
    assert found.slow is not None
    assert len(found.slow) == 1
    assert torch.allclose(found.slow * 2, torch.tensor([10.0 ** (-6 / 8)], dtype=torch.float64))


def test_labels_tell_candidates_apart() -> None:
    labels = [short_label(one) for one in candidates(2.0, ROPE)]
    assert len(set(labels)) == len(labels)
    assert f"YaRN {TIMES}2 (step at 1, by 1.5, scale 1.02)" in labels
    assert any(one.startswith(f"LongRoPE2 {TIMES}2 (critical dimension ") for one in labels)
    scored = [short_label(RetrievalHeads(factor=2, window=window, heads=[1, 5])) for window in (0.75, 0.5)]
    assert scored == [
        f"Retrieval heads {TIMES}2 (2 groups far)",
        f"Retrieval heads {TIMES}2 (window=0.5, 2 groups far)",
    ]
