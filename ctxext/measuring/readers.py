"""The readers of a retrieval test: references and extensions, and the lengths that each is meant for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ctxext.errors import InvalidParameterError
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import check_positions
from ctxext.measuring.labels import label_of
from ctxext.measuring.readings import Reader, Reading, Readings, check_reference, chosen_methods
from ctxext.measuring.truncation import AS_SAVED, TRUNCATED, UNPATCHED, window_name
from ctxext.methods import is_choice
from ctxext.quantities import method_said


def find_readers(
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
) -> tuple[Reader, ...]:
    """Return the readers for a retrieval test, references first, and leave the model unchanged.

    A reader is asked at the lengths that it is meant for. The truncated reader is asked at all lengths: it sees the
    last tokens of the text, as many as the trained window holds, and not fewer, since the hidden thing may be anywhere.
    The unpatched reader is asked beyond its window too, as the control, where something is extended, unless its
    positions end there.

    Args:
        methods: names, with parameters behind them where needed; none measures the checkpoint as it is.
        factors: Factors to extend by; none for the one that the greatest length needs, or 2 without a length.
        lengths: tokens; none for the trained length and the reach of every method.
        reference: the original of a checkpoint that comes extended, which reads for the references.
        unpatched: True lets the control read beyond its window.
        beyond: True allows lengths for which a reader is not meant, to see how it fails, where it has positions there.
        trained_length: tokens that the checkpoint was trained for; None where its config says so.

    Raises:
        InvalidParameterError: a length that no reader is meant for, a method that reaches none, factors without
            methods, or a reference that makes no sense.
        IncompatibleError: a method that cannot be right on this model.
        UnknownNameError: an unknown method.
    """
    of_checkpoint = Readings(checkpoint, trained_length=trained_length, sliding_window=sliding_window)
    trained = of_checkpoint.trained_length
    factors = factors_for(methods, factors, lengths, trained)
    chosen = chosen_methods(checkpoint.subject, methods, factors, trained) if methods else ()
    plain, candidates = of_checkpoint.extensions(chosen)
    original = of_checkpoint if reference is None else _original(of_checkpoint, reference)
    last = label_of(window_name(trained))
    references = [Reading(name=UNPATCHED, label=UNPATCHED), Reading(name=TRUNCATED, label=last)]
    if of_checkpoint.extended is not None:
        plain = replace(plain, name=AS_SAVED)
        candidates = [plain, *candidates]
        if reference is None:  # the model as saved, cut off: inside the window its answers are the whole one's
            references = [replace(plain, name=TRUNCATED, label=last, reach=None)]
    is_endless = of_checkpoint.most is None
    beyond = beyond and is_endless
    wanted = _lengths(lengths, candidates, trained, beyond)
    if not candidates:
        check_positions(checkpoint.subject, wanted[-1])
    if wanted[-1] <= trained:  # inside the window, the truncated reading is the unpatched one
        references = [reading for reading in references if reading.name != TRUNCATED]
    control = bool(candidates) and unpatched and is_endless

    def is_asked(reading: Reading, length: int) -> bool:
        if beyond or reading.name == TRUNCATED or length <= trained:
            return True
        return reading.dynamic or length <= (reading.reach or 0) if reading.is_candidate else control

    readers = []
    for reading in (*references, *candidates):
        asked = tuple(length for length in wanted if is_asked(reading, length))
        if asked:
            readers.append(Reader(reading, of_checkpoint if reading in candidates else original, asked))
        elif reading.is_candidate and reading.name != AS_SAVED:
            raise InvalidParameterError(
                f"{reading.label} reaches {reading.reach:,} tokens, fewer than every length asked for. Leave it out, "
                f"or ask for a smaller --length."
            )
    return tuple(readers)


def _original(own: Readings, reference: Checkpoint) -> Readings:
    """Return the readings of the checkpoint that ``own`` was made from."""
    if own.extended is None:
        raise InvalidParameterError(
            f"{own.checkpoint.name} does not come extended: it is its own reference. Leave out the reference "
            f"{reference.name}."
        )
    check_reference(own.checkpoint, reference)
    return Readings(reference, trained_length=own.trained_length, sliding_window=own.sliding_window)


def factors_for(methods: Sequence[str], factors: Sequence[float], lengths: Sequence[int], trained: int) -> list[float]:
    """Return the given factors; without any, the factor of the greatest length, or 2 if no length is given.

    Raises:
        InvalidParameterError: a factor without a method, or no factor and no length beyond the trained one.
    """
    if factors and not methods:
        raise InvalidParameterError(f"A factor of {factors[0]:g} is for a method; name one with --method.")
    if factors or not lengths:
        return list(factors) or [2.0]
    unsaid = [said for said in methods if not is_choice(said) and "factor" not in method_said(said)[1]]
    if unsaid and max(lengths) <= trained:
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
            f"(--method and --factor), or allow it, to see how it fails, if it has positions there (--beyond)."
        )
    return tuple(wanted)
