"""The smallest laboratory: the quick preset's way, on a model of one layer."""

from __future__ import annotations

from ctxext.laboratory.run import LabSettings
from ctxext.laboratory.subjects import Body

SMALL = Body(hidden=16, layers=1, heads=2)
TINY = LabSettings(
    text=SMALL,
    puzzle=SMALL,
    length=16,
    text_steps=3,
    text_rows=4,
    windows=4,
    puzzle_steps=2,
    puzzle_tokens=100,
    puzzle_rows=4,
)
