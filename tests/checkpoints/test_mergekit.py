"""mergekit merges weights; the positions of what it writes are those of its base model's config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ctxext
from tests._models import logits, tiny, tokens
from tests._programs import ran
from tests._tokenizer import make_tokenizer

pytestmark = pytest.mark.nightly

MERGE = """
merge_method: linear
base_model: {place}/first
models:
  - {{model: {place}/first, parameters: {{weight: 0.5}}}}
  - {{model: {place}/second, parameters: {{weight: 0.5}}}}
dtype: float32
"""


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_an_extended_base_model_extends_the_merge(method: str, tmp_path: Path) -> None:
    pytest.importorskip("mergekit", reason="needs mergekit: make nightly installs it")
    for name, seed in (("first", 0), ("second", 1)):
        model = ctxext.patch(tiny(seed=seed), method, factor=4)
        ctxext.save(model, tmp_path / name, tokenizer=make_tokenizer(bos=True))
    (tmp_path / "merge.yaml").write_text(MERGE.format(place=tmp_path), encoding="utf-8")
    ran(["-m", "mergekit.scripts.run_yaml", "merge.yaml", "merged"], tmp_path, code=0)
    first, second, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second", "merged"))
    assert all(torch.allclose(merged[name], (first[name] + second[name]) / 2) for name in merged)
    model = ctxext.load(tmp_path / "merged").eval()
    assert ctxext.describe(model).target_length == 256
    expected = ctxext.load(tmp_path / "first").eval()
    expected.load_state_dict(merged, strict=False)
    assert torch.allclose(logits(model, tokens()), logits(expected, tokens()))
