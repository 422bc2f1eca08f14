"""Figures of reports: panels of lines, of differences and of heat maps, in one look; drawing needs matplotlib."""

from __future__ import annotations

import contextlib
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ctxext.errors import require_package
from ctxext.measuring.labels import tokens_label
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.truncation import TRUNCATED

# Hues of Okabe and Ito and their neighbours: colour-blind readers can tell them apart, and all are dark enough for text
# on white. A method has the same colour in every figure.
COLOURS = {
    "unpatched": "#C45500",
    "truncated": "#6E6E6E",
    "pi": "#3C97CC",
    "ntk": "#00855F",
    "dynamic_ntk": "#B5578C",
    "ntk_by_parts": "#6F5BC8",
    "yarn": "#0072B2",
    "dynamic_yarn": "#B87700",
    "llama3": "#882255",
    "abf": "#857400",
    "dynamic_pi": "#16838E",
    "longrope": "#7A5C45",
    "alibi": "#2F6B2F",
    "self_extend": "#A3195B",
    "retrieval_heads": "#C2255C",
    "rerope": "#4B5FD6",
    "dual_chunk": "#8A5A00",
    "string": "#007A87",
    "dpe": "#7A3E9D",
    "streaming": "#5B6770",
    "group": "#B5651D",
    "tile": "#2E8B57",
    "hierarchical": "#8B2E8B",
    "stretch": "#1F5FA8",
    "nope": "#A33B2A",
}
OTHERS = ("#4D4D9F", "#A0522D", "#556B2F", "#8B4789")
INK, NOTE, FAINT, BAND = "#333333", "#777777", "#DDDDDD", "#F4F4F4"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "text.parse_math": False,  # names of documents and checkpoints may hold dollars
    "savefig.facecolor": "white",
}
DASHED = (0, (3, 1.5))
SHADES = ("#C7522A", "#E5A583", "#F3E9D2", "#8DB8D6", "#1F6FA8")
Strokes = Callable[[Any], None]
"""Function that draws on a figure or on axes of matplotlib."""


def require_matplotlib() -> None:
    """Raise ``InvalidParameterError`` with the command to run if matplotlib is missing."""
    require_package("matplotlib", "eval", "Plots need")


@dataclass(frozen=True, eq=False, kw_only=True)
class Figure:
    """Picture of a report.

    Args:
        size: width and height in inches.
        alternative: the numbers, for readers who cannot see it.
    """

    name: str
    title: str
    size: tuple[float, float]
    draw: Strokes
    caption: str = ""
    alternative: str = ""

    def save(self, file: Path | BytesIO, *, caption: bool = True) -> None:
        """Write a PNG, by default with the caption at the bottom.

        Raises:
            InvalidParameterError: matplotlib is not installed.
        """
        with saved_figure(file, self.size, self.title) as figure:
            self.draw(figure)
            if caption and self.caption:
                text = textwrap.fill(self.caption, int(15 * self.size[0]))
                figure.supxlabel(text, x=0.012, ha="left", fontsize=8.5, color=NOTE)


@dataclass(frozen=True, eq=False)
class Panel:
    """Part of a figure: what draws it on matplotlib axes, its numbers in words, and its size in inches."""

    draw: Strokes
    words: str = ""
    size: tuple[float, float] = (5.4, 3.8)


def paneled(name: str, title: str, panels: Sequence[Panel], *, across: int = 4, caption: str = "") -> Figure:
    """Return a figure of panels, row by row, with at most ``across`` of them in a row."""
    rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    widths = [panel.size[0] for panel in rows[0]]
    above = 0.3 * len(_wrapped(title, sum(widths)))

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(rows), len(rows[0]), squeeze=False, width_ratios=widths)
        for axes, panel in itertools.zip_longest(grid.flat, panels):
            axes.axis("off") if panel is None else panel.draw(axes)

    return Figure(
        name=name,
        title=title,
        size=(sum(widths), sum(max(panel.size[1] for panel in row) for row in rows) + above),
        draw=draw,
        caption=caption,
        alternative=". ".join(panel.words for panel in panels),
    )


@contextlib.contextmanager
def saved_figure(file: Path | BytesIO, size: tuple[float, float], title: str) -> Iterator[Any]:
    """Yield a matplotlib figure of so many inches in the look of reports, and write it as a PNG at the block's end.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib import figure

    with matplotlib.rc_context(STYLE):
        canvas = figure.Figure(figsize=size, layout="constrained")
        canvas.suptitle("\n".join(_wrapped(title, size[0])), x=0.012, ha="left", fontsize=12, fontweight="bold")
        yield canvas
        _without_formulas(canvas)
        canvas.savefig(file, dpi=160, format="png")


def _wrapped(title: str, width: float) -> list[str]:
    """Return the lines of a title over a figure so many inches wide."""
    return textwrap.wrap(title, int(9.5 * width), break_on_hyphens=False) or [""]


def _without_formulas(figure: Any) -> None:
    """Label log axes in plain numbers: matplotlib writes their powers as formulas, which are not parsed here."""
    from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, NullFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(NullFormatter())


def colours_for(methods: Iterable[str]) -> list[str]:
    """Return a colour for each method, another than its usual one where that is unknown or taken."""
    others = itertools.cycle(OTHERS)
    colours: list[str] = []
    for method in methods:
        colour = COLOURS.get(method)
        is_free = colour not in colours or method == TRUNCATED
        colours.append(colour if colour and is_free else next(others))
    return colours


def draw_grid(axes: Any, title: str = "", *, axis: str = "y") -> None:
    """Draw faint lines behind the data, and a title on the left."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(axis=axis, color=FAINT, lw=0.6)


@dataclass(frozen=True)
class Line:
    """Line through ``points`` (x, y), named at its right end, with bounds of each y; a truncation is dashed."""

    method: str
    label: str
    points: Sequence[tuple[int | float, float]]
    band: Sequence[tuple[float, float]] = ()


def lines_panel(
    lines: Sequence[Line],
    *,
    title: str = "",
    x_label: str,
    y_label: str = "",
    ticks: Mapping[int, str] | Mapping[float, str] | Sequence[int],
    doubling: bool = False,
    log: bool | None = None,
    trained_length: int | None = None,
) -> Panel:
    """Return a panel of lines over positions, lengths or distances.

    Args:
        lines: Lines; infinite points are left out, and a line without points.
        ticks: places to label on the horizontal axis, in tokens or with their labels.
        doubling: True where equal steps of the horizontal axis double the number of tokens.
        log: True for a logarithmic vertical axis; by default where its values span more than a factor of 3.
    """
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    lines = [replace(line, points=points) for line, points in zip(lines, finite, strict=True) if points]

    def draw(axes: Any) -> None:
        if not lines:
            return
        colours = colours_for(line.method for line in lines)
        for line, colour in zip(lines, colours, strict=True):
            x, y = zip(*line.points, strict=True)
            is_baseline, marker = line.method == TRUNCATED, "o" if len(x) < 12 else None
            style = {"color": colour, "ls": DASHED if is_baseline else "-", "zorder": 5 if is_baseline else 3}
            axes.plot(x, y, lw=1.8, marker=marker, ms=4.5, solid_capstyle="round", **style)
            if line.band:
                axes.fill_between(x, *zip(*line.band, strict=True), color=colour, alpha=0.08, lw=0)
        if doubling:
            axes.set_xscale("log", base=2)
        axes.margins(x=0.06 if doubling else 0.02, y=0.1)
        values = [value for line in lines for _, value in line.points]
        if max(values) > 3 * min(values) if log is None else log:
            axes.set_yscale("log")
            _plain_ticks(axes)
        labels = ticks if isinstance(ticks, Mapping) else {tick: tokens_label(tick) for tick in ticks}
        axes.set_xticks(list(labels), list(labels.values()))
        axes.xaxis.minorticks_off()  # a log axis would label some of them between ours
        if trained_length is not None:
            _shade(axes, trained_length)
        last = max(line.points[-1][0] for line in lines)
        ends = [line.points[-1] for line in lines]
        short = ["" if x == last else f", up to {tokens_label(round(x))}" for x, _ in ends]
        names = [line.label + part for line, part in zip(lines, short, strict=True)]
        _name_ends(axes, list(zip(names, colours, (y for _, y in ends), strict=True)))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        draw_grid(axes, title)

    words = [f"{line.label} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in lines]
    return Panel(draw, f"{title or x_label}: {'; '.join(words)}")


def differences_panel(
    columns: Sequence[str],
    groups: Sequence[tuple[str, str, Sequence[PairedDifference]]],
    *,
    title: str = "",
    x_label: str = "positions, tokens",
    below: str = "the older text helps",
    colours: Sequence[str] | None = None,
) -> Panel:
    """Return a panel of mean differences with 95 percent intervals, above and below a line at 0.

    A group far above the others would hide their differences: it is named below the axis instead.

    Args:
        groups: method, label and a difference for each column.
        x_label: Name of the columns.
        below: Meaning of a difference below the line.
        colours: Colour of each group; by default the colour of its method.
    """
    means = [[difference.mean for difference in differences] for _, _, differences in groups]
    highest = [max(group) for group in means]
    limit = max(0.3, 4 * min(max(map(abs, group)) for group in means), -4 * min(map(min, means)))

    def draw(axes: Any) -> None:
        hues = colours or colours_for(method for method, _, _ in groups)
        tops = list(zip(groups, hues, highest, strict=True))
        shown = [(*group, colour) for group, colour, top in tops if top <= limit]
        hidden = [f"{label} {top:+.2f}" for (_, label, _), _, top in tops if top > limit]
        axes.axhline(0, color=COLOURS[TRUNCATED], lw=1.4, ls=DASHED, zorder=2)
        for index, (_, _, differences, colour) in enumerate(shown):
            shift = (index - (len(shown) - 1) / 2) * min(0.24, 0.6 / len(shown))
            y, errors = [change.mean for change in differences], [change.margin for change in differences]
            x = [place + shift for place in range(len(differences))]
            axes.errorbar(x, y, yerr=errors, fmt="o", ms=5, lw=1.6, color=colour)
        axes.set_xlim(-0.6, len(columns) - 0.4)
        axes.set_xticks(range(len(columns)), columns, fontsize=9)
        axes.margins(y=0.15)
        _name_ends(axes, [(label, colour, differences[-1].mean) for _, label, differences, colour in shown])
        off = f"\noff the scale: {', '.join(hidden)}" if hidden else ""
        axes.set_xlabel(f"{x_label}{'; ' if x_label else ''}below the line {below}{off}")
        draw_grid(axes, title)

    words = [f"{label} {', '.join(map(str, differences))}" for _, label, differences in groups]
    return Panel(draw, f"{title or x_label}, {', '.join(columns)}: {'; '.join(words)}", (4.8, 3.8))


def heat_panel(
    title: str, cells: Mapping[tuple[str, int], tuple[float, str]], *, trained_length: int, divider: int = 0
) -> Panel:
    """Return a heat map from vermilion (0) over sand to blue (1), with lengths to the right.

    The colours are told apart by colour-blind readers, and in grey by lightness on both sides of the middle. A dashed
    line marks where the trained window ends, a wide one stands below the first ``divider`` rows.

    Args:
        cells: value from 0 to 1 and text, by row and length in tokens; rows from above in the order of the cells.
        divider: number of rows; 0 for no wide line.
    """
    rows, lengths = list(dict.fromkeys(row for row, _ in cells)), sorted({length for _, length in cells})

    def draw(axes: Any) -> None:
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap

        shades = LinearSegmentedColormap.from_list("found", SHADES).with_extremes(bad="#FAFAFA")
        values = np.full((len(rows), len(lengths)), np.nan)
        for (row, length), (value, text) in cells.items():
            place = rows.index(row), lengths.index(length)
            values[place] = value
            # The ends of the scale are too dark for dark text.
            ink = "white" if value < 0.15 or value > 0.85 else INK
            axes.text(place[1], place[0], text, fontsize=8.5, ha="center", va="center", color=ink)
        axes.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths])
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for x in range(1, len(lengths)):
            axes.axvline(x - 0.5, color="white", lw=1.5)
        for y in range(1, len(rows)):
            axes.axhline(y - 0.5, color="white", lw=5.0 if y == divider else 1.5)
        inside = sum(length <= trained_length for length in lengths)
        if 0 < inside < len(lengths):
            axes.axvline(inside - 0.5, color=INK, lw=1.6, ls=DASHED)
        axes.set_xlabel("tokens")
        axes.set_title(title, loc="left", fontsize=10.5)

    width = 0.4 + 0.085 * max(map(len, rows)) + max(1.6, 0.74 * len(lengths), 0.078 * len(title))
    means = {length: [value for (_, at), (value, _) in cells.items() if at == length] for length in lengths}
    words = ", ".join(f"{sum(part) / len(part):.0%} at {tokens_label(at)}" for at, part in means.items())
    return Panel(draw, f"{title} ({words})", (width, max(0.92, 0.46 * len(rows)) + 0.95))


def _plain_ticks(axes: Any) -> None:
    """Put plain numbers on a log axis: 1, 2, 5 per decade, or even steps where those are fewer than three."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_ylim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{m}e{decade}") for decade in decades for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 3:
        even = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
        inside = [float(tick) for tick in even if low <= tick <= high]
    axes.set_yticks(inside, [f"{tick:,.10g}" for tick in inside])
    axes.yaxis.minorticks_off()


def _shade(axes: Any, trained_length: int) -> None:
    """Shade the trained window, and name it at the top: inside it, or next to it where it is narrow."""
    low, high = axes.get_xlim()
    axes.axvspan(low, min(trained_length, high), color=BAND, lw=0, zorder=0)
    axes.set_xlim(low, high)
    border = (axes.transData + axes.transAxes.inverted()).transform((trained_length, axes.get_ylim()[0]))[0]
    place, side = (min(border, 1) / 2, "center") if border > 0.3 else (border + 0.01, "left")
    axes.text(place, 0.985, "trained window", transform=axes.transAxes, ha=side, va="top", fontsize=9, color=NOTE)


def _name_ends(axes: Any, ends: Sequence[tuple[str, str, float]]) -> None:
    """Write names on the right of a panel, each at the height of its value, as far apart as their letters need."""
    axes.autoscale_view()
    rows = axes.get_subplotspec().get_gridspec().nrows
    gap = 0.25 * rows / axes.figure.get_figheight()  # of the height of the panel
    to_axes = axes.transData + axes.transAxes.inverted()
    places = sorted((float(to_axes.transform((1, value))[1]), label, colour) for label, colour, value in ends)
    heights = [place for place, _, _ in places]
    for _ in range(200):
        heights[0], heights[-1] = max(heights[0], 0.0), min(heights[-1], 1.0)
        for low in range(len(heights) - 1):
            overlap = max(0.0, gap - (heights[low + 1] - heights[low]))
            heights[low] -= overlap / 2
            heights[low + 1] += overlap / 2
    for height, (_, label, colour) in zip(heights, places, strict=True):
        axes.text(1.015, height, label, transform=axes.transAxes, color=colour, fontsize=9.5, va="center")
