"""Scores, readings and verdict of a measurement of perplexity, as its report holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ctxext.evaluation.report.figures import COLOURS, Line, Panel, differences_panel, lines_panel
from ctxext.evaluation.report.page import (
    AGAINST,
    POSITION_AXIS,
    Headline,
    Page,
    losses_page,
    readings_table,
)
from ctxext.measuring.labels import label_of, perplexity_label, tokens_label
from ctxext.measuring.provenance import Provenance, Report
from ctxext.measuring.statistics import PairedDifference, perplexity
from ctxext.measuring.truncation import SELECTED, TRUNCATED, UNPATCHED, is_reference, is_short, window_name

# The two kinds of score: positions start..stop of a text, and all up to a length.
POSITIONS, LENGTH = "positions", "length"
TITLES = {POSITIONS: "Perplexity by position", LENGTH: "Perplexity up to a length"}


@dataclass(frozen=True, kw_only=True)
class PerplexityScore:
    """One number of a reading.

    Args:
        kind: ``positions``: the mean loss at the positions ``start <= i < stop``. ``length``: the mean over all
            positions below ``stop``.
        start: Tokens; 0 for a length.
        versus_truncation: Loss minus the best truncation's on the same tokens, weighed as in ``PairedDifference``;
            None inside the trained window, where nothing is truncated, for the best truncation itself, and for a
            single token.
        window: Tokens that a truncation sees, beyond the trained window; for the best truncation, the size of the
            window that is best on the tokens of this score.
        selected: True for the best truncation where the selection is better than each of them.
    """

    kind: str
    start: int
    stop: int
    tokens: int
    loss: float
    versus_truncation: PairedDifference | None = None
    window: int | None = None
    selected: bool = False

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, dimensionless."""
        return perplexity(self.loss)


@dataclass(frozen=True, kw_only=True)
class PerplexityReading:
    """One way to read the texts.

    Args:
        name: ``unpatched``; ``truncated 2048`` for the last 2,048 tokens, and ``truncated`` for the one of them
            that is best on the tokens of a score; or a method's name.
        scores: Scores of positions first, then of lengths.
        in_window: Loss inside the trained window minus the unpatched model's on the same tokens; None without an
            unpatched model to compare with, and for the references.
        dynamic: True where positions follow the length of the text, so that every length took a separate pass.
        tokens: Tokens that went through the model, in all passes.
    """

    name: str
    scores: tuple[PerplexityScore, ...]
    in_window: PairedDifference | None = None
    dynamic: bool = False
    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def at(self, kind: str) -> tuple[PerplexityScore, ...]:
        """Return the scores of one kind, by increasing length."""
        return tuple(score for score in self.scores if score.kind == kind)


@dataclass(frozen=True, kw_only=True)
class PerplexityResult(Report):
    """A whole measurement.

    Args:
        trained_length: Tokens of the longest truncation.
    """

    TITLE, FORMAT = "a perplexity result", 3

    trained_length: int
    lengths: tuple[int, ...]
    readings: tuple[PerplexityReading, ...]
    notes: tuple[str, ...]
    provenance: Provenance

    def find(self, name: str) -> PerplexityReading | None:
        """Return the reading of one name; None where it was not made."""
        return next((reading for reading in self.readings if reading.name == name), None)

    @property
    def extension(self) -> PerplexityReading | None:
        """The reading of the extended model, None where the checkpoint was measured as it is."""
        return next((reading for reading in self.readings if not is_reference(reading.name)), None)

    def sentence(self) -> str:
        """Say in one sentence whether the extended model uses its window."""
        measured = self.extension or self.find(UNPATCHED)
        scores = measured.scores if measured else ()
        compared = [(score, score.versus_truncation) for score in scores if score.versus_truncation is not None]
        positions = [pair for pair in compared if pair[0].kind == POSITIONS]
        if measured is None or not compared:
            return f"Nothing here lies beyond the trained {self.trained_length:,} tokens, so nothing was truncated."
        score, difference = (positions or compared)[-1]
        where = f"positions {score.start:,} to {score.stop:,}" if score.kind == POSITIONS else f"length {score.stop:,}"
        answer = difference.answer(len(self.provenance.documents))
        best, place = self.find(TRUNCATED), (score.kind, score.start, score.stop)
        same = [other for other in (best.scores if best else ()) if (other.kind, other.start, other.stop) == place]
        window = (same[0].window if same else None) or self.trained_length
        fed = f"feeding only {'selected' if same and same[0].selected else 'the last'} {window:,} tokens"
        beat = f"{fed}, the best of truncations and selection" if self.find(SELECTED) else f"the best truncation, {fed}"
        return f"Does {measured.name} at {where} beat {beat}? {answer}"


def perplexity_page(result: PerplexityResult) -> Page:
    """Return the tables, the notes, the answer and the figure of a result."""
    references = [r.name for r in result.readings if r.name != UNPATCHED and is_reference(r.name)]
    styles = dict.fromkeys(map(label_of, references), "reference")
    tables = []
    for kind, title in TITLES.items():
        cells = {label_of(r.name): {_span(s): _perplexity(r, s) for s in r.at(kind)} for r in result.readings}
        columns = [_span(score) for score in result.readings[-1].at(kind)]
        tables.append(readings_table(title, columns, cells, styles=styles))
    differences = {
        label_of(r.name): {_span(s): str(s.versus_truncation or "").replace(" ± ", "\n± ") for s in r.at(POSITIONS)}
        for r in result.readings
    }
    columns = [_span(score) for score in result.readings[-1].at(POSITIONS)]
    tables.append(readings_table(f"{AGAINST} ± standard error", columns, differences, missing="", styles=styles))
    sentences: list[str] = []
    if (extension := result.extension) is not None and (inside := extension.in_window) is not None:
        sentences.append(
            f"Inside the trained window, {label_of(extension.name)} minus unpatched: {inside} nats per token, "
            f"perplexity x{perplexity(inside.mean):.3f}."
        )
    sentences += [*result.notes, Headline(result.sentence())]
    return losses_page("perplexity", result.provenance, tables, sentences, _perplexity_panels(result))


def _perplexity(reading: PerplexityReading, score: PerplexityScore) -> str:
    """Return a number, for the best truncation with the window that it has there."""
    number = perplexity_label(score.perplexity)
    window = score.window if reading.name == TRUNCATED else None
    return number if window is None else f"{number}\n({label_of(SELECTED if score.selected else window_name(window))})"


def _perplexity_panels(result: PerplexityResult) -> list[Panel]:
    """Return perplexity by position, and on the right the difference to the best truncation."""
    lines, colours = [], {}
    for reading in (r for r in result.readings if not is_short(r.name)):  # the best represents them
        colours[reading.name] = reading.name if reading.name in COLOURS else "yarn"
        points = [((s.start + s.stop) / 2, s.perplexity) for s in reading.at(POSITIONS)]
        lines.append(Line(colours[reading.name], label_of(reading.name), points))
    ticks = range(0, result.lengths[-1] + 1, 2 ** max(0, math.ceil(math.log2(result.lengths[-1] / 8))))
    trained = result.trained_length
    title = TITLES[POSITIONS]
    panels = [lines_panel(lines, title=title, x_label=POSITION_AXIS, ticks=ticks, trained_length=trained)]
    measured = result.extension or result.find(UNPATCHED)
    scored = [(score, d) for score in (measured.at(POSITIONS) if measured else ()) if (d := score.versus_truncation)]
    if measured and scored:
        group = (colours[measured.name], label_of(measured.name), [difference for _, difference in scored])
        panels.append(
            differences_panel([_span(score) for score, _ in scored], [group], title=AGAINST, x_label=POSITION_AXIS)
        )
    return panels


def _span(score: PerplexityScore) -> str:
    start = f"{tokens_label(score.start)}-" if score.kind == POSITIONS else ""
    return f"{start}{tokens_label(score.stop)}"
