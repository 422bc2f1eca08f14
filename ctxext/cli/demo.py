"""``ctxext demo``: a comparison on real input that shows each reading as soon as it is measured."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.text import Text

from ctxext.cli.eval.common import cost_of, ending_on_interrupt
from ctxext.cli.options import DemoOptions
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint, checked_device, load_checkpoint
from ctxext.evaluation.comparison import Comparison, Series, prepare
from ctxext.evaluation.comparison.result import ComparisonResult
from ctxext.evaluation.forward import pass_cost, turning_point
from ctxext.evaluation.labels import all_of, capitalised, label_of, tokens_label
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.passkey import PasskeyTrial, make_prompts
from ctxext.evaluation.provenance import from_json
from ctxext.evaluation.readings import Reader, Reading, chosen_methods, known_trained_length
from ctxext.evaluation.report.comparison import loss_figure, unpatched_sentence
from ctxext.evaluation.report.figures import require_matplotlib
from ctxext.evaluation.report.page import Heading, Page, TextTable
from ctxext.evaluation.statistics import bucketed, edges_for
from ctxext.evaluation.survey import PromptJob, Survey, jobs_of
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, is_reference, window_of
from ctxext.progress import StageBar, terminal
from ctxext.texts.corpus import Corpus, corpus_of
from ctxext.texts.documents import SKIPPED_TOKENS, installed_texts, read_documents

SECONDS = 280.0  # five minutes, of which loading takes some
STEP = 4096  # tokens of the pass by which the time is told; shorter ones say too much of what long ones do not have
QUICK, EVERYTHING = ("yarn",), ("pi", "ntk", "dynamic_ntk", "yarn")
FIGURE, DATA, TABLE, UNFINISHED = "loss.png", "result.json", "table.md", "unfinished"
# Below this ratio to the unpatched model inside its window a perplexity counts as flat.
FLAT = 1.35
NO_BREAK = "\N{NO-BREAK SPACE}"


def show(options: DemoOptions) -> None:
    """Measure, and show the result.

    Raises:
        CtxextError: whatever cannot be right, before anything is measured.
    """
    console = terminal()
    _prepare(options.output)
    with console.status("Loading the checkpoint ..."):
        checkpoint = load_checkpoint(options.model, dtype=faster_dtype() if options.model is None else "auto")
    preset = Preset(checkpoint, options)
    reach = preset.checked_length()
    corpus = corpus_of(
        read_documents(options.text or _plays(options.documents)),
        checkpoint.tokenizer,
        tokens=reach + 1,
        whole=True,
        skip=0 if options.text else SKIPPED_TOKENS,
    )
    pace = seconds_per_cost(checkpoint, corpus)
    comparison = preset.comparison(corpus, reach) if options.length else preset.fitting(corpus, reach, pace)
    keys = preset.keys(comparison) if (options.everything if options.passkey is None else options.passkey) else None
    _announce(console, comparison, keys, pace, options.everything)
    began = time.perf_counter()
    with ending_on_interrupt(console, comparison):
        result = _measure(console, comparison, keys, options.output)
    _tell(console, result, time.perf_counter() - began, options.output)
    shutil.rmtree(options.output / UNFINISHED)


def faster_dtype() -> str:
    """Return ``fp32`` where a CPU multiplies such matrices faster than bf16 ones, for which few CPUs have units."""
    if checked_device(None).type != "cpu":
        return "auto"

    def seconds(dtype: torch.dtype) -> float:
        states, weights = torch.ones(2048, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        F.linear(states, weights)
        began = time.perf_counter()
        for _ in range(4):
            F.linear(states, weights)
        return time.perf_counter() - began

    return "fp32" if seconds(torch.float32) < seconds(torch.bfloat16) else "auto"


def seconds_per_cost(checkpoint: Checkpoint, corpus: Corpus) -> float:
    """Measure the seconds for one unit of ``pass_cost``, on a short pass, the second of its kind."""
    ids = corpus.documents[0].input_ids[:, : STEP + 1]
    loss_by_position(checkpoint.model, ids)  # a first pass is slower, by the memory that it has to ask for
    began = time.perf_counter()
    loss_by_position(checkpoint.model, ids)
    return (time.perf_counter() - began) / pass_cost(ids.shape[1], turning_point(checkpoint.model))


@dataclass(frozen=True, eq=False)
class Preset:
    """The comparison of the demo: a checkpoint and the options of ``ctxext demo``."""

    checkpoint: Checkpoint
    options: DemoOptions

    @property
    def methods(self) -> Sequence[str]:
        """The names of the methods."""
        return self.options.method or (EVERYTHING if self.options.everything else QUICK)

    @property
    def trained(self) -> int:
        """Tokens that the checkpoint was trained for."""
        return known_trained_length(self.checkpoint.model)

    def checked_length(self) -> int:
        """Check the options before anything is computed, and return the greatest length to read.

        Raises:
            UnknownNameError: an unknown method.
            InvalidParameterError: a factor or length out of range, or a method twice.
        """
        factor = self.options.factor
        if len(set(self.methods)) != len(self.methods):
            raise InvalidParameterError(f"Give each method once, and at least one; found {', '.join(self.methods)}.")
        chosen_methods(self.checkpoint.model, self.methods, (factor,))
        reach = int(self.trained * factor + 1e-6)
        wanted = reach if self.options.length is None else self.options.length
        if not self.trained < wanted <= reach:
            raise InvalidParameterError(
                f"length must be above the trained length of {self.trained:,} tokens and at most {reach:,} (factor "
                f"{factor:g} times it), found {wanted:,}. Raise --factor to go further."
            )
        edges_for(self.trained, wanted)
        return wanted

    def fitting(self, corpus: Corpus, wanted: int, pace: float) -> Comparison:
        """Plan the comparison of ``wanted`` tokens, or of fewer where there is no time for that."""
        for windows in (None, (self.trained,)):
            comparison = self.comparison(corpus, wanted, windows)
            if self.options.everything or cost_of(comparison.jobs) * pace <= SECONDS:
                return comparison
        return self.comparison(corpus, (self.trained + wanted) // 2, (self.trained,))

    def comparison(self, corpus: Corpus, length: int, windows: Sequence[int] | None = None) -> Comparison:
        """Plan a comparison of so many tokens, against truncations to these windows; by default those of the preset."""
        quick = None if self.options.everything else (self.trained // 2, self.trained)
        return prepare(
            self.checkpoint,
            corpus.cut,
            self.options.output / UNFINISHED,  # kept until all of it is measured
            methods=self.methods,
            factors=(self.options.factor,),
            lengths=(length,),
            depths=(),
            windows=windows or quick,
        )

    def keys(self, comparison: Comparison) -> Survey[PromptJob]:
        """Plan two passkeys that no truncation sees, for the unpatched model and for YaRN, or else the last method."""
        length = min(comparison.lengths[-1], self.trained * 3 // 2)
        beyond = 1 - self.trained / length
        depths = tuple(dict.fromkeys(round(part * beyond, 2) for part in (0.0, 0.6)))
        point = turning_point(self.checkpoint.model)
        prompts = make_prompts(self.checkpoint.tokenizer, (length,), depths, turning_point=point)
        extended = [reading for reading in comparison.readings if reading.is_candidate]
        asked = next((each for each in extended if each.method and each.method["method"] == "yarn"), extended[-1])
        model = comparison.readers[0].readings
        readers = [Reader(reading, model, (length,)) for reading in (comparison.readings[0], asked)]
        return Survey("ctxext demo", self.checkpoint, jobs_of(readers, prompts))


def _announce(
    console: Console, comparison: Comparison, keys: Survey[PromptJob] | None, pace: float, everything: bool
) -> None:
    checkpoint = comparison.checkpoint
    texts = all_of([document.name for document in comparison.corpus.documents])
    who = all_of([reading.label for reading in comparison.readings if reading.name != TRUNCATED])
    minutes = max(1, round(cost_of([*comparison.jobs, *(keys.jobs if keys else ())]) * pace / 60))
    about = (
        f", trained to {tokens_label(comparison.trained_length)} tokens, in "
        f"{checkpoint.dtype_note}, reads {tokens_label(comparison.lengths[-1])} tokens of {texts}: {who}. About "
        f"{minutes} min here, by a measured step{'' if everything else '; ctxext demo --all measures more'}.\n"
    )
    console.print(Text.assemble((checkpoint.name, "bold"), about))


def _measure(console: Console, comparison: Comparison, keys: Survey[PromptJob] | None, output: Path) -> DemoResult:
    """Measure and show each reading as soon as it is finished: the cheap ones first, the references before methods."""
    mine, asked = comparison.begin(), keys.begin() if keys else ()
    edges = edges_for(comparison.trained_length, comparison.lengths[-1])
    spans = [f"{tokens_label(start)}-{tokens_label(stop)}" for start, stop in itertools.pairwise(edges)]
    console.print(f"{'perplexity':<18}" + "".join(f"{span:>9}" for span in spans), style="dim")

    def order(reader: Reader) -> tuple[bool, float]:
        return reader.reading.is_candidate, cost_of([job for job in comparison.jobs if job.reader is reader])

    done: list[Reading] = []
    with StageBar(console, cost_of([*mine, *asked])) as bar:
        for reader in sorted(comparison.readers, key=order):
            comparison.measure([job for job in mine if job.reader is reader], progress=bar)
            done.append(reader.reading)
            cells = "".join(f"{_number(value) if value else '':>9}" for value in _so_far(comparison, reader, edges))
            console.print(f"{reader.reading.label:<18}{cells}{_seconds(comparison, reader.reading):8.0f} s")
            finished = comparison.so_far(done)
            if finished is not None:
                _draw(demo_result(finished, (), {}), output)
        if keys:
            keys.measure(asked, progress=bar)
    seconds = {reading.name: _seconds(comparison, reading) for reading in done}
    return demo_result(comparison.result(), _passkeys(keys), seconds)


def _seconds(comparison: Comparison, reading: Reading) -> float:
    """Return the seconds that a finished reading took, in this process or an earlier one."""
    finished = comparison.journal.finished()
    return float(sum(finished[job.key]["seconds"] for job in comparison.jobs if job.reader.reading is reading))


def _so_far(comparison: Comparison, reader: Reader, edges: tuple[int, ...]) -> list[float | None]:
    """Return a finished reading's perplexity between the edges; None inside the window, which truncations share."""
    losses = comparison.losses_of(reader.reading)
    if reader.window is None:
        return [bucket.perplexity for bucket in bucketed(losses, edges)]
    shifted = tuple(edge - edges[1] for edge in edges[1:])
    return [None, *(bucket.perplexity for bucket in bucketed(losses, shifted))]


def _passkeys(keys: Survey[PromptJob] | None) -> tuple[PasskeyRow, ...]:
    return tuple(
        PasskeyRow(
            label_of((reader.reading.method or {}).get("method", UNPATCHED)),
            tuple(from_json(PasskeyTrial, trial) for trial in trials),
        )
        for reader, trials in (keys.trials() if keys else ())
    )


def _plays(documents: int) -> list[Path]:
    texts = installed_texts()
    if not 1 <= documents <= len(texts):
        raise InvalidParameterError(f"documents must be from 1 to {len(texts)}, found {documents}.")
    return texts[:documents]


@dataclass(frozen=True)
class PasskeyRow:
    """Passkey trials of one way of reading."""

    name: str
    trials: tuple[PasskeyTrial, ...]


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured, and what it was measured on.

    Args:
        trained_length: tokens that the checkpoint was trained for.
        length: tokens that were read.
        series: the references, then the methods.
        passkeys: of the unpatched model and of one method; empty where none were asked.
        seconds: of each reading.
        fingerprints: of the methods' frequencies.
        provenance: see ``ComparisonResult``.
    """

    trained_length: int
    length: int
    series: tuple[Series, ...]
    passkeys: tuple[PasskeyRow, ...]
    seconds: dict[str, float]
    fingerprints: dict[str, str]
    provenance: dict[str, Any]
    made_by: str = "ctxext demo"

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the texts."""
        return tuple(self.provenance["documents"])

    def of(self, name: str) -> Series:
        """Return the series of one name."""
        return next(series for series in self.series if series.name == name)

    @property
    def extended(self) -> tuple[Series, ...]:
        """The series of the methods, without the references."""
        return tuple(series for series in self.series if not is_reference(series.name))


def demo_result(found: ComparisonResult, passkeys: tuple[PasskeyRow, ...], seconds: dict[str, float]) -> DemoResult:
    """Summarise a comparison at one factor and one length as the demo shows it."""
    panel = found.panels[-1]
    names = {row.reading.name: str((row.reading.method or {})["method"]) for row in found.candidates}
    return DemoResult(
        trained_length=found.trained_length,
        length=panel.length,
        series=tuple(replace(series, name=names.get(series.name, series.name)) for series in panel.series),
        passkeys=passkeys,
        seconds=seconds,
        fingerprints={names[row.reading.name]: row.reading.fingerprint for row in found.candidates},
        provenance=dict(found.provenance),
    )


def _tell(console: Console, result: DemoResult, seconds: float, output: Path) -> None:
    page = demo_page(result)
    page.show(console)
    _draw(result, output)
    (output / DATA).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    (output / TABLE).write_text(page.markdown(), encoding="utf-8")
    paths = [str(output / name) for name in (FIGURE, DATA, TABLE)]
    console.print(f"\n{seconds:.0f} s. Written: {', '.join(paths)}")


def _prepare(output: Path) -> None:
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


def _draw(result: DemoResult, output: Path) -> None:
    loss_figure(result.series, trained_length=result.trained_length, title=_title(result)).save(output / FIGURE)


def _title(result: DemoResult) -> str:
    trained, length = tokens_label(result.trained_length), tokens_label(result.length)
    return f"{result.provenance['checkpoint']}: trained to {trained}, read to {length}"


def demo_page(result: DemoResult) -> Page:
    """Return both tables and the sentences."""
    tables = [_loss_table(result), *([_passkey_table(result)] if result.passkeys else [])]
    return Page(_title(result), [*tables, Heading("What you see"), *sentences(result)])


def sentences(result: DemoResult) -> list[str]:
    """Return what a newcomer should take away; each sentence depends on what was measured."""
    lines = [
        unpatched_sentence(result.of(UNPATCHED), result.trained_length),
        _methods_sentence(result),
        _truncation_sentence(result),
    ]
    lines += [_passkey_sentence(result)] if result.passkeys else []
    dynamic = [label_of(series.name) for series in result.extended if series.dynamic]
    if dynamic:
        lines.append(
            f"{capitalised(', '.join(dynamic))} adapts to the length of the text: this single pass uses "
            f"its {tokens_label(result.length)} frequencies throughout; on texts up to "
            f"{tokens_label(result.trained_length)} it changes nothing."
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
    windows = [tokens_label(tokens) for series in result.series if (tokens := window_of(series.name))]
    among = f" (the best of truncations to {all_of(windows)})" if len(windows) > 1 else ""
    end = result.series[0].buckets[-1]
    span = f"{tokens_label(end.start)}-{tokens_label(end.stop)}"
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
        f"At {span} the best method here, {label_of(best.name)}, differs by "
        f"{difference} nats per token from keeping only the last {window} tokens{among}, {verdict}."
    )


def _passkey_sentence(result: DemoResult) -> str:
    plain, patched = result.passkeys
    distances = sorted({trial.distance for trial in plain.trials})
    counts = [f"{row.name} {sum(t.correct for t in row.trials)} of {len(row.trials)}" for row in (plain, patched)]
    return (
        f"A key hidden {all_of([f'{distance:,}' for distance in distances])} tokens back, where no truncation sees "
        f"it: {counts[0]}, {counts[1]} found."
    )


def _loss_table(result: DemoResult) -> TextTable:
    buckets = result.series[0].buckets
    spans = [f"{tokens_label(bucket.start)}-{tokens_label(bucket.stop)}" for bucket in buckets]
    return TextTable(
        title=f"Perplexity by position in {', '.join(result.texts)}",
        header=["", *spans, "inside", f"{spans[-1]}\nvs best\ntruncation"],
        rows=[_loss_row(series) for series in result.series],
        styles=_styles(result),
        caption="inside: perplexity in the trained window over unpatched; vs best truncation: loss minus that of "
        "feeding only the last tokens, as many of them as predict those tokens best (in brackets); nats ± s.e.",
    )


def _loss_row(series: Series) -> list[str]:
    cells = [_number(bucket.perplexity) for bucket in series.buckets]
    for place, window in enumerate(series.windows, start=1):
        cells[place] += f" ({tokens_label(window)})"
    # The last cell must not break in a narrow terminal.
    versus = "-" if series.name == TRUNCATED else f"{series.versus_truncation[-1]}".replace(" ", NO_BREAK)
    return [label_of(series.name), *cells, f"x{series.in_window_ratio:.2f}", versus]


def _passkey_table(result: DemoResult) -> TextTable:
    rows = []
    for row in result.passkeys:
        cells = [f"{'found' if trial.correct else 'lost'} (loss {trial.loss:.2f})" for trial in row.trials]
        rows.append([row.name, *cells])
    return TextTable(
        title="A five-digit key hidden beyond the trained window",
        header=["key's distance", *(f"{trial.distance:,}" for trial in result.passkeys[0].trials)],
        rows=rows,
        styles=_styles(result),
    )


def _styles(result: DemoResult) -> dict[str, str]:
    return {label_of(series.name): "reference" for series in result.series if is_reference(series.name)}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _is_ours(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("made_by") == DemoResult.made_by)
    except (OSError, ValueError, AttributeError):
        return False
