"""Progress of a training run: loss, tokens per second, time left."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ctxext.progress import terminal


class TrainingProgress(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A bar on a terminal; elsewhere a line on stderr for every time the Trainer logs.

    Checkpoints hold the time that training took, so that the time of a resumed run is the time of all its parts.

    Args:
        tokens_of: called with the number of a step, from 0 on: its tokens, of all processes together.
    """

    def __init__(self, tokens_of: Callable[[int], int]) -> None:
        self.tokens_of = tokens_of
        self.tokens = 0
        self.steps, self.seconds = 0, 0.0
        self._started = 0.0
        self._earlier_seconds = 0.0  # of the parts of the run before it was resumed
        self._bar: Progress | None = None

    @property
    def tokens_per_second(self) -> float:
        """Speed of training, saving included, in all parts of a resumed run; NaN before the first step."""
        return self.tokens / self.total_seconds if self.total_seconds else float("nan")

    @property
    def total_seconds(self) -> float:
        """Seconds of training up to the last step, in all parts of a resumed run."""
        return self._earlier_seconds + self.seconds

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer stores in ``trainer_state.json``."""
        return {"args": {}, "attributes": {"total_seconds": self.total_seconds, "total_tokens": self.tokens}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._started, self.steps, self.seconds, self.tokens = time.monotonic(), 0, 0.0, 0
        if state.global_step:
            stored = state.stateful_callbacks.get(type(self).__name__, {"attributes": {}})["attributes"]
            # A checkpoint of a Trainer without this callback knows no time: it then counts from here.
            self._earlier_seconds = stored.get("total_seconds", 0.0)
            self.tokens = stored.get("total_tokens", 0)
        if state.is_world_process_zero and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}", markup=False))
            self._bar = Progress(*columns, console=terminal(stderr=True))
            self._bar.add_task("training", total=state.max_steps, completed=state.global_step, state="")
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, and log after the last one: steps since the last entry of the loss curve would be lost."""
        control.should_log |= state.global_step == state.max_steps
        self.steps, self.seconds = self.steps + 1, time.monotonic() - self._started
        self.tokens += self.tokens_of(state.global_step - 1)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Show the state of training: the loss of a step is known only now, after the end of the step."""
        if logs is None or "loss" not in logs:
            return
        line = self._line(state, logs["loss"])
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], state=line, refresh=True)
        elif state.is_world_process_zero:
            sys.stderr.write(f"{line}  learning rate {logs['learning_rate']:.2e}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the bar and leave the terminal as it was; also after an error or an interrupt."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, state: Any, loss: float) -> str:
        left = (state.max_steps - state.global_step) * self.seconds / self.steps if self.steps else 0.0
        time_left = datetime.timedelta(seconds=round(left))
        return (
            f"step {state.global_step}/{state.max_steps}  loss {loss:.4f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {time_left} left"
        )
