"""From finished cells to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ctxext.evaluation.comparison.plan import LOSS, PASSKEY, Plan
from ctxext.evaluation.comparison.readings import TRUNCATED, UNPATCHED, Reading
from ctxext.evaluation.comparison.result import ComparisonResult, Panel, PasskeyScore, Row, Score
from ctxext.evaluation.comparison.series import block_for, summarise
from ctxext.evaluation.comparison.store import CellStore
from ctxext.evaluation.comparison.verdict import Verdict, judge
from ctxext.evaluation.perplexity import bucketed, paired_difference

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
        self.truncated = next(reading for reading in plan.readings if reading.name == TRUNCATED)

    def losses(self, reading: Reading, length: int) -> Tensor:
        """[documents, length]; a static reading's come from its one pass over its greatest length."""
        if reading.name == TRUNCATED:
            head = self.losses(self.unpatched, self.plan.trained_length)
            tail = self._rows(reading, self.plan.lengths[-1])[:, : length - self.plan.trained_length]
            return torch.cat([head, tail], dim=1)
        measured = length if reading.dynamic else self.plan.lengths_of(reading)[-1]
        return self._rows(reading, measured)[:, :length]

    def end(self, reading: Reading, length: int) -> Tensor:
        """[documents, positions]: the last stretch before ``length``."""
        return self.losses(reading, length)[:, length - _stretch(self.plan, length) :]

    def _rows(self, reading: Reading, length: int) -> Tensor:
        found = [self.store.outcome(self._line(reading, LOSS, length, i)) for i in range(len(self.plan.documents))]
        return torch.stack([outcome.losses for outcome in found if outcome.losses is not None])

    def passkeys(self, reading: Reading) -> tuple[PasskeyScore, ...]:
        places: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
        hidden: dict[tuple[int, float], bool] = {}
        for index, prompt in enumerate(self.plan.prompts):
            # Inside the window, the truncated reading is the unpatched one.
            inside = prompt.length <= self.plan.trained_length
            asked = self.unpatched if reading.name == TRUNCATED and inside else reading
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
    inside, plain = (shelf.losses(which, window) for which in (reading, shelf.unpatched))
    scores = []
    for length in plan.lengths_of(reading):
        losses = shelf.losses(reading, length)
        start = length - _stretch(plan, length)
        truncated = shelf.end(shelf.truncated, length)
        difference = losses[:, start:].double() - truncated.double()
        block = block_for(documents, length - start)
        beyond = length > window
        score = Score(
            length=length,
            end=bucketed(losses, [start, length])[0],
            whole=bucketed(losses, [0, length])[0],
            versus_truncation=paired_difference(losses[:, start:], truncated, block=block) if beyond else None,
            by_document=tuple(difference.mean(dim=1).tolist()) if beyond else (),
        )
        scores.append(score)
    return Row(
        reading=reading,
        inside=bucketed(inside, [0, window])[0],
        short_context=paired_difference(inside, plain, block=block_for(documents, window)),
        scores=tuple(scores),
        passkeys=shelf.passkeys(reading),
    )


def _verdict(plan: Plan, shelf: _Shelf, rows: Sequence[Row], length: int) -> Verdict:
    competing = [row.reading for row in rows if row.reading.is_candidate and row.at(length)]
    return judge(
        length,
        {reading.name: shelf.end(reading, length) for reading in competing},
        shelf.end(shelf.truncated, length),
        block=block_for(len(plan.documents), _stretch(plan, length)),
    )


def _panels(plan: Plan, shelf: _Shelf) -> tuple[Panel, ...]:
    methods = [reading for reading in plan.readings if not reading.is_reference]
    factors: list[float | None] = [*sorted({reading.factor for reading in methods if not reading.any_factor})]
    panels = []
    for factor in factors or [max((reading.factor for reading in methods), default=None)]:
        own = [r for r in methods if r.factor == factor or (r.any_factor and factor is not None and r.factor >= factor)]
        length = max(plan.lengths_of(own[0])) if own else plan.lengths[-1]
        shown = [shelf.unpatched, shelf.truncated, *(r for r in own if length in plan.lengths_of(r))]
        unpatched, truncated = (shelf.losses(reading, length) for reading in shown[:2])
        series = [
            summarise(
                reading.name,
                shelf.losses(reading, length),
                unpatched=unpatched,
                truncated=truncated,
                trained_length=plan.trained_length,
                dynamic=reading.dynamic,
            )
            for reading in shown
        ]
        panels.append(Panel(factor=factor, length=length, series=tuple(series)))
    return tuple(panels)
