"""The figures of a comparison, each of one panel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.comparison.result import ComparisonResult, FactorSeries, Row, Score, Series, Verdict
from ctxext.evaluation.labels import label_of, tokens_label
from ctxext.evaluation.readings import TIMES, Reading
from ctxext.evaluation.report.sentences import all_of, capitalised, windows_in_words
from ctxext.evaluation.report.style import (
    BAND,
    COLOURS,
    DASHED,
    NOTE,
    OTHERS,
    Drawing,
    Look,
    draw_differences,
    draw_grid,
    label_ends,
    looks_for,
    plain_ticks,
    saved_figure,
)
from ctxext.evaluation.statistics import PairedDifference
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, is_reference, window_of

WIDTH = 5.1
# Lost to found, the same in both themes: the cells bring their own background.
LOST, FOUND, CELL_INK = "#F3D3B8", "#7DB8E0", "#1A1A1A"
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": "linecolor", "handletextpad": 0.4}


def drawings(result: ComparisonResult) -> list[list[Drawing]]:
    """All figures of a result, in the order of a page, those together that belong together."""
    forests = [_forest(result, verdict) for verdict in reversed(result.verdicts)]
    positions = [[_by_position(result, panel), _against_truncation(result, panel)] for panel in result.panels]
    passkeys = [_passkeys(result)] if any(row.passkeys for row in result.rows) else []
    return [forests, *positions, [_at_length(result), *passkeys]]


def save_loss_figure(series: Sequence[Series], path: Path, *, trained_length: int, title: str) -> None:
    """Draw perplexity by position on the left, the methods' difference to the best truncation on the right.

    Args:
        series: the references first, then the methods; of the truncations the best one is drawn.
        path: of the PNG.
        trained_length: tokens; marked in the figure.
        title: one line.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    methods = [item for item in series if not is_reference(item.name)]
    series = [item for item in series if window_of(item.name) is None]
    looks = looks_for({item.name: (item.name, label_of(item.name)) for item in series})
    widths = (1.65, 1) if methods else (1,)
    with saved_figure(path, (10.0, 4.5), title) as figure:
        left, *right = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        _draw_perplexity(left, series, looks, trained_length, title="Perplexity by position")
        for axes in right:
            _draw_against(axes, methods, looks, title="Loss minus the best truncation's, nats")
            axes.legend(**LEGEND | {"handletextpad": 0.2}, loc="upper left")


def _looks(readings: Sequence[Reading]) -> dict[str, Look]:
    """Looks by reading, without the factor in the labels: a title names it."""
    return looks_for({item.name: (_kind(item), re.sub(rf" {TIMES}[\d.]+", "", item.label)) for item in readings})


def _kind(reading: Reading) -> str:
    """What decides a reading's colour: its method, whatever the factor."""
    if reading.window is not None:
        return TRUNCATED
    return reading.name if reading.is_reference or reading.method is None else str(reading.method["method"])


def _forest(result: ComparisonResult, verdict: Verdict) -> Drawing:
    """Every reading's distance to the best truncation, best first."""
    rows = _by_distance(result, verdict.length)
    end, window = tokens_label(verdict.length), tokens_label(verdict.window)
    told = "; ".join(f"{row.reading.label} {gap}" for row, _, gap in rows)
    dots = " Small dots: each document." if len(result.provenance["documents"]) > 1 else ""
    return Drawing(
        name=f"truncation-{verdict.length}",
        title=f"Against the best truncation, at {end} tokens",
        caption=f"Loss minus that of the best truncation, seeing only the last {window} tokens, on the same tokens, "
        f"with 95 percent intervals. Left of the line, the older text helps. Grey: truncation to the last "
        f"{windows_in_words(result.trained_length)} tokens, the best of which is the line.{dots}",
        alternative=f"Each method's loss minus the best truncation's (to the last {window}) at {end} tokens, in nats "
        f"per token: {told}.",
        size=(WIDTH, 0.9 + 0.29 * len(rows)),
        draw=lambda figure: _draw_forest(figure, rows),
    )


def _by_distance(result: ComparisonResult, length: int) -> list[tuple[Row, Score, PairedDifference]]:
    """The rows that were measured at a length beyond the window, the best truncation aside, the best first."""
    scored = [(row, row.at(length)) for row in result.rows if row.reading.name != TRUNCATED]
    found = [(row, score, score.versus_truncation) for row, score in scored if score and score.versus_truncation]
    return sorted(found, key=lambda item: item[2].mean)


def _draw_forest(figure: Any, rows: Sequence[tuple[Row, Score, PairedDifference]]) -> None:
    axes = figure.subplots()
    gaps = [gap for _, _, gap in rows]
    nearest = min(abs(gap.mean) + gap.margin for row, _, gap in rows if row.reading.window is None)
    limit = min(max(0.15, 5 * nearest), 1.05 * max(gap.mean + gap.margin for gap in gaps))
    low = min(-0.25 * limit, *(gap.mean - gap.margin for gap in gaps)) * 1.1
    axes.axvline(0, color=COLOURS[TRUNCATED], lw=1.4, ls=DASHED, zorder=2)
    for place, (row, score, gap) in enumerate(rows):
        colour = COLOURS.get(_kind(row.reading), OTHERS[0])  # a method's own, whatever the factor
        if gap.mean > limit:
            axes.plot(limit * 0.985, place, marker=">", ms=6, color=colour, clip_on=False)
        else:
            axes.errorbar(gap.mean, place, xerr=gap.margin, fmt="o", ms=5.5, lw=1.8, color=colour, zorder=4)
            if len(score.by_document) > 1:
                dots = [value for value in score.by_document if low < value < limit]
                axes.plot(dots, [place] * len(dots), ".", ms=4, color=NOTE, zorder=5)
        axes.text(1.02, place, str(gap), transform=axes.get_yaxis_transform(), va="center", fontsize=9.5)
    axes.set_yticks(range(len(rows)), [row.reading.label for row, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(low, limit)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("nats per token; left: better than the best truncation")
    draw_grid(axes, axis="x")


def _by_position(result: ComparisonResult, panel: FactorSeries) -> Drawing:
    readings = [result.row(item.name).reading for item in panel.drawn]
    looks = _looks(readings)
    ends = "; ".join(f"{looks[item.name].label} {item.buckets[-1].perplexity:.4g}" for item in panel.drawn)
    last = panel.drawn[0].buckets[-1]
    dynamic = [looks[reading.name].label for reading in readings if reading.dynamic]
    caption = "How well each token is predicted, by where it stands (log scale). Shaded: the trained window."
    if dynamic:
        caption += (
            f" {capitalised(all_of(dynamic))} here with the positions of {tokens_label(panel.length)} throughout."
        )
    return Drawing(
        name=f"loss{_suffix(panel)}",
        title=f"Perplexity by position{_of_factor(panel)}",
        caption=caption,
        alternative=f"Perplexity by position. At positions {last.start:,} to {last.stop:,}: {ends}.",
        size=(WIDTH, 3.7),
        draw=lambda figure: _draw_perplexity(figure.subplots(), panel.drawn, looks, result.trained_length),
    )


def _against_truncation(result: ComparisonResult, panel: FactorSeries) -> Drawing:
    readings = [result.row(item.name).reading for item in panel.drawn]
    looks = _looks(readings)
    names = {reading.name for reading in readings if reading.is_candidate}
    methods = [item for item in panel.drawn if item.name in names]
    windows = next(item for item in panel.series if item.name == TRUNCATED).windows
    chosen = all_of([tokens_label(window) for window in windows])
    told = "; ".join(
        f"{looks[item.name].label} {', '.join(str(gap) for gap in item.versus_truncation)}" for item in methods
    )
    return Drawing(
        name=f"difference{_suffix(panel)}",
        title=f"Against the best truncation{_of_factor(panel)}",
        caption=f"The same tokens, minus their loss under the best truncation (in these stretches the last {chosen} "
        f"tokens), with 95 percent intervals.",
        alternative=f"Loss minus the best truncation's (the last {chosen}) in consecutive stretches beyond the window, "
        f"nats per token: {told}.",
        size=(WIDTH, 3.9),
        draw=lambda figure: _draw_panel_against(figure, methods, looks),
    )


def _draw_panel_against(figure: Any, methods: Sequence[Series], looks: Mapping[str, Look]) -> None:
    _draw_against(figure.subplots(), methods, looks)
    figure.legend(loc="outside lower center", ncols=4, columnspacing=1.2, **LEGEND)


def _draw_perplexity(
    axes: Any, series: Sequence[Series], looks: Mapping[str, Look], trained_length: int, title: str = ""
) -> None:
    """Perplexity by position on a log scale, each line labelled at its end."""
    stop = series[0].curve[-1].stop
    axes.axvspan(0, trained_length, color=BAND, lw=0, zorder=0)
    ends = []
    for item in series:
        # Inside the window truncation is the unpatched model itself.
        first = trained_length if item.name == TRUNCATED else 0
        drawn = [bucket for bucket in item.curve if bucket.start >= first]
        x, y = [(bucket.start + bucket.stop) / 2 for bucket in drawn], [bucket.perplexity for bucket in drawn]
        dashes = DASHED if item.name == TRUNCATED else "-"
        order = {UNPATCHED: 4, TRUNCATED: 5}.get(item.name, 3)
        axes.plot(x, y, color=looks[item.name].colour, lw=1.8, ls=dashes, zorder=order, solid_capstyle="round")
        ends.append((item.name, y[-1]))
    axes.set_yscale("log")
    axes.set_xlim(0, stop)
    axes.margins(y=0.08)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 1.25)
    plain_ticks(axes, low, high * 1.25)
    middle, ha = (trained_length / 2, "center") if trained_length > 0.25 * stop else (0.01 * stop, "left")
    axes.text(middle, high * 1.12, "trained window", ha=ha, va="top", fontsize=9, color=NOTE)
    label_ends(axes, ends, looks, gap=0.058)
    ticks = _positions(trained_length, stop)
    axes.set_xticks(ticks, [tokens_label(tick) for tick in ticks])
    axes.set_xlabel("position in the text, tokens")
    draw_grid(axes, title)


def _draw_against(axes: Any, methods: Sequence[Series], looks: Mapping[str, Look], title: str = "") -> None:
    """Means with 95 percent intervals; a method far above the others would hide their differences and is named."""
    means = {item.name: [difference.mean for difference in item.versus_truncation] for item in methods}
    smallest = min(max(abs(value) for value in values) for values in means.values())
    shown = [item for item in methods if max(map(abs, means[item.name])) <= max(0.3, 4 * smallest)]
    hidden = [item for item in methods if item not in shown]
    draw_differences(
        axes,
        [(bucket.start, bucket.stop) for bucket in methods[0].buckets[1:]],
        [(looks[item.name], item.versus_truncation) for item in shown],
        width=0.6 / max(1, len(shown)),
        title=title,
    )
    low, high = axes.get_ylim()
    reach = max(abs(low), abs(high)) * 1.1
    axes.set_ylim(min(low * 1.15, -0.35 * reach), 1.25 * reach)
    notes = ["below the line: the old text helps"]
    if hidden:
        names = ", ".join(f"{looks[item.name].label} {max(means[item.name]):+.2f}" for item in hidden)
        notes.append(f"off the scale: {names}")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for place, note in enumerate(notes):
        height = 0.02 + 0.05 * place
        axes.text(
            0.985, height, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=8.5, color=NOTE, bbox=box
        )


def _positions(trained_length: int, stop: int) -> list[int]:
    """Six to eight round positions, the trained length among them."""
    step = max(1, trained_length // 4)
    while stop / step > 9:
        step *= 2
    return list(range(0, stop + 1, step))


def _at_length(result: ComparisonResult) -> Drawing:
    last, end = result.lengths[-1], result.row(UNPATCHED).scores[-1].end
    told = "; ".join(
        f"{row.reading.label} {', '.join(f'{tokens_label(s.length)} {s.end.perplexity:.4g}' for s in row.scores)}"
        for row in result.rows
    )
    return Drawing(
        name="perplexity-at-length",
        title="Perplexity at length",
        caption=f"Of the last {tokens_label(end.stop - end.start)} positions before each length (log scales). Other "
        f"positions are other words: compare methods at one length, not lengths.",
        alternative=f"Perplexity at the end of each length, up to {tokens_label(last)}: {told}.",
        size=(WIDTH, 0.4 + 2.9 * len(result.panels)),
        draw=lambda figure: _draw_at_length(figure, result),
    )


def _draw_at_length(figure: Any, result: ComparisonResult) -> None:
    grid = figure.subplots(len(result.panels), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    named = [[result.row(item.name) for item in panel.drawn] for panel in result.panels]
    for axes, panel, rows in zip(grid, result.panels, named, strict=True):
        looks = _looks([row.reading for row in rows])
        for row in rows:
            x, y = [score.length for score in row.scores], [score.end.perplexity for score in row.scores]
            dashes = DASHED if row.reading.name == TRUNCATED else "-"
            axes.plot(x, y, marker="o", ms=4, lw=1.6, ls=dashes, color=looks[row.reading.name].colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        draw_grid(axes, "" if panel.factor is None else f"factor {panel.factor:g}")
    for axes, rows in zip(grid, named, strict=True):  # when the range of them all is known
        plain_ticks(axes, *axes.get_ylim())
        ends = [(row.reading.name, row.scores[-1].end.perplexity) for row in rows]
        label_ends(axes, ends, _looks([row.reading for row in rows]), gap=0.075)
    grid[-1].set_xticks(result.lengths, [tokens_label(length) for length in result.lengths])
    grid[-1].margins(x=0.06)
    grid[-1].set_xlabel("length, tokens")


def _passkeys(result: ComparisonResult) -> Drawing:
    rows = [row for row in result.rows if row.passkeys]
    told = "; ".join(
        f"{row.reading.label} {sum(p.found for p in row.passkeys)} of {sum(p.trials for p in row.passkeys)}"
        for row in rows
    )
    return Drawing(
        name="passkeys",
        title="Passkeys found",
        caption="A five-digit key in noise, by length and by depth (0: at the start). Blue found, orange lost; the "
        "number is the loss of the key's tokens, in nats.",
        alternative=f"Passkeys found of those hidden, all lengths and depths together: {told}.",
        size=(WIDTH, 0.35 + 1.55 * -(-len(rows) // 3)),
        draw=lambda figure: _draw_passkeys(figure, rows),
    )


def _draw_passkeys(figure: Any, rows: Sequence[Row]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("found", [LOST, FOUND])
    lengths = sorted({score.length for row in rows for score in row.passkeys})
    depths = sorted({score.depth for row in rows for score in row.passkeys})
    grid = figure.subplots(-(-len(rows) // 3), 3, squeeze=False, sharex=True, sharey=True)
    for axes, row in zip(grid.flat, rows, strict=False):
        for score in row.passkeys:
            x, y = lengths.index(score.length), depths.index(score.depth)
            axes.pcolormesh(
                [x - 0.5, x + 0.5], [y - 0.5, y + 0.5], [[score.found / score.trials]], cmap=shades, vmin=0, vmax=1
            )
            loss = f"{score.loss:.2f}" if score.loss < 9.95 else f"{score.loss:.0f}"
            axes.text(x, y, loss, ha="center", va="center", fontsize=8, color=CELL_INK)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(len(depths) - 0.5, -0.5)
        axes.set_title(row.reading.label, loc="left", fontsize=9.5)
        axes.set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths], fontsize=9)
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=9)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for axes in list(grid.flat)[len(rows) :]:
        axes.set_visible(False)
    figure.supylabel("depth", fontsize=9.5)


def _of_factor(panel: FactorSeries) -> str:
    return "" if panel.factor is None else f", factor {panel.factor:g}"


def _suffix(panel: FactorSeries) -> str:
    return "" if panel.factor is None else f"-x{panel.factor:g}".replace(".", "_")
