"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from _models import tiny

from ctxext import patching
from ctxext.checkpoints import load
from ctxext.methods import METHODS
from ctxext.spec import RopeSpec

# These check their own arguments, with errors that a user reads, and take 4 for 4.0. The runtime shape checker would
# refuse both before that code runs, so it leaves the constructors and the verbs alone; all else stays checked.
for _cls in (*METHODS.values(), RopeSpec):
    _cls.__init__.__no_type_check__ = True
for _verb in (
    patching.patch,
    patching.unpatch,
    patching.method,
    patching.resolve,
    patching._factor_for,
    patching.base_model,
    load.load,
):
    _verb.__no_type_check__ = True  # type: ignore[attr-defined]

# Tiny models: more threads only wait for each other, and stock reloads in other processes sum in the same order.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Llama checkpoint; read it only."""
    directory = tmp_path_factory.mktemp("plain")
    tiny().save_pretrained(directory)
    return directory


@pytest.fixture
def _for_compiling() -> Iterator[None]:
    """The runtime checker of shapes wraps every function, and dynamo cannot trace what it does."""
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch._dynamo.reset()
