"""From finished cells to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ctxext.evaluation.comparison.plan import LOSS, PASSKEY, Plan
from ctxext.evaluation.comparison.readings import TRUNCATED, UNPATCHED, Reading
from ctxext.evaluation.comparison.result import ComparisonResult, Panel, PasskeyScore, Row, Score
from ctxext.evaluation.comparison.series import block_for, edges_for, summarise
from ctxext.evaluation.comparison.store import CellStore
from ctxext.evaluation.comparison.verdict import Verdict, judge
from ctxext.evaluation.perplexity import Bucket, bucketed, paired_difference
from ctxext.evaluation.truncation import best_window, join_best

__all__ = ["assemble"]


def assemble(
    plan: Plan, store: CellStore, *, provenance: Mapping[str, Any], made: Mapping[str, Any]
) -> ComparisonResult:
    """Put finished cells together; every cell of the plan must be in the store.

    Raises:
        ResultsError: a cell's losses cannot be read.
    """
    shelf = _Shelf(plan, store)
    rows = tuple(_row(plan, shelf, reading) for reading in plan.readings)
    beyond = [n for n in plan.lengths[1:] if any(row.at(n) for row in rows if row.reading.is_candidate)]
    block = block_for(len(plan.documents), _stretch(plan, plan.lengths[-1]))
    return ComparisonResult(
        trained_length=plan.trained_length,
        lengths=plan.lengths,
        unit="documents" if block is None else f"blocks of {block} tokens",
        rows=rows,
        refusals=plan.refusals,
        panels=_panels(plan, shelf),
        verdicts=tuple(_verdict(plan, shelf, rows, length) for length in beyond),
        provenance=provenance,
        made=made,
    )


class _Shelf:
    """Losses of finished cells, read when they are asked for: all at once may not fit into memory."""

    def __init__(self, plan: Plan, store: CellStore) -> None:
        self.plan, self.store, self.lines = plan, store, store.finished()
        self.unpatched = next(reading for reading in plan.readings if reading.name == UNPATCHED)
        self.windows = {reading.window: reading for reading in plan.readings if reading.window is not None}
        self._ends: dict[int, Tensor] = {}

    def losses(self, reading: Reading, length: int) -> Tensor:
        """[documents, length]; a static reading's come from its one pass over its greatest length."""
        if reading.window is not None:
            head = self.losses(self.unpatched, self.plan.trained_length)
            tail = self._rows(reading, self.plan.lengths[-1])[:, : length - self.plan.trained_length]
            return torch.cat([head, tail], dim=1)
        measured = length if reading.dynamic else self.plan.lengths_of(reading)[-1]
        return self._rows(reading, measured)[:, :length]

    def truncations(self, length: int, start: int) -> dict[int, Tensor]:
        """[documents, positions] from ``start`` to ``length``, by window."""
        return {window: self.losses(reading, length)[:, start:] for window, reading in self.windows.items()}

    def stretch(self, reading: Reading, length: int, start: int) -> tuple[int | None, Tensor]:
        """[documents, positions] from ``start`` to ``length``, and which window they are of; None for no truncation."""
        if reading.name != TRUNCATED:
            return reading.window, self.losses(reading, length)[:, start:]
        found = self.truncations(length, start)
        window = best_window({tokens: [own] for tokens, own in found.items()})
        return window, found[window]

    def best_end(self, length: int) -> Tensor:
        """The best truncation's losses of the last stretch before ``length``: every reading is held against them."""
        if length not in self._ends:
            found = self.truncations(length, length - _stretch(self.plan, length))
            self._ends[length] = found[best_window({tokens: [own] for tokens, own in found.items()})]
        return self._ends[length]

    def end(self, reading: Reading, length: int) -> Tensor:
        """[documents, positions]: the last stretch before ``length``."""
        return self.losses(reading, length)[:, length - _stretch(self.plan, length) :]

    def _rows(self, reading: Reading, length: int) -> Tensor:
        found = [self.store.outcome(self._line(reading, LOSS, length, i)) for i in range(len(self.plan.documents))]
        return torch.stack([outcome.losses for outcome in found if outcome.losses is not None])

    def passkeys(self, reading: Reading) -> tuple[PasskeyScore, ...]:
        if reading.name == TRUNCATED or (reading.window or self.plan.trained_length) < self.plan.trained_length:
            return ()  # a key is looked for in all that fits, the longest window
        places: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
        hidden: dict[tuple[int, float], bool] = {}
        for index, prompt in enumerate(self.plan.prompts):
            # Inside the window, the truncated reading is the unpatched one.
            inside = prompt.length <= self.plan.trained_length
            asked = self.unpatched if reading.window is not None and inside else reading
            if prompt.length in self.plan.lengths_of(reading):
                place = (prompt.length, prompt.passkey.depth)
                places.setdefault(place, []).append(self._line(asked, PASSKEY, prompt.length, index))
                hidden[place] = prompt.passkey.distance > self.plan.trained_length
        return tuple(
            PasskeyScore(
                length=length,
                depth=depth,
                found=sum(line["correct"] for line in lines),
                trials=len(lines),
                loss=sum(line["loss"] for line in lines) / len(lines),
                hidden=hidden[length, depth],
            )
            for (length, depth), lines in places.items()
        )

    def _line(self, reading: Reading, kind: str, length: int, index: int) -> Mapping[str, Any]:
        cell = self.plan.find(reading.name, kind, length, index)
        if cell is None or cell.key not in self.lines:
            raise LookupError(f"unfinished: {reading.name}, {kind}, {length}, {index}")
        return self.lines[cell.key]


def _stretch(plan: Plan, length: int) -> int:
    """Positions that stand for a length: a quarter of the window, or what lies beyond the window if that is less."""
    quarter = max(1, plan.trained_length // 4)
    return quarter if length == plan.trained_length else min(quarter, length - plan.trained_length)


def _row(plan: Plan, shelf: _Shelf, reading: Reading) -> Row:
    window, documents = plan.trained_length, len(plan.documents)
    own = shelf.unpatched if reading.name == TRUNCATED else reading  # inside the window nothing is dropped
    inside, plain = (shelf.losses(which, window) for which in (own, shelf.unpatched))
    return Row(
        reading=reading,
        inside=bucketed(inside, [0, window])[0],
        short_context=paired_difference(inside, plain, block=block_for(documents, window)),
        scores=tuple(_score(plan, shelf, reading, length) for length in plan.lengths_of(reading)),
        passkeys=shelf.passkeys(reading),
    )


def _score(plan: Plan, shelf: _Shelf, reading: Reading, length: int) -> Score:
    start = length - _stretch(plan, length)
    window, end = shelf.stretch(reading, length, start)
    window_of_whole, whole = shelf.stretch(reading, length, 0)
    bucket = Bucket(start, length, end.numel(), end.double().mean().item())
    (up_to_there,) = bucketed(whole, [0, length])
    if length <= plan.trained_length:
        return Score(length=length, end=bucket, whole=up_to_there, versus_truncation=None, by_document=())
    best = shelf.best_end(length)
    block = block_for(len(plan.documents), length - start)
    return Score(
        length=length,
        end=bucket,
        whole=up_to_there,
        versus_truncation=paired_difference(end, best, block=block, baselines=len(shelf.windows)),
        by_document=tuple((end.double() - best.double()).mean(dim=1).tolist()),
        window=window,
        window_of_whole=window_of_whole,
    )


def _verdict(plan: Plan, shelf: _Shelf, rows: Sequence[Row], length: int) -> Verdict:
    competing = [row.reading for row in rows if row.reading.is_candidate and row.at(length)]
    stretch = _stretch(plan, length)
    return judge(
        length,
        {reading.name: shelf.end(reading, length) for reading in competing},
        shelf.truncations(length, length - stretch),
        block=block_for(len(plan.documents), stretch),
    )


def _panels(plan: Plan, shelf: _Shelf) -> tuple[Panel, ...]:
    methods = [reading for reading in plan.readings if not reading.is_reference]
    factors: list[float | None] = [*sorted({reading.factor for reading in methods if not reading.any_factor})]
    panels = []
    for factor in factors or [max((reading.factor for reading in methods), default=None)]:
        own = [r for r in methods if r.factor == factor or (r.any_factor and factor is not None and r.factor >= factor)]
        length = max(plan.lengths_of(own[0])) if own else plan.lengths[-1]
        references = [reading for reading in plan.readings if reading.is_reference]
        shown = [*references, *(reading for reading in own if length in plan.lengths_of(reading))]
        unpatched = shelf.losses(shelf.unpatched, length)
        truncated = join_best(shelf.truncations(length, 0), edges_for(plan.trained_length, length)[1:])
        series = [
            summarise(
                reading.name,
                truncated.losses if reading.name == TRUNCATED else shelf.losses(reading, length),
                unpatched=unpatched,
                truncated=truncated,
                trained_length=plan.trained_length,
                dynamic=reading.dynamic,
            )
            for reading in shown
        ]
        panels.append(Panel(factor=factor, length=length, series=tuple(series)))
    return tuple(panels)
