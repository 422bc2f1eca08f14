"""Prompts of NVIDIA's own generator, and ours of the same sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctxext.evaluation.ruler.tasks import TASKS
from ctxext.evaluation.ruler.tasks.base import Setting, Task
from ctxext.texts.documents import Document

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "nvidia.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]


def count(text: str) -> int:
    """Tokens that are words, as in the golden file."""
    return len(text.split())


ESSAY = Document("numbered sentences", GOLDEN["data"]["essay"])


def task_for(name: str, length: int = 4096) -> Task:
    return TASKS[name](Setting(length, count, ESSAY))
