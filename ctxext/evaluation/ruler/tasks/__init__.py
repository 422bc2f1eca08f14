"""RULER's tasks, a family a file, in the benchmark's order."""

from __future__ import annotations

from collections.abc import Sequence

from ctxext.errors import InvalidParameterError, refuse_unknown
from ctxext.evaluation.ruler.tasks.aggregation import CommonWords, FrequentWords
from ctxext.evaluation.ruler.tasks.base import Task
from ctxext.evaluation.ruler.tasks.needles import NEEDLES
from ctxext.evaluation.ruler.tasks.vt import VariableTracking
from ctxext.texts.documents import Document

TASKS: dict[str, type[Task]] = {task.name: task for task in (*NEEDLES, VariableTracking, CommonWords, FrequentWords)}


def choose(names: Sequence[str] | None, essay: Document | None) -> list[type[Task]]:
    """Return the tasks of these names; without names, all that can be made with this essay.

    Raises:
        UnknownNameError: an unknown task.
        InvalidParameterError: none at all, one twice, or one that cannot be made with this essay.
    """
    if names is None:
        return [task for task in TASKS.values() if task.why_not(essay) is None]
    if not names or len(set(names)) < len(names):
        raise InvalidParameterError(f"Name each task once, and at least one; found {', '.join(names) or 'none'}.")
    for name in names:
        refuse_unknown("RULER task", [name], TASKS)
        reason = TASKS[name].why_not(essay)
        if reason is not None:
            raise InvalidParameterError(f"{name} cannot be measured: {reason}.")
    return [TASKS[name] for name in names]
