"""The recipe, loaded from its file as a program is, and its configs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["CONFIGS", "recipe"]

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted((RECIPES / "configs").rglob("*.yaml"))


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("finetune", RECIPES / "finetune.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = _load()
