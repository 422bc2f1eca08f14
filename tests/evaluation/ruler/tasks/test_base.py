"""All tasks of the benchmark, chosen by name and scored as NVIDIA scores them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation.ruler.tasks import TASKS, choose
from ctxext.evaluation.ruler.tasks.base import all_of
from tests.evaluation.ruler._nvidia import CASES, ESSAY, GOLDEN


def test_all_tasks_of_the_benchmark_are_there() -> None:
    assert sorted(TASKS) == sorted({case["task"] for case in CASES})
    assert len(TASKS) == 11
    family = {"niah": "niah", "vt": "variable_tracking"}
    family |= {"cwe": "common_words_extraction", "fwe": "freq_words_extraction"}
    for name, task in TASKS.items():
        assert task.tokens_to_generate == GOLDEN["tokens_to_generate"][family[name.split("_")[0]]]


@pytest.mark.parametrize("case", GOLDEN["scores"], ids=lambda case: repr(case["reply"]))
def test_scores_are_theirs(case: dict[str, Any]) -> None:
    assert all_of(case["reply"], case["answers"]) == case["all"]


def test_choose() -> None:
    everything = [task.name for task in choose(None, ESSAY)]
    assert everything == list(TASKS)
    without = [task.name for task in choose(None, None)]
    assert without == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert [task.name for task in choose(["vt", "cwe"], None)] == ["vt", "cwe"]
    with pytest.raises(UnknownNameError, match="Did you mean 'niah_single_1'"):
        choose(["niah_singel_1"], ESSAY)
    with pytest.raises(InvalidParameterError, match=r"niah_single_2 cannot be measured.*long text"):
        choose(["niah_single_2"], None)
    for names in ([], ["vt", "vt"]):
        with pytest.raises(InvalidParameterError, match="each task once"):
            choose(names, ESSAY)


def test_provenance_of_the_golden_file() -> None:
    provenance = GOLDEN["provenance"]
    assert provenance["repository"] == "NVIDIA/RULER"
    assert re.fullmatch(r"[0-9a-f]{40}", provenance["commit"])
    assert list(itertools.chain(*provenance["definitions"].values())).count("generate_input_output") == 4
