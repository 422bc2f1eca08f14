"""docs/evidence/golden.json, the numbers for other projects: transformers' functions, ctxext and ``ctxext show``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ctxext
from ctxext.errors import InvalidParameterError
from ctxext.methods import known_methods
from ctxext.methods.pi import PI
from ctxext.spec import RopeSpec
from scripts import golden_numbers
from tests._famous import famous_checkpoint
from tests._models import RECENT, tiny
from tests._programs import command

GOLDEN = json.loads(golden_numbers.FILE.read_text(encoding="utf-8"))
PAGE = golden_numbers.FILE.with_suffix(".md").read_text(encoding="utf-8")
SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"  # whose ramp has no width, which ctxext's method refuses


def cases(name: str) -> list[dict[str, Any]]:
    return [case for case in GOLDEN["cases"] if case["config"] == name]


def spec(name: str) -> RopeSpec:
    return RopeSpec(**{field: GOLDEN["configs"][name][field] for field in ("rotary_dim", "base", "trained_length")})


def check(found: list[float], scale: float, case: dict[str, Any]) -> None:
    assert found == pytest.approx(GOLDEN["inv_freq"][case["inv_freq"]], rel=1e-12, abs=0)
    assert scale == pytest.approx(case["attention_scale"], rel=1e-12)


def method_of(case: dict[str, Any]) -> Any:
    method: Any = PI if case["method"] == "rope" else known_methods()[case["method"]]
    return method.from_dict(case["parameters"])


@pytest.mark.skipif(not RECENT, reason="older functions read other fields of a config")
def test_the_file_is_what_the_installed_transformers_computes() -> None:
    made = golden_numbers.contents()
    for part in ("version", "fields", "methods", "configs"):
        assert made[part] == GOLDEN[part]
    for now, then in zip(made["cases"], GOLDEN["cases"], strict=True):
        assert {**now, "inv_freq": 0, "temperature": 0} == {**then, "inv_freq": 0, "temperature": 0}
        assert now["temperature"] == pytest.approx(then["temperature"], rel=1e-12)
        check(made["inv_freq"][now["inv_freq"]], now["attention_scale"], then)


@pytest.mark.parametrize("name", GOLDEN["configs"])
def test_ctxext_computes_the_same(name: str) -> None:
    for case in cases(name):
        if case["published"] and name == SCOUT:
            with pytest.raises(InvalidParameterError, match="high_freq_factor must be above low_freq_factor"):
                method_of(case)
            continue
        found = method_of(case).frequencies(spec(name), case["length"])
        check(found.inv_freq.tolist(), found.attention_scale, case)
        score = found.temperature / case["temperature"]
        latent = name.startswith("deepseek-ai/") and case["published"]
        assert score > 1.5 if latent else score == pytest.approx(1.0, rel=1e-12)


def test_it_has_twenty_configs_each_method_and_the_two_cases_of_torchtitan() -> None:
    *published, torchtitan = GOLDEN["configs"]
    assert len(published) == 20
    assert {case["method"] for case in GOLDEN["cases"]} == GOLDEN["methods"].keys()
    assert golden_numbers.FILE.stat().st_size < 400_000
    short, long = (case for case in cases("deepseek-ai/DeepSeek-V3") if case["published"])
    assert (short["length"], long["length"]) == (4096, 163840)
    assert {**short, "length": 0} == {**long, "length": 0}
    ramp, plain = (GOLDEN["inv_freq"][case["inv_freq"]] for case in (cases(torchtitan)[0], cases(torchtitan)[2]))
    assert (ramp[0], ramp[17]) == pytest.approx((plain[0], plain[17] / 40))
    assert ramp[16] > plain[16] / 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unsloth/SmolLM2-360M", "Qwen/Qwen3.5-27B"])
@pytest.mark.parametrize("method", ["rope", "pi", "ntk", "yarn", "dynamic_yarn"])
def test_show_prints_the_same(name: str, method: str, tmp_path: Path) -> None:
    place = famous_checkpoint(name, tmp_path / "model")
    shown = command("show", method, "--model", str(place), "--json", code=0)
    found = json.loads(shown.stdout)
    *_, case = (one for one in cases(name) if one["method"] == method and "truncate" not in one["parameters"])
    check(found["inv_freq"], found["attention_scale"], case)
    assert found["temperature"] == pytest.approx(case["temperature"], rel=1e-12)
    assert (found["trained_length"], found["target_length"]) == (spec(name).trained_length, case["target_length"])


@pytest.mark.parametrize("method", ["yarn", "pi", "ntk", "abf", "llama3", "longrope", "ntk_by_parts"])
def test_a_trainer_that_writes_its_length_into_the_config_changes_no_stock_form(method: str) -> None:
    """torchtitan's backend does so; pytorch/torchtitan#4117 was this mistake in its own models."""
    factors: dict[str, Any] = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if method == "longrope" else {}
    config = ctxext.patch(tiny("llama"), method, factor=4, **factors).config
    before = LlamaRotaryEmbedding(config)
    config.max_position_embeddings = 16
    after = LlamaRotaryEmbedding(config)
    assert after.inv_freq.tolist() == before.inv_freq.tolist()
    assert after.attention_scaling == before.attention_scaling


def test_the_example_of_the_page_runs_with_json_alone() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert re.findall(r"^import .*", code, re.MULTILINE) == ["import json"]
    assert len(code.splitlines()) <= 11
    exec(code.replace("docs/evidence/golden.json", str(golden_numbers.FILE)), {})
    assert {*re.findall(r"`(\w+)`", PAGE)} >= {*GOLDEN["cases"][0]}
