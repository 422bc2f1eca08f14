"""The recipe, loaded from its file as a program is, its configs, words for its command line, what happens to a run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from ctxext.training.trainer import LongTrainer

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted((RECIPES / "configs").rglob("*.yaml"))
CONFIG = RECIPES / "configs" / "smollm2-135m-16k-yarn-pose.yaml"
SMALL = {"data.length": 32, "training.learning_rate": 1e-2, "training.checkpoint_every": 2}
SMALL |= {"lora.rank": 4, "dtype": "fp32"}
"""What makes a run of that config a small one, on the tests' documents."""
QUIET: dict[str, Any] = {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
"""What a Trainer is told in a test."""


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("finetune", RECIPES / "finetune.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = _load()


def words_of(settings: Mapping[str, object], *overrides: str) -> list[str]:
    """Settings as words of the command line, but for those that the overrides after them name, in full or in short."""
    named = {word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")}
    kept = {key: value for key, value in settings.items() if named.isdisjoint((key, key.rpartition(".")[2]))}
    return [word for key, value in kept.items() for word in (f"--{key}", str(value))] + [*overrides]


def losses(run: Path) -> dict[int, float]:
    entries = json.loads((run / "run.json").read_text(encoding="utf-8"))["loss"]
    return {entry["step"]: entry["loss"] for entry in entries}


class Stop(TrainerCallback):
    """Somebody presses Ctrl-C in the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def interrupted(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    original = LongTrainer.__init__

    def with_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(Stop())

    monkeypatch.setattr(LongTrainer, "__init__", with_stop)
    return KeyboardInterrupt
