"""The walk over all model types: what it looks at for each kind of positions, and the pages that come of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ctxext
from ctxext.methods import known_methods
from tests._models import RECENT
from tests.walk import check, pages, run
from tests.walk.check import Stock, check_model, sees_ahead, text_of_length, walked_methods
from tests.walk.kinds import GROUPS, group_of, positions_of
from tests.walk.tiny import KINDS, kind_of, model_types, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(not RECENT, reason="built for the newest transformers")


@pytest.fixture(autouse=True)
def _with_the_sessions_stock_process(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_stock", stock)


def walked(model_type: str, *methods: str) -> dict[str, Any]:
    return run.walk_type(model_type, list(methods))


def outcomes(line: dict[str, Any]) -> dict[str, str]:
    return {one["method"]: one["outcome"] for one in line["findings"]}


OF_KIND = {"llama": "rotary", "eurobert": "rotary encoder", "bloom": "ALiBi", "t5": "buckets", "pegasus": "sinusoids"}
OF_KIND |= dict.fromkeys(("t5gemma", "moonshine"), "rotary on two sides")
OF_KIND |= dict.fromkeys(("bert", "clip_text_model"), "learned table") | {"mamba": "none", "xlnet": "other"}


@pytest.mark.parametrize(("model_type", "kind"), OF_KIND.items())
def test_every_kind_of_positions_has_its_name(model_type: str, kind: str) -> None:
    config = tiny_config(model_type)
    assert positions_of(tiny_model(config), kind_of(type(config))) == kind


@pytest.mark.nightly
def test_every_type_whose_text_is_no_other_types_is_walked() -> None:
    walked_types = set(model_types())
    assert {"muse_glimmer", "muse_spark", "step3p7", "glm5_next", "qwen3_vl"} <= walked_types
    assert not {"llava", "aria"} & walked_types, "their texts are read by types that are walked alone"
    evidence = run.ROOT / "docs/evidence"
    if f"transformers {transformers.__version__}:" in (evidence / "architectures.md").read_text():
        shown = re.findall(r"^([\w.-]+),", (evidence / "architectures.csv").read_text(), re.M)
        assert walked_types == set(shown), "make the pages again: python -m tests.walk.run --markdown ..."


def test_every_method_belongs_to_a_group_on_every_kind() -> None:
    assert {group_of(name, "rotary") for name in known_methods()} == set(GROUPS)
    assert [group_of("pi", kind) for kind in ("rotary", "ALiBi", "learned table")] == ["frequencies", "slopes", "rows"]


@pytest.mark.nightly
def test_a_table_gets_its_own_methods_and_one_of_each_other_group() -> None:
    line = walked("gpt2", "yarn", "ntk", "tile", "hierarchical", "stretch_buckets")
    assert line["outcome"] == "right"
    found = outcomes(line)
    assert found["tile"] == found["hierarchical"] == "right"
    assert found["yarn"] == found["stretch_buckets"] == "refused"
    assert "ntk" not in found, "of a group that is for another kind, one method is enough"


@pytest.mark.nightly
def test_what_is_a_decoder_and_an_encoder_decoder_is_walked_as_both() -> None:
    line = walked("bart", "tile")
    assert line["kind"] == "causal, seq2seq"
    assert outcomes(line) == {"tile": "right", "tile (seq2seq)": "right"}
    assert walked("bert", "tile")["kind"] == "masked", "its causal form is a copy of it"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("seq2seq", "speech")])
def test_each_kind_of_model_says_something_of_tokens(kind: str) -> None:
    types = {"causal": "llama", "masked": "eurobert", "encoder": "clip_text_model", "pictures": "granite_docling"}
    model_type = types.get(kind, "markuplm")
    model = tiny_model(tiny_config(model_type), loader=KINDS[kind])
    found = check.logits_of(model, text_of_length(16))
    assert found.shape[:2] == (1, 16)
    assert sees_ahead(model, text_of_length(16)) == (kind not in ("causal", "encoder", "pictures"),)


def test_a_promise_about_short_texts_is_held_to(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wandering(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(model, inputs)
        return logits + (ctxext.describe(model).method is not None)

    original = check.logits_of
    monkeypatch.setattr(check, "logits_of", wandering)
    (finding,) = check_model(tiny_model(tiny_config("gpt2")), walked_methods(["tile"]), stock, tmp_path)
    assert finding.outcome == "wrong"
    assert "promised to be read as before, and is not" in finding.detail


def line_of(
    model_type: str, outcome: str, *findings: tuple[str, str, str], positions: str = "rotary"
) -> dict[str, Any]:
    found = [{"method": name, "outcome": how, "detail": detail, "stock": True} for name, how, detail in findings]
    line = {"model_type": model_type, "kind": "causal", "positions": positions, "layers": "2/2", "findings": found}
    return line | {"outcome": outcome, "reason": "; ".join(detail for *_, detail in findings), "seconds": 1.0}


LINEAR = ("pi", "right", "stock linear")
NO_ALIBI = "IncompatibleError: Method 'alibi' cannot replace the rotation of this "
LINES = [
    line_of("llama", "right", LINEAR, ("yarn", "right", "stock yarn")),
    *(
        line_of(name, "right", LINEAR, ("alibi", "refused", NO_ALIBI + name + ". Take pi."))
        for name in ("axk1", "axk2")
    ),
    line_of("gpt2", "right", ("tile", "right", "n_positions=128"), positions="learned table"),
    line_of(
        "mamba", "refused", ("pi", "refused", "IncompatibleError: It has none. Nothing needs it."), positions="none"
    ),
    line_of("strange", "unchecked", positions="other") | {"reason": "It does not build here: no such package"},
]


def test_a_page_has_counts_by_kind_and_its_tables_say_each_reason_once() -> None:
    made = pages.pages(LINES)
    text, types, reasons = made[".md"], made[".csv"], made["-reasons.csv"]
    assert "| rotary | 3 | 0 | 0 | 0 |" in text
    assert "| learned table | 1 | 0 | 0 | 0 |" in text
    assert "| **all** | 4 | 1 | 1 | 0 |" in text
    links = re.findall(r"\(architectures([\w-]*\.csv)\)", text)
    assert {".md", *links} == set(made), "every table is linked"
    assert reasons.count("cannot replace the rotation of this model. Take pi.") == 1
    assert '"axk1, axk2"' in reasons
    assert "\nmamba,causal,none,refused,(" in types
    assert "\nrefused,It has none.,mamba\n" in made["-refused.csv"]
    used = {number for group in re.findall(r"\(([\d, ]+)\)", types) for number in group.split(", ")}
    assert used == set(re.findall(r"^(\d+),", reasons, re.M)), "every number is used, and is there"
    assert max(len(row) for row in types.splitlines() if row.startswith("axk")) < 120


def test_the_short_form_counts_alike() -> None:
    assert "**4 model types right, 1 refused by a named reason, 0 wrong**, 1 not checked" in pages.coverage(LINES)
    assert "4 right, 1 refused by reason, 0 wrong, 1 not checked" in pages.summarise(LINES)
