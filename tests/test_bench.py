"""What the benchmarks share (``scripts/bench.py``), and what a GPU is rented for (``scripts/gpu_run.sh``).

The round that warms up is not counted, no row is lost, views are no launches, a compiled step computes what a whole
pass does, and every stage runs on a CPU before it runs on rented minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer

from ctxext.errors import ResultsError
from ctxext.measuring.checkpoint import Checkpoint
from scripts import bench
from tests._models import tiny
from tests._steps import compiled_step, launches, launches_a_layer

ROOT = Path(__file__).parents[1]


def test_timers_take_turns_and_the_first_round_does_not_count() -> None:
    turns: list[str] = []
    times = {"a": iter((100.0, 1.0, 5.0, 2.0)), "b": iter((100.0, 4.0, 4.0, 7.0))}

    def timer(name: str) -> float:
        turns.append(name)
        return next(times[name])

    assert bench.medians([lambda: timer("a"), lambda: timer("b")], rounds=3) == [2.0, 4.0]
    assert turns == ["a", "b"] * 4


def test_a_table_is_printed_and_kept_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, notes = tmp_path / "table.md", ["one"]

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        say("the first")
        yield ["1", "2"]
        assert file.read_text().endswith("|---|---|\n| 1 | 2 |\n\n- one\n")
        notes.append("two")
        yield ["3", "[4]"]

    bench.report("Title", ("a", "b"), rows, file, notes)
    whole = "Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | [4] |\n\n- one\n- two\n"
    assert file.read_text() == whole
    assert capsys.readouterr().out == whole


def test_options_that_hold_several_values() -> None:
    assert bench.listed("bf16, fp32,", ("bf16", "fp32")) == ["bf16", "fp32"]
    assert bench.listed("stock; ctxext, kept", separator=";") == ["stock", "ctxext, kept"]
    with pytest.raises(typer.BadParameter, match="'fp31' is none of bf16, fp32"):
        bench.listed("fp31", ("bf16", "fp32"))


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda x: (x @ x).relu().view(-1)[2:], 2),
        (lambda x: x.T.unsqueeze(0).expand(3, 4, 4).contiguous(), 1),
        (lambda x: x.clone().add_(1).mul_(2).flatten(), 3),
        (lambda x: torch.empty(3), 0),
        (lambda x: torch.split(x, 2), 0),
    ],
)
def test_what_computes_is_a_launch_and_a_view_is_none(call: Callable[[torch.Tensor], object], count: int) -> None:
    x = torch.randn(4, 4)
    assert launches(lambda: call(x), "cpu") == count


def test_launches_a_layer_are_those_that_a_further_layer_adds() -> None:
    x = torch.randn(4)

    def step_of(layers: int) -> Callable[[], object]:
        return lambda: [x.exp() for _ in range(7 + 5 * layers)]

    assert launches_a_layer(step_of, "cpu", (2, 4)) == 5


@pytest.mark.nightly
@torch.no_grad()
def test_compiled_steps_give_the_logits_of_a_whole_pass() -> None:
    model = tiny("llama", num_hidden_layers=1)
    ids = torch.randint(5, 60, (1, 12))
    step = compiled_step(model, ids[:, :8], 16)
    seen = torch.cat([step(token) for token in ids[:, 8:].T[..., None]], 1)
    torch.testing.assert_close(seen, model(ids).logits[:, 8:])
    torch.compiler.reset()


def test_the_eager_attention_of_bloom_is_a_bias_and_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    attention = import_module("bench_attention")
    setting = attention.Setting(9, 4, 8, "fp32", False, "cpu")
    q, k, v = attention.tensors(setting)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    slopes = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)])  # of four heads, by the paper
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    expected = (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(attention.variants(setting)[attention.EAGER]((q, k, v)), expected)


def test_all_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    missing_of = import_module("gpu_check").missing_of
    assert missing_of(["json", "no_such_wheel", "bench", "nor_this.one"]) == ["no_such_wheel", "nor_this"]


def gpu_run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this Python."""
    environment = os.environ | {"PYTHON": sys.executable, "CTXEXT_COMMIT": "0123abc"}
    command = [ROOT / "scripts" / "gpu_run.sh", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("options", [("--from", "smokes"), ("--only", ""), ("--froom", "smoke")])
def test_options_are_refused_before_anything_runs(tmp_path: Path, options: tuple[str, str]) -> None:
    refused = gpu_run("--out", str(tmp_path / "out"), *options)
    assert refused.returncode != 0
    assert options[0] in refused.stderr or options[1] in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_every_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    run = gpu_run("--device", "cpu", "--quick", "--minutes", "60", "--out", str(tmp_path))
    stages = ["heads", "alibi", "far", "smoke", "compiled", "steps", "launches", "tests", "training", "serve", "cudnn"]
    summary = (tmp_path / "summary.md").read_text()
    ended = [line.split("|")[1:3] for line in summary.splitlines()[4:] if not line.startswith("| flash")]
    assert ended == [[f" {name} ", " done "] for name in stages]
    assert run.returncode == 0
    tables = ["steps", "compiled", "heads", "launches", "bloom", "alibi", "training", "serve", "cudnn"]
    for name in [*tables, *stages]:
        text = (tmp_path / f"{name}.{'md' if name in tables else 'log'}").read_text()
        assert torch.__version__ in text
        assert "0123abc" in text
    for method in ("stock", "self_extend", "dual_chunk"):
        assert f"| bf16 | {method} | 0." in (tmp_path / "compiled.md").read_text(), "a compiled step was measured"
    assert {"far-needles.md", "far-code-self_extend.md", "far-code-dual_chunk.md"} <= set(os.listdir(tmp_path))


@pytest.mark.parametrize("name", ["answers.csv", "study"])
def test_results_belong_to_one_checkpoint_and_its_settings(name: str, tmp_path: Path) -> None:
    """A study that is repeated goes on from what it finds, whoever wrote that."""
    one, other = (Checkpoint(name, tiny(), None, sha256=name) for name in ("one", "other"))
    output = tmp_path / name
    for _ in range(2):
        bench.claim(output, "study.py", one, factor=2)
        (output if output.suffix else output / "cells").write_text("results")
    for checkpoint, factor, said in (
        (other, 2, "another checkpoint: one"),
        (one, 4, 'another settings: {"factor": 2}'),
    ):
        with pytest.raises(ResultsError, match=f"holds jobs of {said}"):
            bench.claim(output, "study.py", checkpoint, factor=factor)
    unknown = tmp_path / f"unknown-{name}"
    unknown.write_text("results") if output.suffix else (unknown / "cells").mkdir(parents=True)
    with pytest.raises(ResultsError, match=r"says of which checkpoint|is not empty and holds no earlier study"):
        bench.claim(unknown, "study.py", one, factor=2)
