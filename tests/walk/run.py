r"""Walk every type of language model of the installed transformers and prove every method that is for its positions.

For each type: its smallest honest random config, what kind of positions it has (rotations, ALiBi, a learned table,
sinusoids, buckets of distances), and of those that rotate which layers do, by arithmetic, against what ctxext sees. For
each method: patched in place, logits changed beyond the trained length, tokens that saw later ones still do and others
still do not, saved, reloaded by a process that never imports ctxext, compared (difference exactly 0, or a hard error
where there is no stock form), reloaded by ``ctxext.load``, compared, unpatched bit for bit. A refusal counts only when
it is a ``CtxextError`` with its reason.

    python -m tests.walk.run --jobs 2 --markdown docs/evidence/architectures.md \
        --coverage docs/evidence/coverage.md

Finished types are kept in a JSONL file and not walked again until the code changes; Ctrl-C loses nothing but the types
in progress.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctxext.core.subject import Subject
from ctxext.probe.layers import look
from tests.walk.check import Finding, Stock, check_model, is_decoders, walked_methods
from tests.walk.kinds import OTHER, positions_of
from tests.walk.pages import coverage as coverage_of
from tests.walk.pages import pages, summarise, table
from tests.walk.special import NOT_ALONE
from tests.walk.tiny import KINDS, model_types, tiny_config, tiny_model

ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm"
_stock: Stock | None = None


def walk_safely(model_type: str, methods: list[str] | None = None) -> dict[str, Any]:
    """``walk_type``; whatever it raises is a finding, told in a form that every exception can travel in."""
    try:
        return walk_type(model_type, methods)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        reason = f"{type(error).__name__} at {where}: {error}".replace("\n", " ")
        return _line(model_type) | {"outcome": "wrong", "reason": reason}
    finally:
        gc.collect()
        gc.freeze()  # ctxext looks for other holders of a config among all objects, and those of imports hold none


def walk_type(model_type: str, methods: list[str] | None = None) -> dict[str, Any]:
    """All methods on one model type, as one line of the result file."""
    started, line = time.process_time(), _line(model_type)
    if model_type in NOT_ALONE:
        return line | {"outcome": "unchecked", "reason": NOT_ALONE[model_type]}
    stock = _stock if _stock is not None else Stock().__enter__()
    findings: list[Finding] = []
    try:
        for kind in _forms(model_type):
            model = tiny_model(tiny_config(model_type), loader=KINDS[kind])
            line["positions"] = positions = positions_of(model, kind)
            line["layers"] = line["layers"] or _layers(model)
            with tempfile.TemporaryDirectory() as folder:
                found = check_model(model, walked_methods(methods), stock, Path(folder), positions)
            findings += [_in_form(one, kind) for one in found] if findings else found
    except BUILDING as error:
        if findings or _in_ctxext(error):
            raise
        is_import = isinstance(error, ImportError)
        said = str(error).strip().partition("\n")[0] if is_import else f"{type(error).__name__}: {error}"
        return line | {"outcome": "unchecked", "reason": f"It does not build here: {said}".replace("\n", " ")}
    finally:
        if stock is not _stock:
            stock.__exit__()
    outcomes = Counter(finding.outcome for finding in findings)
    outcome = next((name for name in ("wrong", "right", "unchecked") if outcomes[name]), "refused")
    line["findings"] = [finding.to_dict() for finding in findings]
    seconds = round(time.process_time() - started, 1)
    return line | {"outcome": outcome, "reason": _reason(line["findings"], outcome), "seconds": seconds}


# What building a tiny model raises where its config does not hold together, or a package is missing.
BUILDING = (ImportError, ValueError, AttributeError, AssertionError, RuntimeError, TypeError, StrictDataclassError)


def _in_ctxext(error: BaseException) -> bool:
    """Whether an error passed through ctxext, or through a check: then it says nothing of building a model."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(str(ROOT / "ctxext") in name or name.endswith("check.py") for name in files)


def _line(model_type: str) -> dict[str, Any]:
    """A line of the result file before anything was found."""
    empty: dict[str, Any] = {"layers": "", "findings": [], "seconds": 0.0}
    return {"model_type": model_type, "kind": ", ".join(_forms(model_type)), "positions": OTHER} | empty


def _forms(model_type: str) -> list[str]:
    """What a type is walked as: an encoder as what it is trained as, and an encoder-decoder on one side and on both."""
    config_class = CONFIG_MAPPING[model_type]
    known = [name for name, loader in KINDS.items() if config_class in loader._model_mapping]
    both = [name for name in ("seq2seq", "speech") if name in known]
    if known[0] not in both and both and getattr(config_class(), "is_encoder_decoder", False):
        return [known[0], both[0]]
    return ["masked"] if known[0] == "causal" and "masked" in known else known[:1]


def _in_form(finding: Finding, kind: str) -> Finding:
    """A finding of the second form of a type."""
    name, paren, rest = finding.method.partition(" (")
    return replace(finding, method=f"{name} ({kind}" + (f", {rest}" if paren else ")"))


def _layers(model: PreTrainedModel) -> str:
    """How many of the tiny model's layers rotate, and how many of those see a window only."""
    paths = [path for path, module in Subject(model).rotaries if is_decoders(model, module)]
    if not paths:
        return ""
    seen = look(model, paths)
    if seen.failure:
        return "not seen"
    windowed = len(seen.rotating & seen.windowed)
    rotate = f"{len(seen.rotating)}/{len(seen.attending | seen.rotating)}"
    return f"{rotate}, {windowed} windowed" if windowed else rotate


def _reason(findings: list[dict[str, Any]], outcome: str) -> str:
    """The distinct details of the findings that are not right, each with the methods that it stands for."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding["outcome"] != "right" and (outcome != "wrong" or finding["outcome"] == "wrong"):
            detail = finding["detail"].partition(" Known families:")[0].removeprefix("IncompatibleError: ")
            reasons.setdefault(detail, []).append(finding["method"])
    if len(reasons) == 1 and outcome == "refused":
        return next(iter(reasons))
    return " / ".join(f"{', '.join(names)}: {detail}" for detail, names in reasons.items())


def code_version() -> str:
    """A digest of everything that a result depends on."""
    digest = hashlib.sha256(f"{transformers.__version__} {torch.__version__}".encode())
    rooms = ("methods", "core", "kernels", "caches", "attention", "models", "checkpoints")
    places = [ROOT / "ctxext", *(ROOT / "ctxext" / room for room in rooms), ROOT / "tests/walk"]
    for path in sorted(path for place in places for path in place.glob("*.py") if path.name != "pages.py"):
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
    if os.access(MEMORY, os.W_OK):
        tempfile.tempdir = MEMORY  # each check writes a checkpoint and several configs
    gc.freeze()
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
    markdown: Annotated[Path | None, typer.Option(help="Write the page here, and its tables beside it.")] = None,
    coverage: Annotated[Path | None, typer.Option(help="Write the block of docs/guides/models.md here.")] = None,
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
    lines = [done[name] for name in chosen if name in done]
    console.print(table(lines))
    summary = summarise(lines)
    console.print(summary)
    if markdown:
        for ending, text in pages(lines).items():
            markdown.with_name(f"{markdown.stem}{ending}").write_text(text)
    if coverage:
        coverage.write_text(coverage_of(lines))
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


if __name__ == "__main__":
    typer.run(main)
