"""Plugin of axolotl: extends a model as soon as it is loaded, and guards its checkpoints.

In axolotl's file, ``plugins: [ctxext.training.axolotl.ExtensionPlugin]`` and ``ctxext: {method: self_extend,
factor: 4}``, with the arguments of ``ctxext.patch``.

Source: axolotl 0.19.0 (integrations/base.py, integrations/config.py, loaders/model.py).
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from ctxext.core.patching import patch
from ctxext.training.checkpoints import ExtensionCallback


class ExtensionArgs(BaseModel):  # axolotl's own settings inherit from it
    """Settings of the plugin: arguments of ``ctxext.patch`` by their names."""

    ctxext: dict[str, Any]


class ExtensionPlugin(BasePlugin):  # type: ignore[misc]
    """Extension of the model before axolotl raises its length to the length of the training sequences."""

    def get_input_args(self) -> str:
        """Return where axolotl finds the settings."""
        return f"{__name__}.{ExtensionArgs.__name__}"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Extend the model that was loaded."""
        patch(model, **cfg["ctxext"])

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[ExtensionCallback]:
        """Return the callback that writes the extension into checkpoints."""
        return [ExtensionCallback(model)]
