"""How reports look: tables and sentences in a terminal, colours, and figures (these need matplotlib)."""

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

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ctxext.errors import ResultsError, require_package
from ctxext.evaluation.labels import tokens_label
from ctxext.evaluation.report.markdown import code, escaped, table
from ctxext.evaluation.statistics import PairedDifference
from ctxext.files import write_whole
from ctxext.version import __version__

FIGURES = "figures"  # the folder of a report's pictures


def plain_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str | None] | None = None
) -> Table:
    """A table for a terminal whose first column is text and whose others are numbers.

    Args:
        header: above the columns.
        rows: cells.
        styles: of rows, by their first cell, in rich's words; rows that it lacks are plain.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row, style=(styles or {}).get(row[0]))
    return table


def say(console: Console, sentences: Sequence[str]) -> None:
    """Print sentences as a list, after an empty line."""
    console.print()
    for sentence in sentences:
        console.print(Padding(f"- {sentence}", (0, 0, 0, 2), expand=False))


# In a light and in a dark theme. Those of the light one are hues of Okabe and Ito and their neighbours, which
# colour-blind readers can tell apart, dark enough for text on white.
OF_METHODS = {
    "unpatched": ("#C45500", "#FF8F4D"),
    "truncated": ("#6E6E6E", "#B0B0B0"),
    "pi": ("#3C97CC", "#7CC8F2"),
    "ntk": ("#00855F", "#3CC79B"),
    "dynamic_ntk": ("#B5578C", "#E79AC6"),
    "ntk_by_parts": ("#6F5BC8", "#A99BF0"),
    "yarn": ("#0072B2", "#4DA9E8"),
    "dynamic_yarn": ("#B87700", "#F0B23C"),
    "llama3": ("#882255", "#D9739F"),
    "abf": ("#857400", "#C9B84A"),
    "dynamic_pi": ("#16838E", "#5CC7D1"),
    "longrope": ("#7A5C45", "#C4A38A"),
    "alibi": ("#2F6B2F", "#86C486"),
    "self_extend": ("#A3195B", "#F06BA8"),
    "rerope": ("#4B5FD6", "#9AA6F5"),
    "dual_chunk": ("#8A5A00", "#DBA84A"),
    "string": ("#007A87", "#4FC3CF"),
    "dpe": ("#7A3E9D", "#C58FE3"),
    "streaming": ("#5B6770", "#A3B1BB"),
    "group": ("#B5651D", "#E8A868"),
    "tile": ("#2E8B57", "#7FCFA0"),
    "hierarchical": ("#8B2E8B", "#D58FD5"),
    "stretch": ("#1F5FA8", "#7FB2EA"),
    "nope": ("#A33B2A", "#F08F7A"),
}
COLOURS = {name: light for name, (light, _) in OF_METHODS.items()}
OTHERS = ("#4D4D9F", "#A0522D", "#556B2F", "#8B4789")
INK, NOTE, FAINT, BAND = "#333333", "#777777", "#DDDDDD", "#F4F4F4"
# Colours that a page sets itself, in a light and in a dark theme, by the name of its CSS variable.
VARIABLES = {
    "ink": (INK, "#E6E6E6"),
    "note": (NOTE, "#9A9A9A"),
    "axis": ("#999999", "#7A7A7A"),
    "grid": (FAINT, "#3A3A3A"),
    "band": (BAND, "#262626"),
    "panel": ("#FFFFFF", "#1B1B1B"),
} | {f"c-{name.replace('_', '-')}": themes for name, themes in OF_METHODS.items()}
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
OF_PAGES = {"font.size": 10.5}  # differs from STYLE
DASHED = (0, (3, 1.5))


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


def require_matplotlib() -> None:
    """Raise ``InvalidParameterError`` with the command to run if matplotlib is missing."""
    require_package("matplotlib", "eval", "Plots need")


def require_report() -> None:
    """Raise ``InvalidParameterError`` with the command to run if what a report needs is missing."""
    require_matplotlib()
    require_package("jinja2", "eval", "A report needs")


def rendered(template: str, package: str = "ctxext.evaluation.report", **values: Any) -> str:
    """A page, or a part of one.

    Values are escaped for what the page is: HTML, or Markdown where the template's name says so.

    Args:
        template: its file name.
        package: whose folder it lies in; what pages have in common lies here.
        values: what the template names.
    """
    import jinja2

    is_markdown = template.endswith(".md.jinja")
    places = dict.fromkeys((package, "ctxext.evaluation.report"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(place, ".") for place in places]),
        autoescape=not is_markdown,
        finalize=escaped if is_markdown else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": code, "table": lambda one: table(one.header, one.rows, numbers=True)}
    return environment.get_template(template).render(variables=VARIABLES, version=__version__, **values)


@contextlib.contextmanager
def _figure(size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A matplotlib figure of so many inches, in the style of reports, which holds only inside of the block."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | options):
        yield Figure(figsize=size, layout="constrained")


@contextlib.contextmanager
def saved_figure(path: Path, size: tuple[float, float], title: str, **options: Any) -> Iterator[Any]:
    """Write the matplotlib figure that is drawn inside of the block.

    Args:
        path: of the PNG.
        size: width and height in inches.
        title: one line.
        options: settings of matplotlib that differ from those of all reports.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    with _figure(size, **options) as figure:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        yield figure
        _without_formulas(figure)
        figure.savefig(path, dpi=160)


def _without_formulas(figure: Any) -> None:
    """Label log axes in plain numbers: matplotlib writes their powers as formulas, which are not parsed here."""
    from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, NullFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(NullFormatter())


def draw_grid(axes: Any, title: str = "", *, axis: str = "y") -> None:
    """Faint lines behind what is drawn, and a title on the left."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(axis=axis, color=FAINT, lw=0.6)


def label_ends(axes: Any, ends: Sequence[tuple[str, float]], looks: Mapping[str, Look], *, gap: float) -> None:
    """Name lines beside their right ends on a log axis: in their order, at least ``gap`` of its height apart."""
    for name, place in _spread(ends, *axes.get_ylim(), gap=gap):
        look = looks[name]
        axes.text(1.015, place, look.label, transform=axes.transAxes, color=look.colour, fontsize=9.5, va="center")


def draw_differences(
    axes: Any,
    spans: Sequence[tuple[int, int]],
    groups: Sequence[tuple[Look, Sequence[PairedDifference]]],
    *,
    width: float,
    title: str = "",
) -> None:
    """Means with 95 percent intervals, beside a line for the best truncation.

    Args:
        axes: to draw on.
        spans: positions, first and stop, from left to right.
        groups: how each is drawn, and its difference in every span.
        width: between two groups in a span; the spans are 1 apart.
        title: one line.
    """
    axes.axhline(0, color=COLOURS["truncated"], lw=1.4, ls=DASHED, zorder=2)
    for index, (look, differences) in enumerate(groups):
        x = [place + (index - (len(groups) - 1) / 2) * width for place in range(len(spans))]
        means, errors = [one.mean for one in differences], [one.margin for one in differences]
        axes.errorbar(x, means, yerr=errors, fmt="o", ms=5, lw=1.6, color=look.colour, label=look.label)
    axes.set_xlim(-0.6, len(spans) - 0.4)
    axes.set_xticks(range(len(spans)), [f"{tokens_label(a)}-{tokens_label(b)}" for a, b in spans], fontsize=9)
    axes.set_xlabel("positions, tokens")
    draw_grid(axes, title)


def plain_ticks(axes: Any, low: float, high: float) -> None:
    """Put plain numbers on a log axis: 1, 2, 5 per decade, or even steps where those are fewer than three."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{m}e{decade}") for decade in decades for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 3:
        inside = [
            float(tick) for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high
        ]
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
        with saved_figure(path, self.size, self.title, **OF_PAGES) as figure:
            self.draw(figure)

    def svg(self) -> str:
        """An ``<svg>`` element whose colours are CSS variables and whose ids no other figure of a page has."""
        options = OF_PAGES | {"svg.fonttype": "none", "svg.hashsalt": self.name}
        with _figure(self.size, **options) as figure, io.StringIO() as file:
            self.draw(figure)
            _without_formulas(figure)
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            text = file.getvalue()
        text = text[text.index("<svg") :]  # without what stands in front of an element of its own file
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)  # the page sets its size
        for variable, (light, _) in VARIABLES.items():
            text = text.replace(light.lower(), f"var(--{variable})")
        return text.strip()


def write_pages(output: Path, texts: Mapping[str, str], figures: Sequence[Drawing]) -> list[Path]:
    """Write the files of a report, its figures in a folder of their own, and return their paths, that folder last.

    Args:
        output: a folder.
        texts: of each file, by its name.
        figures: saved as PNG files.

    Raises:
        ResultsError: a file cannot be written.
    """
    folder = output / FIGURES
    try:
        for name, text in texts.items():
            write_whole(output / name, text)
        folder.mkdir(exist_ok=True)
        for figure in figures:
            figure.save(folder / f"{figure.name}.png")
    except OSError as error:
        raise ResultsError(
            f"Cannot write the report to {str(output)!r}: {error.strerror}. All cells are kept; make room there and "
            f"run the same command again."
        ) from error
    return [*(output / name for name in texts), folder]
