"""A comparison from checkpoint and texts to its result: a survey whose jobs are the cells of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.comparison.plan import LOSS, Cell, ComparisonPlan, check_lengths, make_plan
from ctxext.evaluation.comparison.result import ComparisonResult, assemble
from ctxext.evaluation.forward import turning_point
from ctxext.evaluation.journal import Journal
from ctxext.evaluation.passkey import DEPTHS, make_prompts
from ctxext.evaluation.provenance import provenance_of
from ctxext.evaluation.readings import Reading, Readings, chosen_methods
from ctxext.evaluation.survey import ProcessGroup, Survey
from ctxext.evaluation.truncation import TRUNCATED
from ctxext.methods import Method
from ctxext.texts.corpus import Corpus


@dataclass(eq=False, kw_only=True)
class Comparison(Survey[Cell]):
    """A planned comparison; ``begin`` it, ``measure`` what is pending, then ask for its ``result``.

    Args:
        corpus: on which texts, whole.
        plan: all cells.
        seed: of the passkeys.
    """

    corpus: Corpus
    plan: ComparisonPlan
    seed: int

    def result(self) -> ComparisonResult:
        """Put the finished cells together."""
        return self._assembled(self.plan)

    def so_far(self, readings: Sequence[Reading]) -> ComparisonResult | None:
        """Put the cells of some finished readings together; return None before every reference is among them."""
        shown = [reading for reading in self.plan.readings if reading in readings or reading.name == TRUNCATED]
        if not all(reading in shown for reading in self.plan.readings if reading.is_reference):
            return None
        readers = [reader for reader in self.readers if reader.reading in shown]
        cells = [cell for cell in self.plan.cells if cell.reader in readers]
        return self._assembled(replace(self.plan, readings=tuple(shown), cells=tuple(cells)))

    def losses_of(self, reading: Reading) -> Float[Tensor, "documents positions"]:
        """Return a finished reading's losses at its greatest length; a truncation's, beyond the trained window."""
        finished = self.journal.finished()
        cells = [cell for cell in self.plan.cells if cell.reader.reading is reading and cell.kind == LOSS]
        last = max(cell.length for cell in cells)
        return torch.stack([self.journal.losses(finished[cell.key]) for cell in cells if cell.length == last])

    def _assembled(self, plan: ComparisonPlan) -> ComparisonResult:
        provenance = provenance_of(self.checkpoint, self.corpus, seed=self.seed).to_dict()
        del provenance["extensions"], provenance["trained_length"]  # in the rows, and as it was measured
        finished = self.journal.finished()
        circumstances = {
            "date": provenance.pop("date"),
            "command": provenance.pop("command"),
            "seconds": sum(finished[cell.key]["seconds"] for cell in plan.cells),
            "processes": self.group.processes,
        }
        return assemble(plan, self.journal, provenance=provenance, made=circumstances)


def prepare(
    checkpoint: Checkpoint,
    corpus: Callable[[int], Corpus],
    output: Path | None,
    *,
    methods: Sequence[str | Method] = (),
    factors: Sequence[float] = (2.0,),
    lengths: Sequence[int] = (),
    depths: Sequence[float] = DEPTHS,
    trials: int = 1,
    seed: int = 0,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    windows: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Comparison:
    """Plan a comparison, before anything of it is measured.

    Args:
        checkpoint: from ``load_checkpoint``.
        corpus: called once with the tokens that each document must have; returns them whole.
        output: folder for cells and report; None keeps the cells in memory.
        methods: see ``chosen_methods``; empty for all that apply.
        factors: each at least 1.
        lengths: tokens; empty for the reach of every method.
        depths: of the passkeys, each from 0 to 1; empty for none.
        trials: passkeys per length and depth, at least 1.
        seed: of the first passkey of each length and depth.
        trained_length: tokens that the checkpoint was trained for; None where its config says so.
        sliding_window: see ``ctxext.patch``.
        windows: of the truncations, see ``Readings``.
        group: the processes that share the work; None for this one alone.
        progress: called with methods tried and methods in all.

    Raises:
        CtxextError: whatever cannot be right, before anything is computed.
    """
    model = Readings(checkpoint, trained_length=trained_length, sliding_window=sliding_window, windows=windows)
    readings, refusals = model.find(chosen_methods(checkpoint.model, methods, factors), progress=progress)
    wanted = check_lengths(lengths, model.trained_length, readings)
    texts = corpus(wanted[-1] + 1)
    plan = make_plan(
        model,
        readings=readings,
        refusals=refusals,
        documents=texts.documents,
        prompts=make_prompts(checkpoint.tokenizer, wanted, depths, trials=trials, seed=seed),
        lengths=wanted,
        turning_point=turning_point(checkpoint.model),
    )
    path, identity = (None, None) if output is None else (output / "cells.jsonl", output / "comparison.json")
    group = group or ProcessGroup()
    return Comparison(
        "ctxext eval compare",
        checkpoint,
        plan.cells,
        corpus=texts,
        journal=Journal(path, group.process, work="cells", identity=identity),
        group=group,
        plan=plan,
        seed=seed,
    )
