"""A comparison from checkpoint and texts to its result, in two steps: plan, then measure what is not yet on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.comparison.plan import Cell, CellStore, ComparisonPlan, check_lengths, make_plan, measure_cells
from ctxext.evaluation.comparison.result import ComparisonResult, assemble
from ctxext.evaluation.corpus import Corpus
from ctxext.evaluation.forward import Progress, turning_point
from ctxext.evaluation.passkey import DEPTHS, make_prompts
from ctxext.evaluation.provenance import provenance_of, setting_of
from ctxext.evaluation.readings import Wardrobe, chosen_methods
from ctxext.evaluation.survey import Team, share_of
from ctxext.methods import Method

__all__ = ["Comparison", "prepare", "setting_of"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A planned comparison; ``begin`` it, ``measure`` what is pending, then ask for its ``result``.

    Args:
        checkpoint: what is measured.
        corpus: on which texts, whole.
        wardrobe: of the checkpoint's model.
        plan: all cells.
        store: where finished cells are.
        team: the processes that share the work.
        seed: of the passkeys.
    """

    checkpoint: Checkpoint
    corpus: Corpus
    wardrobe: Wardrobe
    plan: ComparisonPlan
    store: CellStore
    team: Team
    seed: int

    def begin(self) -> tuple[Cell, ...]:
        """Claim the folder and return the cells that this process has to compute.

        Raises:
            ResultsError: the folder belongs to another comparison, or cannot be written.
        """
        if self.team.is_main:
            dtype = next(self.checkpoint.model.parameters()).dtype
            names = ", ".join(document.name for document in self.corpus.documents)
            self.store.claim(
                {
                    "checkpoint": {"name": f"{self.checkpoint.name} in {dtype}", "sha256": self.checkpoint.sha256},
                    "corpus": {"name": names, "sha256": self.corpus.sha256},
                }
            )
        self.team.meet()
        finished = self.store.finished()
        self.team.meet()  # nobody writes before everybody has read, so that all see the same cells pending
        pending = [cell for cell in self.plan.cells if cell.key not in finished]
        return share_of(pending, self.team.process, self.team.processes)

    def measure(self, cells: Sequence[Cell], *, progress: Progress = lambda *_: None) -> None:
        """Compute cells and keep each at once, then wait for the other processes.

        Raises:
            CtxextError: as ``measure_cells`` does; every finished cell is kept.
        """
        measure_cells(self.wardrobe, self.plan, cells, self.store, progress=progress)
        self.team.meet()

    def result(self) -> ComparisonResult:
        """Put the finished cells together."""
        provenance = provenance_of(self.checkpoint, self.corpus, seed=self.seed).to_dict()
        del provenance["extensions"], provenance["trained_length"]  # in the rows, and as it was measured
        finished = self.store.finished()
        made = {
            "date": provenance.pop("date"),
            "command": provenance.pop("command"),
            "seconds": sum(finished[cell.key]["seconds"] for cell in self.plan.cells),
            "processes": self.team.processes,
        }
        return assemble(self.plan, self.store, provenance=provenance, made=made)


def prepare(
    checkpoint: Checkpoint,
    corpus: Callable[[int], Corpus],
    output: Path,
    *,
    methods: Sequence[str | Method] = (),
    factors: Sequence[float] = (2.0,),
    lengths: Sequence[int] = (),
    depths: Sequence[float] = DEPTHS,
    trials: int = 1,
    seed: int = 0,
    trained_length: int | None = None,
    sliding_window: str | None = None,
    team: Team | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Comparison:
    """Plan a comparison, before anything of it is measured.

    Args:
        checkpoint: from ``load_checkpoint``.
        corpus: called once with the tokens that each document must have; returns them whole.
        output: folder for cells and report.
        methods: see ``chosen_methods``; empty for all that apply.
        factors: each at least 1.
        lengths: tokens; empty for the reach of every method.
        depths: of the passkeys, each from 0 to 1; empty for none.
        trials: passkeys per length and depth, at least 1.
        seed: of the first passkey of each length and depth.
        trained_length: tokens that the checkpoint was trained for; None where its config says so.
        sliding_window: see ``ctxext.patch``.
        team: the processes that share the work; None for this one alone.
        progress: called with methods tried and methods in all.

    Raises:
        CtxextError: whatever cannot be right, before anything is computed.
    """
    model = checkpoint.model
    wardrobe = Wardrobe(model, trained_length=trained_length, sliding_window=sliding_window)
    readings, refusals = wardrobe.find_readings(chosen_methods(model, methods, factors), progress=progress)
    wanted = check_lengths(lengths, wardrobe.trained_length, readings)
    texts = corpus(wanted[-1] + 1)
    plan = make_plan(
        readings=readings,
        refusals=refusals,
        documents=texts.documents,
        prompts=make_prompts(checkpoint.tokenizer, wanted, depths, trials=trials, seed=seed),
        trained_length=wardrobe.trained_length,
        lengths=wanted,
        setting=setting_of(checkpoint, sliding_window),
        turning_point=turning_point(model),
    )
    team = team or Team()
    return Comparison(checkpoint, texts, wardrobe, plan, CellStore(output, team.process), team, seed)
