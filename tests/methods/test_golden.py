"""What the authors' own programs computed (scripts/make_golden.py): each file says where it comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from ctxext.methods import RopeMethod, known_methods
from ctxext.spec import RopeSpec

FILES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "golden").glob("*.json"))}
# The authors compute in float32: their own distance from the formulas in float64 is up to 4.7e-7.
FLOAT32 = 1e-6
# Of these, tests of the encodings read the files.
OF_ENCODINGS = {"fox", "path"}
OF_FREQUENCIES = sorted(FILES.keys() - OF_ENCODINGS)


@pytest.mark.parametrize("name", FILES)
def test_provenance_is_complete(name: str) -> None:
    text = FILES[name].read_text()
    provenance = json.loads(text)["provenance"]
    assert re.fullmatch(r"[\w-]+/[\w-]+", provenance["repository"])
    for commit in (provenance["commit"], provenance["made_at"]):
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
    assert provenance["command"].startswith(f"python scripts/make_golden.py {name} ")
    assert provenance["definitions"]
    assert {"python", "torch"} <= provenance["versions"].keys()
    assert not re.search(r'"/|"~|/(home|work|tmp)/', text), "a path of the machine that made it"


@pytest.mark.parametrize("name", OF_FREQUENCIES)
def test_frequencies_are_those_of_the_authors(name: str) -> None:
    method = known_methods()["yarn" if name.startswith("yarn_") else name]
    assert issubclass(method, RopeMethod)
    cases = json.loads(FILES[name].read_text())["cases"]
    assert cases
    for case in cases:
        found = method.from_dict(case["parameters"]).frequencies(RopeSpec(**case["rope"]), case["length"])
        golden = torch.tensor(case["inv_freq"], dtype=torch.float64)
        torch.testing.assert_close(found.inv_freq, golden, rtol=FLOAT32, atol=0)
        assert found.attention_scale == pytest.approx(case["attention_scale"], rel=1e-12)


def test_there_are_golden_files_of_the_methods_and_of_the_encodings() -> None:
    assert len(OF_FREQUENCIES) >= 9
    assert FILES.keys() > OF_ENCODINGS
