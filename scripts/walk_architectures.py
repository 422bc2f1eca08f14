r"""Walk every type of language model of the installed transformers and prove every method on those that rotate.

For each type, causal, masked or encoder-decoder: its smallest honest random config, and which of its layers rotate, by
arithmetic, against what ctxext sees. For each method, ALiBi in the place of rotation too: patched in place, logits
changed beyond the trained length, tokens that saw later ones still do and others still do not, saved, reloaded by a
process that never imports ctxext, compared (difference exactly 0, or a hard error where there is no stock form),
reloaded by ``ctxext.load``, compared, unpatched bit for bit. A refusal counts only when it is a ``CtxextError`` with
its reason.

    python -m scripts.walk_architectures --jobs 2 --markdown docs/results/architectures.md \
        --coverage docs/results/coverage.md

Finished types are kept in a JSONL file and not walked again until the code changes; Ctrl-C loses nothing but the types
in progress.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import faulthandler
import hashlib
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import platform
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.surgery.probe import look
from ctxext.surgery.rebuild import rotaries
from scripts.walk.check import Stock, check_model, walked_methods
from scripts.walk.special import NOT_ALONE
from scripts.walk.tables import check_tables, has_table, table_methods
from scripts.walk.tiny import KINDS, kind_of, model_types, tiny_config, tiny_model

ROOT = Path(__file__).parents[1]
_stock: Stock | None = None


def walk_safely(model_type: str, methods: list[str] | None = None) -> dict[str, Any]:
    """``walk_type``; whatever it raises is a finding, told in a form that every exception can travel in."""
    try:
        return walk_type(model_type, methods)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        reason = f"{type(error).__name__} at {where}: {error}".replace("\n", " ")
        line = {"model_type": model_type, "kind": kind_of(CONFIG_MAPPING[model_type]), "layers": "", "findings": []}
        return line | {"seconds": 0.0, "outcome": "wrong", "reason": reason}


def walk_type(model_type: str, methods: list[str] | None = None) -> dict[str, Any]:
    """All methods on one model type, as one line of the result file."""
    started = time.monotonic()
    kind = kind_of(CONFIG_MAPPING[model_type])
    line: dict[str, Any] = {"model_type": model_type, "kind": kind, "layers": "", "findings": [], "seconds": 0.0}
    if model_type in NOT_ALONE:
        return line | {"outcome": "refused", "reason": NOT_ALONE[model_type]}
    try:
        model = tiny_model(tiny_config(model_type))
    except ModuleNotFoundError:
        raise  # an optional package says so itself; this is something else
    except ImportError as error:
        package = str(error).strip().partition("\n")[0]
        return line | {"outcome": "refused", "reason": f"does not build here: {package}"}
    except (ValueError, AttributeError, AssertionError, RuntimeError, TypeError, StrictDataclassError) as error:
        if "rotary" in inspect.getsource(importlib.import_module(_class_module(model_type))):
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
            return line | {"outcome": "unchecked", "reason": f"no tiny config of it builds here ({said})"}
        return line | {"outcome": "no rope", "reason": "no rotary positions in its code"}
    is_table = False
    if not any(True for _ in rotaries(model)):
        is_table = has_table(model)
        if not is_table and not _rotates(model):
            return line | {"outcome": "no rope", "reason": "no rotary positions in its code"}
    stock = _stock if _stock is not None else Stock().__enter__()
    with tempfile.TemporaryDirectory() as folder:
        if is_table:
            findings = check_tables(model, table_methods(methods), stock, Path(folder))
        else:
            findings = check_model(model, walked_methods(methods), stock, Path(folder))
    if stock is not _stock:
        stock.__exit__()
    outcomes = Counter(finding.outcome for finding in findings)
    best = next((name for name in ("wrong", "unchecked", "right") if outcomes[name]), "refused")
    outcome, line["layers"] = best, "table" if is_table else _layers(model)
    line["findings"] = [finding.to_dict() for finding in findings]
    seconds = round(time.monotonic() - started, 1)
    return line | {"outcome": outcome, "reason": _reason(line["findings"], outcome), "seconds": seconds}


def _class_module(model_type: str) -> str:
    """Where the code of a type's language model lies."""
    config_class = CONFIG_MAPPING[model_type]
    found = KINDS[kind_of(config_class)]._model_mapping[config_class]
    return (found[0] if isinstance(found, tuple) else found).__module__


def _layers(model: PreTrainedModel) -> str:
    """How many of the tiny model's layers rotate, and how many of those see a window only."""
    text = model.config.get_text_config(decoder=True)
    paths = [path for path, module in rotaries(model) if module.config is text]
    if not paths or model.config.is_encoder_decoder:
        return ""
    seen = look(model, paths)
    if seen.failure:
        return "not seen"
    windowed = len(seen.rotating & seen.windowed)
    rotate = f"{len(seen.rotating)}/{len(seen.attending | seen.rotating)}"
    return f"{rotate}, {windowed} windowed" if windowed else rotate


def _rotates(model: PreTrainedModel) -> bool:
    """Whether the code of the model's own modules rotates anything, in whatever form (decorators do not count)."""
    for module_class in {type(module) for module in model.modules()}:
        if module_class.__module__.startswith("transformers."):
            lines = inspect.getsource(module_class).lower().splitlines()
            if any("rotary" in line and not line.lstrip().startswith("@") for line in lines):
                return True
    return False


def _reason(findings: list[dict[str, Any]], outcome: str) -> str:
    """The distinct details of the findings that are not right, each with the methods that it stands for."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding["outcome"] != "right" and (outcome != "wrong" or finding["outcome"] == "wrong"):
            name = finding["method"].partition(" (")[0]
            detail = finding["detail"].replace(f"Method {name!r}", "It").partition(" Known families:")[0]
            detail = detail.removeprefix("IncompatibleError: ")
            reasons.setdefault(detail, []).append(finding["method"])
    if len(reasons) == 1 and outcome == "refused":
        return next(iter(reasons))
    return " / ".join(f"{', '.join(names)}: {detail}" for detail, names in reasons.items())


def code_version() -> str:
    """A digest of everything that a result depends on."""
    digest = hashlib.sha256(f"{transformers.__version__} {torch.__version__}".encode())
    places = [ROOT / "ctxext", ROOT / "ctxext/methods", ROOT / "ctxext/architectures", ROOT / "scripts/walk"]
    for path in sorted(path for place in places for path in place.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def _start_worker() -> None:
    global _stock
    faulthandler.enable()
    _quiet()
    _stock = Stock().__enter__()


def _finished(path: Path, version: str, methods: list[str] | None) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {line["model_type"]: line for line in lines if line["version"] == version and line["methods"] == methods}


def main(
    types: Annotated[str | None, typer.Option("--model-types", help="Only these, separated by commas.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; each brings one of stock transformers with it.")] = 2,
    results: Annotated[Path, typer.Option(help="Where finished types are kept.")] = Path("runs/walk.jsonl"),
    markdown: Annotated[Path | None, typer.Option(help="Write the table here too.")] = None,
    coverage: Annotated[Path | None, typer.Option(help="Write the block of docs/models.md here.")] = None,
) -> None:
    """Walk the model types, print the table, exit with 1 if anything is wrong."""
    chosen = types.split(",") if types else model_types()
    names = methods.split(",") if methods else None
    version = code_version()
    done = _finished(results, version, names)
    results.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    with results.open("a") as file:
        for line in _walk([name for name in chosen if name not in done], names, jobs, console):
            line |= {"version": version, "methods": names}
            file.write(json.dumps(line) + "\n")
            file.flush()
            done[line["model_type"]] = line
    lines = [done[name] for name in chosen if name in done and done[name]["outcome"] != "no rope"]
    console.print(_table(lines))
    summary = summarise(lines)
    console.print(summary)
    if markdown:
        markdown.write_text(_markdown(lines, summary))
    if coverage:
        coverage.write_text(textwrap.fill(COVERAGE.format(**counts(lines)), 120, break_on_hyphens=False) + "\n")
    raise typer.Exit(1 if any(line["outcome"] == "wrong" for line in lines) else 0)


def _walk(chosen: list[str], names: list[str] | None, jobs: int, console: Console) -> Any:
    """Yield the lines of the types as they finish; stop at Ctrl-C."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker)
    with pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("model types", total=len(chosen))
        futures = {pool.submit(walk_safely, name, names): name for name in chosen}
        try:
            for future in concurrent.futures.as_completed(futures):
                progress.update(task, advance=1, description=futures[future])
                yield future.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            console.print("Stopped; what is finished is kept.")
        except concurrent.futures.BrokenExecutor:
            console.print("A process was killed (memory?); what is finished is kept, so run the same command again.")
            raise typer.Exit(2) from None


HEADER = """\
# Every rotary architecture

Made by `python scripts/walk_architectures.py --markdown docs/results/architectures.md --coverage
docs/results/coverage.md` on {date}, {machine}, torch {torch} (CPU), transformers {transformers}. Walked:
every type that the installed transformers knows as a causal, masked, sequence-to-sequence or speech-to-text
language model and that rotates, at a tiny size with random weights.

What was checked of each type: which of its layers rotate (by putting what is not a number into cos and sin,
against what ctxext sees). Of each method on it: patched in place; logits beyond the trained window changed; a
change of a later token reaches earlier ones exactly if it did before; saved and reloaded by stock transformers
in a process that never imports ctxext, compared (difference exactly 0, or a hard error where there is no stock
form); restored by `ctxext.load`, compared; undone bit for bit. `alibi` is the retrofit that takes the place of
rotation. Nothing else was checked: not images, audio, generation (contract tests do that on some types) or
whether an extension is any good.

"rotate" counts layers of the tiny model that rotate, of those that attend; an encoder-decoder's are not looked
at. A type is unchecked where no tiny config of it builds, or where it is accepted but cannot be run on tokens
alone.
"""

COVERAGE = """\
transformers {transformers}: **{right} model types right, {refused} refused by a named reason, {wrong}
wrong**{more}, causal, masked and encoder-decoder types, by the checks that
[architectures.md](architectures.md) lists with every type: which layers rotate,
causality, stock reload, unpatching ({checks_right} pairs of method and model type right, {checks_refused}
refused; ALiBi in the place of rotation on {alibi} types). Single and per-layer-type rotary modules (Gemma 3),
partial and interleaved rotation (GPT-NeoX, Cohere), latent attention (DeepSeek), mRoPE text models, windows
that would cap the reach (lifted or kept, never silently), and beside them BLOOM, MPT and Falcon with ALiBi.
Models that rotate in windowed layers only are refused: an extension could only harm them.
"""


def counts(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the results say in numbers."""
    types = Counter(line["outcome"] for line in lines)
    findings = [finding for line in lines for finding in line["findings"]]
    checks = Counter(finding["outcome"] for finding in findings)
    alibi = sum(finding["method"].startswith("alibi") and finding["outcome"] == "right" for finding in findings)
    unchecked = types["unchecked"]
    return {
        **{name: types[name] for name in ("right", "refused", "wrong", "unchecked")},
        **{f"checks_{name}": checks[name] for name in ("right", "refused", "wrong", "unchecked")},
        "alibi": alibi,
        "more": f", {unchecked} not checked" if unchecked else "",
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
    }


def summarise(lines: list[dict[str, Any]]) -> str:
    """The line that counts."""
    return (
        "{right} right, {refused} refused by reason, {wrong} wrong{more} ({checks_right} checks of a method on a model "
        "right, {checks_refused} refused, {checks_wrong} wrong, {checks_unchecked} not to be run; ALiBi in the place "
        "of rotation right on {alibi}; transformers {transformers})"
    ).format(**counts(lines))


COLUMNS = ("model type", "kind", "outcome", "methods right", "rotate", "reason")


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    right = sum(finding["outcome"] == "right" for finding in line["findings"])
    of = f"{right}/{len(line['findings'])}"
    return line["model_type"], line["kind"], line["outcome"], of, line["layers"], line["reason"]


def _table(lines: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, title="methods on model types")
    colours = {"right": "green", "refused": "yellow", "wrong": "red", "unchecked": "magenta"}
    for line in lines:
        name, kind, outcome, *rest, reason = _cells(line)
        table.add_row(name, kind, f"[{colours[outcome]}]{outcome}[/]", *rest, reason.replace("[", r"\["))
    return table


def _markdown(lines: list[dict[str, Any]], summary: str) -> str:
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    header = HEADER.format(date=datetime.date.today().isoformat(), machine=machine, **counts(lines))
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(line)) + " |" for line in lines]
    head = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([header, summary, "", *head, *rows, ""])


if __name__ == "__main__":
    typer.run(main)
