"""Who reads the prompts, and at which lengths: the references, and the checkpoint extended by every method named."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.labels import label_of
from ctxext.evaluation.provenance import setting_of
from ctxext.evaluation.readings import Reading, Wardrobe, chosen_methods
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, window_name

__all__ = ["AS_SAVED", "Panel", "Reader", "factors_for", "make_panel"]

AS_SAVED = "as saved"


@dataclass(frozen=True, eq=False)
class Reader:
    """One way to read, with the model that reads so.

    Args:
        reading: its name, method and fingerprint.
        wardrobe: of the model.
        lengths: tokens at which it is asked, increasing.
        window: tokens that it is shown at most, the last ones; None shows it everything.
        setting: what every answer depends on beside reading and prompt, as JSON values.
    """

    reading: Reading
    wardrobe: Wardrobe
    lengths: tuple[int, ...]
    window: int | None
    setting: dict[str, Any]

    def wearing(self) -> contextlib.AbstractContextManager[None]:
        """The model as this reader has it, inside a ``with``."""
        return self.wardrobe.wearing(self.reading)

    @property
    def model(self) -> nn.Module:
        """As this reader has it while ``wearing``."""
        return self.wardrobe.model


@dataclass(frozen=True, eq=False)
class Panel:
    """All readers.

    Args:
        readers: the references first.
        lengths: of all of them, increasing.
        trained_length: tokens that the checkpoint was trained for.
    """

    readers: tuple[Reader, ...]
    lengths: tuple[int, ...]
    trained_length: int


def make_panel(
    checkpoint: Checkpoint,
    *,
    methods: Sequence[str] = (),
    factors: Sequence[float] = (),
    lengths: Sequence[int] = (),
    reference: Checkpoint | None = None,
    unpatched: bool = True,
    beyond: bool = False,
    trained_length: int | None = None,
    sliding_window: str | None = None,
) -> Panel:
    """Find the readers; the model is at the end what it was.

    A reader is asked at the lengths that it is meant for; the truncated one at all: it is shown the last tokens of the
    trained window, and not fewer, since what is to be found may stand anywhere; the unpatched one beyond its window
    too, as the control, where something is extended.

    Args:
        checkpoint: to measure.
        methods: names, with parameters behind them where needed; none measures the checkpoint as it is.
        factors: at which to extend; none for the one that the greatest length needs, or 2 where no length is given.
        lengths: tokens; none for the trained length and the reach of every method.
        reference: the original of a checkpoint that comes extended, which reads for the references.
        unpatched: whether the control reads beyond its window.
        beyond: allow lengths for which a reader is not meant, to see how it fails.
        trained_length: tokens that the checkpoint was trained for; None where its config says so.
        sliding_window: see ``ctxext.patch``.

    Raises:
        InvalidParameterError: a length that no reader is meant for, factors without methods, or a reference that makes
            no sense.
        IncompatibleError: a method that cannot be right on this model.
        UnknownNameError: an unknown method.
    """
    own = Wardrobe(checkpoint.model, trained_length=trained_length, sliding_window=sliding_window)
    plain, candidates = _candidates(own, methods, factors_for(methods, factors, lengths, own.trained_length))
    original = own if reference is None else _reference(checkpoint, reference, own, sliding_window)
    last = label_of(window_name(own.trained_length))
    references = [Reading(name=UNPATCHED, label=UNPATCHED), Reading(name=TRUNCATED, label=last)]
    if own.extended is not None:
        candidates = (plain, *candidates)
        if reference is None:  # the model as saved, cut off: inside the window its answers are the whole one's
            references = [replace(plain, name=TRUNCATED, label=last, reach=None)]
    wanted = _lengths(lengths, candidates, own.trained_length, beyond)
    if wanted[-1] <= own.trained_length:  # inside the window, the truncated reading is the unpatched one
        references = [reading for reading in references if reading.name != TRUNCATED]
    readers = []
    for reading in (*references, *candidates):
        wardrobe = own if reading in candidates else original
        allowed = [
            n for n in wanted if _is_asked(reading, n, own.trained_length, bool(candidates) and unpatched, beyond)
        ]
        if allowed:
            window = own.trained_length if reading.name == TRUNCATED else None
            setting = setting_of(checkpoint if wardrobe is own else reference or checkpoint, sliding_window)
            readers.append(Reader(reading, wardrobe, tuple(allowed), window, setting))
    return Panel(tuple(readers), wanted, own.trained_length)


def _candidates(
    wardrobe: Wardrobe, methods: Sequence[str], factors: Sequence[float]
) -> tuple[Reading, tuple[Reading, ...]]:
    """The model as it is, and extended by each method at each factor."""
    chosen = chosen_methods(wardrobe.model, methods, factors) if methods else ()
    (plain, *others), refusals = wardrobe.find_readings(chosen)
    if refusals:
        raise IncompatibleError(f"{refusals[0].label}: {refusals[0].reason}")
    if wardrobe.extended is not None:
        plain = replace(plain, name=AS_SAVED)
    return plain, tuple(reading for reading in others if not reading.is_reference)


def _reference(checkpoint: Checkpoint, reference: Checkpoint, own: Wardrobe, sliding_window: str | None) -> Wardrobe:
    if own.extended is None:
        raise InvalidParameterError(
            f"{checkpoint.name} does not come extended: it is its own reference. Leave out the reference "
            f"{reference.name}."
        )
    found = Wardrobe(reference.model, trained_length=own.trained_length, sliding_window=sliding_window)
    if found.extended is not None:
        raise InvalidParameterError(f"The reference {reference.name} is extended itself; give the original checkpoint.")
    if reference.tokenizer.get_vocab() != checkpoint.tokenizer.get_vocab():
        raise InvalidParameterError(
            f"The reference {reference.name} has another tokenizer than {checkpoint.name}, so that it would read other "
            f"prompts."
        )
    return found


def factors_for(methods: Sequence[str], factors: Sequence[float], lengths: Sequence[int], trained: int) -> list[float]:
    """The factors asked for; without any, the one that the greatest length needs, or 2 where no length is given.

    Raises:
        InvalidParameterError: a factor without a method, or no factor and no length beyond the trained one.
    """
    if factors and not methods:
        raise InvalidParameterError(f"A factor of {factors[0]:g} is for a method; name one with --method.")
    if factors or not lengths:
        return list(factors) or [2.0]
    if methods and max(lengths) <= trained:
        raise InvalidParameterError(
            f"The greatest length, {max(lengths):,} tokens, is inside the trained {trained:,}, so that it does not say "
            f"by how much to extend. Give a --factor."
        )
    return [max(1.0, max(lengths) / trained)]


def _lengths(lengths: Sequence[int], candidates: Sequence[Reading], trained: int, beyond: bool) -> tuple[int, ...]:
    reaches = {reading.reach for reading in candidates if reading.reach is not None}
    wanted = sorted(set(lengths) or {trained, *reaches})
    reach = max(reaches, default=trained)
    if wanted[-1] > reach and not beyond and not any(reading.dynamic for reading in candidates):
        furthest = "what is extended here reaches" if candidates else "this model is trained for"
        raise InvalidParameterError(
            f"{wanted[-1]:,} tokens are more than the {reach:,} that {furthest}. Ask for fewer, extend further "
            f"(--method and --factor), or allow it, to see how it fails (--beyond)."
        )
    return tuple(wanted)


def _is_asked(reading: Reading, length: int, trained: int, control: bool, beyond: bool) -> bool:
    if beyond or reading.name == TRUNCATED or length <= trained:
        return True
    if not reading.is_candidate:
        return control
    return reading.dynamic or length <= (reading.reach or 0)
