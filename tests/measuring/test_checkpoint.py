"""Which models see tokens that come after those they predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, BertLMHeadModel

from ctxext.checkpoints.source import read_any_config
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.files import read_json
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint, stored_dtype
from tests._checkpoints import rain, save_with_tokenizer
from tests._models import bert, tiny
from tests._programs import command
from tests._tokenizer import BYTES_AFTER_BOS
from tests.walk.tiny import tiny_config

AHEAD = ("bert", "roberta", "electra", "roformer", "big_bird", "rembert", "xlm", "xlnet", "cpmant")
CAUSAL = ("llama", "gpt2", "mistral", "mixtral", "qwen3_next", "deepseek_v3", "mamba", "mamba2", "rwkv", "bloom")
CAUSAL += ("xglm",)


@pytest.mark.parametrize("family", [*AHEAD, *CAUSAL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_sees_later_tokens_is_told_from_one_that_does_not(family: str, dtype: torch.dtype) -> None:
    if family in AHEAD:  # as the class of causal models builds it
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    else:
        model = tiny(family)
    checkpoint = Checkpoint("tiny", model.to(dtype), BYTES_AFTER_BOS)
    assert checkpoint.reads_ahead == (family in AHEAD)
    if family in AHEAD:
        with pytest.raises(IncompatibleError, match=r"reads to both sides.* ctxext eval masked"):
            checkpoint.require_causal()


def test_a_vocabulary_of_two_tells_it_too() -> None:
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    models = bert(BertLMHeadModel, vocab_size=2, pad_token_id=None), tiny(vocab_size=2, **none)
    assert [Checkpoint("tiny", model, BYTES_AFTER_BOS).reads_ahead for model in models] == [True, False]


@pytest.mark.parametrize("family", ["xlm", "bert"])
def test_no_loss_is_printed_of_a_model_that_knows_what_it_predicts(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, **({"n_words": 260} if family == "xlm" else {"vocab_size": 260}))
    folder = save_with_tokenizer(AutoModelForCausalLM.from_config(config), tmp_path / "model", BYTES_AFTER_BOS)
    (tmp_path / "a.txt").write_text(rain("a"))
    found = command("eval", "perplexity", folder, "-t", tmp_path / "a.txt", "-l", "64", "--dtype", "fp32", code=1)
    assert "reads to both sides" in found.output


def test_weights_that_exceed_a_device_are_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_tokenizer(tiny(), tmp_path)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has more to say.")
    monkeypatch.setattr("ctxext.measuring.checkpoint.load_saved", Mock(side_effect=full))
    said = r"does not fit into .*: CUDA out of memory\. Tried to allocate 2\.00 GiB\. Load it"
    with pytest.raises(InvalidParameterError, match=said):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize(("whole", "text"), [(None, torch.float16), (torch.float16, torch.bfloat16)])
def test_a_dtype_that_the_text_part_alone_names_is_kept(whole: Any, text: Any, tmp_path: Path) -> None:
    """Weights in float16 would lose three bits in bfloat16."""
    model = tiny("gemma3").half()
    save_with_tokenizer(model, tmp_path)
    config = read_json(tmp_path / "config.json")
    for part, dtype in ((config, whole), (config["text_config"], text)):
        part["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(read_any_config(tmp_path)) == torch.float16  # by which `ctxext plan` counts, too
    checkpoint = load_checkpoint(str(tmp_path), device="cpu", weights=False)
    assert checkpoint.dtype_note.startswith("fp32 (stored in float16")
    assert checkpoint.stored == "float16"
