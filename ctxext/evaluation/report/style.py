"""Figures of evaluations; needs matplotlib."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.errors import require_package
from ctxext.evaluation.comparison import Series
from ctxext.evaluation.labels import few_of, label_of, tokens_label
from ctxext.evaluation.truncation import is_reference, window_of

__all__ = [
    "COLOURS",
    "FAINT",
    "INK",
    "NOTE",
    "STYLE",
    "VARIABLES",
    "Drawing",
    "Look",
    "draw_differences",
    "draw_perplexity",
    "few_of",
    "label_ends",
    "label_of",
    "looks_for",
    "plain_ticks",
    "require_matplotlib",
    "save_loss_figure",
    "tokens_label",
]

# Hues of Okabe and Ito and their neighbours, which colour-blind readers can tell apart, dark enough for text on white.
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
}
OTHERS = ("#4D4D9F", "#A0522D", "#556B2F", "#8B4789")
INK, NOTE, FAINT, BAND = "#333333", "#777777", "#DDDDDD", "#F4F4F4"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Look:
    """How a line is drawn: its label and its colour."""

    label: str
    colour: str


def looks_for(names: Mapping[str, tuple[str, str]]) -> dict[str, Look]:
    """A look for each name.

    Args:
        names: name to its method's name (which has a colour of its own wherever it is drawn) and its label.
    """
    others = itertools.cycle(OTHERS)
    looks: dict[str, Look] = {}
    for name, (method, label) in names.items():
        own = COLOURS.get(method)
        taken = own is None or any(look.colour == own for look in looks.values())
        looks[name] = Look(label, next(others) if taken or own is None else own)
    return looks


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
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    methods = [item for item in series if not is_reference(item.name)]
    series = [item for item in series if window_of(item.name) is None]
    looks = looks_for({item.name: (item.name, label_of(item.name)) for item in series})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        widths = (1.65, 1) if methods else (1,)
        left, *right = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        draw_perplexity(left, series, looks, trained_length)
        left.set_title("Perplexity by position", loc="left", fontsize=10.5)
        for axes in right:
            draw_differences(axes, methods, looks)
            axes.set_title("Loss minus the best truncation's, nats", loc="left", fontsize=10.5)
            axes.legend(frameon=False, fontsize=9, loc="upper left", handletextpad=0.2, labelcolor="linecolor")
        figure.savefig(path, dpi=160)


def require_matplotlib() -> None:
    """Raise ``InvalidParameterError`` with the command to run if matplotlib is missing."""
    require_package("matplotlib", "eval", "Plots need")


def draw_perplexity(axes: Any, series: Sequence[Series], looks: Mapping[str, Look], trained_length: int) -> None:
    """Perplexity by position on a log scale, each line labelled at its end."""
    stop = series[0].curve[-1].stop
    axes.axvspan(0, trained_length, color=BAND, lw=0, zorder=0)
    ends = []
    for item in series:
        # Inside the window truncation is the unpatched model itself.
        first = trained_length if item.name == "truncated" else 0
        drawn = [bucket for bucket in item.curve if bucket.start >= first]
        x, y = [(bucket.start + bucket.stop) / 2 for bucket in drawn], [bucket.perplexity for bucket in drawn]
        style = {"truncated": (0, (3, 1.5))}.get(item.name, "-")
        order = {"unpatched": 4, "truncated": 5}.get(item.name, 3)
        axes.plot(x, y, color=looks[item.name].colour, lw=1.8, ls=style, zorder=order, solid_capstyle="round")
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
    axes.set_xticks(_positions(trained_length, stop), [tokens_label(tick) for tick in _positions(trained_length, stop)])
    axes.set_xlabel("position in the text, tokens")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)


def label_ends(axes: Any, ends: Sequence[tuple[str, float]], looks: Mapping[str, Look], *, gap: float) -> None:
    """Name lines beside their right ends on a log axis: in their order, at least ``gap`` of its height apart."""
    for name, place in _spread(ends, *axes.get_ylim(), gap=gap):
        look = looks[name]
        axes.text(1.015, place, look.label, transform=axes.transAxes, color=look.colour, fontsize=9.5, va="center")


def draw_differences(axes: Any, methods: Sequence[Series], looks: Mapping[str, Look]) -> None:
    """Means with 95 percent intervals; a method far above the others would hide their differences and is named."""
    means = {item.name: [difference.mean for difference in item.versus_truncation] for item in methods}
    smallest = min(max(abs(value) for value in values) for values in means.values())
    shown = [item for item in methods if max(map(abs, means[item.name])) <= max(0.3, 4 * smallest)]
    hidden = [item for item in methods if item not in shown]
    labels = [f"{tokens_label(bucket.start)}-{tokens_label(bucket.stop)}" for bucket in methods[0].buckets[1:]]
    axes.axhline(0, color=COLOURS["truncated"], lw=1.4, ls=(0, (3, 1.5)), zorder=2)
    width = 0.6 / max(1, len(shown))
    for index, item in enumerate(shown):
        x = [place + (index - (len(shown) - 1) / 2) * width for place in range(len(labels))]
        errors = [difference.margin for difference in item.versus_truncation]
        look = looks[item.name]
        axes.errorbar(x, means[item.name], yerr=errors, fmt="o", ms=5, lw=1.6, color=look.colour, label=look.label)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    low, high = axes.get_ylim()
    reach = max(abs(low), abs(high)) * 1.1
    axes.set_ylim(min(low * 1.15, -0.35 * reach), 1.25 * reach)
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlabel("positions, tokens")
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.text(0.985, 0.02, "below the line: the old text helps", **_corner(axes), va="bottom")
    if hidden:
        names = ", ".join(f"{looks[item.name].label} {max(means[item.name]):+.2f}" for item in hidden)
        axes.text(0.985, 0.07, f"off the scale: {names}", **_corner(axes), va="bottom")


def _corner(axes: Any) -> dict[str, Any]:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    return {"transform": axes.transAxes, "ha": "right", "fontsize": 8.5, "color": NOTE, "bbox": box}


def _positions(trained_length: int, stop: int) -> list[int]:
    """Six to eight round positions, the trained length among them."""
    step = max(1, trained_length // 4)
    while stop / step > 9:
        step *= 2
    return list(range(0, stop + 1, step))


def plain_ticks(axes: Any, low: float, high: float) -> None:
    """1, 2, 5 per decade in plain numbers: perplexities are not read as powers of ten."""
    decade = 10.0 ** len(str(int(low)))
    ticks = [m * decade * 10.0**e / 100 for e in range(12) for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(inside, [f"{tick:,.10g}" for tick in inside])
    axes.minorticks_off()


def _spread(ends: Sequence[tuple[str, float]], low: float, high: float, *, gap: float) -> list[tuple[str, float]]:
    """Heights for the labels at the lines' ends, as fractions of a log axis, pushed apart to about ``gap``."""
    span = math.log(high / low)
    places = sorted((math.log(y / low) / span, name) for name, y in ends)
    heights = [place for place, _ in places]
    for _ in range(200):
        heights[0], heights[-1] = max(heights[0], 0.0), min(heights[-1], 1.0)
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 0:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    return [(name, height) for (_, name), height in zip(places, heights, strict=True)]


# Colours that the page sets itself, by the name of its CSS variable: light and dark.
VARIABLES = {
    "ink": (INK, "#E6E6E6"),
    "note": (NOTE, "#9A9A9A"),
    "axis": ("#999999", "#7A7A7A"),
    "grid": (FAINT, "#3A3A3A"),
    "band": (BAND, "#262626"),
    "panel": ("#FFFFFF", "#1B1B1B"),
    "c-unpatched": (COLOURS["unpatched"], "#FF8F4D"),
    "c-truncated": (COLOURS["truncated"], "#B0B0B0"),
    "c-pi": (COLOURS["pi"], "#7CC8F2"),
    "c-ntk": (COLOURS["ntk"], "#3CC79B"),
    "c-dynamic-ntk": (COLOURS["dynamic_ntk"], "#E79AC6"),
    "c-ntk-by-parts": (COLOURS["ntk_by_parts"], "#A99BF0"),
    "c-yarn": (COLOURS["yarn"], "#4DA9E8"),
    "c-dynamic-yarn": (COLOURS["dynamic_yarn"], "#F0B23C"),
    "c-llama3": (COLOURS["llama3"], "#D9739F"),
    "c-abf": (COLOURS["abf"], "#C9B84A"),
    "c-dynamic-pi": (COLOURS["dynamic_pi"], "#5CC7D1"),
    "c-longrope": (COLOURS["longrope"], "#C4A38A"),
    "c-alibi": (COLOURS["alibi"], "#86C486"),
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """One figure.

    Args:
        name: of its file, without ending.
        title: one line.
        caption: what to see, and how to read it.
        alternative: the same for who cannot see it, with numbers.
        size: inches.
        draw: fills a matplotlib figure.
    """

    name: str
    title: str
    caption: str
    alternative: str
    size: tuple[float, float]
    draw: Callable[[Any], None]

    def save(self, path: Path) -> None:
        """Write a PNG in the light theme, with its title."""
        with _figure(self) as figure:
            figure.suptitle(self.title, x=0.012, ha="left", fontsize=12, fontweight="bold")
            figure.savefig(path, dpi=160)

    def svg(self) -> str:
        """An ``<svg>`` element whose colours are CSS variables and whose ids no other figure of a page has."""
        with _figure(self) as figure, io.StringIO() as file:
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
        for variable, (light, _) in VARIABLES.items():
            text = text.replace(light.lower(), f"var(--{variable})")
        return text.strip()


@contextlib.contextmanager
def _figure(drawing: Drawing) -> Iterator[Any]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    options = STYLE | {"svg.fonttype": "none", "svg.hashsalt": drawing.name, "font.size": 10.5}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=drawing.size, layout="constrained")
        FigureCanvasAgg(figure)
        drawing.draw(figure)
        yield figure
