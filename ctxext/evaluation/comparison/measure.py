"""The work: each cell measured on the one loaded model, dressed and undressed in place, and kept at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.comparison.plan import LOSS, Cell, Plan
from ctxext.evaluation.comparison.readings import Wardrobe
from ctxext.evaluation.comparison.store import CellStore, Outcome
from ctxext.evaluation.perplexity import loss_by_position
from ctxext.evaluation.progress import Progress, ticking
from ctxext.evaluation.truncation import tail_losses, window_of

__all__ = ["measure_cells", "share_of", "told_of_memory"]


@runtime_checkable
class Work(Protocol):
    """A piece of work that one process does."""

    @property
    def key(self) -> str:
        """Its name, unlike every other's."""

    @property
    def cost(self) -> float:
        """In the units of ``pass_cost``."""


Piece = TypeVar("Piece", bound=Work)


def share_of(cells: Sequence[Piece], process: int, processes: int) -> tuple[Piece, ...]:
    """The cells that one of several processes computes: about the same cost for each, the same split in each.

    Args:
        cells: those that are not finished, the same in every process.
        process: number of this one, from 0.
        processes: how many there are.
    """
    loads = [0.0] * processes
    mine = set()
    for cell in sorted(cells, key=lambda cell: -cell.cost):
        least = loads.index(min(loads))
        loads[least] += cell.cost
        if least == process:
            mine.add(cell.key)
    return tuple(cell for cell in cells if cell.key in mine)


def measure_cells(
    wardrobe: Wardrobe, plan: Plan, cells: Sequence[Cell], store: CellStore, *, progress: Progress = lambda *_: None
) -> None:
    """Compute cells and keep each as soon as it is finished. The model is at the end what it was at the start.

    Args:
        wardrobe: of the model.
        plan: that the cells are of.
        cells: to compute.
        store: where to keep them.
        progress: called with what is being done and the cost done since the last call; the cells' costs are the total.

    Raises:
        ResultsError: the store cannot be written.
        InvalidParameterError: a cell does not fit into memory.
        IncompatibleError: a cell gives no finite loss; or as in ``loss_by_position``.
    """
    for reading in plan.readings:
        mine = [cell for cell in cells if cell.reading == reading.name]
        if not mine:
            continue
        with wardrobe.wearing(reading):
            for cell in mine:
                where = f"{reading.label}, {cell.item}, {cell.length:,} tokens"
                with ticking(wardrobe.model, where, cell.cost / _passes(wardrobe.model, plan, cell), progress):
                    store.add(cell, _measured(wardrobe.model, plan, cell, where))


def _passes(model: nn.Module, plan: Plan, cell: Cell) -> int:
    """Forward passes that a cell takes; for a passkey, the plan knew only how many they are at most."""
    return cell.passes if cell.kind == LOSS else passkey.passes(model, plan.prompts[cell.index].passkey)


def _measured(model: nn.Module, plan: Plan, cell: Cell, where: str) -> Outcome:
    began = time.perf_counter()
    with told_of_memory(where):
        outcome = _losses(model, plan, cell) if cell.kind == LOSS else _passkey(model, plan, cell)
    values = outcome.losses if outcome.losses is not None else torch.tensor(outcome.loss)
    if not values.isfinite().all():
        raise IncompatibleError(
            f"The model computes losses that are no numbers: {where}. Measure in another --dtype (fp32 has the range), "
            f"or leave this method out. Finished cells are kept."
        )
    return replace(outcome, seconds=time.perf_counter() - began)


@contextlib.contextmanager
def told_of_memory(where: str) -> Iterator[None]:
    """Turn an out-of-memory error into what the user has to know: ``InvalidParameterError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InvalidParameterError(
            f"Out of memory at {where}. What is finished is kept; ask for smaller lengths, or run the same command on "
            f"a device with more memory."
        ) from error


def _losses(model: nn.Module, plan: Plan, cell: Cell) -> Outcome:
    document = plan.documents[cell.index].take(cell.length + 1)
    window = window_of(cell.reading)
    if window is None:
        return Outcome(losses=loss_by_position(model, document.input_ids)[0])
    trained, prefix = plan.trained_length, document.prefix
    tail = tail_losses(model, document.input_ids, window=window, trained_length=trained, prefix=prefix)
    return Outcome(losses=tail[0])


def _passkey(model: nn.Module, plan: Plan, cell: Cell) -> Outcome:
    window, prefix = window_of(cell.reading), plan.documents[0].prefix
    trial = passkey.ask(model, plan.prompts[cell.index], window=window, prefix=prefix)
    return Outcome(correct=trial.correct, loss=trial.loss)
