"""What a terminal shows: texts as they are, a bar for work that takes a while, and one for work in stages."""

from __future__ import annotations

import contextlib
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

from ctxext.errors import LeftOutWarning


def terminal(**options: Any) -> Console:
    """Return a rich console that prints every text as it is.

    Names of documents, checkpoints and files stand in what is printed. Rich would take brackets in them for markup
    and words between colons for emoji. What is to be bold is a ``rich.text.Text``.

    Args:
        options: what ``rich.console.Console`` takes beside that.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


@contextlib.contextmanager
def saying_what_is_left_out(say: Callable[[str], None]) -> Iterator[None]:
    """Let ``say`` print each ``LeftOutWarning``, in one line; other warnings are shown as they are."""
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
    """Call it with (done, total); a bar appears on stderr once ``after`` seconds have passed, and goes at the end."""

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
        """Tell how far the work is."""
        self._bar.update(self._task, completed=done, total=total)
        if not self._shown and time.monotonic() >= self._begins:
            self._shown = True
            self._bar.start()


class StageBar:
    """Call it with (stage, work done since the last call); a bar shows the stage, the time and the time left.

    Args:
        console: where the bar appears, to go at the end.
        total: work in all stages.
        report: whether each finished stage leaves a line with its seconds.
    """

    def __init__(self, console: Console, total: float, *, report: bool = False) -> None:
        stage = TextColumn("{task.description:<24}", markup=False)
        columns = (SpinnerColumn(), stage, BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True)
        self._task = self._bar.add_task("", total=total)
        self._report = report
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
        """Tell what is being done, and how much of it was done since the last call."""
        if self._stage is None or self._stage[0] != stage:
            self._finish()
            self._stage = (stage, time.perf_counter())
        self._bar.update(self._task, description=stage, advance=done)

    def _finish(self) -> None:
        if self._report and self._stage is not None:
            name, began = self._stage
            line = f"  {name:<24}{time.perf_counter() - began:6.0f} s"
            self._bar.console.print(line, style="dim")
