"""A laboratory of the smallest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctxext.laboratory.run import Laboratory, LabSettings, prepare
from ctxext.laboratory.subjects import Body

SMALL = Body(hidden=16, layers=1, heads=2)
COUNTS = {"text_steps": 3, "text_rows": 4, "windows": 4, "puzzle_steps": 2, "puzzle_tokens": 100, "puzzle_rows": 4}
TINY = LabSettings(text=SMALL, puzzle=SMALL, length=16, **COUNTS)


def laboratory(output: Path | None, text: Path, settings: LabSettings = TINY, **asked: Any) -> Laboratory:
    given: dict[str, Any] = {"only": ("rope", "alibi"), "tasks": ("text", "parity"), "seeds": 2, "workers": 1} | asked
    return prepare(output, text=[text] if "text" in given["tasks"] else (), settings=settings, **given)
