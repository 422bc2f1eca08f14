"""A progress bar that shows itself only for work that takes a while."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, ProgressColumn

__all__ = ["Later"]


class Later:
    """Call it with (done, total); a bar appears on stderr once ``after`` seconds have passed, and goes at the end."""

    def __init__(self, *columns: str | ProgressColumn, after: float) -> None:
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("work")
        self._begins = time.monotonic() + after
        self._shown = False

    def __enter__(self) -> Later:
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
