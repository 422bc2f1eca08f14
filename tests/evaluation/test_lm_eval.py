"""lm-evaluation-harness reads a saved extended checkpoint over its whole new window."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.measuring.loss import loss_by_position
from tests._tokenizer import BYTES

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm_eval")

TRAINED, TEXT = 512, "".join(f"{i} rivers run, and the rain falls on {i * i % 97} of them.\n" for i in range(19))


def read_by_harness(harness: Any) -> float:
    from lm_eval.api.instance import Instance

    request = Instance("loglikelihood_rolling", {"text": TEXT}, (TEXT,), 0)
    (found,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
    return float(found)


def read_by_ctxext(model: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    ids = torch.tensor([[0, *tokenizer(TEXT).input_ids]])
    assert TRAINED < ids.shape[1] < 2 * TRAINED
    return pytest.approx(-loss_by_position(model, ids).sum().item(), rel=1e-5)


def test_its_window_is_the_extended_one(model: LlamaForCausalLM, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    model.save_pretrained(tmp_path / "plain")
    ctxext.patch(model, "yarn", factor=2)
    model.save_pretrained(tmp_path / "extended")
    for name in ("plain", "extended"):
        BYTES.save_pretrained(tmp_path / name)
    own, found = read_by_ctxext(model, BYTES), {}
    for name, length in (("plain", TRAINED), ("extended", 2 * TRAINED)):
        harness = HFLM(pretrained=str(tmp_path / name), dtype="float32", device="cpu", batch_size=1, prefix_token_id=0)
        assert harness.max_length == length
        found[name] = read_by_harness(harness)
    assert found["extended"] == own
    assert found["plain"] != pytest.approx(found["extended"], rel=1e-3)
    # What stock code cannot express is handed over loaded.
    ctxext.unpatch(model)
    ctxext.patch(model, "dynamic_yarn", factor=2)
    model.save_pretrained(tmp_path / "dynamic")
    harness = HFLM(pretrained=ctxext.load(tmp_path / "dynamic"), tokenizer=BYTES, prefix_token_id=0)
    assert harness.max_length == 2 * TRAINED
    assert read_by_harness(harness) == read_by_ctxext(model, BYTES)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["self_extend", "alibi", "dynamic_yarn", "yarn"])
def test_code_beside_a_checkpoint_gives_the_numbers_of_the_loader(
    method: str, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    """As the arguments ``--model hf --model_args`` of its command say it."""
    from lm_eval.api.registry import get_model

    ctxext.save(ctxext.patch(model, method, factor=2), tmp_path, tokenizer=BYTES, remote_code=True)
    said = f"pretrained={tmp_path},trust_remote_code=True,dtype=float32,prefix_token_id=0"
    harness = get_model("hf").create_from_arg_string(said, {"device": "cpu", "batch_size": 1})
    assert harness.max_length == 2 * TRAINED
    assert read_by_harness(harness) == read_by_ctxext(ctxext.load(tmp_path), BYTES)


def test_a_class_registered_by_name_is_loaded_as_the_page_says(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.registry import get_model

    page = (Path(__file__).parents[2] / "docs/guides/works-with.md").read_text(encoding="utf-8")
    register, module = re.findall(r"```python\n(.*?)```", page.split("## lm-evaluation-harness\n")[1], re.DOTALL)
    (tmp_path / "my_models.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    exec(register, {})
    assert "my_models" not in sys.modules
    ctxext.save(ctxext.patch(model, "self_extend", factor=2), tmp_path / "extended", tokenizer=BYTES)
    said = f"pretrained={tmp_path / 'extended'},prefix_token_id=0"
    harness = get_model("extended").create_from_arg_string(said, {"device": "cpu", "batch_size": 1})
    assert (harness.max_length, ctxext.describe(harness.model).method["method"]) == (2 * TRAINED, "self_extend")


def test_a_config_that_goes_on_naming_the_trained_length_is_named(model: LlamaForCausalLM) -> None:
    """Cut at the old window unless it is told otherwise, which a note says."""
    from lm_eval.models.huggingface import HFLM

    ctxext.patch(model, "dynamic_ntk", factor=2)
    (note,) = [note for note in ctxext.describe(model).notes if "lm-eval" in note]
    assert f"max_position_embeddings={TRAINED}" in note
    assert f"max_length={2 * TRAINED}" in note
    assert HFLM(pretrained=model, tokenizer=BYTES, prefix_token_id=0).max_length == TRAINED
    told = HFLM(pretrained=model, tokenizer=BYTES, prefix_token_id=0, max_length=2 * TRAINED)
    assert read_by_harness(told) == read_by_ctxext(model, BYTES)
