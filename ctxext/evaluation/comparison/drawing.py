"""A figure that is drawn twice: for a file (PNG), and for a page (SVG in the page's own colours, light or dark)."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.evaluation import _plots
from ctxext.evaluation._plots import COLOURS

__all__ = ["VARIABLES", "Drawing"]

# Colours that the page sets itself, by the name of its CSS variable: light and dark.
VARIABLES = {
    "ink": (_plots.INK, "#E6E6E6"),
    "note": (_plots.NOTE, "#9A9A9A"),
    "axis": ("#999999", "#7A7A7A"),
    "grid": (_plots.FAINT, "#3A3A3A"),
    "band": (_plots.BAND, "#262626"),
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

    style = _plots.STYLE | {"svg.fonttype": "none", "svg.hashsalt": drawing.name, "font.size": 10.5}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=drawing.size, layout="constrained")
        FigureCanvasAgg(figure)
        drawing.draw(figure)
        yield figure
