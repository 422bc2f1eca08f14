"""Reports of every measuring command on tiny models, recorded: the code beneath may change, and no number with it.

    python -m tests._records                 # write all of tests/golden/records/ anew
    python -m tests._records compare longppl # or these

A record holds what a report says but for its sentences and circumstances: numbers, names, labels and structure. Write
one anew only for a change that is meant to change numbers, and say in the commit which and why. On another processor
than the recorded one, where numbers are compared loosely, write all of them anew at the commit that they name first.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ctxext.choosing import choose, halving
from ctxext.choosing.candidates import candidates
from ctxext.methods import RopeMethod
from scripts.make_golden import git
from scripts.make_saved import values
from tests._programs import ROOT, command
from tests._tokenizer import make_tokenizer, make_two_sided_tokenizer

FOLDER = ROOT / "tests" / "golden" / "records"
TRAINED = 256
WIDER = 384  # tokens: enough for a passkey's prompt
TEXTS = 6
SMALL = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": TRAINED, "pad_token_id": 259}

# What differs between two runs of one measurement or between two machines, and is no result.
CIRCUMSTANCES = {"attention", "checkpoint_sha256", "command", "date", "device", "dtype", "evaluator_sha256", "machine"}
CIRCUMSTANCES |= {"made", "seconds", "versions"}
# What changes with the wording.
PROSE = {"answer", "dropped", "left_out", "notes", "reason", "says", "sentences", "why_not"}

# What stands for numbers whose last digits may differ as those of losses do; equal where arithmetic is the same.
DIGESTS = {"fingerprint"}

# How far numbers may be from those that another processor, or another torch or transformers, recorded: relative, and
# absolute for differences of losses. Training multiplies roundings, and half precision has coarse ones.
CLOSE, TRAINED_CLOSE, HALF_CLOSE = 1e-5, 1e-3, 3e-2


@dataclass(frozen=True)
class Case:
    """One measurement that is recorded.

    Args:
        words: what is typed after ``ctxext``; empty for what no command measures so small.
        report: the file that holds the report then.
        close: see ``CLOSE``.
        within: what must be there while it is measured.
        run: measures in the place of a command, and returns the report.
    """

    words: str = ""
    report: str = "out.json"
    close: float = CLOSE
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    run: Callable[[], Any] | None = None


def texts(count: int) -> str:
    """Name the first texts as options."""
    return " ".join(f"-t text{number}.txt" for number in range(count))


def laboratory() -> Any:
    """Train and test two encodings on text and on parity, in the quick preset's way and smaller."""
    from ctxext.laboratory.run import prepare
    from tests.laboratory._tiny import TINY

    asked: dict[str, Any] = {"only": ("rope", "alibi"), "tasks": ("text", "parity"), "seeds": 2, "workers": 1}
    return prepare(None, text=["text0.txt", "text1.txt"], settings=TINY, **asked).run().to_dict()


def before_after() -> Any:
    """Train the recipe's adapter for two steps and measure before and after."""
    from ctxext.training.settings import read_settings
    from tests.training._recipe import CONFIG, SMALL, recipe, words_of

    settings = SMALL | {
        "checkpoint": "llama",
        "data.train": "text0.txt",
        "output": "run",
        "training.steps": 2,
        "training.warmup": 1,
        "merge": "false",
        "evaluation.text": "text1.txt",
        "evaluation.lengths": f"[{TRAINED}, {2 * TRAINED}]",
        "evaluation.passkey_lengths": "[400]",
        "evaluation.passkey_depths": "[0.5]",
        "evaluation.passkey_trials": 2,
    }
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path("cache")):
        recipe.finetune(read_settings(CONFIG, words_of(settings)))
    report = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    losses = [{name: entry[name] for name in ("step", "loss")} for entry in report["loss"]]
    return {"loss": losses, "evaluation": report["evaluation"]}


@contextlib.contextmanager
def few_candidates() -> Iterator[None]:
    """Let ``choose`` try a few of its candidates, on one text at each look."""

    def few(*given: Any) -> list[RopeMethod]:
        every = candidates(*given)
        return [*every[:10:3], *every[10::40]]

    with (
        mock.patch.object(choose, "candidates", few),
        mock.patch.object(halving, "ENOUGH", TRAINED),
    ):
        yield


LLAMA = "llama --dtype fp32"
COMPARED = "-m yarn -m dynamic_ntk"
KEYS = "--keys keys.json --short 96 --stride 32 --alpha 0.5 --beta -6"
CASES = {
    "perplexity_position": Case(f"eval perplexity {LLAMA} {texts(2)} -m yarn -f 4 -l 256 -l 1024 -o out.json"),
    "perplexity_documents": Case(f"eval perplexity {LLAMA} {texts(6)} -m dynamic_ntk -f 2 -l 512 -o out.json"),
    "perplexity_plain": Case(f"eval perplexity {LLAMA} {texts(2)} -l 200 -o out.json"),
    "perplexity_sliding": Case(
        f"eval perplexity {LLAMA} {texts(2)} --mode sliding -m yarn -f 2 -l 256 -l 512 --stride 128 -o out.json"
    ),
    "perplexity_yarn": Case(
        f"eval perplexity {LLAMA} {texts(2)} --mode yarn -m yarn -f 2 -l 512 --tokens 1024 -o out.json"
    ),
    "perplexity_yarn_truncated": Case(
        f"eval perplexity {LLAMA} {texts(2)} --mode yarn --truncate -m pi -f 2 -l 256 -l 512 -o out.json"
    ),
    "perplexity_longlora": Case(
        f"eval perplexity {LLAMA} {texts(2)} --mode longlora -m pi -f 2 -l 512 --tokens 1024 -o out.json"
    ),
    "compare": Case(f"eval compare wider --dtype fp32 {texts(2)} {COMPARED} -f 2 --depth 0 -o out", "out/report.json"),
    "compare_documents": Case(
        f"eval compare {LLAMA} {texts(6)} -m yarn -f 2 -l 320 --no-passkey -o out", "out/report.json"
    ),
    "longppl": Case(f"eval longppl {LLAMA} {texts(2)} {COMPARED} -f 2 {KEYS} -o out.json"),
    "longppl_keys": Case(f"eval longppl {LLAMA} {texts(1)} -m pi -f 2 {KEYS}", "keys.json"),
    "passkey": Case(f"eval passkey {LLAMA} {COMPARED} -f 2 --depth 0 --depth 0.6 --trials 2 -l 400 -l 500 -o out.json"),
    "needle": Case(f"eval passkey {LLAMA} -m pi -f 2 --depth 0.5 -l 400 {texts(1)} --seed 3 -o out.json"),
    "ruler": Case(
        f"eval ruler {LLAMA} -m yarn -l 1800 --samples 1 --task niah_single_1 --task niah_single_2 --task vt "
        f"{texts(1)} -o out.json"
    ),
    "retrieval": Case(
        f"eval retrieval {LLAMA} -m yarn -m dynamic_ntk -f 8 -l 1200 -l 1400 --samples 3 --choices 3 -o out.json"
    ),
    "masked": Case(f"eval masked bert {texts(2)} -m tile -m pi -f 2 --passes 2 -o out.json"),
    "choose": Case(f"choose {LLAMA} {texts(4)} --target 512 -o out.json", within=few_candidates),
    "laboratory": Case(run=laboratory, close=TRAINED_CLOSE),
    "before_after": Case(run=before_after, close=TRAINED_CLOSE),
}


@contextlib.contextmanager
def inputs() -> Iterator[None]:
    """Work in a new folder with checkpoints and texts, whose names are the same wherever it lies."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number in range(TEXTS):
            lines = [f"{number} {i}: the rain falls and {i * i % (89 + number)} rivers run.\n" for i in range(60)]
            Path(f"text{number}.txt").write_text("".join(lines), encoding="utf-8")
        llama = SMALL | {"num_key_value_heads": 1, "bos_token_id": 256, "eos_token_id": None}
        for name, trained in (("llama", TRAINED), ("wider", WIDER)):
            config = LlamaConfig(**llama | {"max_position_embeddings": trained})
            weighted(LlamaForCausalLM(config)).save_pretrained(name)
            make_tokenizer(bos=True).save_pretrained(name)
        weighted(BertForMaskedLM(BertConfig(**SMALL))).save_pretrained("bert")
        make_two_sided_tokenizer().save_pretrained("bert")
        yield


def weighted(model: PreTrainedModel) -> PreTrainedModel:
    """Give every matrix weights that follow from its name: what a version of transformers draws is its own affair."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(values(name, weight.shape))
    return model.eval()


def measured(name: str) -> Any:
    """Measure a case, and return its report as JSON has it."""
    case = CASES[name]
    with inputs(), case.within():
        if case.run is not None:
            return json.loads(json.dumps(case.run()))
        done = command(*shlex.split(case.words))
        assert done.exit_code == 0, done.output
        return json.loads(Path(case.report).read_text(encoding="utf-8"))


def results(report: Any) -> Any:
    """Leave out of a report, at any depth, what is no result."""
    if isinstance(report, dict):
        return {name: results(value) for name, value in report.items() if name not in CIRCUMSTANCES | PROSE}
    return [results(value) for value in report] if isinstance(report, list) else report


def differences(recorded: Any, found: Any, close: float = 0.0, place: str = "") -> Iterator[str]:
    """Name each place where two reports differ, and both values.

    Args:
        recorded: the report of the golden file.
        found: today's.
        close: how far numbers with a decimal point may be apart, relative and absolute; 0: not by their last digit,
            and digests of numbers are compared too.
        place: where in the whole report both are.
    """
    if type(recorded) is not type(found):
        yield f"{place}: {recorded!r} became {found!r}"
    elif isinstance(recorded, dict):
        for name in sorted(recorded.keys() ^ found.keys()):
            yield f"{place}.{name}: {'no longer there' if name in recorded else 'new'}"
        for name in recorded.keys() & found.keys() - (DIGESTS if close else set()):
            yield from differences(recorded[name], found[name], close, f"{place}.{name}")
    elif isinstance(recorded, list) and len(recorded) == len(found):
        for number, pair in enumerate(zip(recorded, found, strict=True)):
            yield from differences(*pair, close, f"{place}[{number}]")
    elif isinstance(recorded, float) and math.isclose(recorded, found, rel_tol=close, abs_tol=close):
        return
    elif recorded != found:
        yield f"{place}: {recorded!r} became {found!r}"


def arithmetic() -> dict[str, str]:
    """Say what the last digits of a sum of floats depend on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    parts = [said[name] for name in ("model name", "cpu family", "model") if name in said]
    return {
        "processor": ", ".join(parts) or platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def stored(name: str) -> Any:
    """Read the golden file of a case."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str) -> None:
    """Measure a case and write its golden file, a line for every part of the report."""
    case = CASES[name]
    provenance = {
        "command": f"OMP_NUM_THREADS=1 python -m tests._records {name}",
        "measured": f"ctxext {case.words}" if case.words else f"tests._records.{name}",
        "made_at": git(ROOT, "rev-parse", "HEAD").strip(),
        "python": platform.python_version(),
        "arithmetic": arithmetic(),
    }
    report = results(measured(name))
    lines = ",\n".join(f"{json.dumps(part)}: {json.dumps(value, allow_nan=False)}" for part, value in report.items())
    text = f'{{"provenance": {json.dumps(provenance)},\n"report": {{\n{lines}}}}}\n'
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"Wrote {(FOLDER / name).relative_to(ROOT)}.json, {len(text) / 1024:.0f} KiB")


def main() -> None:
    """Write the golden files of the cases that are named, or of all."""
    if changes := git(ROOT, "status", "--porcelain", "--", "ctxext", "recipes", "tests/*.py"):
        sys.exit(f"Commit first: a record names the commit that made it, and this worktree has\n{changes}")
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        write(name)


if __name__ == "__main__":
    main()
