"""Measure, while a model is trained, how far its heads that read far retrieve."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ctxext.attention.recorder import retrieval_share
from ctxext.errors import IncompatibleError
from ctxext.training.before_after import arithmetic
from ctxext.training.parallel import launched_parallelism
from ctxext.training.settings import Settings

SHARE = "retrieval_share"
"""Name in the log of the attention that the heads which read far pay to what a text said before, from 0 to 1."""


class RetrievalShare(TrainerCallback):  # type: ignore[misc]
    """Log the share of retrieval before the first step, then every ``evaluation.heads_every`` steps, and at the end.

    Whether the heads that were chosen before training still retrieve shows here first: their share falls together with
    the gain in loss, while passkeys are found for long after (arXiv:2604.02650).

    Raises:
        IncompatibleError: the extension changes texts as short as the probe, or processes share weights or a sequence.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings, self.every = model, settings, settings.evaluation.heads_every
        if self.every is not None:
            if launched_parallelism().non_data_parallel_size > 1:
                raise IncompatibleError(
                    "Processes share a sequence in this run, and heads are measured on a whole one. Leave out "
                    "evaluation.heads_every, or take data parallelism (recipes/accelerate/ddp.yaml)."
                )
            self.measure()

    def measure(self) -> float:
        """Measure the share now; every process does, each on the same tokens."""
        with arithmetic(self.settings, self.model):
            return retrieval_share(self.model, seed=self.settings.seed)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the beginning of a run, and so refuse weights that processes share."""
        if state.global_step == 0:
            self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure where it is due."""
        step = state.global_step
        if self.every is not None and (step % self.every == 0 or step == state.max_steps):
            state.log_history.append({"step": step, SHARE: self.measure()})
