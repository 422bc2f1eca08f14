"""What the heads that read far retrieve, while they are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import ctxext
from ctxext.attention.recorder import retrieval_share
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.training.heads import SHARE
from tests.training._recipe import recipe

CHOSEN = ("--method", "retrieval_heads", "--factor", "4", "--heads_every", "3")


@pytest.mark.slow
def test_a_run_tells_what_its_heads_retrieve(settings: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Before the first step, every three steps and at the end; as the models themselves before and after."""
    recipe.finetune(settings(*CHOSEN, "--parameters", "{heads: [0, 3]}"))
    told = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))[SHARE]
    assert [entry["step"] for entry in told] == [0, 3, 4]
    extended = ctxext.patch(LlamaForCausalLM.from_pretrained(checkpoint), "retrieval_heads", factor=4, heads=[0, 3])
    for entry, model in ((told[0], extended), (told[-1], ctxext.load(tmp_path / "run" / "adapter"))):
        assert entry[SHARE] == pytest.approx(retrieval_share(model), rel=1e-4)
    assert told[0][SHARE] != told[-1][SHARE]


def test_what_cannot_be_measured_is_refused_before_training(settings: Any) -> None:
    with pytest.raises(InvalidParameterError, match="only retrieval_heads has heads that read far"):
        settings("--heads_every", "3")
    with pytest.raises(IncompatibleError, match="changes texts of more than 16 tokens"):
        recipe.finetune(settings(*CHOSEN, "--parameters", "{heads: [0], exact: false, window: 16}"))
