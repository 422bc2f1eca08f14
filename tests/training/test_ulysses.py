"""The recipe under ``recipes/accelerate/zero3-ulysses.yaml`` on two processes of a CPU, against one process.

It needs a C++ compiler: DeepSpeed compiles how processes of a CPU talk to each other.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ctxext
from tests._models import logits, tiny, tokens
from tests._programs import ROOT, ran
from tests.training._recipe import CONFIG, SMALL, words_of

# Slow: DeepSpeed starts in two processes again and again. The launches of test_engines are in every run.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("deepspeed") is None or shutil.which("c++") is None, reason="needs deepspeed and a C++ compiler"
    ),
]

RECIPE = ROOT / "recipes" / "finetune.py"
LAUNCH = [
    *("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "accelerate" / "zero3-ulysses.yaml")),
    *("--num_processes", "2", "--parallelism_config_sp_size", "2", "--main_process_port", "0"),
]
GIVEN = {"config": CONFIG, "training.steps": 3, "training.warmup": 0, "training.clip": 0, "merge": "true"}


@pytest.fixture(scope="module")
def place(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a checkpoint is, and the output of one process, of two, and of two that were interrupted."""
    root = tmp_path_factory.mktemp("ulysses")
    tiny("llama", vocab_size=257, tie_word_embeddings=False).save_pretrained(root / "plain")
    tokenizer.save_pretrained(root / "plain")
    words = words_of(SMALL | GIVEN)
    words += ["--data.train", str(corpus), "--checkpoint", str(root / "plain"), "--output"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        # In the folder of all programs DeepSpeed waits without an end for the lock of one that was killed.
        patch.setenv("TORCH_EXTENSIONS_DIR", str(root / "extensions"))
        patch.setenv("HF_DATASETS_CACHE", str(root / "cache"))

        def run(command: list[str], *more: str) -> None:
            ran([*command, str(RECIPE), *words, *more], root, code=0)

        run([], "one")
        run(LAUNCH, "two")
        shutil.copytree(root / "two", root / "resumed")
        for name in ("checkpoint-3", "adapter", "merged"):
            shutil.rmtree(root / "resumed" / name)
        (root / "resumed" / "run.json").unlink()
        run(LAUNCH, "resumed", "--resume")
    return root


def losses(run: Path) -> list[float]:
    report = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert report["processes"] == (1 if run.name == "one" else 2)
    return [entry["loss"] for entry in report["loss"]]


def test_losses_are_those_of_one_process(place: Path) -> None:
    """From the second step on they follow from the gradients."""
    one = losses(place / "one")
    assert len(one) == 3
    assert one[0] > one[1] + 0.1
    assert losses(place / "two") == pytest.approx(one, rel=1e-5)
    assert losses(place / "resumed") == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("run", ["two", "resumed"])
def test_adapter_and_merged_model_are_whole(run: str, place: Path) -> None:
    expected = logits(ctxext.load(place / "one" / "adapter").eval(), tokens())
    adapted = ctxext.load(place / run / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(place / run / "merged").eval()
    for found in (adapted, merged):
        torch.testing.assert_close(logits(found, tokens()), expected, atol=1e-3, rtol=0)
