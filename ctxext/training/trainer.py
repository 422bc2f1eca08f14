"""Trainer for long sequences: runs on any number of processes, and stops at a NaN or infinite loss."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel, Trainer, TrainerState, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME

from ctxext.caches.records import ATTENTION, Given
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError
from ctxext.measuring.survey import explain_out_of_memory
from ctxext.probe.code import source_of
from ctxext.training.parallel import attention_of, release_attention, require_carried, whole_sequence
from ctxext.training.sequences import DerivedSequences, PackedSequences, Sequences

SMALLER = (
    "Begin a new run with a lower data.length or training.batch, or with more of memory.checkpointing, offload and "
    "mlp_tile. `ctxext plan` tells what a step takes."
)

LOSS = re.compile(r"\.loss_function\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
"""A call of a model's loss with its arguments, in the source of a class."""


class NotANumberError(CtxextError, ArithmeticError):
    """The loss is NaN or infinite: further steps would destroy the weights."""


class LongTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that refuses NaN or infinite losses and gradients, and engines that would falsify them.

    Its data are ``Sequences``, read in the given order: ``TrainingArguments(train_sampling_strategy="sequential",
    remove_unused_columns=False)``.

    Args:
        embedding_learning_rate: Learning rate of the token embedding, where it is trained; None for the same as
            everything else.

    Raises:
        IncompatibleError: if the engine that spreads the run over processes cannot carry it; see
            ``ctxext.training.parallel``.
        NotANumberError: while training; names the step and its sequences, before any weight was changed by them.
        InvalidParameterError: while training; a step does not fit into the device's memory.
    """

    train_dataset: Any

    def __init__(
        self, model: nn.Module, *args: Any, embedding_learning_rate: float | None = None, **kwargs: Any
    ) -> None:
        self.subject, self.embedding_learning_rate = Subject.of(model), embedding_learning_rate
        configs = self.subject.config, self.subject.text
        self._caching = [config for config in configs if getattr(config, "use_cache", False)]
        super().__init__(model, *args, **{"data_collator": collate, **kwargs})
        self._set_caching(self.args.use_cache)  # the Trainer tells the whole config only
        if not _counts_tokens(type(self.subject.model)):
            # BERT's class takes the number of tokens in a step among its keywords, and no notice of it: its loss is the
            # mean of one pass, which the Trainer would add up over all that a step accumulates.
            self.model_accepts_loss_kwargs = False
        data = self.train_dataset
        lengths = {data.length_of(i) for i in range(len(data))} if isinstance(data, Sequences) else set()
        require_carried(self.subject, self.accelerator, lengths=lengths, packed=_packed(data))
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.mixed_precision_policy is not None:
            # accelerate's policy rounds the loss to 16 bits, and adds up the processes' gradients in as many.
            plugin.mixed_precision_policy = dataclasses.replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer, with the embedding's weights in a separate group."""
        fresh = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        embedding = self.subject.model.get_input_embeddings().weight
        if fresh and self.embedding_learning_rate is not None and embedding.requires_grad:
            for group in list(optimizer.param_groups):
                if any(weight is embedding for weight in group["params"]):
                    group["params"] = [weight for weight in group["params"] if weight is not embedding]
                    optimizer.add_param_group(group | {"params": [embedding], "lr": self.embedding_learning_rate})
        return optimizer

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Train as the Trainer does; afterwards the model can be measured, with masks and caches."""
        parallelism = self.accelerator.parallelism_config
        if resume_from_checkpoint is not None and parallelism is not None and parallelism.sp_size > 1:
            # DeepSpeed wraps the data loader, and then the Trainer cannot skip the sequences that were read already.
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            data = self.train_dataset
            self.train_dataset = DerivedSequences(data, state.global_step * len(data) // self.args.max_steps)
            self.args.ignore_data_skip = True
        self._set_caching(self.args.use_cache)
        try:
            with explain_out_of_memory("a step of training", SMALLER):
                return super().train(resume_from_checkpoint, **kwargs)
        finally:
            release_attention(self.subject)
            self._set_caching(True)

    def _set_caching(self, whether: bool) -> None:
        """Let the model cache, or keep it from caching: with a cache, packed documents would see each other."""
        for config in self._caching:
            config.use_cache = whether

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Given) -> Any:
        """Prepare inputs as the Trainer does, and add the length of the whole sequence for a patched model."""
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and parallelism.cp_enabled:
            inputs = {**inputs, **whole_sequence(self.subject, inputs)}
            if attention_of(self.subject) == ATTENTION:
                # The Trainer would refuse a model with attention other than SDPA; ctxext's is SDPA without a mask here.
                return super()._prepare_context_parallel_inputs(None, inputs)
        return super()._prepare_context_parallel_inputs(model, inputs)

    def training_step(self, model: nn.Module, inputs: Given, num_items_in_batch: Any = None) -> Tensor:
        """Run one forward and backward pass."""
        self._indices: list[int] = inputs.pop("index")
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not math.isfinite(self._largest_gradient(model)):
            raise self._not_a_number(f"A gradient is not finite (the loss is {loss.item():.4g})")
        return loss

    def prediction_step(self, model: nn.Module, inputs: Given, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass of an evaluation."""
        inputs = {name: value for name, value in inputs.items() if name != "index"}
        before = any(config.use_cache for config in self._caching)
        self._set_caching(self.args.use_cache)
        try:
            return super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self._set_caching(before)

    def _largest_gradient(self, model: nn.Module) -> float:
        """Sum over processes the largest number in each process's gradients: NaN on one process makes the sum NaN.

        The host waits for the device once, and not for every weight.
        """
        whole = (weight.grad for weight in model.parameters() if weight.grad is not None)
        parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in whole]
        largest = get_total_norm([gradient for gradient in parts if gradient.numel()], math.inf)
        among: Tensor = self.accelerator.reduce(largest.to(self.accelerator.device, torch.float32), "sum")
        return float(among)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the Trainer's loss, and check it before a backward pass, which with DeepSpeed changes weights."""
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if self.model.training and not torch.isfinite(loss):
            raise self._not_a_number(f"The loss is {loss.item()}")
        return result

    def _not_a_number(self, wrong: str) -> NotANumberError:
        data = self.train_dataset
        where = (
            "; ".join(map(data.origin_of, self._indices)) if isinstance(data, Sequences) else f"items {self._indices}"
        )
        return NotANumberError(
            f"{wrong} in step {self.state.global_step + 1}, on {where}. No weight was changed by this step. Begin a "
            f"new run with a lower learning rate or a longer warm-up; --resume would repeat this one."
        )


def collate(rows: list[Given]) -> Given:
    """Build a batch of ``Sequences``. The indices stay a list: engines that share sequences would shard a tensor."""
    indices = [int(row["index"]) for row in rows]
    tensors = default_data_collator([{key: row[key] for key in row if key != "index"} for row in rows])
    return {**tensors, "index": indices}


def _counts_tokens(kind: type[PreTrainedModel]) -> bool:
    """Return whether a class hands the number of tokens in a step on to its loss."""
    forward = inspect.unwrap(kind.forward)
    calls = LOSS.findall(source_of(forward))
    told = not calls or any("**" in call or "num_items_in_batch" in call for call in calls)
    return told and "loss_function" in forward.__code__.co_names


def _packed(data: Any) -> bool:
    return isinstance(data, PackedSequences) or any(map(_packed, getattr(data, "parts", ())))
