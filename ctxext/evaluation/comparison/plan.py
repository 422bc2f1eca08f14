"""What a comparison measures: its cells, each of which is computed, kept and resumed by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.comparison.readings import Reading, Refusal
from ctxext.evaluation.comparison.series import edges_for
from ctxext.evaluation.corpus import TokenisedDocument
from ctxext.evaluation.passkey import JUDGED, Prompt
from ctxext.evaluation.progress import pass_cost
from ctxext.evaluation.truncation import TRUNCATED, passes_beyond

__all__ = ["LOSS", "PASSKEY", "Cell", "Plan", "check_lengths", "make_plan"]

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
class Plan:
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
    prompts: tuple[Prompt, ...]
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
    prompts: Sequence[Prompt] = (),
    trained_length: int,
    lengths: Sequence[int],
    setting: Mapping[str, Any],
    turning_point: int,
) -> Plan:
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
    frame = Plan(tuple(reaching), (*refusals, *short), cut, tuple(prompts), trained_length, tuple(lengths), ())
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


def _cells(plan: Plan, reading: Reading, setting: Mapping[str, Any], turning_point: int) -> list[Cell]:
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
