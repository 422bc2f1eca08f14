"""Cross-entropy over hidden states, a chunk at a time, so that tokens x vocabulary never exists.

At 32K tokens and a vocabulary of 128K the loss of plain transformers holds logits of 8 GiB in bfloat16, a float32 copy
of 16 GiB, and gradients of the same sizes. Here one chunk's logits are computed, overwritten with their gradient,
pushed back through the head, and dropped, all during the forward pass. Only the gradient by the hidden states
stays, as large as these, and the gradient of the head's weights where the head is trained.

Measured on 2 CPU cores against recomputing every chunk in the backward pass (torch.utils.checkpoint): one product with
the head's weight less. Under engines that shard the head's weights a chunk *is* recomputed, since these attach their
work to the one backward pass they know.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FlatParameter
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ctxext.caches.digest import is_fsdp
from ctxext.core.edits import HOOKED, Edits
from ctxext.core.override import ForwardOverride
from ctxext.core.subject import Subject, text_of
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.measuring.head import box_inputs_of_head, require_head, require_pieces, shell_of
from ctxext.methods.parameters import checked_tokens
from ctxext.training.parallel import is_sharded
from ctxext.training.sequences import IGNORED

Z_LOSS = "z_loss_coefficient"  # by which Bamba adds the square of the logits' log-sum-exp to its loss


def chunk_loss(model: nn.Module, *, chunk: int = 1024) -> ChunkedLoss:
    """Make a model compute its loss in chunks from now on, in transformers' Trainer or in your own loop.

    Called with ``labels``, the model returns the loss, and gradients, of its class up to rounding, and no logits.
    Called without labels it behaves as before. Call this function before the model is passed to a Trainer or wrapped
    for distributed training; adapters may be attached before or after.

        handle = chunk_loss(model)
        Trainer(model, ...).train()
        handle.remove()                  # or: with chunk_loss(model): ...

    Args:
        model: a transformers causal language model, or a PEFT or compiled wrapper around one.
        chunk: tokens whose logits exist at a time, over all rows, at least 1. They take about chunk x vocabulary x 10
            bytes; below 512 the products with the head become slow.

    Returns:
        A handle whose ``remove()``, or the end of a ``with`` block, undoes the change.

    Raises:
        InvalidParameterError: for a ``chunk`` below 1.
        IncompatibleError: the model has no language modelling head, or its class has a loss that is not cross-entropy.
        PatchStateError: the model's loss is replaced already (by Liger, or by this function).
    """
    chunk = checked_tokens("chunk", chunk)
    causal = Subject.of(model).model
    require_head(causal)
    called = inspect.unwrap(type(causal).forward).__code__.co_names
    if "loss_function" not in called or causal.loss_function is not ForCausalLMLoss or getattr(causal, Z_LOSS, None):
        raise IncompatibleError(
            f"{type(causal).__name__} has a loss of its own. Only the cross-entropy of the next token, as transformers "
            f"computes it for most models, is computed in chunks. Train it without: loss_chunk=None."
        )
    return ChunkedLoss(causal, chunk)


class ChunkedLoss:
    """Handle of ``chunk_loss``, which undoes it."""

    def __init__(self, causal: PreTrainedModel, chunk: int) -> None:
        self._owner, self._name = _innermost(causal)
        self._forward = ChunkedForward(causal, chunk=chunk)
        self._edits = Edits()
        self._edits.set(self._owner, self._name, self._forward)

    def remove(self) -> None:
        """Let the model compute its loss as before. A second call does nothing.

        Raises:
            PatchStateError: if the model was patched since; unpatch it first.
        """
        current = getattr(self._owner, self._name, None)
        if self._edits.lines() and isinstance(current, ForwardOverride) and current is not self._forward:
            raise PatchStateError(
                f"The {type(self._forward.module).__name__} was patched after chunk_loss(model), on top of it. Call "
                f"ctxext.unpatch(model) first."
            )
        self._edits.undo()

    def __enter__(self) -> ChunkedLoss:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _innermost(causal: PreTrainedModel) -> tuple[Any, str]:
    """Return the owner and name of the class's own forward, below all overrides."""
    owner, name = causal, HOOKED if HOOKED in vars(causal) else "forward"
    while isinstance(current := vars(owner).get(name), ForwardOverride):
        if isinstance(current, ChunkedForward):
            raise PatchStateError(f"This {type(causal).__name__} computes its loss in chunks already.")
        owner, name = current, "inner"
    if current is not None and getattr(current, "__func__", None) is not type(causal).forward:
        raise PatchStateError(
            f"The forward of this {type(causal).__name__} has been replaced ({current!r:.80}), by Liger or by "
            f"accelerate's mixed precision perhaps. Call chunk_loss(model) before the latter, and use one of it and "
            f"the former."
        )
    return owner, name


@dataclass
class ChunkedForward(ForwardOverride):
    """Replacement of a causal model's ``forward`` that returns the loss without the logits."""

    chunk: int = 1024

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with ``labels`` the result holds the loss and everything else but logits."""
        given = dict(self.given(args, kwargs))
        labels, targets = given.pop("labels", None), given.pop("shift_labels", None)
        if labels is None and targets is None:
            return self.run(*args, **kwargs)
        count, as_dict = given.pop("num_items_in_batch", None), given.pop("return_dict", None)
        ignored = given.pop("ignore_index", IGNORED)
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if ignored != IGNORED:
            if (targets == IGNORED).any():
                raise InvalidParameterError(
                    f"Some labels are {IGNORED} and ignore_index is {ignored}, so they would count as tokens. Use one "
                    f"of the two."
                )
            targets = targets.masked_fill(targets == ignored, IGNORED)
        layers = Pieces(self.module, given, targets)
        size = max(1, self.chunk // targets.shape[0])
        total = layers.recomputed(size) if is_sharded(self.module) else layers.at_once(size)
        if count is None:
            count = (layers.targets != IGNORED).sum()
        loss = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        aux = getattr(layers.output, "aux_loss", None)
        if aux is not None:  # mixtures of experts balance their load; their classes add it to the loss they compute
            loss = loss + _balance(self.module) * aux.to(loss.device)
        kept = {key: value for key, value in layers.output.items() if key != "logits"}
        output = type(layers.output)(**kept, loss=loss)
        plain = as_dict is False or not getattr(self.module.config, "return_dict", True)
        return output.to_tuple() if plain else output


def _balance(causal: Any) -> float:
    """Return the weight of the loss that balances experts, by the name and the place where the class reads it."""
    places = itertools.product((causal, text_of(causal.config)), ("router_aux_loss_coef", "aux_loss_coef"))
    return float(next(getattr(place, name) for place, name in places if hasattr(place, name)))


class Pieces:
    """One forward pass through the layers, whose head is applied to a piece of the positions at a time.

    Args:
        targets: token that each position should predict, ``[batch, positions]``.
    """

    def __init__(self, causal: Any, given: dict[str, Any], targets: Tensor) -> None:
        self.causal = causal
        self.source = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        self.inputs: Tensor = given[self.source]
        self.shell, self.replay = shell_of(causal)
        if is_fsdp(causal):
            box_inputs_of_head(self.shell)
        # The layers run here. The head computes one position only, and its logits are not used.
        self.output: Any = self._run(**given)
        self.hidden: Tensor = self.replay.output[0]
        self.targets = targets.to(self.hidden.device)
        if self.hidden.shape[:2] != targets.shape:
            raise IncompatibleError(
                f"{type(causal).__name__} made {list(self.hidden.shape[:2])} hidden states for labels of shape "
                f"{list(targets.shape)}; its loss cannot be computed in chunks."
            )

    def _run(self, **arguments: Any) -> Any:
        self.replay.calls = 0
        output = type(self.causal).forward(self.shell, **arguments, return_dict=True)
        require_pieces(self.causal, self.replay, output.logits)
        return output

    def logits(self, hidden: Tensor) -> Float[Tensor, "batch piece vocab"]:
        """Compute the logits of a piece of the hidden states: the head and all that follows it."""
        self.replay.hidden = hidden
        logits: Tensor = self._run(**{self.source: self.inputs[:, : hidden.shape[1]]}, use_cache=False).logits
        return logits

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def at_once(self, size: int) -> Float[Tensor, ""]:
        """Compute the summed loss, and its gradients, which the backward pass then returns."""
        total = torch.zeros((), device=self.hidden.device)
        wanted = torch.is_grad_enabled()
        by_hidden = torch.zeros_like(self.hidden) if wanted else None
        leaves: list[Tensor] | None = None
        by_leaves: list[Tensor] = []
        for start in _counting(self.targets, size):
            piece = slice(start, start + size)
            hidden = self.hidden.detach()[:, piece].requires_grad_(wanted)
            logits = self.logits(hidden)
            value, by_logits = cross_entropy_and_gradient(logits, self.targets[:, piece])
            total = total + value
            if by_hidden is None:
                continue
            if leaves is None:
                leaves = [leaf for leaf in _leaves(logits) if leaf is not hidden]
                # In float32: sums of 16-bit numbers over chunks lose what one large product keeps.
                by_leaves = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
            by_piece, *by_each_leaf = torch.autograd.grad(logits, [hidden, *leaves], by_logits)
            del logits, by_logits
            by_hidden[:, piece] = by_piece
            for sum_, part in zip(by_leaves, by_each_leaf, strict=True):
                sum_ += part
        if by_hidden is None or leaves is None:
            return total
        result: Tensor = WithGradients.apply(  # type: ignore[no-untyped-call]
            total, [by_hidden, *by_leaves], self.hidden, *leaves
        )
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def recomputed(self, size: int) -> Float[Tensor, ""]:
        """Compute the summed loss under autograd; the backward pass computes each piece's logits again."""

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = self.logits(hidden)
            return F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )

        pieces = zip(torch.split(self.hidden, size, dim=1), torch.split(self.targets, size, dim=1), strict=True)
        losses: list[Tensor] = [checkpoint(loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum()


def cross_entropy_and_gradient(
    logits: Float[Tensor, "batch piece vocab"], targets: Int[Tensor, "batch piece"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "batch piece vocab"]]:
    """Compute the sum of -log p(target) over targets that count, and its gradient, in the logits' dtype."""
    ignored = (targets == IGNORED)[..., None]
    index = targets[..., None].masked_fill(ignored, 0)
    scores = torch.log_softmax(logits.detach(), dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    value = -scores.gather(-1, index).masked_fill(ignored, 0.0).sum()
    by_logits = scores.exp_().scatter_add_(-1, index, torch.full_like(index, -1.0, dtype=scores.dtype))
    return value, by_logits.masked_fill_(ignored, 0.0).to(logits.dtype)


def _counting(targets: Tensor, size: int) -> list[int]:
    """Return the starts of the pieces in which some target counts; the first piece's if there is none."""
    starts = range(0, targets.shape[1], size)
    counts = torch.stack([(targets[:, start : start + size] != IGNORED).any() for start in starts]).tolist()
    return [start for start, some in zip(starts, counts, strict=True) if some] or [0]


def _leaves(logits: Tensor) -> list[Tensor]:
    """Return the leaves of the graph of ``logits``, the tensors to which a backward pass would give gradients."""
    leaves: dict[Any, Tensor] = {}
    seen: set[Any] = set()
    nodes = [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[node] = node.variable
        nodes += [following for following, _ in node.next_functions]
    for leaf in leaves.values():
        if isinstance(leaf, FlatParameter):
            raise IncompatibleError("The first version of FSDP flattens the head's weights. Set fsdp_version to 2.")
    return list(leaves.values())


class WithGradients(torch.autograd.Function):
    """A number whose gradients by some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise PatchStateError("A loss in chunks has one backward pass: its gradients are not kept for another.")
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(g.mul_(by_value).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
