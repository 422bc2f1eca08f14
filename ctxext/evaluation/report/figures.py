"""Figures of reports: their look, and the three kinds of panel that they consist of; drawing needs matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ctxext.errors import require_package
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.statistics import PairedDifference

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


def require_matplotlib() -> None:
    """Raise ``InvalidParameterError`` with the command to run if matplotlib is missing."""
    require_package("matplotlib", "eval", "Plots need")


@dataclass(frozen=True, eq=False, kw_only=True)
class Figure:
    """Picture of a report.

    Args:
        name: name of its file, without ending.
        title: one line.
        size: width and height in inches.
        draw: fills a matplotlib figure.
        caption: what to see, and how to read it.
        alternative: the same for readers who cannot see it, with numbers.
    """

    name: str
    title: str
    size: tuple[float, float]
    draw: Callable[[Any], None]
    caption: str = ""
    alternative: str = ""

    def save(self, file: Path | IO[bytes]) -> None:
        """Write a PNG.

        Raises:
            InvalidParameterError: matplotlib is not installed.
        """
        require_matplotlib()
        import matplotlib
        from matplotlib import figure

        with matplotlib.rc_context(STYLE):
            canvas = figure.Figure(figsize=self.size, layout="constrained")
            canvas.suptitle(self.title, x=0.012, ha="left", fontsize=12, fontweight="bold")
            self.draw(canvas)
            _without_formulas(canvas)
            canvas.savefig(file, dpi=160, format="png")


def _without_formulas(figure: Any) -> None:
    """Label log axes in plain numbers: matplotlib writes their powers as formulas, which are not parsed here."""
    from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, NullFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(NullFormatter())


def colours_for(methods: Mapping[str, str]) -> dict[str, str]:
    """Return a colour for each reading: that of its method, or another where two readings share a method.

    Args:
        methods: the method of each reading, by the name of the reading.
    """
    others = itertools.cycle(OTHERS)
    colours: dict[str, str] = {}
    for name, method in methods.items():
        colour = COLOURS.get(method)
        colours[name] = next(others) if colour is None or colour in colours.values() else colour
    return colours


def draw_grid(axes: Any, title: str = "", *, axis: str = "y") -> None:
    """Draw faint lines behind the data, and a title on the left."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(axis=axis, color=FAINT, lw=0.6)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Line of a panel, named at its right end.

    Args:
        label: its name.
        colour: its colour.
        x: places, increasing.
        y: values.
        dashed: whether it is a baseline.
        band: lower and upper bounds of the values.
    """

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None


def draw_lines(
    axes: Any,
    lines: Sequence[Line],
    *,
    title: str = "",
    x_label: str,
    y_label: str = "",
    ticks: Mapping[float, str] | Sequence[int],
    doubling: bool = False,
    log: bool | None = None,
    trained_length: int | None = None,
) -> None:
    """Draw lines over positions, lengths or distances.

    Args:
        axes: to draw on.
        lines: to draw; none is empty.
        title: one line.
        x_label: name of the horizontal axis.
        y_label: name of the vertical axis.
        ticks: places to label on the horizontal axis, in tokens or with their labels.
        doubling: whether equal steps of the horizontal axis double the number of tokens.
        log: whether the vertical axis is logarithmic; by default where its values span more than a factor of 3.
        trained_length: tokens of the trained window, which is shaded.
    """
    for line in lines:
        marker = "o" if len(line.x) < 12 else None
        style = {"color": line.colour, "ls": DASHED if line.dashed else "-", "zorder": 5 if line.dashed else 3}
        axes.plot(line.x, line.y, lw=1.8, marker=marker, ms=4.5, solid_capstyle="round", **style)
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=line.colour, alpha=0.08, lw=0)
    values = [value for line in lines for value in line.y]
    if doubling:
        axes.set_xscale("log", base=2)
    axes.margins(x=0.06 if doubling else 0.02, y=0.1)
    if max(values) > 3 * min(values) if log is None else log:
        axes.set_yscale("log")
        plain_ticks(axes)
    labels = ticks if isinstance(ticks, Mapping) else {tick: tokens_label(tick) for tick in ticks}
    axes.set_xticks(list(labels), list(labels.values()))
    axes.xaxis.minorticks_off()
    if trained_length is not None:
        _shade(axes, trained_length)
    last = max(line.x[-1] for line in lines)
    ends = ["" if line.x[-1] == last else f", up to {tokens_label(round(line.x[-1]))}" for line in lines]
    _name_ends(axes, [(line.label + end, line.colour, line.y[-1]) for line, end in zip(lines, ends, strict=True)])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    draw_grid(axes, title)


def draw_differences(
    axes: Any,
    columns: Sequence[str],
    groups: Sequence[tuple[str, str, Sequence[PairedDifference]]],
    *,
    title: str = "",
    x_label: str = "positions, tokens",
) -> None:
    """Draw mean differences with 95 percent intervals, above and below a line at 0.

    A group far above the others would hide their differences: it is named below the axis instead.

    Args:
        axes: to draw on.
        columns: names of the columns, from left to right.
        groups: label, colour and a difference for each column.
        title: one line.
        x_label: what the columns are.
    """
    most = [max(abs(difference.mean) for difference in differences) for _, _, differences in groups]
    shown = [group for group, value in zip(groups, most, strict=True) if value <= max(0.3, 4 * min(most))]
    axes.axhline(0, color=COLOURS["truncated"], lw=1.4, ls=DASHED, zorder=2)
    for index, (_, colour, differences) in enumerate(shown):
        shift = (index - (len(shown) - 1) / 2) * min(0.24, 0.6 / len(shown))
        means, errors = [change.mean for change in differences], [change.margin for change in differences]
        x = [place + shift for place in range(len(differences))]
        axes.errorbar(x, means, yerr=errors, fmt="o", ms=5, lw=1.6, color=colour)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_xticks(range(len(columns)), columns, fontsize=9)
    axes.margins(y=0.15)
    _name_ends(axes, [(label, colour, differences[-1].mean) for label, colour, differences in shown])
    beyond = [group for group in groups if group not in shown]
    hidden = ", ".join(f"{label} {max(change.mean for change in changes):+.2f}" for label, _, changes in beyond)
    off = f"\noff the scale: {hidden}" if hidden else ""
    axes.set_xlabel(f"{x_label}; below the line the older text helps{off}")
    draw_grid(axes, title)


def plain_ticks(axes: Any) -> None:
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
    """Shade the trained window, and name it at the top: inside it, or beside it where it is narrow."""
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


# From vermilion (nothing found) over sand to blue (all found): told apart by colour-blind readers, and in grey by
# lightness on both sides of the middle.
SHADES = ("#C7522A", "#E5A583", "#F3E9D2", "#8DB8D6", "#1F6FA8")
ACROSS = 4

# A cell of a heat map: its value from 0 to 1, and its text.
Cell = tuple[float, str]


@dataclass(frozen=True, kw_only=True)
class HeatMaps:
    """Heat maps of several readings side by side, with the length to the right.

    Args:
        maps: title of each reading's map, and its cells by row and length; what was not measured is missing.
        rows: names of the rows, downwards.
        lengths: tokens of the columns.
        trained_length: tokens; a dashed line marks where the trained window ends.
        x_label: what the lengths are of.
        y_label: what the rows are.
        scale: names of the values 0, a half and 1.
        note: line below the maps.
        divider: number of rows above a wide line; None for no such line.
    """

    maps: Sequence[tuple[str, Mapping[tuple[str, int], Cell]]]
    rows: Sequence[str]
    lengths: Sequence[int]
    trained_length: int
    x_label: str
    y_label: str
    scale: tuple[str, str, str]
    note: str
    divider: int | None = None

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches of the figure."""
        width, height = max(1.6, 0.74 * len(self.lengths)), max(0.92, 0.46 * len(self.rows))
        across, names = min(ACROSS, len(self.maps)), 0.085 * max(map(len, self.rows))
        title = 0.078 * max(len(title) for title, _ in self.maps)
        return names + across * (max(width, title) + 0.35) + 1.2, -(-len(self.maps) // across) * (height + 0.9) + 0.65

    def draw(self, figure: Any) -> None:
        """Draw all maps, their scale and the note."""
        inside = sum(length <= self.trained_length for length in self.lengths)
        border = inside if inside < len(self.lengths) else 0  # 0 where there is none to draw
        across = min(ACROSS, len(self.maps))
        grid = figure.subplots(-(-len(self.maps) // across), across, squeeze=False, sharey=True)
        for axes, (title, cells) in zip(grid.flat, self.maps, strict=False):
            image = self._draw_cells(axes, cells, border)
            axes.set_title(title, loc="left", fontsize=10.5)
        for axes in grid.flat[len(self.maps) :]:
            axes.axis("off")
        for axes in grid[:, 0]:
            axes.set_ylabel(self.y_label)
        bar = figure.colorbar(image, ax=list(grid.flat), fraction=0.05, aspect=12, pad=0.02, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels(self.scale, fontsize=9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        dashes = f" Dashed: the trained window ends, at {tokens_label(self.trained_length)}." if border else ""
        figure.supxlabel(self.note + dashes, x=0.012, ha="left", fontsize=8.5, color=NOTE)

    def _draw_cells(self, axes: Any, cells: Mapping[tuple[str, int], Cell], border: int) -> Any:
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap

        shades = LinearSegmentedColormap.from_list("found", SHADES).with_extremes(bad="#FAFAFA")
        values = np.full((len(self.rows), len(self.lengths)), np.nan)
        for (row, length), (value, text) in cells.items():
            place = self.rows.index(row), self.lengths.index(length)
            values[place] = value
            ink = "white" if value < 0.15 or value > 0.85 else INK
            axes.text(place[1], place[0], text, fontsize=8.5, ha="center", va="center", color=ink)
        axes.set_xticks(range(len(self.lengths)), [tokens_label(length) for length in self.lengths])
        axes.set_yticks(range(len(self.rows)), self.rows)
        axes.tick_params(length=0)
        axes.set_xlabel(self.x_label)
        axes.spines[:].set_visible(False)
        for x in range(1, len(self.lengths)):
            axes.axvline(x - 0.5, color="white", lw=1.5)
        for y in range(1, len(self.rows)):
            axes.axhline(y - 0.5, color="white", lw=5.0 if y == self.divider else 1.5)
        if border:
            axes.axvline(border - 0.5, color=INK, lw=1.6, ls=DASHED)
        return axes.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")
