"""Output on a terminal: plain text, a bar that appears when work takes long, and a bar for work in stages."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from ctxext.errors import LeftOutWarning

MINUTE = 60.0  # seconds between two lines about a stage that lasts


def terminal(**options: Any) -> Console:
    """Return a rich console that prints every text unchanged.

    The output contains names of documents, checkpoints and files. Rich would take brackets in a name for markup and
    words between colons for emoji. Bold text is given as a ``rich.text.Text``.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


@contextlib.contextmanager
def status(console: Console, text: str) -> Iterator[None]:
    """Say what is done meanwhile: beside a spinner, or in a line where no terminal can show one."""
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


@contextlib.contextmanager
def saying_what_is_left_out(say: Callable[[str], None]) -> Iterator[None]:
    """Print each ``LeftOutWarning`` by ``say``, in one line; show other warnings as usual."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, LeftOutWarning):
                say(str(message))
            else:
                usual(message, category, *where)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


class DelayedBar:
    """Progress bar to call with (done, total): appears on stderr after ``after`` seconds, vanishes at the end."""

    def __init__(self, *columns: str | ProgressColumn, after: float) -> None:
        self._bar = Progress(*columns, console=terminal(stderr=True), transient=True)
        self._task = self._bar.add_task("work")
        self._begins = time.monotonic() + after
        self._shown = False

    def __enter__(self) -> DelayedBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Update the bar."""
        self._bar.update(self._task, completed=done, total=total)
        if not self._shown and time.monotonic() >= self._begins:
            self._shown = True
            self._bar.start()


class StageBar:
    """Progress bar to call with (stage, work done since the last call): shows stage, time and time left.

    Where no terminal can show a bar, each finished stage is a line with its seconds, and a long one a line a minute.
    """

    def __init__(self, console: Console, total: float) -> None:
        # A long stage gives way to the bar and the times, which take 45 columns.
        name = Column(min_width=24, max_width=max(24, console.width - 45), no_wrap=True, overflow="ellipsis")
        stage = TextColumn("{task.description}", markup=False, table_column=name)
        times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
        columns = (SpinnerColumn(), stage, BarColumn(20), *times)
        # Speed is that of all work so far: a step may last longer than the 30 seconds that rich looks back.
        self._bar = Progress(*columns, console=console, transient=True, speed_estimate_period=math.inf)
        self._told = time.perf_counter()
        self._task = self._bar.add_task("", total=total)
        self._report = not console.is_terminal
        self._stage: tuple[str, float] | None = None

    def __enter__(self) -> StageBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._bar.stop()

    def __call__(self, stage: str, done: float) -> None:
        """Show the stage, and advance the bar by the work done since the last call."""
        if self._stage is None or self._stage[0] != stage:
            self._finish()
            self._stage = (stage, time.perf_counter())
        self._bar.update(self._task, description=stage, advance=done)
        if self._report and time.perf_counter() - self._told >= MINUTE:
            self._told, task = time.perf_counter(), self._bar.tasks[0]
            left = "" if task.time_remaining is None else f", some {task.time_remaining:,.0f} s left"
            self._bar.console.print(f"  {stage:<24}{task.percentage:6.0f} %{left}", style="dim")

    def _finish(self) -> None:
        if self._report and self._stage is not None:
            name, began = self._stage
            line = f"  {name:<24}{time.perf_counter() - began:6.0f} s"
            self._bar.console.print(line, style="dim")
