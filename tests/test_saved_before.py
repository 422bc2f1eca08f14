"""What earlier versions of ctxext saved loads today and computes what it computed then.

``tests/golden/saved/`` holds configs, adapters and numbers that ``scripts/make_saved.py`` wrote with the code of the
commits after which the files are named; each says its commit and command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ctxext
from ctxext.errors import CheckpointError, UnknownNameError
from ctxext.methods import known_methods
from scripts.make_saved import CASES, adapter_tensors, plain_model, reading

STORED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "golden" / "saved").glob("*.json"))
}
# Of logits up to 5 in float32: another machine, or another build of torch, adds in another order.
LOGITS = 1e-4
# Of cos and sin at position 191: a frequency that is off by float32's rounding turns by 1.2e-5 rad until there.
ROTATED = 5e-5

every_model = pytest.mark.parametrize(
    ("commit", "name"), [(commit, name) for commit, stored in STORED.items() for name in stored["models"]]
)
every_commit = pytest.mark.parametrize("commit", STORED)


def numbers(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(found: dict[str, Any], stored: dict[str, Any]) -> None:
    """That two readings are one."""
    torch.testing.assert_close(numbers(found["rotary"]), numbers(stored["rotary"]), atol=ROTATED, rtol=0)
    torch.testing.assert_close(numbers(found["logits"]), numbers(stored["logits"]), atol=LOGITS, rtol=0)


def checkpoint(place: Path, stored: dict[str, Any], **changes: Any) -> Path:
    """A directory as it was saved then: weights from their names, and the stored config."""
    plain_model(stored["base"]).save_pretrained(place)
    (place / "config.json").write_text(json.dumps(stored["config"] | changes))
    return place


def test_every_method_of_then_is_stored_with_where_it_comes_from() -> None:
    assert STORED
    for commit, stored in STORED.items():
        assert stored["provenance"]["commit"].startswith(commit)
        assert "scripts/make_saved.py" in stored["provenance"]["command"]
        assert stored["models"].keys() == CASES.keys()
        named = {case["config"]["ctxext"]["method"]["method"] for case in stored["models"].values()}
        assert named <= known_methods().keys()
        assert len(named) >= 12


@pytest.mark.slow
@every_model
def test_a_checkpoint_of_before_computes_what_it_computed(commit: str, name: str, tmp_path: Path) -> None:
    stored = STORED[commit]["models"][name]
    loaded = ctxext.load(checkpoint(tmp_path, stored)).eval()
    fresh = ctxext.patch(plain_model(stored["base"]), **stored["arguments"])
    found, again = reading(loaded), reading(fresh)
    same(found, stored)
    assert found == again, "a fresh patch of the same method computes something else"
    assert ctxext.describe(loaded).method == ctxext.describe(fresh).method
    plain = reading(plain_model(stored["base"]))
    far = (numbers(plain["logits"]) - numbers(stored["logits"])).abs().max()
    assert far > 100 * LOGITS, "this case could not tell an extended model from a plain one"


@pytest.mark.slow
@every_commit
def test_an_adapter_of_before_computes_what_it_computed(commit: str, tmp_path: Path) -> None:
    stored = STORED[commit]["adapter"]
    plain, adapter = tmp_path / "plain", tmp_path / "adapter"
    plain_model(stored["base"]).save_pretrained(plain)
    adapter.mkdir()
    for name, content in stored["files"].items():
        (adapter / name).write_text(json.dumps(content))
    save_file(adapter_tensors(stored["shapes"]), adapter / "adapter_model.safetensors")
    same(reading(ctxext.load(adapter, base=plain).eval()), stored)
    on_extended = ctxext.patch(plain_model(stored["base"]), **CASES["yarn"][1])
    same(reading(ctxext.load(adapter, base=on_extended).eval()), stored)
    with pytest.raises(CheckpointError, match="method 'yarn' there, 'pi' here"):
        ctxext.load(adapter, base=ctxext.patch(plain_model(stored["base"]), "pi", factor=4))


@every_commit
def test_names_that_nobody_knows_are_refused_with_what_to_do(commit: str, tmp_path: Path) -> None:
    stored = STORED[commit]["models"]["yarn"]
    extension = stored["config"]["ctxext"]

    def refused(kind: type[Exception], sentence: str, **changes: Any) -> None:
        place = checkpoint(tmp_path, stored, ctxext=extension | changes)
        with pytest.raises(kind, match=sentence):
            ctxext.load(place)

    method = extension["method"]
    unknown = r"'yran' is unknown to ctxext .* register it first: ctxext\.methods\.METHODS\['yran'\]"
    refused(CheckpointError, unknown, method=method | {"method": "yran"})
    refused(
        UnknownNameError,
        "Unknown yarn parameter 'beta_fsat'. Did you mean 'beta_fast'",
        method=method | {"beta_fsat": 1},
    )
    refused(CheckpointError, "format 0; ctxext .* reads format 1", format=0)
