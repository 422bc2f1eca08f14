"""A GPU for machines that have none: tensors with a shape, a dtype and the device ``cuda:0``, and no memory.

torch's fake tensors stop operations that mix devices, as a GPU would. Two things keep whole models from running on
them, and are mended here. A torch without CUDA cannot even slice a fake tensor, for want of a guard of the current
device: one that does nothing is compiled and loaded. And code asks positions and masks for their values: those of whole
numbers and booleans are computed on the CPU beside the fake tensors.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

CUDA = torch.device("cuda:0")

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


def load_guard(directory: Path) -> None:
    """Compile and load the guard, for the rest of this process; skips the test where that cannot be, or not be used."""
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        pytest.skip("needs a torch without CUDA, or a GPU: this one asks the driver which attention kernel to take")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, library, torch_directory = directory / "guard.cpp", directory / "guard.so", Path(torch.__file__).parent
    source.write_text(GUARD, encoding="utf-8")
    places = (f"-I{torch_directory / 'include'}", f"-L{torch_directory / 'lib'}")
    subprocess.run(
        [compiler, "-std=c++20", "-fPIC", "-shared", source, "-o", library, *places, "-lc10"],
        check=True,
        capture_output=True,
        text=True,
    )
    torch.ops.load_library(str(library))


@contextmanager
def on_fake_cuda(model: nn.Module) -> Iterator[None]:
    """Bring a model to a fake GPU, where all is that is made inside."""
    overwriting = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a weight cannot be told to become a fake one
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Values():
            model.to(CUDA)
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwriting)


class _Values(TorchDispatchMode):
    """Knows the values of whole numbers and booleans that follow from what is known, and answers with them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        tensors = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
        if not all(value in self.values or not isinstance(value, FakeTensor) for value in tensors):
            self._forget_what_is_written(func, args)
            return func(*args, **arguments[1])
        with unset_fake_temporarily():
            on_host = tree_map(self._on_host, arguments)
            known = func(*on_host[0], **on_host[1])
        if not any(isinstance(value, Tensor) for value in tree_leaves(known)):
            return known
        try:
            found = func(*args, **arguments[1])
        except (DataDependentOutputException, DynamicOutputShapeException):  # its shape hangs on values
            found = tree_map(_fake_of, known)
        for fake, value in zip(tree_leaves(found), tree_leaves(known), strict=True):
            if isinstance(fake, FakeTensor) and not (fake.is_floating_point() or fake.is_complex()):
                self.values[fake] = value
        return found

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return self.values[value] if isinstance(value, FakeTensor) else value

    def _forget_what_is_written(self, func: Any, args: Any) -> None:
        for value, declared in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, Tensor) and declared.alias_info is not None and declared.alias_info.is_write:
                self.values.pop(value, None)


def _fake_of(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device=CUDA) if isinstance(value, Tensor) else value
