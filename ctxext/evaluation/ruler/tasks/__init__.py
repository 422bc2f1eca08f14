"""RULER's tasks, a family a file. This folder is the registry: ``TASKS``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation.ruler.tasks.base import Sources, Task
from ctxext.registry import discover

__all__ = ["TASKS", "choose"]

FAMILIES = ("niah", "vt", "cwe", "fwe", "qa")  # in the benchmark's order; others follow


def _place(name: str) -> int:
    family = name.split("_")[0]
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)


_FOUND: dict[str, type[Task]] = discover(sys.modules[__name__], Task)  # type: ignore[type-abstract]
TASKS = {name: _FOUND[name] for name in sorted(_FOUND, key=_place)}


def choose(names: Sequence[str] | None, sources: Sources) -> list[type[Task]]:
    """The tasks of these names; None for all that can be made from ``sources``.

    Raises:
        UnknownNameError: an unknown task.
        InvalidParameterError: none at all, one twice, or one that cannot be made from ``sources``.
    """
    if names is None:
        return [task for task in TASKS.values() if task.why_not(sources) is None]
    if not names or len(set(names)) < len(names):
        raise InvalidParameterError(f"Name each task once, and at least one; found {', '.join(names) or 'none'}.")
    for name in names:
        if name not in TASKS:
            raise UnknownNameError.of("RULER task", name, TASKS)
        reason = TASKS[name].why_not(sources)
        if reason is not None:
            raise InvalidParameterError(f"{name} cannot be measured: {reason}.")
    return [TASKS[name] for name in names]
