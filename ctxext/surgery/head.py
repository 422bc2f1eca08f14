"""The part of a causal language model after its layers, on a piece of the positions at a time.

Whatever a model's class does there - projection, scaling, soft cap, an adapter on the head - is its own forward's
business. So that forward runs as it is, on a shallow copy of the model in which a stand-in for the layers runs them
once and then replays slices of their output. The model itself is not touched.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError


def require_head(causal: PreTrainedModel) -> str:
    """Return the name of the child that holds a model's layers.

    Raises:
        IncompatibleError: unless the model is layers behind one base model, and a language modelling head.
    """
    name = type(causal).__name__
    if causal.config.is_encoder_decoder:
        raise IncompatibleError(f"{name} is an encoder-decoder; only causal language models have a loss by position.")
    # Llama 4's text model keeps the prefix of the whole one.
    found = [child for child in (causal.base_model_prefix, "model") if child in causal._modules]
    if not found or causal.get_output_embeddings() is None:
        raise IncompatibleError(
            f"{name} is not a base model with a language modelling head (found no {causal.base_model_prefix!r} and "
            f"output embedding). Load it with AutoModelForCausalLM."
        )
    return found[0]


class _StandIn(nn.Module):
    """A module in the place of another, whose attributes are its own wherever this one has none of the name."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["real"], name)


class Replay(_StandIn):
    """Stands in for the base model: runs it at the first call, then replays pieces of its output.

    Attributes:
        piece: the positions that the next call returns.
        hidden: returned instead, where it is set.
        calls: counted by ``forward``; whoever asks for another piece sets it back to 0.
        output: of the base model, once it has run.
        expected: batch and positions of the piece that the last call was asked for.
    """

    def __init__(self, real: nn.Module) -> None:
        super().__init__(real)
        self.piece = slice(0, 1)
        self.hidden: Tensor | None = None
        self.calls = 0
        self.output: Any = None
        self.expected: tuple[int, int] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        first = self.output is None
        if first:
            self.output = self.real(*args, **kwargs)
        hidden = self.output[0][:, self.piece] if self.hidden is None else self.hidden
        positions = self.piece.stop - self.piece.start if self.hidden is None else hidden.shape[1]
        self.expected = (hidden.shape[0], positions)
        if isinstance(self.output, tuple):
            return (hidden, *self.output[1:])
        piece = copy.copy(self.output)
        piece.last_hidden_state = hidden
        if not first and hasattr(piece, "router_logits"):
            piece.router_logits = None  # all tokens' experts, from which a class computes another loss
        return piece


def shell_of(causal: PreTrainedModel) -> tuple[PreTrainedModel, Replay]:
    """A shallow copy of the model with a stand-in for its layers, and its class's own forward.

    Raises:
        IncompatibleError: as ``require_head``.
    """
    layers = require_head(causal)
    replay = Replay(causal.get_submodule(layers))
    shell = copy.copy(causal)
    shell.__dict__["_modules"] = {**causal._modules, layers: replay}
    # accelerate and others put a `forward` on the instance that is bound to the original module.
    shell.__dict__.pop("forward", None)
    return shell, replay


class _Box:
    """A tensor that nobody finds who looks for tensors among the inputs of a call."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Boxing(_StandIn):
    """Stands in for the head and hands it its input in a box, to be opened after all hooks before its forward."""

    def forward(self, hidden: Tensor) -> Any:
        handle = self.real.register_forward_pre_hook(lambda _, inputs: (inputs[0].tensor,))
        try:
            return self.real(_Box(hidden))
        finally:
            handle.remove()


def box_inputs_of_head(shell: PreTrainedModel) -> None:
    """Let a shell call its head on several pieces although FSDP 2 holds the head's weights.

    FSDP 2 takes the gradient of a call's input for the end of the backward pass through the weights of that call, and
    of all modules in its group: it then sums up what gradients they have, over all processes. Other pieces, and a token
    embedding that shares the weights, would come too late. An input that it does not find leaves the sum to the end.

    Raises:
        IncompatibleError: the head is not a child of the model.
    """
    head = shell.get_output_embeddings()
    names = [name for name, child in shell._modules.items() if child is head]
    if not names:
        raise IncompatibleError(
            f"The head of {type(shell).__name__} is not a child of it; under FSDP its loss cannot be computed in "
            f"chunks. Train without chunk_loss."
        )
    for name in names:
        shell._modules[name] = _Boxing(head)


def require_pieces(causal: PreTrainedModel, replay: Replay, logits: Tensor) -> None:
    """Raise ``IncompatibleError`` unless the logits are those of the piece that was replayed, and of that alone."""
    if replay.calls != 1 or tuple(logits.shape[:2]) != replay.expected:
        raise IncompatibleError(
            f"{type(causal).__name__} does not compute its logits from its base model's hidden states alone (calls of "
            f"it: {replay.calls}; [batch, positions] of the logits: {list(logits.shape[:2])}, of the hidden states: "
            f"{replay.expected}), so they cannot be had in pieces."
        )
