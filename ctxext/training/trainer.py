"""The Trainer for long sequences: it stops at a loss that is no number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ctxext._api import base_model
from ctxext.errors import CtxextError
from ctxext.training.sequences import Sequences

__all__ = ["LongTrainer", "NotANumberError"]


class NotANumberError(CtxextError, ArithmeticError):
    """The loss is NaN or infinite: further steps would destroy the weights."""


class LongTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that refuses to train on a loss or gradient that is no number.

    Its data are ``Sequences``, in their own order: ``TrainingArguments(train_sampling_strategy="sequential",
    remove_unused_columns=False)``.

    Args:
        *args: as for ``transformers.Trainer``.
        embedding_learning_rate: of the token embedding, where it is trained; None for the same as everything else.
        **kwargs: as for ``transformers.Trainer``.

    Raises:
        NotANumberError: while training; names the step and its sequences, before any weight was changed by them.
    """

    def __init__(self, *args: Any, embedding_learning_rate: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.embedding_learning_rate = embedding_learning_rate

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own, with the embedding's weights in a group of their own."""
        fresh = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        embedding = base_model(self.model).get_input_embeddings().weight
        if fresh and self.embedding_learning_rate is not None and embedding.requires_grad:
            for group in list(optimizer.param_groups):
                if any(weight is embedding for weight in group["params"]):
                    group["params"] = [weight for weight in group["params"] if weight is not embedding]
                    own = {"params": [embedding], "lr": self.embedding_learning_rate}
                    optimizer.add_param_group({**group, **own})
        return optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass."""
        indices: list[int] = inputs.pop("index").tolist()
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        wrong = None if torch.isfinite(loss) else f"The loss is {loss.item()}"
        if wrong is None and not all(torch.isfinite(w.grad).all() for w in model.parameters() if w.grad is not None):
            wrong = f"A gradient is not finite (the loss is {loss.item():.4g})"
        if wrong is not None:
            data = self.train_dataset
            where = data.describe(indices) if isinstance(data, Sequences) else f"items {indices}"
            raise NotANumberError(
                f"{wrong} in step {self.state.global_step + 1}, on {where}. No weight was changed by this step: resume "
                f"from the last checkpoint with a lower learning rate or a longer warm-up."
            )
        return loss
