"""Old place of a figure, for those that still import it from here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctxext.evaluation.comparison.result import Series
from ctxext.evaluation.report.comparison import loss_figure


def save_loss_figure(series: Sequence[Series], path: Path, *, trained_length: int, title: str) -> None:
    """Draw ``loss_figure``."""
    loss_figure(series, trained_length=trained_length, title=title).save(path)
