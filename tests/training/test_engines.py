"""The whole recipe on two processes against one: DDP and FSDP2, through accelerate and the Trainer, on gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import logits, tiny, tokens
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ctxext

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "smollm2-135m-16k-yarn-pose.yaml"
STEPS = 3

# Name, engine, checkpoint, further words of the command line.
CASES = [
    ("data", "data", "tied", []),
    ("sharded", "sharded", "tied", []),
    ("sharded-untied", "sharded", "untied", ["--memory.checkpointing", "false"]),
]
SINGLE = {case: f"one-{checkpoint}" for case, _, checkpoint, _ in CASES}


@pytest.fixture(scope="module")
def runs(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output directory of every case, and of a single process on each checkpoint."""
    root = tmp_path_factory.mktemp("engines")
    for name in ("tied", "untied"):
        tiny(vocab_size=257, tie_word_embeddings=name == "tied").save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)

    def case(name: str, engine: str, checkpoint: str, words: list[str]) -> dict[str, Any]:
        given = {
            "checkpoint": root / checkpoint,
            "data.train": corpus,
            "output": root / "runs" / name,
            "data.length": 32,
            "training.steps": STEPS,
            "training.warmup": 0,
            "training.clip": 0,
            "training.learning_rate": 1e-2,
            "lora.rank": 4,
            "dtype": "fp32",
        }
        known = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        return {"name": name, "engine": engine, "config": str(CONFIG), "words": [*known, *words]}

    two = ["--training.accumulation", "2"]  # as many sequences in a step as two processes read
    start([case(f"one-{name}", "none", name, two) for name in ("tied", "untied")], 1, root)
    start([case(*listed) for listed in CASES], 2, root)
    return {path.name: path for path in (root / "runs").iterdir()}


def start(cases: list[dict[str, Any]], processes: int, root: Path) -> None:
    """Run cases one after the other, each in all processes; an engine that hangs is ended."""
    listed = root / f"cases-{processes}.json"
    listed.write_text(json.dumps(cases), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "HF_DATASETS_CACHE": str(root / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(processes),
    }
    command = [sys.executable, str(Path(__file__).with_name("engine_program.py")), str(listed)]
    started = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        log = (root / f"log-{processes}-{rank}.txt").open("w+", encoding="utf-8")
        environment = common | (own if processes > 1 else {})
        started.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
    try:
        codes = [process.wait(timeout=400) for process, _ in started]
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    for code, (_, log) in zip(codes, started, strict=True):
        log.seek(0)
        assert code == 0, log.read()[-4000:]
        log.close()


def recorded(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "recorded.pt")
    return found


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in json.loads((run / "run.json").read_text(encoding="utf-8"))["loss"]]


every_case = pytest.mark.parametrize("case", SINGLE)


@every_case
def test_losses_and_gradients_are_those_of_one_process(case: str, runs: dict[str, Path]) -> None:
    """Of every trained weight, in every step: a shared embedding gets its part from both ends."""
    two, one = runs[case], runs[SINGLE[case]]
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert len(losses(two)) == STEPS
    expected = recorded(one)["gradients"]
    for step, (found, whole) in enumerate(zip(recorded(two)["gradients"], expected, strict=True)):
        assert found.keys() == whole.keys()
        assert {"embed_tokens", "input_layernorm", "lora_A", "lora_B"} <= {
            part for name in found for part in name.split(".")
        }
        for name, gradient in whole.items():
            error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error < (1e-5, 1e-3, 1e-3)[step], name  # Adam makes much of what is nearly zero


@every_case
def test_frequencies_stay_in_float32(case: str, runs: dict[str, Path]) -> None:
    expected = recorded(runs[SINGLE[case]])["buffers"]
    found = recorded(runs[case])["buffers"]
    assert any(name.endswith("inv_freq") for name in found)
    for name, buffer in found.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name]), name


@every_case
def test_the_adapter_is_whole_and_extended(case: str, runs: dict[str, Path]) -> None:
    ours, theirs = (ctxext.load(runs[name] / "adapter", dtype=torch.float32).eval() for name in (case, SINGLE[case]))
    assert ctxext.describe(ours).target_length == 128
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    plain = AutoModelForCausalLM.from_pretrained(runs[case] / "merged", dtype=torch.float32).eval()
    found, expected = logits(ours, tokens()), logits(theirs, tokens())
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    torch.testing.assert_close(logits(plain, tokens()), found, atol=1e-3, rtol=0)
