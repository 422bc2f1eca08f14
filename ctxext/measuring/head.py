"""Compute the logits of a causal language model for a piece of the positions at a time.

The class's own forward does everything after the layers: projection, scaling, soft cap, an adapter on the head. So that
forward runs unchanged on a shallow copy of the model, in which a replacement of the layers runs them once and then
replays slices of their output. The model itself is not touched.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError


def require_head(causal: PreTrainedModel) -> str:
    """Return the name of the child that holds a model's layers.

    Raises:
        IncompatibleError: unless the model consists of one base model and a language modelling head.
    """
    name = type(causal).__name__
    if causal.config.is_encoder_decoder:
        raise IncompatibleError(f"{name} is an encoder-decoder; only causal language models have a loss by position.")
    # Llama 4's text model has the prefix of the whole model.
    children = [child for child in (causal.base_model_prefix, "model") if child in causal._modules]
    if not children or causal.get_output_embeddings() is None:
        raise IncompatibleError(
            f"{name} is not a base model with a language modelling head (found no {causal.base_model_prefix!r} and "
            f"output embedding). Load it with AutoModelForCausalLM."
        )
    return children[0]


class StandIn(nn.Module):
    """A module that replaces another one, and takes attributes that it lacks from the replaced module."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["real"], name)


class Replay(StandIn):
    """Replacement of the base model that runs it at the first call, then replays pieces of its output.

    Attributes:
        piece: the positions that the next call returns.
        hidden: hidden states to return instead; None returns the hidden states of ``piece``.
        calls: the number of calls of ``forward``; the caller resets it to 0 for each piece.
        output: the output of the base model, once it has run.
        expected: batch and positions of the piece of the last call.
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
            piece.router_logits = (
                None  # experts of all tokens, from which a class would compute the loss of the router again
            )
        return piece


def shell_of(causal: PreTrainedModel) -> tuple[PreTrainedModel, Replay]:
    """Return a shallow copy of the model that replays its layers, and the replay.

    The copy runs the ``forward`` of its class, even where another one is set on the instance.

    Raises:
        IncompatibleError: as in ``require_head``.
    """
    layers = require_head(causal)
    base: Any = causal.get_submodule(layers)
    calls_inner = "decoder" in inspect.unwrap(type(causal).forward).__code__.co_names  # a head of that name, perhaps
    if calls_inner and hasattr(base, "decoder"):  # as OPT's and BART's
        holder, replay = StandIn(base), Replay(base.decoder)
        holder.decoder = replay
    else:
        holder = replay = Replay(base)
    shell = copy.copy(causal)
    shell.__dict__["_modules"] = {**causal._modules, layers: holder}
    # accelerate and others put a `forward` on the instance that is bound to the original module.
    shell.__dict__.pop("forward", None)
    return shell, replay


class _Box:
    """A box that hides a tensor from hooks that search a call's inputs."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Boxing(StandIn):
    """Replacement of the head that passes it a boxed input, opened after all hooks and before its forward."""

    def forward(self, hidden: Tensor) -> Any:
        handle = self.real.register_forward_pre_hook(lambda _, inputs: (inputs[0].tensor,))
        try:
            return self.real(_Box(hidden))
        finally:
            handle.remove()


def box_inputs_of_head(shell: PreTrainedModel) -> None:
    """Allow a shell to call its head on several pieces although FSDP 2 holds the head's weights.

    FSDP 2 takes the gradient of a call's input as the end of the backward pass through the weights of its group, and
    then reduces their gradients over all processes. The other pieces, and a token embedding that shares the weights,
    would come too late. If FSDP 2 finds no input tensor, it reduces at the end of the whole backward pass.

    Raises:
        IncompatibleError: if the head is not a child of the model.
    """
    head = shell.get_output_embeddings()
    names = [name for name, child in shell._modules.items() if child is head]
    if not names:
        raise IncompatibleError(
            f"{type(shell).__name__} does not hold its head as a child, so FSDP cannot compute its loss in chunks. "
            f"Train without chunk_loss."
        )
    for name in names:
        shell._modules[name] = _Boxing(head)


def require_pieces(causal: PreTrainedModel, replay: Replay, logits: Tensor) -> None:
    """Raise ``IncompatibleError`` unless the logits come from one call and belong to the replayed piece."""
    if replay.calls != 1 or tuple(logits.shape[:2]) != replay.expected:
        raise IncompatibleError(
            f"{type(causal).__name__} cannot compute its logits in pieces, because they do not come from the base "
            f"model's hidden states alone (calls of the base model: {replay.calls}; [batch, positions] of the logits: "
            f"{list(logits.shape[:2])}, of the hidden states: {replay.expected})."
        )
