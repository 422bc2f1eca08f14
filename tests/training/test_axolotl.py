"""The plugin of axolotl by its interface, as axolotl's loader calls it; and, nightly, axolotl's own classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import ctxext
from ctxext.errors import UnknownNameError
from tests._models import tiny

NAME = "ctxext.training.axolotl"
EXTENSION = {"method": "self_extend", "factor": 4}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module, over an axolotl that has a base class alone."""
    base = ModuleType("axolotl.integrations.base")
    vars(base)["BasePlugin"] = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def loaded(plugin: Any, settings: dict[str, Any], length: int) -> nn.Module:
    """A model after the steps of axolotl's loader, which raises its length after the plugin."""
    model = tiny()
    plugin.post_model_build(settings, model)
    model.config.max_position_embeddings = max(length, model.config.max_position_embeddings)
    return model


def test_a_model_is_extended_before_its_length_is_raised(module: Any, tmp_path: Path) -> None:
    plugin = module.ExtensionPlugin()
    settings = module.ExtensionArgs(ctxext=EXTENSION).model_dump()
    model = loaded(plugin, settings, 128)
    assert ctxext.describe(model).target_length == 256
    (callback,) = plugin.add_callbacks_pre_trainer(settings, model)
    assert callback.state()["attributes"]["extension"]["method"]["method"] == "self_extend"
    ctxext.save(model, tmp_path)
    assert ctxext.describe(ctxext.load(tmp_path)).target_length == 256


def test_settings_that_patch_does_not_know_are_refused(module: Any) -> None:
    with pytest.raises(UnknownNameError, match="group_sise"):
        module.ExtensionPlugin().post_model_build({"ctxext": EXTENSION | {"group_sise": 8}}, tiny())


@pytest.mark.nightly
def test_axolotl_finds_the_plugin_and_its_settings() -> None:
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl pins its libraries: see its own setup")
    from axolotl.utils.dict import DictDefault

    manager = base.PluginManager.get_instance()
    manager.register(f"{NAME}.ExtensionPlugin")
    (arguments,) = manager.get_input_args()
    module, _, name = arguments.rpartition(".")
    settings = DictDefault(vars(importlib.import_module(module))[name](ctxext=EXTENSION).model_dump())
    model = tiny()
    manager.post_model_build(settings, model)
    assert ctxext.describe(model).target_length == 256
    (callback,) = manager.add_callbacks_pre_trainer(settings, model)
    assert type(callback) is ctxext.training.ExtensionCallback
