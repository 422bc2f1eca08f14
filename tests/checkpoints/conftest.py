"""An adapter that was saved with its extension."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import Tensor

import ctxext
from tests._models import logits, tokens
from tests._peft import base_of, extended, trained


@pytest.fixture(scope="module")
def saved_adapter(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """An adapter saved with its extension, to be copied, and the logits of its model."""
    directory, model = tmp_path_factory.mktemp("adapters") / "adapter", trained(extended(base_of(plain)))
    ctxext.save(model, directory)
    return directory, logits(model, tokens())


@pytest.fixture
def adapter(saved_adapter: tuple[Path, Tensor], tmp_path: Path) -> tuple[Path, Tensor]:
    """A copy of the adapter that a test may change, and the logits of its model."""
    return shutil.copytree(saved_adapter[0], tmp_path / "adapter"), saved_adapter[1]
