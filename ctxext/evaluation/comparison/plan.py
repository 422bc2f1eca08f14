"""The plan of a comparison: cells, each of which is computed, kept and resumed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.forward import Progress, pass_cost, ticking
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.passkey import JUDGED, PasskeyPrompt
from ctxext.evaluation.readings import Reader, Reading, Readings, Refusal, require_reached
from ctxext.evaluation.statistics import check_finite, edges_for
from ctxext.evaluation.survey import Answer, Job
from ctxext.evaluation.truncation import TRUNCATED, tail_losses, tail_passes
from ctxext.texts.corpus import TokenisedDocument

LOSS, PASSKEY = "loss", "passkey"


@dataclass(frozen=True, eq=False, kw_only=True)
class Cell(Job):
    """One reading of one document or prompt.

    Args:
        kind: ``loss`` or ``passkey``.
        length: tokens that the model may see.
        item: what is read, to show.
        index: of the document or prompt in the plan.
        passes: forward passes that the cost is spread over; for a passkey, at most.
        text: the document, or the prompt.
    """

    kind: str
    length: int
    item: str
    index: int
    passes: int
    text: TokenisedDocument | PasskeyPrompt

    def ask(self, model: nn.Module, progress: Progress) -> Answer:
        """Compute the losses of the document, or whether the key is found."""
        about = {"kind": self.kind, "length": self.length, "item": self.item}
        if isinstance(self.text, PasskeyPrompt):
            trial = self.text.watched(model, self.reader.window, self.name, self.cost, progress)
            return Answer(about | {"correct": trial.correct, "loss": trial.loss})
        with ticking(model, self.name, self.cost / self.passes, progress):
            losses = self._losses(model, self.text)
        check_finite(losses, self.name)
        return Answer(about, losses)

    def _losses(self, model: nn.Module, text: TokenisedDocument) -> Tensor:
        window, trained = self.reader.window, self.reader.readings.trained_length
        if window is None:
            return loss_by_position(model, text.input_ids)[0]
        return tail_losses(model, text.input_ids, window=window, start=trained, prefix=text.prefix)[0]


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
        """Return the lengths that a reading is meant for."""
        return tuple(length for length in self.lengths if reading.is_reference or length <= (reading.reach or 0))


def make_plan(
    model: Readings,
    *,
    readings: Sequence[Reading],
    refusals: Sequence[Refusal] = (),
    documents: Sequence[TokenisedDocument],
    prompts: Sequence[PasskeyPrompt] = (),
    lengths: Sequence[int],
    turning_point: int,
) -> ComparisonPlan:
    """Lay out the cells.

    Args:
        model: that the readings are of.
        readings: from ``Readings.find``.
        refusals: from ``Readings.find``.
        documents: each at least one token longer than the greatest length; what is more is cut off.
        prompts: from ``make_prompts``.
        lengths: from ``check_lengths``.
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
    refused = (*refusals, *short)
    frame = ComparisonPlan(tuple(reaching), refused, cut, tuple(prompts), model.trained_length, tuple(lengths), ())
    readers = [Reader(reading, model, frame.lengths_of(reading)) for reading in reaching]
    return replace(frame, cells=tuple(cell for reader in readers for cell in _cells(frame, reader, turning_point)))


def check_lengths(lengths: Sequence[int], trained_length: int, readings: Sequence[Reading]) -> tuple[int, ...]:
    """Return the trained length and the lengths asked for, increasing; by default every method's reach.

    Args:
        lengths: asked for; empty for the default.
        trained_length: tokens that the checkpoint was trained for.
        readings: from ``find_readings``.

    Raises:
        InvalidParameterError: a length that no method is patched for, or none beyond the trained length.
    """
    reaches = sorted({reading.reach for reading in readings if reading.reach is not None})
    wanted = sorted({*(lengths or reaches), trained_length})
    require_reached(wanted[-1], reaches, trained_length)
    if wanted[0] < trained_length or len(wanted) < 2:
        lengths_found = ", ".join(f"{length:,}" for length in wanted)
        raise InvalidParameterError(
            f"A comparison reads beyond the trained {trained_length:,} tokens (what happens inside is in every table); "
            f"found lengths of {lengths_found}. Give a --length above it, or a --factor above 1."
        )
    edges_for(trained_length, wanted[1])
    return tuple(wanted)


def _cells(plan: ComparisonPlan, reader: Reader, turning_point: int) -> list[Cell]:
    reading, lengths, window, trained = reader.reading, reader.lengths, reader.reading.window, plan.trained_length
    prefix = plan.documents[0].prefix
    cells: list[Cell] = []
    if reading.name == TRUNCATED:
        return cells  # the best of the windows, each of which is measured by itself
    # The longest window has the name that it had when it was the only one: what was measured then still holds.
    name = TRUNCATED if window == trained else reading.name

    def add(
        text: TokenisedDocument | PasskeyPrompt, index: int, length: int, item: str, task: list[Any], passes: int
    ) -> None:
        kind = PASSKEY if isinstance(text, PasskeyPrompt) else LOSS
        cells.append(
            Cell(
                key=reader.readings.key([name, reading.method, reading.fingerprint], task=[kind, length, *task]),
                cost=passes * pass_cost(window or length, turning_point),
                reader=reader,
                name=f"{reading.label}, {item}, {length:,} tokens",
                kind=kind,
                length=length,
                item=item,
                index=index,
                passes=passes,
                text=text,
            )
        )

    passes = 1 if window is None else tail_passes(window, start=trained, positions=lengths[-1], prefix=prefix)
    for length in lengths if reading.dynamic else lengths[-1:]:
        for index, document in enumerate(plan.documents):
            text = document.take(length + 1)
            add(text, index, length, document.name, [text.sha256, 0], passes)
    for index, prompt in enumerate(plan.prompts):
        # A key is looked for in all that fits; inside the window, the truncated reading is the unpatched one.
        if prompt.length in lengths and (window is None or (window == trained < prompt.length)):
            key = prompt.passkey
            item = f"passkey at depth {key.depth:g}, seed {prompt.seed}"
            most = len(key.answer) if reading.dynamic and prompt.length > trained else 1
            add(prompt, index, prompt.length, item, [key.sha256, prompt.seed, JUDGED], most)
    return cells
