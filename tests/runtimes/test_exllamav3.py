"""exllamav3's own numbers, by its reader and its rotary class, against what ``export`` says and the methods are."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import BloomConfig, GemmaConfig, LlamaConfig, MistralConfig

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import CtxextError, IncompatibleError
from ctxext.methods import METHODS, RopeMethod
from ctxext.runtimes.exllamav3 import VERSION
from tests._checkpoints import SHAPE
from tests.runtimes.exllamav3_numbers import GOLDEN, TYPES
from tests.runtimes.vllm_numbers import TRAINED, configs, spec_of

GOLD = json.loads(GOLDEN.read_text())
CASES: list[dict[str, Any]] = GOLD["cases"]
PLAIN = configs()


def label(case: dict[str, Any]) -> str:
    said = [str(value) for value in case["method"].values() if value is not None and not isinstance(value, list)]
    return "-".join([case["model_type"], *said, case["by"]])


@cache
def is_exact(model_type: str, method: str) -> bool | None:
    """What ``export`` says of a method in JSON, which is asked about twice; None where it is refused."""
    chosen = json.loads(method)
    extended = extended_config(PLAIN[model_type], METHODS[chosen["method"]].from_dict(chosen), trained_length=TRAINED)
    try:
        return export_config(extended, to="exllamav3").exact
    except IncompatibleError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=label)
def test_what_is_called_exact_is_what_it_computes(case: dict[str, Any]) -> None:
    plain = PLAIN[case["model_type"]]
    method = METHODS[case["method"]["method"]].from_dict(case["method"])
    exact = is_exact(case["model_type"], json.dumps(case["method"], sort_keys=True))
    if "stops" in case:
        assert exact is None
        return
    assert isinstance(method, RopeMethod)
    target, spec = method.target_length(TRAINED), spec_of(plain)
    for length in (TRAINED, target):
        wanted = method.frequencies(spec, length)
        # What does not turn is divided by 1e30, which no text would notice.
        same = np.allclose(case["inv_freq"], wanted.inv_freq.numpy(), rtol=1e-9, atol=1e-29)
        same &= case["scale"] == pytest.approx(wanted.attention_scale, rel=1e-12)
        assert same or not exact, f"called exact, and differs at {length} tokens"
        if length == target:
            assert not same or exact is not None, "refused, and right for the longest text"


def test_every_method_was_asked_about() -> None:
    assert {case["model_type"] for case in CASES} == set(TYPES)
    assert f"exllamav3-{VERSION}" == GOLD["provenance"]["source"]
    for model_type in TYPES:
        asked = {case["method"]["method"] for case in CASES if case["model_type"] == model_type}
        for name, kind in METHODS.items():
            if not issubclass(kind, RopeMethod) or name in asked:
                continue
            method = kind.example(spec_of(PLAIN[model_type]))
            with pytest.raises(CtxextError):
                export_config(extended_config(PLAIN[model_type], method, trained_length=TRAINED), to="exllamav3")
    exact = [case for case in CASES if "stops" not in case]
    assert len(exact) > 70


def test_a_factor_that_the_lengths_do_not_give_is_not_exact() -> None:
    made = export_config(extended_config(LlamaConfig(**SHAPE), "yarn", factor=3.7), to="exllamav3")
    assert not made.exact
    assert any("takes YaRN's factor from the two lengths, 3.69922" in note for note in made.notes)


@pytest.mark.slow
def test_what_was_not_read_or_is_not_there() -> None:
    plain = GemmaConfig(**SHAPE, head_dim=16)
    assert not export_config(extended_config(plain, "yarn", factor=4.0), to="exllamav3").exact
    mistral = MistralConfig(**SHAPE, sliding_window=256)
    kept = export_config(extended_config(mistral, "yarn", factor=4.0, sliding_window="keep"), to="exllamav3")
    assert not kept.exact
    assert any("attends beyond the 256 tokens" in note for note in kept.notes)
    exact = export_config(extended_config(LlamaConfig(**SHAPE), "yarn", factor=4.0), to="exllamav3")
    assert exact.exact
    assert exact.by_flag == {"-cs": "1024"}
    llama = LlamaConfig(**SHAPE)
    with pytest.raises(IncompatibleError, match=r"exllamav3 has no setting that extends a llama.*ctxext patch"):
        export_config(extended_config(llama, "yarn", factor=4.0), to="exllamav3", served=llama)
    with pytest.raises(IncompatibleError, match="exllamav3 was not seen to run the ALiBi of a bloom"):
        export_config(extended_config(BloomConfig(seq_length=256), "alibi", factor=4.0), to="exllamav3")
    scaled = transformers.LlamaConfig(
        **SHAPE
        | {"max_position_embeddings": 1024}
        | {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            }
        }
    )  # fmt: skip
    with pytest.raises(IncompatibleError, match=r"another attention factor: 1\.13863 .* and not 1\."):
        export_config(scaled, to="exllamav3")
