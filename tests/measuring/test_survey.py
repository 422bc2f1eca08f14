"""Which device each of several processes takes, and what is said where memory ends."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.journal import Journal
from ctxext.measuring.survey import Answer, Job, Survey, explain_out_of_memory, launched_processes


@pytest.mark.parametrize(("present", "device"), [(2, "cuda:1"), (0, "cpu")])
def test_a_torch_built_for_gpus_takes_the_cpu_where_there_is_none(
    present: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install torch`` brings such a build to every Linux machine."""

    def current(check_available: bool = False) -> Any:
        return torch.device("cuda") if present or not check_available else None

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: present)
    for name, value in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 4)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    assert launched_processes().device == device


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        ),
    ],
    ids=["GPU", "CPU"],
)
def test_a_device_without_memory_is_named_with_the_job(error: RuntimeError) -> None:
    with (
        pytest.raises(InvalidParameterError, match=r"Out of memory at yarn, a\.txt\. Ask .* with more memory\.$"),
        explain_out_of_memory("yarn, a.txt"),
    ):
        raise error
    with pytest.raises(InvalidParameterError), explain_out_of_memory("here"):
        torch.empty(2**46)
    with pytest.raises(RuntimeError, match="other"), explain_out_of_memory("here"):
        raise RuntimeError("other")


@dataclass(frozen=True, eq=False, kw_only=True)
class Failing(Job):
    error: Exception
    is_causal: ClassVar[bool] = False

    def ask(self, model: Any, progress: Any) -> Answer:
        raise self.error


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), IncompatibleError("It returned NaN.")])
def test_what_is_finished_is_promised_where_it_is_kept(error: Exception, tmp_path: Path) -> None:
    """A training run has an --output too, and keeps none of its measurements there."""
    reader: Any = SimpleNamespace(applied=contextlib.nullcontext, model=None)
    job = Failing(key="k", cost=1.0, reader=reader, name="one", error=error)
    kept = tmp_path / "out.trials.jsonl"
    for path in (kept, None):
        checkpoint: Any = None
        survey = Survey("ctxext eval", checkpoint, [job], journal=Journal(path))
        with pytest.raises((InvalidParameterError, IncompatibleError)) as caught:
            survey.measure([job])
        assert str(caught.value).endswith(f" What is finished is kept in {kept}.") == (path is not None)
        assert ("kept" in str(caught.value)) == (path is not None)
