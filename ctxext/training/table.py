"""Train the table of positions and nothing else: the whole table, or its new rows only.

The weights around an extended table have never seen its new rows. To train these alone, and nothing else, costs least
(it gained an embedding model of LongEmbed's 15 points, and a tiny BERT of ours nothing: docs/evidence/masked.md): the
rows that were learned stay where the method put them, bit for bit, and so does every other weight. With ``tile`` and
``hierarchical``, whose first rows are the learned ones, a text that fitted before is read exactly as before.

Source: Zhu et al., arXiv:2404.12096, figure 4 (further tuning: the model and the position vectors that it had are
frozen, those between or behind them are trained).
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ctxext.core.patching import patched_state
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, VerificationError
from ctxext.models import find_architecture
from ctxext.models.table import LearnedTable
from ctxext.models.table_rows import weight_of


class TrainedTable:
    """Leaves the table of positions of an extended model to be trained, and freezes everything else.

    Args:
        model: extended by a method for learned tables, in float32.
        only_new: keep the learned rows, wherever the method put them (of several copies the first), and the rows for
            padding. A weight decay would shrink them all the same: leave it at 0.

    Raises:
        IncompatibleError: a model without an extended table of learned positions, or one in 16 bits.
    """

    def __init__(self, model: nn.Module, *, only_new: bool) -> None:
        subject = Subject.of(model)
        base, architecture = subject.model, find_architecture(subject)
        if patched_state(base) is None or not isinstance(architecture, LearnedTable):
            raise IncompatibleError(
                f"This {type(base).__name__} has no extended table of learned positions to train. Extend it by a "
                f"method for tables (ctxext methods lists them), or train an adapter: leave out table."
            )
        kept = architecture.kept_rows(subject)
        self.weights = {name: weight_of(base, name) for name in kept}
        for name, weight in self.weights.items():
            if weight.dtype != torch.float32:
                raise IncompatibleError(
                    f"{name} is of {weight.dtype}, in which small updates are rounded away. Load the model in float32."
                )
        self.kept = kept if only_new else {name: torch.zeros_like(rows) for name, rows in kept.items()}
        self.before = {name: weight.detach()[self.kept[name]].clone() for name, weight in self.weights.items()}
        base.requires_grad_(False)
        for name, weight in self.weights.items():
            weight.requires_grad_(True)
            weight.register_hook(partial(_without, self.kept[name]))  # type: ignore[no-untyped-call]

    def require_kept(self) -> None:
        """Raise ``VerificationError`` unless every untrained row is unchanged, bit for bit."""
        for name, weight in self.weights.items():
            if not torch.equal(weight.detach()[self.kept[name]], self.before[name]):
                raise VerificationError(
                    f"Rows of {name} that were to stay were changed by the optimiser. Train without weight decay, and "
                    f"with an optimiser that leaves alone what has no gradient (AdamW does)."
                )

    def __str__(self) -> str:
        """Return in words how many rows of each table are trained, for a report."""
        counts = [
            f"{int((~kept).sum()):,} of {len(kept):,} rows of {name} are trained" for name, kept in self.kept.items()
        ]
        return ", ".join(counts) + "; all other weights stay as they are"


def _without(kept: Bool[Tensor, " rows"], gradient: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """Set the gradient of the kept rows to 0."""
    return gradient.masked_fill(kept.to(gradient.device)[:, None], 0.0)
