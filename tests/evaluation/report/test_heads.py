"""The page of scores of heads says what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxext.attention.heads import HeadScores
from ctxext.evaluation.report.heads import heads_page, sentences

# Groups of four layers, in which two probes agree on the best two of ten and order the others the other way round.
SCORES = HeadScores(
    kv_heads=(2, 4, 1, 3),
    probes={
        "induction": (0.0, 0.9, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.8),
        "needle": (0.07, 0.9, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0, 0.8),
    },
    spread={"induction": (0.0, 0.2, *[0.0] * 7, 0.0), "needle": (0.0, 0.0, *[0.0] * 7, 0.2)},
    settings={"seeds": [0, 1], "tokens": {"induction": 1025, "needle": 2048}, "provenance": {"checkpoint": "tiny"}},
)


def test_the_page_says_what_the_scores_say(tmp_path: Path) -> None:
    page = heads_page(SCORES)
    told = "The best fifth, 2 of 10 key-value groups, pays 86% of all attention to what a text said before."
    assert page.parts[0] == told
    assert page.parts[1].rows == [
        ["1", "0", "1", "1", "0.900 ± 0.200", "0.900 ± 0.000", "0.900"],
        ["2", "3", "2", "9", "0.800 ± 0.000", "0.800 ± 0.200", "0.800"],
    ]
    (figure,) = page.figures
    figure.save(tmp_path / "heads.png")
    assert figure.title == "Heads that retrieve: tiny"
    assert "layer 0 group 1 0.90, layer 3 group 2 0.80, layer 3 group 1 0.07" in figure.alternative


def test_the_sentences_say_how_far_probes_and_seeds_agree() -> None:
    counted, agreement, spread = sentences(SCORES)
    assert counted == "2 groups score 0.1 or more, 0 less than 0.02."
    # Spearman's coefficient from the differences of ranks: the best two are equal, eight are in reverse order.
    differences = sum((2 * place - 9) ** 2 for place in range(1, 9))
    assert f"rank correlation of {1 - 6 * differences / (10 * 99):.2f};" in agreement
    assert "2 of the 2 best groups by one are among the 2 best by the other" in agreement
    assert "vary by 0.100 on average and by 0.200 at most" in spread


def test_groups_that_look_over_a_window_only_count_nowhere(tmp_path: Path) -> None:
    """They score 0 in every probe, by which the probes would agree."""
    far = {"induction": (0.3, 0.2, 0.1, 0.01), "needle": (0.01, 0.1, 0.2, 0.3)}
    probes = {name: (0.0,) * 12 + values for name, values in far.items()}
    spread = dict.fromkeys(far, (0.0,) * 16)
    scores = HeadScores((2,) * 8, probes, spread, settings=SCORES.settings, windowed=tuple(range(6)))
    page = heads_page(scores)
    told = "The best fifth, 1 of 4 key-value groups, pays 25% of all attention to what a text said before."
    assert page.parts[0] == told
    counted, left_out, agreement, _ = sentences(scores)
    assert counted == "4 groups score 0.1 or more, 0 less than 0.02."
    assert left_out.startswith("12 more groups")
    assert "rank correlation of -1.00; 0 of the 1 best" in agreement
    (figure,) = page.figures
    figure.save(tmp_path / "heads.png")
    assert "needle: best are layer 7 group 1 0.30, layer 7 group 0 0.20, layer 6 group 1 0.10" in figure.alternative


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [(1,), (2,), (1, 1)])
def test_a_model_of_few_groups_has_a_page(kv_heads: tuple[int, ...], tmp_path: Path) -> None:
    values = tuple(0.0 for _ in range(sum(kv_heads)))
    scores = HeadScores(kv_heads, {"induction": values, "needle": values}, settings=SCORES.settings)
    (figure,) = heads_page(scores).figures
    figure.save(tmp_path / "heads.png")
    assert heads_page(scores).markdown().count("tiny") >= 1
