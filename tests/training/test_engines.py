"""The whole recipe on two processes against one, through accelerate and the Trainer, on gloo.

DDP, FSDP2, FSDP2 with context parallelism, and on four processes FSDP2 as on two machines: sequences, masks, losses,
gradients, saving.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ctxext
from tests._models import logits, tiny, tokens
from tests._programs import ROOT, free_port
from tests.training import engine_program
from tests.training._recipe import CONFIG, SMALL, losses, words_of

pytestmark = pytest.mark.nightly
STEPS = 3
HANGING = 1800.0  # seconds; a minute is usual, but machines can be busy

# What is trained, in one process each: checkpoint and words of the command line.
SETUPS: dict[str, tuple[str, list[str]]] = {
    "tied": ("tied", ["--merge"]),
    "untied": ("untied", ["--memory.checkpointing", "false"]),
    "bf16": ("tied", ["--dtype", "bf16", "--method", "alibi"]),
    "pose": ("untied", ["--data.positions", "pose"]),
    "alibi": ("tied", ["--method", "alibi"]),
    "bloom": ("bloom", ["--method", "alibi"]),
    # Beyond the trained window of 64 tokens: frequencies of 96 tokens, of which a process sees 48.
    "dynamic": ("untied", ["--method", "dynamic_ntk", "--data.length", "96", "--data.positions", "consecutive"]),
}
NAMES = ["data-tied", "sharded-tied", "sharded-bf16", "machines-untied"]
NAMES += [f"context-{setup}" for setup in ("pose", "alibi", "bloom", "dynamic")]
CASES = {name: name.split("-") for name in NAMES}


@pytest.fixture(scope="module")
def runs(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output directory of every case, and of a single process on its checkpoint."""
    root = tmp_path_factory.mktemp("engines")
    for name in ("tied", "untied", "bloom"):
        tie = {} if name == "bloom" else {"tie_word_embeddings": name == "tied"}
        tiny("bloom" if name == "bloom" else "llama", vocab_size=257, **tie).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)

    def case(name: str, engine: str, setup: str, *words: str, interrupted: bool = False, resumed: bool = False) -> Any:
        checkpoint, own = SETUPS[setup]
        given = {"checkpoint": root / checkpoint, "data.train": corpus, "output": root / "runs" / name}
        plain = {"training.steps": STEPS, "training.warmup": 0, "training.clip": 0, "merge": "false"}
        known = words_of(SMALL | given | plain, *own, *words)
        flags = {"interrupted": interrupted, "resumed": resumed}
        return {"name": name, "engine": engine, "config": str(CONFIG), "words": known, **flags}

    two, four = (("--training.accumulation", count) for count in "24")  # sequences in a step, as so many processes read
    several = {name: parts for name, parts in CASES.items() if name != "machines-untied"}
    ones = [case(f"one-{name}", "none", name, *two) for name in dict.fromkeys(setup for _, setup in several.values())]
    cases = [case(name, *parts, *(two if parts[0] == "context" else ())) for name, parts in several.items()]
    ones.append(case("one-untied-four", "none", "untied", *four))
    cases += [case("resumed", "sharded", "tied", **{flag: True}) for flag in ("interrupted", "resumed")]
    cases += [case("refused", "context", "alibi", "--extension.attention", "reference")]
    read = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    read |= {"HF_DATASETS_CACHE": str(root / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, read):  # packages read it as they are imported
        start(ones, 1, root)
        start(cases, 2, root)
        start([case("machines-untied", *CASES["machines-untied"])], 4, root, machines=2)
    return {path.name: path for path in (root / "runs").iterdir()}


def start(cases: list[dict[str, Any]], processes: int, root: Path, *, machines: int = 1) -> None:
    """Run cases one after the other, each in all processes; where one fails, the others wait for it and are ended."""
    port = free_port()
    common = {"WORLD_SIZE": str(processes)}
    forks = multiprocessing.get_context("forkserver")  # all are forks of one that has imported the program
    forks.set_forkserver_preload([engine_program.__name__, "datasets", "peft", "matplotlib.pyplot"])
    started = []
    for rank in range(processes):
        here = processes // machines
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        log, environment = root / f"log-{processes}-{rank}.txt", common | (own if processes > 1 else {})
        process = forks.Process(target=engine_program.main, args=(cases, environment, log))
        process.start()
        started.append((process, log))
    deadline = time.monotonic() + HANGING
    try:
        codes = [process.exitcode for process, _ in started]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.2)
            codes = [process.exitcode for process, _ in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    ended = zip(codes, started, strict=True)
    for code, (_, log) in sorted(ended, key=lambda process: process[0] is None):  # those that failed first
        said = log.read_text(encoding="utf-8")[-4000:]
        assert code == 0, f"exit status {code} (None: it hung, or another process failed)\n{said}"


def recorded(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "recorded.pt")
    return found


def single(case: str) -> str:
    engine, setup = CASES[case]
    return f"one-{setup}" + "-four" * (engine == "machines")


every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_losses_and_gradients_are_those_of_one_process(case: str, runs: dict[str, Path]) -> None:
    """Of every trained weight: a token embedding that is the head as well gets its part from both ends."""
    two, one, rounded = runs[case], runs[single(case)], case.endswith("bf16")
    assert losses(two) == pytest.approx(losses(one), rel=1e-2 if rounded else 1e-5)
    assert len(losses(two)) == STEPS
    for step, (found, whole) in enumerate(zip(recorded(two)["gradients"], recorded(one)["gradients"], strict=True)):
        assert found.keys() == whole.keys()
        parts = {part for name in found for part in name.split(".")}
        assert {"lora_A", "lora_B", "modules_to_save", "input_layernorm"} <= parts
        assert {"embed_tokens", "word_embeddings"} & parts
        if rounded and step:
            break  # Adam makes much of gradients that are little but rounding
        for name, gradient in whole.items():  # a key unseen changes them by far more than kernels of other CPUs do
            error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error < (0.1 if rounded else (1e-4, 1e-4, 1e-3)[step]), name


@every_case
def test_frequencies_stay_in_float32(case: str, runs: dict[str, Path]) -> None:
    found, expected = (recorded(runs[name])["buffers"] for name in (case, single(case)))
    assert case.endswith("bloom") or any(name.endswith("inv_freq") for name in found)
    for name, buffer in found.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("case", ["data-tied", "sharded-tied", "sharded-bf16", "context-bloom"])
def test_the_adapter_is_whole_and_extended(case: str, runs: dict[str, Path]) -> None:
    ours, theirs = (ctxext.load(runs[name] / "adapter", dtype=torch.float32).eval() for name in (case, single(case)))
    assert ctxext.describe(ours).fingerprint == ctxext.describe(theirs).fingerprint
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    found, expected = logits(ours, tokens()), logits(theirs, tokens())
    assert (found - expected).abs().mean() < (0.5 if case.endswith("bf16") else 0.01)
    if (runs[case] / "merged").exists():
        plain = AutoModelForCausalLM.from_pretrained(runs[case] / "merged", dtype=torch.float32).eval()
        torch.testing.assert_close(logits(plain, tokens()), found, atol=1e-3, rtol=0)


def test_merged_models_are_among_them(runs: dict[str, Path]) -> None:
    assert {name for name in CASES if (runs[name] / "merged").exists()} == {"data-tied", "sharded-tied"}


def test_shards_are_resumed_with_the_losses_of_a_run_never_interrupted(runs: dict[str, Path]) -> None:
    assert losses(runs["resumed"]) == pytest.approx(losses(runs["sharded-tied"]), rel=1e-5)


def test_what_the_engine_cannot_carry_is_refused_before_the_first_step(runs: dict[str, Path]) -> None:
    said = (runs["refused"] / "refused.txt").read_text(encoding="utf-8")
    assert said.startswith("Context parallelism cannot carry this run: attention backend 'reference' has no form for")
    assert not (runs["refused"] / "recorded.pt").exists()
