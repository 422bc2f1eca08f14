"""Trainer checkpoints that know their extension."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ctxext.adapters import keep_extension
from ctxext.errors import PatchStateError
from ctxext.saved import checked_extension, differences
from ctxext.surgery.edits import Edits
from ctxext.surgery.wrappers import base_model

__all__ = ["ExtensionCallback"]


class ExtensionCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Writes the extension into every checkpoint, and refuses to resume into a differently extended model.

    The Trainer restores weights only: resumed into an unpatched model it goes on without a word, on other positions,
    also where they are those of an adapter that carries its extension. Only this callback compares the two.
    From the start of training on, whatever saves an adapter (checkpoints, ``trainer.save_model``) puts the extension
    beside it; that of a PEFT model whose base was patched does so without the callback too, unless it only puts
    virtual tokens before the text (prompt and prefix tuning).

    Args:
        model: the model being trained, patched or not, or a PEFT wrapper around it.

    Raises:
        PatchStateError: at the start of training, if the checkpoint was written under another extension.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.extension = None if model is None else _extension(model)
        self._model = model

    def state(self) -> dict[str, Any]:
        """What the Trainer stores in ``trainer_state.json``."""
        if self._model is not None:  # it may have been extended further since
            self.extension = _extension(self._model)
        return {"args": {}, "attributes": {"extension": self.extension}}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Compare the checkpoint that is being resumed with the model."""
        if model is not None:
            self._model, self.extension = model, _extension(model)
            keep_extension(model, Edits())  # for good: a model is saved after training, too
        if state.global_step == 0:
            return
        stored = state.stateful_callbacks.get(type(self).__name__)
        if stored is None:
            raise PatchStateError(
                "The checkpoint to resume from was written without ExtensionCallback, so nothing says how its model "
                "was extended. Resume without this callback if you are sure that it is the same."
            )
        before = stored["attributes"]["extension"]
        if before is not None:
            before = checked_extension(before, "the checkpoint's trainer_state.json")
        different = differences(before, self.extension)
        if different:
            raise PatchStateError(
                f"The model of the checkpoint was {_name(before)}, this model is {_name(self.extension)}: {different}. "
                f"Extend it the same way before resuming, or start a new run."
            )


def _extension(model: nn.Module) -> dict[str, Any] | None:
    return getattr(base_model(model).config, "ctxext", None)


def _name(extension: dict[str, Any] | None) -> str:
    if extension is None:
        return "not extended"
    method = extension["method"]
    return f"extended by {method['method']} (factor {method['factor']:g}, fingerprint {extension['fingerprint']})"
