"""Examples in the docstrings of the public API do what they say, on small models with the positions of those named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ctxext

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# As their config.json on the hub has it.
POSITIONS: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {"max_position_embeddings": 8192},
    "meta-llama/Llama-3.1-8B": {
        "max_position_embeddings": 131072,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
}
DOCUMENTED = {"ctxext": ctxext.__doc__ or ""} | {
    name: found.__doc__ or "" for name in ctxext.__all__ if (found := getattr(ctxext, name)) is not ctxext.errors
}
EXAMPLES = [
    (name, re.sub("^ {4}", "", code, flags=re.MULTILINE))
    for name, text in DOCUMENTED.items()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_examples_run(name: str, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def small(place: str) -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **POSITIONS[place])).eval()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", small)
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"ctxext": ctxext, "AutoModelForCausalLM": AutoModelForCausalLM}
    exec(compile(code, name, "exec", dont_inherit=True), known)
    assert ctxext.describe(known["model"]).method is not None


def test_there_are_examples_and_no_mark_of_another_language() -> None:
    assert {"ctxext", "patch"} <= {name for name, _ in EXAMPLES}
    assert not [name for name, text in DOCUMENTED.items() if re.search(r"::\s*$", text, re.MULTILINE)]
