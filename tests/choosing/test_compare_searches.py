"""``scripts/studies/compare_searches.py``: every search keeps to its passes, and what is finished is not done again."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxext.core.subject import Subject
from ctxext.rotary.sites import find_sites
from scripts.studies import compare_searches
from scripts.studies.compare_searches import Genetic, Problem
from tests._checkpoints import rainy, save_with_tokenizer
from tests._models import byte_model, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

TARGET = 4 * TRAINED_LENGTH


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small population, so that there are rounds."""
    for name, value in {"POPULATION": 6, "PARENTS": 3, "NEW": 2}.items():
        monkeypatch.setattr(compare_searches, name, value)


@pytest.mark.nightly
@pytest.mark.parametrize("search", list(compare_searches.SEARCHES))
def test_a_search_keeps_to_its_passes_and_its_seed(search: str) -> None:
    model = tiny(num_hidden_layers=1)
    rope = find_sites(Subject.of(model), TRAINED_LENGTH)[0].spec
    found = []
    for seed in (0, 0, 1):
        problem = Problem(
            model=model,
            rope=rope,
            target=TARGET,
            batch=lambda number, seed=seed: tokens(TARGET + 1, rows=2)[:, seed + number % 3 :],
            passes=11,
            seed=seed,
        )
        found.append(compare_searches.SEARCHES[search](problem))
        assert 8 < problem.spent <= 11
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2]) or search == "grid"
    assert found[0].isfinite().all()


def test_the_genetic_search_has_divisors_that_never_fall_and_all_three_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = find_sites(Subject.of(tiny()), TRAINED_LENGTH)[0].spec
    given: dict[str, Any] = {"model": None, "rope": rope, "target": TARGET, "batch": None}
    problem = Problem(**given, passes=30, seed=0)
    read: list[torch.Tensor] = []

    def loss(self: Problem, vector: torch.Tensor, batch: int = 0) -> float:
        self.spent += 1
        read.append(vector)
        return float((vector[:-1] - 1).square().sum())

    monkeypatch.setattr(Problem, "loss", loss)
    search = Genetic(problem)
    best = search.run()
    assert len(read) == problem.spent == 30
    assert len({tuple(one.tolist()) for one in read}) == 30, "none twice"
    for vector in read:
        divisors = vector[:-1].exp().tolist()
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(divisors))
        assert divisors[-1] <= 1.25 * 4 + 1e-9
        assert vector[-1] == read[0][-1], "the scale is not searched"
    pi, ntk, yarn = (one[:-1].exp() for one in read[:3])
    assert pi.tolist() == pytest.approx([4.0] * 16)
    assert (ntk[0].item(), ntk[-1].item()) == (pytest.approx(1), pytest.approx(4))
    assert (yarn[0].item(), yarn[-1].item()) == (pytest.approx(1), pytest.approx(4))
    losses = [float((one[:-1] - 1).square().sum()) for one in read]
    assert torch.equal(best, read[losses.index(min(losses))])


@pytest.mark.nightly
def test_the_script_prints_a_table_and_goes_on_where_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {
        "checkpoint": save_with_tokenizer(byte_model(), tmp_path / "checkpoint"),
        "text": rainy(tmp_path, [f"search {number}" for number in range(5)], lines=25),
        "held_out": rainy(tmp_path, [f"judge {number}" for number in range(5)], lines=25),
        "output": tmp_path / "found",
        "target": 640,
        "passes": 12.0,
        "rows": 1,
        "stretches": 2,
        "skip": 10,
        "trained_length": 512,
        "seed": [0],
        "tokenizer": None,
    }
    compare_searches.main(**given, search=["longrope-ga", "grid"])
    table = (tmp_path / "found" / "table-640.md").read_text(encoding="utf-8")
    assert "LongRoPE's genetic search" in table
    assert "over 5 held-out documents" in table
    assert "the grid alone" in capsys.readouterr().out
    lines = (tmp_path / "found" / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3, "what was published, and two searches"
    compare_searches.main(**given, search=["longrope-ga", "grid"])
    assert (tmp_path / "found" / "cells.jsonl").read_text(encoding="utf-8").splitlines() == lines
    assert (tmp_path / "found" / "table-640.md").read_text(encoding="utf-8") == table
