"""``ctxext demo``: what a longer context is worth on source code, and a question that only a longer context answers."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.caches.records import cache_argument
from ctxext.cli.eval.common import Session, cost_of, ending_on_interrupt
from ctxext.cli.options import DemoOptions, OutputOptions, SourceOptions
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, printable, require_package
from ctxext.evaluation.report.figures import Figure, Panel, colours_for, draw_grid, paneled
from ctxext.evaluation.report.page import Heading, Page, TextTable
from ctxext.files import JsonObject, package_folders, parse_json
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import Progress, check_known, follows_length, layers_of, ticking
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import all_of, perplexity_label, tokens_label
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.readings import Reader, Readings, chosen_methods
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.survey import Answer, Job, Survey
from ctxext.progress import StageBar, status, terminal
from ctxext.quantities import duration
from ctxext.texts.corpus import Corpus, TokenisedDocument, prefix_label, special_prefix, tokenise, tokens_behind
from ctxext.texts.documents import Document, read_documents

METHODS = ("self_extend", "yarn")
FIGURE, DATA, TABLE, UNFINISHED = "demo.png", "result.json", "table.md", "unfinished"
PART = 8  # 1/8 of the window is read beyond the window, and scored
# A folder of code up to the end of a class that an earlier file has too, some 8,300 tokens before.
CODE, AFTERWARDS = "models/gemma2", "class Gemma2RMSNorm(GemmaRMSNorm)"
DEFAULT = f"the code of transformers/{CODE}"
# Hidden in the text and asked for at its end.
FACT, ANSWER = "\n# The pass key is {}. Remember it.\n", "48213"
REQUEST = "\n# Remember the pass key. The pass key is"
HIDDEN = 20  # the fact is 1/20 of the text after its beginning, or soon after that
WRITTEN = 6  # tokens of an answer
BUSY = 0.75  # share of the processor's time below which a CPU is called busy
# Nats over the best truncation on a text that repeats nothing, of 1,024 tokens: docs/evidence/demo.md.
PLAY = {"self_extend": "+0.021 ± 0.015", "yarn": "-0.017 ± 0.019"}
VERDICTS = {"better": "pays", "no difference": "makes no sure difference", "worse": "does not pay"}


def show(options: DemoOptions) -> None:
    """Measure, and show the result.

    Raises:
        CtxextError: options that cannot be right, before anything is measured.
    """
    files = _prepare(options.output)
    source, written = SourceOptions(checkpoint=options.model), OutputOptions(output=files)
    document = document_of(options)
    session = Session(source, written, methods=options.method or ())
    console, demo = session.console, session.planned(lambda: plan(session.checkpoint, options, document))
    with status(terminal(stderr=True), "Timing two layers ..."):
        announcement = demo.announcement(demo.pace())
    session.announce(demo.trained_length, f", {announcement}")
    began = time.perf_counter()
    with ending_on_interrupt(console, demo):
        pending = demo.begin()
        console.print(f"{'':<22}perplexity at {span_of(demo)}, and the answer", style="dim")
        with StageBar(console, cost_of(pending)) as bar:
            for job in demo.jobs:  # each reading is shown as soon as it is finished
                demo.measure([one for one in pending if one is job], progress=bar)
                line = demo.journal.finished()[job.key]
                end = perplexity_label(math.exp(demo.journal.losses(line).mean().item()))
                console.print(f"{job.name:<22}{end:>8}  {first_line(line['reply'])}")
    result = demo.result()
    session.results.write(result, result.page, console)
    console.print(f"\n{duration(time.perf_counter() - began)}. Written: {', '.join(map(str, files))}")
    shutil.rmtree(options.output / UNFINISHED)


def _prepare(output: Path) -> list[Path]:
    """Make the output folder, refuse to write over files of anything but a demo, and return the files to write."""
    require_package("matplotlib", "demo", "The demo needs")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError(f"Cannot make the folder {str(output)!r}: {error.strerror}.") from error
    files = [output / name for name in (FIGURE, DATA, TABLE)]
    present = [file for file in files if file.exists()]
    if present and not _is_ours(output / DATA):
        raise InvalidParameterError(
            f"{str(present[0])!r} exists and is not an earlier demo's; choose another --output."
        )
    return files


def _is_ours(path: Path) -> bool:
    try:
        return bool(parse_json(path.read_text(encoding="utf-8")).get("made_by") == DemoResult.made_by)
    except (OSError, ValueError, AttributeError):
        return False


@dataclass(frozen=True, eq=False)
class Passage:
    """End of a text with a fact hidden near its beginning, and a request for the fact, ``distance`` tokens behind.

    Args:
        behind: Tokens of the text behind the fact.
    """

    text: TokenisedDocument
    request: Int[Tensor, " request"]
    answer: Int[Tensor, " answer"]
    distance: int
    behind: int = 0

    @classmethod
    def of(cls, text: TokenisedDocument, tokenizer: Any, length: int) -> Passage:
        """Cut the last ``length`` positions out of a text, and put the fact among them as a separate line.

        Raises:
            InvalidParameterError: the text is too short.
        """
        fact, request, answer = (
            torch.tensor(tokens_behind(tokenizer, words)) for words in (FACT.format(ANSWER), REQUEST, f" {ANSWER}")
        )
        room = length + 1 - len(fact)
        ids = text.take(room, skip=max(0, text.tokens - room)).input_ids
        place = max(text.prefix, length // HIDDEN)
        lines = [i for i in range(place, min(2 * place, room)) if "\n" in tokenizer.decode([int(ids[0, i - 1])])]
        place = lines[0] if lines else place
        whole = torch.cat([ids[:, :place], fact[None], ids[:, place:]], dim=1)
        return cls(replace(text, input_ids=whole), request, answer, length + 1 - place, room - place)


def default_text() -> Document:
    """Return source code that repeats itself.

    Raises:
        InvalidParameterError: the installed transformers has none of it.
    """
    [package] = package_folders("transformers")
    files = sorted((package / CODE).rglob("*.py"))
    parts = [f"# File: {path.relative_to(package.parent).as_posix()}\n\n{path.read_text('utf-8')}\n" for path in files]
    text, found, _ = "\n".join(parts).partition(AFTERWARDS)
    if not found:
        raise InvalidParameterError(
            f"transformers {metadata.version('transformers')} lacks {AFTERWARDS!r} in {CODE}, which the demo reads; "
            f"give a --text."
        )
    return Document(DEFAULT, text)


class Reply(NamedTuple):
    """Words of a model behind a request.

    The margin is in nats by which the tokens of the right answer lead all others, at the least of them; below zero the
    first wrong token leads.
    """

    ids: list[int]
    margin: float


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadAndAnswer(Job):
    """Read a passage once, score its end, and write an answer behind it."""

    passage: Passage
    tokenizer: Any
    trained_length: int

    @property
    def tokens(self) -> int:
        """Positions that are read."""
        return self.reader.window or self.passage.text.tokens - 1

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the answer, and the losses at the end."""
        text, window, scored = self.passage.text, self.reader.window, self.trained_length // PART
        ids = text.input_ids
        if window is not None:
            ids = torch.cat([ids[:, : text.prefix], ids[:, text.prefix - window - 1 :]], dim=1)
        last = ids.shape[1] - 1
        positions = torch.arange(last - scored, last)
        with ticking(model, self.name, self.cost, progress, passes=1):
            losses, reply = read_and_answer(model, ids, positions, self.passage)
        words = self.tokenizer.decode(reply.ids, skip_special_tokens=True)
        return Answer({"item": text.name, "reply": words, "margin": reply.margin}, losses)


@torch.no_grad()
def read_and_answer(
    model: nn.Module, ids: Int[Tensor, "1 tokens"], positions: Int[Tensor, " scored"], asked: Passage
) -> tuple[Float[Tensor, " scored"], Reply]:
    """Read a text once; return the losses at some positions, and the likeliest words behind a request.

    Raises:
        IncompatibleError: the model takes no cache.
    """
    subject = Subject.of(model)
    causal: Any = subject.model
    argument = cache_argument(causal)
    if argument is None:
        raise IncompatibleError(
            f"{type(causal).__name__} takes no cache; the demo needs one. Use `ctxext eval compare`."
        )
    check_known(causal, ids)
    check_known(causal, ids[0, positions + 1], predicted=True)
    ids, positions, request = (tensor.to(causal.device) for tensor in (ids, positions, asked.request))
    # A dynamic method fits its positions to all tokens that the cache will hold.
    reach = {"ctxext_length": ids.shape[1] + len(request) + WRITTEN} if follows_length(subject) else {}
    output = causal(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=positions, **reach)
    if argument not in output:
        raise IncompatibleError(
            f"{type(causal).__name__} returns no cache; the demo needs one. Use `ctxext eval compare`."
        )
    losses = F.cross_entropy(output.logits[0].float(), ids[0, positions + 1], reduction="none").cpu()
    step, margin, right = torch.cat([ids[0, -1:], request])[None], math.inf, asked.answer.tolist()
    reply: list[int] = []
    for _ in range(WRITTEN):
        output = causal(input_ids=step, use_cache=True, logits_to_keep=1, **{argument: output[argument]}, **reach)
        logits = output.logits[0, -1].float()
        if reply == right[: len(reply)] and len(reply) < len(right):  # so far it is right
            others = logits.clone()
            others[right[len(reply)]] = -math.inf
            margin = min(margin, float(logits[right[len(reply)]] - others.max()))
        step = logits.argmax()[None, None]
        reply.append(int(step))
    return losses, Reply(reply, margin)


class Pace(NamedTuple):
    """Seconds that a demo takes: at the present load, and on an idle machine."""

    seconds: float
    idle: float


class _MeasuredError(Exception):
    """Ends a pass early, after the layers that are timed."""


@dataclass(eq=False, kw_only=True)
class Demo(Survey[ReadAndAnswer]):
    """Planned demo."""

    passage: Passage
    length: int
    trained_length: int

    def announcement(self, pace: Pace) -> str:
        """Return the sentence that announces the measurement and its time."""
        takes = f"About {pace.seconds:.0f} s."
        if pace.idle < BUSY * pace.seconds:
            takes = f"Busy: about {duration(pace.seconds)}, on an idle machine {duration(pace.idle)}."
        what = f"{tokens_label(self.length)} tokens of {self.passage.text.name}"
        return f"reads {what} in {len(self.jobs)} ways. {takes}\n"

    def pace(self) -> Pace:
        """Time two layers at each length that is read, and return the time of all layers of all readings."""
        model = self.checkpoint.model
        layers, device = layers_of(model), self.checkpoint.subject.model.device
        timed = layers[:2]
        marks: list[tuple[float, float]] = []

        def mark(*_: object) -> None:
            if device.type != "cpu":
                torch.accelerator.synchronize()
            marks.append((time.perf_counter(), time.process_time()))

        def end(*_: object) -> None:
            mark()
            raise _MeasuredError

        paces = {}
        hooks = [timed[0].register_forward_pre_hook(mark), timed[-1].register_forward_hook(end)]
        try:
            for tokens in {job.tokens for job in self.jobs}:
                marks.clear()
                with torch.no_grad(), contextlib.suppress(_MeasuredError):
                    model(input_ids=self.passage.text.input_ids[:, :tokens].to(device), use_cache=False)
                # Only the first layers ran: the others take as long. On an idle machine all threads would share the
                # processor time of the pass evenly.
                (began, worked), (ended, done) = marks
                share = len(layers) / len(timed)
                paces[tokens] = Pace((ended - began) * share, (done - worked) * share / torch.get_num_threads())
        finally:
            for hook in hooks:
                hook.remove()
        seconds, idle = (sum(each) for each in zip(*(paces[job.tokens] for job in self.jobs), strict=True))
        return Pace(seconds, idle if device.type == "cpu" else seconds)

    def result(self) -> DemoResult:
        """Put the finished jobs together."""
        lines, found = self.journal.finished(), self.losses()
        table = LossTable.of({job.reader.reading.name: [found[job.key]] for job in self.jobs})
        rows = [
            TextReading(
                name=job.reader.reading.name,
                label=job.name,
                is_method=job.reader.window is None,
                end=found[job.key].mean().item(),
                difference=table.difference(job.reader.reading.name),
                answer=lines[job.key]["reply"],
                margin=lines[job.key]["margin"],
                seconds=lines[job.key]["seconds"],
            )
            for job in self.jobs
        ]
        return DemoResult(
            trained_length=self.trained_length,
            length=self.length,
            distance=self.passage.distance,
            text=self.passage.text.name,
            window=table.window,
            # A window that shows a part of the fact does not lack it.
            lacks_it=self.passage.behind > table.window,
            rows=tuple(rows),
            provenance=self.with_extensions(provenance_of(self.checkpoint, self.corpus)).to_dict(),
        )


def document_of(options: DemoOptions) -> Document:
    """Read the text of the demo, or raise ``InvalidParameterError``; standard input can be read once."""
    # A second document is enough to refuse: a folder or a data set may hold many.
    documents = list(islice(read_documents([options.text]), 2)) if options.text else [default_text()]
    if len(documents) != 1:
        several = "more" if documents else "none"
        raise InvalidParameterError(
            f"text: the text of the demo must be one document, found {several} in {options.text!r}. Give one text file."
        )
    return documents[0]


def plan(checkpoint: Checkpoint, options: DemoOptions, document: Document) -> Demo:
    """Plan the demo: the same on every machine.

    Raises:
        UnknownNameError: an unknown method.
        InvalidParameterError: a factor or length out of range, a method twice, or a text that is too short.
        IncompatibleError: a method that cannot be right on this model.
    """
    readings = Readings(checkpoint)
    trained, names = readings.trained_length, options.method or METHODS
    readings.windows = (trained // 2, trained)  # truncations: set before the readings are listed
    found, refusals = readings.find(chosen_methods(checkpoint.subject, names, (options.factor,), trained))
    if refusals:
        raise IncompatibleError(f"{refusals[0].label}: {refusals[0].reason}")
    methods = tuple(reading for reading in found if reading.is_candidate)
    reach, length = min(reading.reach or 0 for reading in methods), options.length or trained + trained // PART
    if not trained < length <= reach:
        raise InvalidParameterError(
            f"length must be above the trained length of {trained:,} tokens and at most {reach:,} (factor "
            f"{options.factor:g} times it), found {length:,}. Raise --factor to go further."
        )
    tokenizer, prefix = checkpoint.tokenizer, special_prefix(checkpoint.tokenizer)
    text = tokenise(document, tokenizer, prefix=prefix)
    corpus = Corpus((text,), prefix_label(tokenizer, prefix), 1)
    journal = Journal(options.output / UNFINISHED / "jobs.jsonl", identity="demo.json")
    passage = Passage.of(text, tokenizer, length)
    jobs = [
        ReadAndAnswer(
            key=readings.key(reading.identity, text=passage.text.sha256),
            cost=float(reading.window or length),
            reader=Reader(reading, readings, (length,)),
            name=reading.label,
            passage=passage,
            tokenizer=tokenizer,
            trained_length=trained,
        )
        for reading in found
        if reading.is_candidate or reading.window
    ]
    return Demo(
        DemoResult.made_by,
        checkpoint,
        jobs,
        corpus=corpus,
        journal=journal,
        passage=passage,
        length=length,
        trained_length=trained,
    )


def span_of(shown: Demo | DemoResult) -> str:
    """Return the positions that are scored, in words."""
    return f"{tokens_label(shown.length - shown.trained_length // PART)}-{tokens_label(shown.length)}"


def first_line(answer: str) -> str:
    """Return an answer's first line."""
    return printable(answer.strip().split("\n")[0])


@dataclass(frozen=True)
class TextReading:
    """One reading of the text: a method or a truncation, and its nats per token at the end."""

    name: str
    label: str
    is_method: bool
    end: float
    difference: PairedDifference
    answer: str
    margin: float
    seconds: float

    @property
    def is_right(self) -> bool:
        """True where the answer begins with the fact."""
        return self.answer.strip().startswith(ANSWER)


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo measured, with its text and lengths.

    Args:
        lacks_it: True where the best truncation shows nothing of the fact.
    """

    trained_length: int
    length: int
    distance: int
    text: str
    window: int
    rows: tuple[TextReading, ...]
    provenance: JsonObject
    made_by: str = "ctxext demo"
    lacks_it: bool = True

    @property
    def title(self) -> str:
        """Checkpoint and lengths."""
        trained, length = tokens_label(self.trained_length), tokens_label(self.length)
        return f"{self.provenance['checkpoint']}, trained to {trained} tokens, reads {length}"

    @property
    def extended(self) -> list[TextReading]:
        """Rows of methods."""
        return [row for row in self.rows if row.is_method]

    @property
    def truncated(self) -> TextReading:
        """Row of the best truncation."""
        return next(row for row in self.rows if row.label == f"last {tokens_label(self.window)}")

    @property
    def page(self) -> Page:
        """Table and sentences."""
        rows = [
            [
                row.label,
                perplexity_label(math.exp(row.end)),
                "the best" if row is self.truncated else gain(row.difference),
                first_line(row.answer),
                f"{row.margin:+.1f}",
                f"{row.seconds:.0f} s",
            ]
            for row in self.rows
        ]
        table = TextTable(
            title=f"{self.text}: perplexity, nats gained over the best truncation, and the answer (right: {ANSWER})",
            header=["", span_of(self), "gain", "writes", "margin", "took"],
            rows=rows,
            caption="Margin: nats by which the right answer leads any other, at the least of its tokens.",
            styles={row.label: "reference" for row in self.rows if row not in self.extended},
        )
        return Page(self.title, [self.figure, table, Heading("What you see"), *sentences(self)])

    def to_dict(self) -> JsonObject:
        """Return plain JSON values."""
        return asdict(self)

    @property
    def figure(self) -> Figure:
        """Loss of each reading at the end of the text, and its answer."""
        words = ", ".join(f"{row.label} {row.end:.2f} nats, answers {first_line(row.answer)!r}" for row in self.rows)
        asked = f"Asked for a number {self.distance:,} tokens back, in {self.text}."
        caption = f"{asked} 1 nat less: 2.7 times less perplexity."
        return paneled("demo", self.title, [Panel(self._draw, words, (8.4, 3.1))], caption=caption)

    def _draw(self, axes: Any) -> None:
        """Draw a bar for each reading, and its answer in words."""
        places, colours = range(len(self.rows)), colours_for(row.name.split()[0] for row in self.rows)
        axes.barh(places, [row.end for row in self.rows], color=colours, height=0.62)
        for place, row, colour in zip(places, self.rows, colours, strict=True):
            mark, weight = ("✓", "bold") if row.is_right else ("✗", "normal")
            words = f"{row.end:.2f}   {mark} “{first_line(row.answer)}”"
            axes.annotate(
                words, (row.end, place), (6, 0), textcoords="offset points", va="center", color=colour, weight=weight
            )
        axes.set_yticks(places, [row.label for row in self.rows])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.6 * max(row.end for row in self.rows))
        axes.set_xlabel(f"loss at tokens {span_of(self)}, nats per token: less is better")
        draw_grid(axes, axis="x")


def sentences(result: DemoResult) -> list[str]:
    """Return what a newcomer should take away, in sentences that follow from the numbers."""
    best = min(result.extended, key=lambda row: row.end)
    verdict = VERDICTS[best.difference.verdict_of_best(len(result.extended))]
    gains = all_of([f"{row.label} {gain(row.difference)}" for row in result.extended])
    right, wrong = (
        [
            f"{row.label} (which lacks it)" if row is result.truncated and result.lacks_it else row.label
            for row in [*result.extended, result.truncated]
            if row.is_right is is_right
        ]
        for is_right in (True, False)
    )
    answers = f"{all_of(right) if right else 'no reading'} answered right"
    rest = f"; {all_of(wrong)} did not" if right and wrong else ""
    found = [
        f"A longer window {verdict} on this text: {gains} nats per token over the best truncation.",
        f"Asked for a number {result.distance:,} tokens back, {answers}{rest}.",
    ]
    # The stored measurements below were made with both default methods on the default text.
    if result.text == DEFAULT and {row.name.split()[0] for row in result.extended} == PLAY.keys():
        if best.name.startswith("yarn"):
            found.append(
                "YaRN is best on this text. Self-Extend is advised all the same: inside the window it changes no bit, "
                "where YaRN costs 0.03 nats, and no truncation beats it where a text repeats nothing."
            )
        found.append(
            f"Most texts repeat little. On a play Self-Extend gains {PLAY['self_extend']} nats, YaRN {PLAY['yarn']} "
            f"(stored: docs/evidence/demo.md). For yours: ctxext inspect CHECKPOINT -t FILE."
        )
    return found


def gain(difference: PairedDifference) -> str:
    """Write how much better a reading is than the best truncation, in nats per token."""
    return f"{-difference.mean + 0.0:+.3f} \N{PLUS-MINUS SIGN} {difference.standard_error:.3f}"
