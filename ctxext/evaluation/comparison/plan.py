"""What a comparison measures: its cells, each of which is computed, kept and resumed by itself."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctxext.errors import IncompatibleError, InvalidParameterError, ResultsError
from ctxext.evaluation import passkey
from ctxext.evaluation.corpus import TokenisedDocument
from ctxext.evaluation.forward import Progress, pass_cost, ticking
from ctxext.evaluation.journal import Journal, parsed_object, told_of_disk
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.passkey import JUDGED, PasskeyPrompt
from ctxext.evaluation.readings import Reading, Refusal, Wardrobe
from ctxext.evaluation.statistics import edges_for
from ctxext.evaluation.survey import share_of, told_of_memory
from ctxext.evaluation.truncation import TRUNCATED, passes_beyond, tail_losses, window_of
from ctxext.files import write_whole

__all__ = [
    "LOSS",
    "PASSKEY",
    "Cell",
    "CellStore",
    "ComparisonPlan",
    "Outcome",
    "check_lengths",
    "make_plan",
    "measure_cells",
    "share_of",
    "told_of_memory",
]

LOSS, PASSKEY = "loss", "passkey"


@dataclass(frozen=True)
class Cell:
    """The smallest piece of work: one reading of one document or prompt.

    Args:
        key: of everything that its result depends on; 16 hexadecimal digits.
        reading: name of the reading.
        kind: ``loss`` or ``passkey``.
        length: tokens that the model may see.
        item: what is read, to show.
        index: of the document or prompt in the plan.
        cost: in the units of ``pass_cost``.
        passes: forward passes that the cost is spread over.
    """

    key: str
    reading: str
    kind: str
    length: int
    item: str
    index: int
    cost: float
    passes: int = 1


@dataclass(frozen=True, eq=False)
class ComparisonPlan:
    """A whole comparison before anything of it is measured.

    Args:
        readings: the references, then the methods.
        refusals: methods that do not apply.
        documents: all of the same number of tokens, one more than the greatest length.
        prompts: passkeys; may be empty.
        trained_length: tokens that the checkpoint was trained for.
        lengths: tokens, increasing; the trained length first.
        cells: the work, in the order in which one process does it.
    """

    readings: tuple[Reading, ...]
    refusals: tuple[Refusal, ...]
    documents: tuple[TokenisedDocument, ...]
    prompts: tuple[PasskeyPrompt, ...]
    trained_length: int
    lengths: tuple[int, ...]
    cells: tuple[Cell, ...]

    def lengths_of(self, reading: Reading) -> tuple[int, ...]:
        """The lengths that a reading is meant for."""
        return tuple(length for length in self.lengths if reading.is_reference or length <= (reading.reach or 0))

    def find(self, reading: str, kind: str, length: int, index: int) -> Cell | None:
        """The cell of one reading, kind, length and document or prompt; None where the plan has none."""
        return self._places.get((reading, kind, length, index))

    @cached_property
    def _places(self) -> dict[tuple[str, str, int, int], Cell]:
        return {(cell.reading, cell.kind, cell.length, cell.index): cell for cell in self.cells}


def make_plan(
    *,
    readings: Sequence[Reading],
    refusals: Sequence[Refusal] = (),
    documents: Sequence[TokenisedDocument],
    prompts: Sequence[PasskeyPrompt] = (),
    trained_length: int,
    lengths: Sequence[int],
    setting: Mapping[str, Any],
    turning_point: int,
) -> ComparisonPlan:
    """Lay out the cells.

    Args:
        readings: from ``find_readings``.
        refusals: from ``find_readings``.
        documents: each at least one token longer than the greatest length; what is more is cut off.
        prompts: from ``make_prompts``.
        trained_length: tokens that the checkpoint was trained for.
        lengths: from ``check_lengths``.
        setting: what every cell depends on (checkpoint, dtype, versions), as JSON values; part of every cell's key.
        turning_point: of the model, for the cells' costs.

    Raises:
        InvalidParameterError: no method is left, or a document is too short.
    """
    reaching, short = [], []
    for reading in readings:
        is_short = not reading.is_reference and reading.reach is not None and reading.reach < lengths[1]
        reason = f"it reaches {reading.reach:,} tokens, less than every length asked for" if is_short else ""
        short += [Refusal(label=reading.label, reason=reason)] if is_short else []
        reaching += [] if is_short else [reading]
    if not any(reading.is_candidate for reading in reaching):
        reasons = "; ".join(f"{refusal.label}: {refusal.reason}" for refusal in (*refusals, *short))
        raise InvalidParameterError(f"No method is left to compare. {reasons}")
    cut = tuple(document.take(lengths[-1] + 1) for document in documents)
    frame = ComparisonPlan(
        tuple(reaching), (*refusals, *short), cut, tuple(prompts), trained_length, tuple(lengths), ()
    )
    cells = [cell for reading in reaching for cell in _cells(frame, reading, setting, turning_point)]
    return replace(frame, cells=tuple(cells))


def check_lengths(lengths: Sequence[int], trained_length: int, readings: Sequence[Reading]) -> tuple[int, ...]:
    """The trained length and the lengths asked for, increasing; by default every method's reach.

    Args:
        lengths: asked for; empty for the default.
        trained_length: tokens that the checkpoint was trained for.
        readings: from ``find_readings``.

    Raises:
        InvalidParameterError: a length that no method is patched for, or none beyond the trained length.
    """
    reaches = sorted({reading.reach for reading in readings if reading.reach is not None})
    wanted = sorted({*(lengths or reaches), trained_length})
    if reaches and wanted[-1] > reaches[-1]:
        raise InvalidParameterError(
            f"A length of {wanted[-1]:,} tokens is beyond what any method here is patched for: the furthest "
            f"reaches {reaches[-1]:,}, trained to {trained_length:,}. Raise --factor, or ask for a smaller --length."
        )
    if wanted[0] < trained_length or len(wanted) < 2:
        found = ", ".join(f"{length:,}" for length in wanted)
        raise InvalidParameterError(
            f"A comparison reads beyond the trained {trained_length:,} tokens (what happens inside is in every table); "
            f"found lengths of {found}. Give a --length above it, or a --factor above 1."
        )
    edges_for(trained_length, wanted[1])
    return tuple(wanted)


def _cells(plan: ComparisonPlan, reading: Reading, setting: Mapping[str, Any], turning_point: int) -> list[Cell]:
    lengths, trained, window = plan.lengths_of(reading), plan.trained_length, reading.window
    cells: list[Cell] = []
    if reading.name == TRUNCATED:
        return cells  # the best of the windows, each of which is measured by itself

    def add(kind: str, length: int, item: str, index: int, task: list[Any], passes: int = 1) -> None:
        depends = {
            "setting": dict(setting),
            "trained_length": trained,
            # The longest window has the name that it had when it was the only one: what was measured then still holds.
            "reading": [TRUNCATED if window == trained else reading.name, reading.method, reading.fingerprint],
            "task": [kind, length, *task],
        }
        key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
        cost = passes * pass_cost(window or length, turning_point)
        cells.append(Cell(key, reading.name, kind, length, item, index, cost, passes))

    beyond = {"start": trained, "positions": lengths[-1], "prefix": plan.documents[0].prefix}
    passes = 1 if window is None else passes_beyond(window, **beyond)
    for length in lengths if reading.dynamic else lengths[-1:]:
        for index, document in enumerate(plan.documents):
            add(LOSS, length, document.name, index, [document.take(length + 1).sha256, 0], passes)
    for index, prompt in enumerate(plan.prompts):
        # A key is looked for in all that fits; inside the window, the truncated reading is the unpatched one.
        if prompt.length in lengths and (window is None or (window == trained < prompt.length)):
            key = prompt.passkey
            item = f"passkey at depth {key.depth:g}, seed {prompt.seed}"
            steps = len(key.answer) if reading.dynamic and prompt.length > trained else 1
            add(PASSKEY, prompt.length, item, index, [key.sha256, prompt.seed, JUDGED], steps)
    return cells


def measure_cells(
    wardrobe: Wardrobe,
    plan: ComparisonPlan,
    cells: Sequence[Cell],
    store: CellStore,
    *,
    progress: Progress = lambda *_: None,
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


def _passes(model: nn.Module, plan: ComparisonPlan, cell: Cell) -> int:
    """Forward passes that a cell takes; for a passkey, the plan knew only how many they are at most."""
    return cell.passes if cell.kind == LOSS else passkey.passes(model, plan.prompts[cell.index].passkey)


def _measured(model: nn.Module, plan: ComparisonPlan, cell: Cell, where: str) -> Outcome:
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


def _losses(model: nn.Module, plan: ComparisonPlan, cell: Cell) -> Outcome:
    document = plan.documents[cell.index].take(cell.length + 1)
    window = window_of(cell.reading)
    if window is None:
        return Outcome(losses=loss_by_position(model, document.input_ids)[0])
    trained, prefix = plan.trained_length, document.prefix
    tail = tail_losses(model, document.input_ids, window=window, trained_length=trained, prefix=prefix)
    return Outcome(losses=tail[0])


def _passkey(model: nn.Module, plan: ComparisonPlan, cell: Cell) -> Outcome:
    window, prefix = window_of(cell.reading), plan.documents[0].prefix
    trial = passkey.ask(model, plan.prompts[cell.index], window=window, prefix=prefix)
    return Outcome(correct=trial.correct, loss=trial.loss)


IDENTITY, LOSSES = "comparison.json", "losses"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one cell gave.

    Args:
        losses: nats per token, [positions], of a loss cell.
        correct: whether the key was found, of a passkey cell.
        loss: of the key's tokens, nats, of a passkey cell.
        seconds: wall time.
    """

    losses: Float[Tensor, " positions"] | None = None
    correct: bool = False
    loss: float = 0.0
    seconds: float = 0.0


class CellStore:
    """A folder of finished cells: a line of ``cells*.jsonl`` each, and losses by position in a file beside.

    A line is written only after its losses are safe on disk.

    Args:
        folder: made if it is missing.
        process: number of this process, 0 for the main one.
    """

    def __init__(self, folder: Path, process: int = 0) -> None:
        self.folder = folder
        self._lines = Journal(folder / "cells.jsonl", process)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Make the folder this comparison's, or see that it already is.

        Args:
            identity: ``{"checkpoint": {"name", "sha256"}, "corpus": {"name", "sha256"}}``.

        Raises:
            ResultsError: the folder holds a comparison of another checkpoint or corpus, or something else, or cannot
                be written.
        """
        path = self.folder / IDENTITY
        with told_of_disk(self.folder, lambda: 0):
            (self.folder / LOSSES).mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(entry.name != LOSSES for entry in self.folder.iterdir()):
                    raise ResultsError(
                        f"{str(self.folder)!r} is not empty and holds no earlier comparison; choose another --output."
                    )
                made = {"made_by": "ctxext eval compare", "format": FORMAT, **identity}
                write_whole(path, json.dumps(made, indent=1) + "\n")
                return
            found = parsed_object(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise ResultsError(f"{str(path)!r} is not of format {FORMAT} of a comparison; choose another --output.")
        for part, mine in identity.items():
            theirs = found.get(part) or {}
            if theirs.get("sha256") != mine["sha256"]:
                raise ResultsError(
                    f"{str(self.folder)!r} holds a comparison of another {part}: {theirs.get('name')} (sha256 "
                    f"{theirs.get('sha256')}), and this is {mine['name']} (sha256 {mine['sha256']}). Choose another "
                    f"--output, or give what that comparison was made of."
                )

    def finished(self) -> dict[str, dict[str, Any]]:
        """The line of every finished cell, of all processes, by key."""
        found = {}
        for entry in self._lines.entries():
            if "key" in entry and ("file" not in entry or (self.folder / entry["file"]).is_file()):
                found[entry["key"]] = entry
        return found

    def outcome(self, entry: Mapping[str, Any]) -> Outcome:
        """What a finished cell gave.

        Raises:
            ResultsError: its losses cannot be read.
        """
        if "file" not in entry:
            return Outcome(correct=entry["correct"], loss=entry["loss"], seconds=entry["seconds"])
        path = self.folder / entry["file"]
        try:
            return Outcome(losses=safetensors.torch.load_file(path)["losses"], seconds=entry["seconds"])
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise ResultsError(f"{str(path)!r} is damaged ({error}). Delete it and run the command again.") from error

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep a finished cell: once this returns, it is on disk.

        Raises:
            ResultsError: it cannot be written; every cell before it is kept.
        """
        entry = {name: value for name, value in asdict(cell).items() if name not in ("cost", "passes", "index")}
        with told_of_disk(self.folder, lambda: len(self.finished())):
            if outcome.losses is None:
                entry |= {"correct": outcome.correct, "loss": outcome.loss}
            else:
                entry["file"] = f"{LOSSES}/{cell.key}.safetensors"
                about = {"reading": cell.reading, "document": cell.item, "unit": "nats per token"}
                content = safetensors.torch.save({"losses": outcome.losses.contiguous()}, metadata=about)
                write_whole(self.folder / entry["file"], content)
            self._lines.append(entry | {"seconds": round(outcome.seconds, 3)})
