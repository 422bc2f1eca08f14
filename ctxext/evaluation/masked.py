"""Masked-token loss: how well does a model that reads to both sides (BERT, RoBERTa, ModernBERT) fill in masked tokens?

**Masks.** In a pass every seventh token of the text is masked (14.3 percent), always by the mask token itself. The
first one is at another place in every pass, in an order that the seed decides: the passes over one text never mask a
token twice, seven of them mask each once, and texts take turns, so that over a few texts every position is masked. This
lies between two published ways: BERT's training masks 15 percent at random, a tenth of them by random tokens and a
tenth by themselves; pseudo-log-likelihood masks a single token in each pass. Evenly spread masks never hide two
neighbours together, so that losses are lower than with random ones: compare losses of one protocol only.

**Position and length.** Every token sees the whole text, so that a loss belongs to a position *and* to the length that
was read: each length is a pass of the model. The position is the masked token's place in the text that is read, special
tokens counted. A token near an end sees hardly more than one side.

**The baseline** of a model without a longer context is a window around the masked token: the same masked tokens (and
the same others masked) are read by the unextended model in windows of a quarter, a half, three quarters and all of the
trained length. A window scores the masked tokens in its middle half, so that each sees at least a quarter of it to
either side, or all that there is. The best of the four counts, chosen on the very tokens that are compared, as in
``ctxext.measuring.truncation``. Within the trained length nothing has to be cut: the unextended model reads it all.

Source: Devlin et al., arXiv:1810.04805, section 3.1 (masks); Salazar et al., arXiv:1910.14659, section 2
(pseudo-log-likelihood).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.figures import Line, Panel, lines_panel
from ctxext.evaluation.report.page import POSITION_AXIS, Page, TextTable, losses_page, readings_table
from ctxext.files import digest
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import Progress, check_known, head_chunk, opened, pass_cost, ticking, turning_point
from ctxext.measuring.head import require_pieces
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.provenance import Provenance, Report
from ctxext.measuring.readers import find_readers
from ctxext.measuring.readings import Reader, known_trained_length
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.survey import Answer, Job, Survey
from ctxext.measuring.truncation import (
    TRUNCATED,
    UNPATCHED,
    is_reference,
    window_name,
    window_of,
    windows_of,
)
from ctxext.texts.corpus import Corpus, special_suffix

EVERY = 7
LEAST = 8  # tokens of the text that the smallest window holds
SPANS = 8  # of positions in a table
FINE = 8  # pieces of a trained length in a figure, at most
# What a score is of: all of the text, the positions in a span, the same for a figure.
WHOLE, POSITION, CURVE = "whole", "position", "curve"


@dataclass(frozen=True, eq=False)
class View:
    """The stretch of a text that one row of a forward pass sees, special tokens apart.

    Args:
        stop: one past the last position.
        asked: positions whose losses count.
    """

    start: int
    stop: int
    masked: Int[Tensor, " masked"]
    asked: Int[Tensor, " asked"]


@dataclass(frozen=True, eq=False)
class MaskedText:
    """A text of just so many tokens, and which of them each pass masks.

    Args:
        prefix: Number of special tokens before it.
        passes: Positions that each pass masks.
    """

    name: str
    input_ids: Int[Tensor, " tokens"]
    prefix: int
    suffix: int
    passes: tuple[Tensor, ...]
    mask: int

    @property
    def length(self) -> int:
        """Tokens, special ones included."""
        return len(self.input_ids)

    @property
    def sha256(self) -> str:
        """The first 12 hexadecimal digits of a hash of tokens and masks."""
        content = [self.input_ids.tolist(), [masked.tolist() for masked in self.passes], self.mask]
        return digest(repr(content))

    def views(self, window: int | None = None) -> list[View]:
        """Return the rows that give the loss of every masked token once.

        Args:
            window: tokens of a row, special ones included; None, or as much as the text has, for the whole text.
        """
        first, last = self.prefix, self.length - self.suffix
        if window is None or window >= self.length:
            return [View(first, last, masked, masked) for masked in self.passes]
        room = window - self.prefix - self.suffix
        middle = max(1, room // 2)
        views = []
        for masked, begin in itertools.product(self.passes, range(first, last, middle)):
            asked = masked[(masked >= begin) & (masked < begin + middle)]
            start = min(max(begin - (room - middle) // 2, first), last - room)
            seen = masked[(masked >= start) & (masked < start + room)]
            views += [View(start, start + room, seen, asked)] if len(asked) else []
        return views

    def at_positions(self, losses: Float[Tensor, " masked"]) -> Float[Tensor, " tokens"]:
        """Put the losses of masked tokens, pass by pass, at their positions; NaN where none was masked."""
        places = torch.full((self.length,), torch.nan)
        places[torch.cat(self.passes)] = losses
        return places

    def row(self, view: View) -> Int[Tensor, " tokens"]:
        """Return the token ids of a view, masked, with the special tokens around it."""
        ids = self.input_ids.clone()
        ids[view.masked] = self.mask
        ends = self.input_ids[: self.prefix], self.input_ids[self.length - self.suffix :]
        return torch.cat([ends[0], ids[view.start : view.stop], ends[1]])


def tokens_needed(tokenizer: Any, length: int) -> int:
    """Return how many tokens a document needs to be read at a length, special tokens in front included."""
    return length - len(special_suffix(tokenizer))


def masked_texts(
    tokenizer: Any, corpus: Corpus, length: int, *, every: int = EVERY, passes: int = 1, seed: int = 0
) -> tuple[MaskedText, ...]:
    """Cut the documents to a length, and draw their masks.

    Args:
        length: tokens of each text, special ones included.
        every: Number of tokens per masked token; at least 2.
        passes: Passes over each text, each masking other tokens; from 1 to ``every``.

    Raises:
        InvalidParameterError: a number out of range, a text too short for a masked token in each pass, or a tokenizer
            without a mask token.
    """
    if tokenizer.mask_token_id is None:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} has no mask token, so that its model fills in nothing. Give a masked language "
            f"model; a causal one is measured by ctxext eval perplexity."
        )
    for name, value, least, most in (("every", every, 2, None), ("passes", passes, 1, every)):
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise InvalidParameterError(f"{name} must be {allowed}, found {value}.")
    suffix = special_suffix(tokenizer)
    # Offsets of the passes, by the seed alone: no token is masked twice, and texts of every length have the same.
    order = random.Random(f"masks {seed} {every}").sample(range(every), every)
    texts = []
    for number, document in enumerate(corpus.documents):
        taken = document.take(length - len(suffix))
        ids = torch.cat([taken.input_ids[0], taken.input_ids.new_tensor(suffix)])
        place = torch.arange(document.prefix, length - len(suffix))
        if len(place) < every:
            raise InvalidParameterError(
                f"Of {length:,} tokens, {len(place)} can be masked, too few for one in {every}. Give a smaller --every "
                f"or a greater --length."
            )
        offsets = [order[(number * passes + turn) % every] for turn in range(passes)]
        masks = tuple(place[(place - document.prefix) % every == offset] for offset in offsets)
        texts.append(MaskedText(document.name, ids, document.prefix, len(suffix), masks, tokenizer.mask_token_id))
    return tuple(texts)


# Not inference_mode: a dynamic method may leave its buffers behind, and inference tensors cannot be trained with.
@torch.no_grad()
def masked_losses(
    model: nn.Module,
    text: MaskedText,
    *,
    window: int | None = None,
    ticks: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Float[Tensor, " tokens"]:
    """Compute the loss of every masked token at its position, in nats; NaN where none was masked.

    Args:
        ticks: Context of all passes, made from their number.

    The head runs at the masked positions alone, so that positions x vocabulary never exists.

    Raises:
        IncompatibleError: a model in training mode, or one whose head takes more than the hidden states.
    """
    losses, views = torch.full((text.length,), torch.nan), text.views(window)
    rows = max(1, text.length // (window or text.length))  # about as many tokens as the whole text has
    with ticks(-(-len(views) // rows)):
        for at in range(0, len(views), rows):
            _read(model, text, views[at : at + rows], losses)
    return losses


def _read(model: nn.Module, text: MaskedText, views: Sequence[View], losses: Tensor) -> None:
    subject, shell, replay = opened(model)
    device = next(shell.parameters()).device
    ids = torch.stack([text.row(view) for view in views]).to(device)
    check_known(model, ids, predicted=True)
    check_known(model, text.input_ids, predicted=True)  # tokens under a mask are predicted alone
    rows = torch.cat([torch.full((len(view.asked),), row) for row, view in enumerate(views)])
    columns = torch.cat([view.asked - view.start + text.prefix for view in views])
    places = torch.cat([view.asked for view in views])
    shell(input_ids=ids, return_dict=True)  # the layers read everything, the head one position
    chunk = head_chunk(subject)
    for at in range(0, len(places), chunk):
        part = slice(at, at + chunk)
        replay.calls = 0
        replay.hidden = replay.output[0][rows[part].to(device), columns[part].to(device)][None]
        logits = shell(input_ids=ids, return_dict=True).logits
        require_pieces(shell, replay, logits)
        wanted = text.input_ids[places[part]].to(device)
        losses[places[part]] = functional.cross_entropy(logits[0].float(), wanted, reduction="none").cpu()


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskedJob(Job):
    """One reader and one text."""

    text: MaskedText
    is_causal = False

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Return the losses of all masked tokens, pass by pass."""
        found = masked_losses(
            model,
            self.text,
            window=self.reader.reading.window,
            ticks=lambda passes: ticking(model, self.name, self.cost / passes, progress),
        )
        return Answer({"item": self.text.name}, found[torch.cat(self.text.passes)])


def masked_readers(
    checkpoint: Checkpoint,
    *,
    methods: Sequence[str] = (),
    factors: Sequence[float] = (),
    lengths: Sequence[int] = (),
    reference: Checkpoint | None = None,
    trained_length: int | None = None,
) -> tuple[Reader, ...]:
    """Return the unextended model, the same in windows around each masked token, and each method up to its reach.

    Beyond its trained length the unextended model reads as a control, where it can: a learned table has no rows there.

    Raises:
        InvalidParameterError: a length that nobody is meant for.
        IncompatibleError: a method that cannot be right on this model.
        UnknownNameError: an unknown method.
    """
    trained = known_trained_length(checkpoint.subject, trained_length)
    asked = find_readers(
        checkpoint,
        methods=methods,
        factors=factors,
        lengths=sorted({*lengths, trained}) if lengths else (),
        reference=reference,
        trained_length=trained_length,
    )
    readers: list[Reader] = []
    for reader in asked:
        if reader.reading.name != TRUNCATED:
            readers.append(reader)
            continue
        beyond = tuple(length for length in reader.lengths if length > trained)
        special = checkpoint.tokenizer.num_special_tokens_to_add()
        sizes = [size for size in windows_of(trained) if size >= special + LEAST]
        named = [replace(reader.reading, name=window_name(size), label=f"{size:,} around") for size in sizes]
        readers += [Reader(reading, reader.readings, beyond) for reading in named if beyond]
    return tuple(readers)


def masked_jobs(
    readers: Sequence[Reader], texts: Callable[[int], Sequence[MaskedText]], checkpoint: Checkpoint
) -> list[MaskedJob]:
    """Lay out every reader and every text of a length that it is meant for."""
    point = turning_point(checkpoint.subject)
    lengths = sorted({length for reader in readers for length in reader.lengths})
    pairs = itertools.product(readers, [(length, texts(length)) for length in lengths])
    return [
        MaskedJob(
            key=reader.readings.key(reader.reading.identity, task=["losses of masked tokens", text.sha256]),
            cost=len(text.views(reader.reading.window)) * pass_cost(reader.reading.window or length, point),
            reader=reader,
            name=f"{reader.reading.label}, {text.name}, {length:,} tokens",
            text=text,
        )
        for reader, (length, of_length) in pairs
        if length in reader.lengths
        for text in of_length
    ]


@dataclass(frozen=True, kw_only=True)
class MaskedScore:
    """One number of a reading.

    Args:
        kind: ``whole``; ``position`` or, finer, ``curve`` for the positions ``start <= i < stop``.
        tokens: Masked tokens whose losses were averaged, over all texts.
        versus: Loss minus the baseline's on the same tokens; None for the baseline itself. The baseline is the best
            window around each token beyond the trained length, and the unextended model within it.
        window: Tokens of the best window on these masked tokens; None for other readings.
    """

    length: int
    kind: str
    start: int
    stop: int
    tokens: int
    loss: float
    versus: PairedDifference | None = None
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class MaskedReading:
    """One way to read the texts.

    Args:
        name: ``unpatched``, ``truncated`` for the best window around each masked token, ``truncated 512`` for a single
            one of these, or how the model was extended.
    """

    name: str
    label: str
    scores: tuple[MaskedScore, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens, increasing."""
        return tuple(sorted({score.length for score in self.scores}))

    def at(self, length: int, kind: str) -> tuple[MaskedScore, ...]:
        """Return the scores of one length and kind, by increasing position."""
        return tuple(score for score in self.scores if (score.length, score.kind) == (length, kind))


@dataclass(frozen=True, kw_only=True)
class MaskedReport(Report):
    """A whole measurement.

    Args:
        every: Number of tokens per masked token.
    """

    TITLE, KIND, FORMAT = "a masked-token report", "masked", 1

    trained_length: int
    every: int
    passes: int
    readings: tuple[MaskedReading, ...]
    provenance: Provenance

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths, in tokens, increasing."""
        return tuple(sorted({length for reading in self.readings for length in reading.lengths}))

    def find(self, name: str) -> MaskedReading | None:
        """Return the reading of one name; None where it was not made."""
        return next((reading for reading in self.readings if reading.name == name), None)

    @property
    def extensions(self) -> tuple[MaskedReading, ...]:
        """The readings of extended models."""
        return tuple(reading for reading in self.readings if not is_reference(reading.name))


def masked_report(survey: Survey[MaskedJob], provenance: Provenance, *, every: int, passes: int) -> MaskedReport:
    """Summarise a finished survey."""
    trained, losses = survey.readers[0].readings.trained_length, survey.losses()
    labels = {TRUNCATED: "best window around"} | {
        reader.reading.name: reader.reading.label for reader in survey.readers
    }
    scores: dict[str, list[MaskedScore]] = {name: [] for name in (UNPATCHED, *labels)}
    for length in sorted({job.text.length for job in survey.jobs}):
        texts: dict[str, list[Tensor]] = {}
        for job in survey.jobs:
            if job.text.length == length:
                texts.setdefault(job.reader.reading.name, []).append(job.text.at_positions(losses[job.key]))
        for name, score in _scores(LossTable.of(texts), length, trained):
            scores[name].append(score)
    return MaskedReport(
        trained_length=trained,
        every=every,
        passes=passes,
        readings=tuple(
            MaskedReading(name=name, label=labels[name], scores=tuple(of_reading))
            for name, of_reading in scores.items()
            if of_reading
        ),
        provenance=survey.with_extensions(provenance),
    )


def _scores(table: LossTable, length: int, trained: int) -> Iterator[tuple[str, MaskedScore]]:
    """Yield the scores of every reading at one length, with its name, beginning with the best windows.

    The losses of a text are NaN where nothing was masked.
    """
    best = [TRUNCATED] if table.short else []
    other = TRUNCATED if best else UNPATCHED
    for kind, start, stop in _spans(length, trained):
        masked = table.span(start, stop).select(lambda texts: [text[~text.isnan()] for text in texts])
        if not masked.tokens(masked.names[0]):
            continue
        baselines = [other, window_name(masked.window)] if best else [other]
        for name in (*best, *table.names):
            compared = name not in baselines and kind != CURVE and (best or other in table.names)
            yield (
                name,
                MaskedScore(
                    length=length,
                    kind=kind,
                    start=start,
                    stop=stop,
                    tokens=masked.tokens(name),
                    loss=masked.mean(name),
                    versus=masked.versus(name, other) if compared else None,
                    window=masked.window if name == TRUNCATED else None,
                ),
            )


def _spans(length: int, trained: int) -> Iterator[tuple[str, int, int]]:
    """Yield kind, start and stop of every score of a length."""
    steps = {
        WHOLE: length,
        POSITION: trained * max(1, -(-length // (SPANS * trained))),
        CURVE: max(1, -(-length // (FINE * SPANS)), trained // FINE),
    }
    for kind, step in steps.items():
        for start in range(0, length, step):
            yield kind, start, min(start + step, length)


def masked_page(report: MaskedReport) -> Page:
    """Return losses at each length, losses by position at the greatest length, sentences, a figure."""
    last, readings = report.lengths[-1], [r for r in report.readings if window_of(r.name) is None]
    whole = {r.label: {tokens_label(s.length): s for s in r.scores if s.kind == WHOLE} for r in readings}
    tables = _losses_and_gaps(
        "Loss of masked tokens, nats, by tokens read",
        f"Loss minus {_baseline(report, report.lengths)}",
        list(map(tokens_label, report.lengths)),
        whole,
    )
    spans = {r.label: {_span(score): score for score in r.at(last, POSITION)} for r in readings if last in r.lengths}
    title = f"{tokens_label(last)} tokens read, loss by position"
    gaps = f"{title} minus {_baseline(report, [last])}"
    tables += _losses_and_gaps(title, gaps, list(next(iter(spans.values()))), spans)
    return losses_page("masked", report.provenance, tables, masked_sentences(report), [_panel(report, readings)])


def _losses_and_gaps(
    title: str, gaps: str, columns: Sequence[str], scores: Mapping[str, Mapping[str, MaskedScore]]
) -> list[TextTable]:
    """Return a table of losses, and below it, under the title ``gaps``, one of their differences to the baseline."""
    losses = {label: {column: f"{s.loss:.3f}" for column, s in of.items()} for label, of in scores.items()}
    versus = {label: {column: str(s.versus or "") for column, s in of.items()} for label, of in scores.items()}
    return [readings_table(title, columns, losses, missing=""), readings_table(gaps, columns, versus, missing="")]


def masked_sentences(report: MaskedReport) -> list[str]:
    """Return the gain of each extension at its greatest length, its cost within the trained one, and the masks."""
    sentences, texts = [], len(report.provenance.documents)
    for reading in report.extensions:
        last = reading.at(reading.lengths[-1], WHOLE)[0]
        if last.versus is not None and last.length > report.trained_length:
            sentences.append(
                f"Does {reading.label} beat the best window around each masked token at {tokens_label(last.length)} "
                f"tokens? {last.versus.answer(texts, per='masked token')}"
            )
        sentences += [
            f"{reading.label} at the trained {tokens_label(score.length)} tokens, minus unpatched: {score.versus}."
            for score in reading.at(report.trained_length, WHOLE)
            if score.versus is not None
        ]
    times = texts * report.passes / report.every  # below 1 no position twice, since texts take turns
    sentences.append(
        f"One token in {report.every} is masked, in {report.passes} {'pass' if report.passes == 1 else 'passes'} over "
        f"each of {texts} {'text' if texts == 1 else 'texts'}: every position is masked {times:.3g} times on "
        f"average{'' if times >= 1 else f', and {1 - times:.0%} of them never'}."
    )
    return sentences


def _panel(report: MaskedReport, readings: Sequence[MaskedReading]) -> Panel:
    """Return the loss by position, each reading at its greatest length."""
    last, lines = report.lengths[-1], []
    for reading in readings:
        curve = reading.at(reading.lengths[-1], CURVE)
        points = [((score.start + score.stop) / 2, score.loss) for score in curve]
        lines.append(Line(reading.name.split()[0], reading.label, points))
    return lines_panel(
        lines,
        title="By position, each at the greatest length that it reads",
        x_label=POSITION_AXIS,
        y_label="loss of masked tokens, nats",
        ticks=range(0, last + 1, max(1, last // 8)),
        log=False,
        trained_length=report.trained_length if last > report.trained_length else None,
    )


def _baseline(report: MaskedReport, lengths: Sequence[int]) -> str:
    inside, beyond = "the unextended model's", "that of the best window around each token"
    kinds = [inside] * (lengths[0] <= report.trained_length) + [beyond] * (lengths[-1] > report.trained_length)
    return ", and beyond the trained length ".join(kinds)


def _span(score: MaskedScore) -> str:
    return f"{tokens_label(score.start)}-{tokens_label(score.stop)}"
