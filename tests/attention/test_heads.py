"""Which heads retrieve: scores by probe, the choice of the best, their file, and the method that reads them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

import ctxext
from ctxext.attention.heads import HeadScores, heads
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError
from tests._models import tiny
from tests.attention._induction import induction


def test_scores_are_the_mean_over_seeds_beside_their_spread() -> None:
    model = tiny(initializer_range=0.3)
    scores = heads(model, seeds=(3, 4))
    first, second = torch.tensor(induction(model, 3)), torch.tensor(induction(model, 4))
    assert torch.allclose(torch.tensor(scores.probes["induction"]), (first + second) / 2, atol=1e-6)
    assert torch.allclose(torch.tensor(scores.spread["induction"]), (first - second).abs() / math.sqrt(2), atol=1e-6)
    assert scores == heads(model, seeds=(3, 4))


def scores_of(*values: float, kv_heads: tuple[int, ...] = (2, 3)) -> HeadScores:
    return HeadScores(kv_heads=kv_heads, probes={"induction": values}, fingerprint="0123456789ab")


def test_the_best_groups_come_first_and_the_lower_number_of_equal_ones() -> None:
    scores = scores_of(0.1, 0.5, 0.5, 0.0, 0.9)
    assert scores.ranked() == (4, 1, 2, 0, 3)
    assert scores.chosen(share=0.2) == (4,)
    assert scores.chosen(share=0.21) == (1, 4)
    assert scores.chosen(share=0.001) == (4,)
    assert scores.chosen(share=1.0) == (0, 1, 2, 3, 4)
    assert scores.chosen(threshold=0.5) == (1, 2, 4)
    assert scores.chosen(threshold=1.0) == (4,)
    assert [scores.place(group) for group in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_share_is_not_rounded_up_by_an_error_of_rounding() -> None:
    scores = scores_of(*(group / 100 for group in range(90)), kv_heads=(3,) * 30)
    for whole in range(1, 91):
        assert len(scores.chosen(share=whole / 90)) == whole
    assert len(scores.chosen(share=0.2)) == 18


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of the two"),
        ({"share": 0.2, "threshold": 0.1}, "one of the two"),
        ({"share": 0.0}, "share must be above 0 and at most 1, found 0.0"),
        ({"share": 1.5}, "share must be above 0"),
        ({"share": math.nan}, "share must be above 0"),
        ({"share": "0.2"}, "share must be above 0 and at most 1, found '0.2'"),
        ({"threshold": "0.1"}, "threshold must be from 0 to 1, found '0.1'"),
        ({"threshold": -0.1}, "threshold must be from 0 to 1, found -0.1"),
        ({"threshold": math.nan}, "threshold must be from 0 to 1"),
    ],
)
@pytest.mark.usefixtures("_any_types")
def test_a_choice_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        scores_of(0.1, 0.2, 0.3, 0.4, 0.5).chosen(**given)


def test_scores_are_read_as_they_were_saved(tmp_path: Path) -> None:
    scores = heads(tiny(), seeds=(1, 2))
    scores.save(tmp_path / "heads.json")
    assert HeadScores.read(tmp_path / "heads.json") == scores


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "{}",
        '{"kv_heads": 3, "probes": {}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {"induction": [0.1]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": {"needle": [0.1, NaN]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [3, -1], "probes": {"needle": [0.1, 0.2]}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [], "probes": {"needle": []}, "spread": {}, "fingerprint": "", "settings": {}}',
        '{"kv_heads": [2], "probes": [0.1, 0.2], "spread": {}, "fingerprint": "", "settings": {}}',
    ],
)
def test_a_file_of_something_else_is_refused_with_the_way_out(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "heads.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidParameterError, match=r"ctxext heads CHECKPOINT -o heads\.json"):
        HeadScores.read(path)


@pytest.mark.slow
def test_a_patched_model_is_refused() -> None:
    model = ctxext.patch(tiny(), "yarn", factor=2)
    with pytest.raises(PatchStateError, match=r"ctxext\.unpatch"):
        heads(model)
    assert heads(ctxext.unpatch(model)) == heads(tiny())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_file_of_scores_fits_the_model_in_every_dtype_and_without_its_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The command scores in bfloat16, programs load in float32, and ``ctxext patch`` reads no weights."""
    path = tmp_path / "heads.json"
    scores = heads(tiny().bfloat16(), seeds=(0,))
    scores.save(path)
    for model in (tiny().to(dtype), tiny().to("meta")):
        extended = ctxext.patch(model, "retrieval_heads", factor=4, heads=path)
        assert extended.config.ctxext["method"]["heads"] == list(scores.chosen(share=0.2))


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    heads(tiny(), seeds=(0,)).save(path)
    deeper = tiny(num_hidden_layers=3)
    for model in (tiny(seed=1), deeper, deeper.to("meta")):
        with pytest.raises(InvalidParameterError, match="holds the scores of another model, or of one that was fine"):
            ctxext.patch(model, "retrieval_heads", factor=4, heads=str(path))


@pytest.mark.parametrize("when", ["written", "given"])
def test_a_file_of_scores_fits_no_weights_that_processes_share(tmp_path: Path, when: str) -> None:
    """DeepSpeed ZeRO-3 puts an id on each weight, and leaves no numbers in it."""
    model, path, scores = tiny(), tmp_path / "heads.json", heads(tiny(), seeds=(0,))
    replace(scores, fingerprint="unknown" if when == "written" else scores.fingerprint).save(path)
    if when == "given":
        next(model.parameters()).ds_id = 0
    with pytest.raises(IncompatibleError, match=r"processes share its weights, or shared them.*heads=\[2, 5\]"):
        ctxext.patch(model, "retrieval_heads", factor=4, heads=path)


def test_the_heads_of_a_model_whose_weights_are_offloaded_are_scored_where_they_are_brought_back() -> None:
    model, wanted = tiny(initializer_range=0.3), heads(tiny(initializer_range=0.3))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert heads(model).probes == wanted.probes
    extended = ctxext.patch(model, "retrieval_heads", factor=4)
    plain = ctxext.patch(tiny(initializer_range=0.3), "retrieval_heads", factor=4)
    assert extended.config.ctxext["method"] == plain.config.ctxext["method"]


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        (lambda: tiny("mistral", sliding_window=16), {}, r"sees only the last 16 tokens.*'lift'.*'keep'"),
        (tiny, {"sliding_window": "drop"}, "must be 'keep' or 'lift'"),
        (tiny, {"sliding_window": "lift"}, "already see the whole text"),
        (tiny, {"attention": "falsh"}, "'flash'"),
        (lambda: tiny("ministral3"), {"temperature": "yarn", "scaling": "extend"}, "would sharpen twice"),
        (lambda: tiny("gpt2"), {}, "is not for the positions of this gpt2. Methods for it: .*tile"),
        (lambda: tiny("xglm"), {}, "is not for the positions of this xglm. Methods for it: .*pi"),
    ],
    ids=["windows", "no choice", "lifted", "backend", "temperature", "table", "sinusoids"],
)
def test_heads_are_scored_after_all_that_is_refused_without_them(made: Any, given: dict[str, Any], said: str) -> None:
    model, read = made(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: read.append(ids))
    with pytest.raises(CtxextError, match=said):
        ctxext.patch(model, "retrieval_heads", factor=4, **given)
    assert not read


def test_heads_are_scored_across_windows_that_are_lifted() -> None:
    """Windows as long as the probe hide nothing of it; shorter ones leave nothing to score."""
    wanted = ctxext.patch(tiny("mistral", sliding_window=None), "retrieval_heads", factor=4)
    lifted = ctxext.patch(tiny("mistral", sliding_window=64), "retrieval_heads", factor=4, sliding_window="lift")
    assert lifted.config.ctxext["method"] == wanted.config.ctxext["method"]
    with pytest.raises(IncompatibleError, match="reaches beyond a window"):
        ctxext.patch(tiny("mistral", sliding_window=16), "retrieval_heads", factor=4, sliding_window="lift")
    with pytest.raises(IncompatibleError, match="reaches beyond a window"):
        heads(tiny("mistral", sliding_window=64))
