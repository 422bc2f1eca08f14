"""``ctxext demo``: where a longer context pays and where not, and a question that only a longer context answers."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from ctxext.checkpoints.save import save
from ctxext.cli.eval.common import cost_of, ending_on_interrupt
from ctxext.cli.options import DemoOptions
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint, checked_device, load_checkpoint
from ctxext.evaluation.forward import Progress, follows_length, ticking
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.labels import all_of, perplexity_label, tokens_label
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.provenance import provenance_of
from ctxext.evaluation.readings import Reader, Reading, Readings, chosen_methods
from ctxext.evaluation.report.figures import (
    COLOURS,
    DASHED,
    INK,
    Figure,
    Panel,
    colours_for,
    draw_grid,
    paneled,
    require_matplotlib,
)
from ctxext.evaluation.report.page import NONE, Heading, Page, TextTable
from ctxext.evaluation.statistics import PairedDifference, check_finite, document_difference
from ctxext.evaluation.survey import Answer, Job, Survey
from ctxext.evaluation.truncation import TRUNCATED, best_window
from ctxext.methods import saved_class
from ctxext.patching import patch, unpatch
from ctxext.progress import StageBar, status, terminal
from ctxext.surgery.caches import cache_argument
from ctxext.surgery.subject import base_model
from ctxext.texts.corpus import Corpus, TokenisedDocument, prefix_label, special_prefix, tokenise, tokens_behind
from ctxext.texts.documents import SKIPPED_TOKENS, Document, installed_texts, package_folders, read_documents

SECONDS = 210.0  # four minutes, of which loading takes some
STEPS = (512, 2048)  # tokens of the two passes by which the time of longer ones is told
METHODS = ("self_extend", "yarn")
FIGURE, DATA, TABLE, UNFINISHED = "demo.png", "result.json", "table.md", "unfinished"
PART = 8  # one part in so many of the window is scored, at the end of the text and at the end of the window
# A folder of code in which one file repeats another some nine thousand tokens later, read up to this token.
CODE = "models/jamba"
# Of the code, and of the play, whose list of persons is left out.
DEFAULT_CUTS: Sequence[Mapping[str, int]] = ({"stop": 19456}, {"skip": SKIPPED_TOKENS})
# Hidden in the first text and asked for at its end.
FACT, ANSWER = "\n# The pass key is {}. Remember it.\n", "48213"
REQUEST = "\n# What is the pass key? The pass key is"
HIDDEN = 20  # the fact stands after one part in so many of the text
WRITTEN = 6  # tokens of an answer
# Ratios to the best truncation's perplexity from which an unpatched model gets worse, and breaks.
WORSE, BROKEN = 1.05, 2.0
VERDICTS = {"better": "pays", "no difference": "makes no sure difference", "worse": "does not pay"}


def show(options: DemoOptions) -> None:
    """Measure, and show the result.

    Raises:
        CtxextError: whatever cannot be right, before anything is measured.
    """
    console = terminal()
    _prepare(options.output)
    with status(terminal(stderr=True), "Loading the checkpoint ..."):
        checkpoint = load_checkpoint(options.model, dtype=faster_dtype() if options.model is None else "auto")
    with status(terminal(stderr=True), "Reading two short texts, to tell how long the others take ..."):
        demo = plan(checkpoint, options)
    console.print(Text.assemble((checkpoint.name, "bold"), demo.announcement))
    began = time.perf_counter()
    with ending_on_interrupt(console, demo.survey):
        result = _measure(console, demo)
    result.page.show(console)
    _write(result, options.output)
    paths = ", ".join(str(options.output / name) for name in (FIGURE, DATA, TABLE))
    console.print(f"\n{time.perf_counter() - began:.0f} s. Written: {paths}")
    if options.save is not None:
        console.print(_saved(checkpoint, demo.survey.readers[-len(demo.methods)].reading, options.save))
    shutil.rmtree(options.output / UNFINISHED)


def _prepare(output: Path) -> None:
    """Make the output folder, and refuse to write over files that an earlier demo did not write."""
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


def _is_ours(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("made_by") == DemoResult.made_by)
    except (OSError, ValueError, AttributeError):
        return False


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


@dataclass(frozen=True, eq=False)
class Passage:
    """Text to read, with or without a fact hidden near its beginning, and a request for it.

    Args:
        text: one token more than positions are read.
        request: token ids that ask for the fact behind the text; none where there is no fact.
        distance: tokens from the fact to the end of the text; 0 where there is none.
    """

    text: TokenisedDocument
    request: Int[Tensor, " request"]
    distance: int

    @classmethod
    def of(
        cls, text: TokenisedDocument, tokenizer: Any, length: int, *, asks: bool, skip: int = 0, stop: int | None = None
    ) -> Passage:
        """Cut a text to ``length`` positions; where it ``asks``, the fact is among them, on a line of its own.

        Args:
            text: to cut.
            tokenizer: of the model.
            length: positions.
            asks: whether to hide the fact.
            skip: tokens left out at its start.
            stop: token up to which to read; None reads on from ``skip``.

        Raises:
            InvalidParameterError: the text is too short.
        """
        fact = torch.tensor([tokens_behind(tokenizer, FACT.format(ANSWER)) if asks else []], dtype=torch.long)
        room = length + 1 - fact.shape[1]
        ids = text.take(room, skip=skip if stop is None else max(0, stop - room)).input_ids
        if not asks:
            return cls(replace(text, input_ids=ids), torch.tensor([], dtype=torch.long), 0)
        place = max(text.prefix, length // HIDDEN)
        lines = [i for i in range(place, min(2 * place, room)) if "\n" in tokenizer.decode([int(ids[0, i - 1])])]
        place = lines[0] if lines else place
        whole = torch.cat([ids[:, :place], fact, ids[:, place:]], dim=1)
        request = torch.tensor(tokens_behind(tokenizer, REQUEST))
        return cls(replace(text, input_ids=whole), request, length + 1 - place)


def default_texts() -> list[Document]:
    """Return source code that repeats itself, and a play, which does not.

    Raises:
        InvalidParameterError: one of them is not installed.
    """
    [package] = package_folders("transformers")
    folder = package / CODE
    files = sorted(folder.rglob("*.py"))
    if not files:
        raise InvalidParameterError(
            f"transformers {metadata.version('transformers')} has no {CODE}, which the demo reads; give a --text."
        )
    parts = [f"# File: {path.relative_to(package.parent).as_posix()}\n\n{path.read_text('utf-8')}\n" for path in files]
    play = next(iter(read_documents(installed_texts()[:1])))
    code = Document(f"the code of transformers/{CODE}", "\n".join(parts))
    return [code, replace(play, name=f"the play {play.name}")]


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadAndAnswer(Job):
    """Read a passage once, score the ends of window and text, and write an answer behind it where it asks.

    Args:
        passage: to read.
        tokenizer: of the model.
        trained_length: tokens.
    """

    passage: Passage
    tokenizer: Any
    trained_length: int

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the answer, and the losses inside the window, where it is read, and at the end."""
        text, window, scored = self.passage.text, self.reader.window, self.trained_length // PART
        ids = text.input_ids
        if window is not None:
            ids = torch.cat([ids[:, : text.prefix], ids[:, text.prefix - window - 1 :]], dim=1)
        last = ids.shape[1] - 1
        ends = [last] if window is not None else [self.trained_length, last]
        positions = torch.cat([torch.arange(end - scored, end) for end in ends])
        with ticking(model, self.name, self.cost, progress, passes=1):
            losses, reply = read_and_answer(model, ids, positions, self.passage.request)
        check_finite(losses, self.name)
        return Answer({"item": text.name, "reply": self.tokenizer.decode(reply, skip_special_tokens=True)}, losses)


@torch.no_grad()
def read_and_answer(
    model: nn.Module, ids: Int[Tensor, "1 tokens"], positions: Int[Tensor, " scored"], request: Int[Tensor, " request"]
) -> tuple[Float[Tensor, " scored"], list[int]]:
    """Read a text once; return the losses at some positions, and the likeliest tokens behind a request.

    Args:
        model: a causal language model in eval mode.
        ids: of the text.
        positions: to score.
        request: token ids that follow the text; where there are none, nothing is written.

    Raises:
        IncompatibleError: the model takes no cache.
    """
    causal: Any = base_model(model)
    argument = cache_argument(causal)
    if argument is None:
        raise IncompatibleError(
            f"{type(causal).__name__} takes no cache; the demo needs one. Use `ctxext eval compare`."
        )
    ids, positions, request = (tensor.to(causal.device) for tensor in (ids, positions, request))
    # A dynamic method fits its positions to all tokens that the cache will hold.
    reach = {"ctxext_length": ids.shape[1] + len(request) + WRITTEN} if follows_length(causal) else {}
    output = causal(input_ids=ids[:, :-1], use_cache=len(request) > 0, logits_to_keep=positions, **reach)
    losses = F.cross_entropy(output.logits[0].float(), ids[0, positions + 1], reduction="none").cpu()
    step, reply = torch.cat([ids[0, -1:], request])[None], []
    for _ in range(WRITTEN if len(request) else 0):
        output = causal(input_ids=step, use_cache=True, logits_to_keep=1, **{argument: output[argument]}, **reach)
        step = output.logits[:, -1:].argmax(dim=-1)
        reply.append(int(step))
    return losses, reply


@dataclass(frozen=True, eq=False)
class Demo:
    """Planned demo.

    Args:
        survey: its jobs, reader by reader: unpatched, truncations, methods.
        methods: extensions that are compared.
        passages: that are read.
        length: tokens that are read.
        trained_length: tokens that the checkpoint was trained for.
    """

    survey: Survey[ReadAndAnswer]
    methods: tuple[Reading, ...]
    passages: tuple[Passage, ...]
    length: int
    trained_length: int

    @property
    def announcement(self) -> str:
        """Sentence that says what is about to be measured."""
        texts = all_of([passage.text.name for passage in self.passages])
        return (
            f", trained to {tokens_label(self.trained_length)} tokens, in {self.survey.checkpoint.dtype_note}, reads "
            f"{tokens_label(self.length)} tokens of {texts}. About {max(1, round(cost_of(self.survey.jobs) / 60))} min "
            f"here, by two measured steps.\n"
        )

    def losses(self, reader: Reader) -> list[Tensor]:
        """Return a finished reader's losses, a tensor for each passage."""
        finished = self.survey.journal.finished()
        return [self.survey.journal.losses(finished[job.key]) for job in self.survey.jobs if job.reader is reader]


def plan(checkpoint: Checkpoint, options: DemoOptions) -> Demo:
    """Plan the demo: as far beyond the window as four minutes allow, or to the length that was asked for.

    Raises:
        UnknownNameError: an unknown method.
        InvalidParameterError: a factor or length out of range, a method twice, or a text that is too short.
        IncompatibleError: a method that cannot be right on this model.
    """
    readings = Readings(checkpoint)
    trained, names = readings.trained_length, options.method or METHODS
    readings.windows = (trained // 2, trained)
    found, refusals = readings.find(chosen_methods(checkpoint.model, names, (options.factor,)))
    if refusals:
        raise IncompatibleError(f"{refusals[0].label}: {refusals[0].reason}")
    methods = tuple(reading for reading in found if reading.is_candidate)
    reach = min(reading.reach or 0 for reading in methods)
    lengths = [trained * quarters // 4 for quarters in (8, 6, 5) if trained * quarters // 4 <= reach]
    if options.length is not None:
        lengths = [options.length]
    if not lengths or not trained < lengths[0] <= reach:
        raise InvalidParameterError(
            f"length must be above the trained length of {trained:,} tokens and at most {reach:,} (factor "
            f"{options.factor:g} times it), found {lengths[0] if lengths else reach:,}. Raise --factor to go further."
        )
    documents = read_documents(options.text) if options.text else default_texts()
    tokenizer, prefix = checkpoint.tokenizer, special_prefix(checkpoint.tokenizer)
    texts = tuple(tokenise(document, tokenizer, prefix=prefix) for document in documents)
    corpus = Corpus(texts, prefix_label(tokenizer, prefix), len(texts))
    journal = Journal(options.output / UNFINISHED / "jobs.jsonl", identity=options.output / UNFINISHED / "demo.json")
    cuts = [{} for _ in texts] if options.text else DEFAULT_CUTS
    passages = _passages(texts, tokenizer, lengths[-1], cuts)
    seconds = seconds_by_tokens(checkpoint, passages[0].text.input_ids)
    for length in lengths:
        passages = _passages(texts, tokenizer, length, cuts)
        readers = [Reader(reading, readings, (length,)) for reading in found if reading.name != TRUNCATED]
        jobs = [
            ReadAndAnswer(
                key=readings.key(
                    [reader.reading.name, reader.reading.method, reader.reading.fingerprint], text=passage.text.sha256
                ),
                cost=seconds(reader.window or length),
                reader=reader,
                name=f"{reader.reading.label}, {passage.text.name}",
                passage=passage,
                tokenizer=tokenizer,
                trained_length=trained,
            )
            for reader in readers
            for passage in passages
        ]
        if cost_of(jobs) <= SECONDS:
            break
    return Demo(
        Survey("ctxext demo", checkpoint, jobs, corpus=corpus, journal=journal), methods, passages, length, trained
    )


def _passages(
    texts: Sequence[TokenisedDocument], tokenizer: Any, length: int, cuts: Sequence[Mapping[str, int]]
) -> tuple[Passage, ...]:
    """Cut texts to a length, each from or up to its own token; the first one hides the fact."""
    return tuple(
        Passage.of(text, tokenizer, length, asks=text is texts[0], **cut) for text, cut in zip(texts, cuts, strict=True)
    )


def seconds_by_tokens(checkpoint: Checkpoint, ids: Int[Tensor, "1 tokens"]) -> Callable[[int], float]:
    """Measure what a pass takes: seconds a token and seconds a pair of tokens, out of passes of two lengths."""
    paces, steps = [], [min(step, ids.shape[1] // part) for step, part in zip(STEPS, (2, 1), strict=True)]
    for step in (steps[0], *steps):  # a first pass is slower, by the memory that it has to ask for
        began = time.perf_counter()
        loss_by_position(checkpoint.model, ids[:, :step], start=step - 2)
        paces.append((time.perf_counter() - began) / step)
    a_pair = max(0.0, (paces[2] - paces[1]) / (steps[1] - steps[0]))
    a_token = max(0.0, paces[2] - a_pair * steps[1])
    return lambda tokens: tokens * (a_token + a_pair * tokens)


def _measure(console: Console, demo: Demo) -> DemoResult:
    """Measure, and show each reading as soon as it is finished."""
    survey, pending = demo.survey, demo.survey.begin()
    span = f"{tokens_label(demo.length - demo.trained_length // PART)}-{tokens_label(demo.length)}"
    names = "".join(f"{passage.text.name[-26:]:>28}" for passage in demo.passages)
    console.print(f"{f'perplexity at {span}':<22}{names}", style="dim")
    with StageBar(console, cost_of(pending)) as bar:
        for reader in survey.readers:
            survey.measure([job for job in pending if job.reader is reader], progress=bar)
            ends = [losses[-(demo.trained_length // PART) :] for losses in demo.losses(reader)]
            cells = "".join(f"{perplexity_label(math.exp(losses.mean().item())):>28}" for losses in ends)
            console.print(f"{reader.reading.label:<22}{cells}")
    return summarised(demo)


@dataclass(frozen=True)
class TextReading:
    """One reading of one text.

    Args:
        name: of the reading.
        label: the same, to show.
        inside: nats per token at the end of the window; None for a truncation.
        end: nats per token at the end of the text.
        difference: ``end`` minus that of the best truncation.
        answer: what it wrote behind the request; empty on a text that does not ask.
        seconds: that it took.
    """

    name: str
    label: str
    inside: float | None
    end: float
    difference: PairedDifference
    answer: str
    seconds: float

    @property
    def end_of_window(self) -> float:
        """Nats per token at the end of the window; that of a truncation is the unpatched model's, and not kept."""
        return math.nan if self.inside is None else self.inside

    @property
    def is_right(self) -> bool:
        """True where the answer begins with the fact."""
        return self.answer.strip().startswith(ANSWER)


@dataclass(frozen=True)
class TextResult:
    """All readings of one text.

    Args:
        name: of the text.
        rows: unpatched, truncations, methods.
        window: tokens that the best truncation sees.
    """

    name: str
    rows: tuple[TextReading, ...]
    window: int

    def of(self, name: str) -> TextReading:
        """Return the row of one reading."""
        return next(row for row in self.rows if row.name == name)

    @property
    def extended(self) -> list[TextReading]:
        """The rows of methods."""
        return [row for row in self.rows[1:] if row.inside is not None]

    @property
    def truncated(self) -> TextReading:
        """The row of the best truncation."""
        return next(row for row in self.rows if row.label == f"last {tokens_label(self.window)}")


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo measured, and what it was measured on.

    Args:
        trained_length: tokens that the checkpoint was trained for.
        length: tokens that were read.
        distance: tokens from the fact in the first text to its end.
        texts: a result for each.
        provenance: see ``provenance_of``.
    """

    trained_length: int
    length: int
    distance: int
    texts: tuple[TextResult, ...]
    provenance: dict[str, Any]
    made_by: str = "ctxext demo"

    @property
    def spans(self) -> tuple[str, str]:
        """Positions that are scored, inside the window and at the end of the text."""
        scored = self.trained_length // PART
        inside, end = (f"{tokens_label(n - scored)}-{tokens_label(n)}" for n in (self.trained_length, self.length))
        return inside, end

    @property
    def title(self) -> str:
        """Checkpoint and lengths."""
        trained, length = tokens_label(self.trained_length), tokens_label(self.length)
        return f"{self.provenance['checkpoint']}: trained to {trained}, read to {length}"

    @property
    def page(self) -> Page:
        """Tables and sentences."""
        tables = [self._losses(text) for text in self.texts]
        return Page(self.title, [*tables, self._answers(), Heading("What you see"), *sentences(self)])

    @property
    def figure(self) -> Figure:
        """Perplexity of each reading at the end of each text."""
        return paneled("demo", self.title, [self._panel(text) for text in self.texts])

    def _panel(self, text: TextResult) -> Panel:
        """Draw a bar for each reading, with the 95 percent interval of its difference to the best truncation."""
        rows, best = text.rows, text.truncated
        values = [math.exp(row.end) for row in rows]
        colours = colours_for(row.name.split()[0] for row in rows)

        def draw(axes: Any) -> None:
            places = range(len(rows))
            ends = [[math.exp(row.end + side * row.difference.margin) for row in rows] for side in (-1, 1)]
            errors = [[abs(end - value) for end, value in zip(side, values, strict=True)] for side in ends]
            axes.barh(places, values, color=colours, height=0.62, xerr=errors, error_kw={"ecolor": INK, "lw": 1.2})
            axes.axvline(math.exp(best.end), color=COLOURS[TRUNCATED], lw=1.4, ls=DASHED)
            for place, value, end in zip(places, values, ends[1], strict=True):
                axes.annotate(
                    perplexity_label(value), (max(value, end), place), (5, 0), textcoords="offset points", va="center"
                )
            axes.set_yticks(places, [row.label for row in rows])
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.margins(x=0.14)
            marks = "dashed: the best truncation; black: 95 % interval of the gap"
            axes.set_xlabel(f"perplexity at {self.spans[1]}, less is better\n{marks}")
            draw_grid(axes, text.name, axis="x")

        words = ", ".join(f"{row.label} {perplexity_label(value)}" for row, value in zip(rows, values, strict=True))
        return Panel(draw, f"{text.name}: {words}", (5.2, 3.2))

    def _losses(self, text: TextResult) -> TextTable:
        rows = [
            [
                row.label,
                NONE if row.inside is None else perplexity_label(math.exp(row.inside)),
                perplexity_label(math.exp(row.end)),
                "the best" if row is text.truncated else gain(row.difference),
                f"{row.seconds:.0f} s",
            ]
            for row in text.rows
        ]
        inside, end = self.spans
        return TextTable(
            title=f"{text.name}: perplexity, and nats gained over the best truncation",
            header=["", inside, end, "gain", "took"],
            rows=rows,
            styles={row.label: "reference" for row in text.rows if row not in text.extended},
        )

    def _answers(self) -> TextTable:
        text = self.texts[0]
        rows = [
            [row.label, row.answer.strip().split("\n")[0], "right" if row.is_right else "wrong"] for row in text.rows
        ]
        return TextTable(
            title=f"{text.name}: asked for the pass key {ANSWER}, hidden in its first tenth",
            header=["", "writes", ""],
            rows=rows,
            prose=True,
        )


def summarised(demo: Demo) -> DemoResult:
    """Put the finished jobs together."""
    survey, scored = demo.survey, demo.trained_length // PART
    lines = survey.journal.finished()
    losses = {reader: demo.losses(reader) for reader in survey.readers}
    texts = []
    for place, passage in enumerate(demo.passages):
        ends = {reader.window: [losses[reader][place][-scored:]] for reader in survey.readers if reader.window}
        window = best_window(ends)
        rows = []
        for reader in survey.readers:
            mine = losses[reader][place]
            [line] = [lines[job.key] for job in survey.jobs if job.reader is reader and job.passage is passage]
            rows.append(
                TextReading(
                    name=reader.reading.name,
                    label=reader.reading.label,
                    inside=None if reader.window else mine[:scored].mean().item(),
                    end=mine[-scored:].mean().item(),
                    difference=document_difference([mine[-scored:]], ends[window], baselines=len(ends)),
                    answer=line["reply"],
                    seconds=line["seconds"],
                )
            )
        texts.append(TextResult(passage.text.name, tuple(rows), window))
    provenance = provenance_of(survey.checkpoint, survey.corpus)
    return DemoResult(
        trained_length=demo.trained_length,
        length=demo.length,
        distance=demo.passages[0].distance,
        texts=tuple(texts),
        provenance=survey.with_extensions(provenance).to_dict(),
    )


def sentences(result: DemoResult) -> list[str]:
    """Return what a newcomer should take away, in three sentences that follow from the numbers."""
    return [_unpatched_sentence(result), _gain_sentence(result), _answer_sentence(result)]


def _unpatched_sentence(result: DemoResult) -> str:
    ratios = [math.exp(text.rows[0].difference.mean) for text in result.texts]
    times = all_of([f"{ratio:.2f} times (on {text.name})" for ratio, text in zip(ratios, result.texts, strict=True)])
    fate = "it breaks" if max(ratios) > BROKEN else "it gets worse" if max(ratios) > WORSE else "it does not break"
    window = tokens_label(result.trained_length)
    return (
        f"Unpatched, the model's perplexity at {result.spans[1]} is {times} that of the best truncation: {fate} beyond "
        f"its {window} tokens."
    )


def _gain_sentence(result: DemoResult) -> str:
    """Say where the best method pays, and what methods cost inside the window."""
    parts: dict[str, list[str]] = {}
    for text in result.texts:
        best = min(text.extended, key=lambda row: row.end)
        verdict = best.difference.verdict_of_best(len(text.extended))
        gains = ", ".join(f"{row.label} {gain(row.difference)}" for row in text.extended)
        parts.setdefault(VERDICTS[verdict], []).append(f"{text.name} ({gains})")
    pays = "; it ".join(f"{verdict} on {all_of(texts)}" for verdict, texts in parts.items())
    costs = []
    for row in result.texts[0].extended:
        losses = [text.of(row.name).end_of_window - text.rows[0].end_of_window for text in result.texts]
        cost = sum(losses) / len(losses)
        costs.append(f"{row.label} {f'costs {cost:.3f} nats' if abs(cost) >= 0.0005 else 'changes nothing'}")
    return f"A longer window {pays}, in nats per token; inside the old one {all_of(costs)}."


def _answer_sentence(result: DemoResult) -> str:
    text = result.texts[0]
    asked = [*text.extended, text.rows[0], text.truncated]
    right, wrong = (
        [
            f"{row.label} (which lacks it)" if row is text.truncated else row.label
            for row in asked
            if row.is_right is is_right
        ]
        for is_right in (True, False)
    )
    answers = f"{all_of(right) if right else 'no reading'} answered right"
    rest = f"; {all_of(wrong)} did not" if right and wrong else ""
    return f"Asked for a number that stands {result.distance:,} tokens back on {text.name}, {answers}{rest}."


def gain(difference: PairedDifference) -> str:
    """Write how much better a reading is than the best truncation, in nats per token."""
    return f"{-difference.mean + 0.0:+.3f} \N{PLUS-MINUS SIGN} {difference.standard_error:.3f}"


def _write(result: DemoResult, output: Path) -> None:
    result.figure.save(output / FIGURE)
    (output / DATA).write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    (output / TABLE).write_text(result.page.markdown(), encoding="utf-8")


def _saved(checkpoint: Checkpoint, reading: Reading, directory: Path) -> str:
    """Save the checkpoint as a reading extends it, and say how to go on."""
    assert reading.method is not None
    patch(checkpoint.model, saved_class(reading.method["method"]).from_dict(reading.method))
    save(checkpoint.model, directory, tokenizer=checkpoint.tokenizer)
    unpatch(checkpoint.model)
    return f"Saved, extended by {reading.label}: {directory}. Go on: ctxext serve {directory}"
