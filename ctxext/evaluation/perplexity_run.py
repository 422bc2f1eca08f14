"""Measure the perplexity of an extended model, and of the references that it has to beat."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

import ctxext
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.corpus import Corpus
from ctxext.evaluation.perplexity import PairedDifference, document_difference, grouped_difference
from ctxext.evaluation.perplexity_plan import Plan
from ctxext.evaluation.perplexity_result import LENGTH, POSITIONS, PerplexityResult, Reading, Score
from ctxext.evaluation.perplexity_work import Losses, Work
from ctxext.evaluation.progress import Progress, turning_point
from ctxext.evaluation.protocols import Spread, alone
from ctxext.evaluation.provenance import provenance_of
from ctxext.evaluation.truncation import TRUNCATED, UNPATCHED, best_window, window_name, window_of
from ctxext.saved import already_extended
from ctxext.surgery.wrappers import base_model

__all__ = ["run", "total_cost", "window_losses"]

AS_SAVED = "as saved"
Timed = tuple[str, Losses, float]
Truncations = Mapping[int, Losses]


def run(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: Plan,
    *,
    reference: Checkpoint | None = None,
    inside: Sequence[Tensor] | None = None,
    name: str | None = None,
    spread: Spread = alone,
    progress: Progress = lambda *_: None,
) -> PerplexityResult:
    """Measure the references, then the extended model; it is patched in place and at the end what it was.

    The references are read by the checkpoint unpatched. A checkpoint that comes extended may have been trained since,
    so that taking its extension off gives a model that nobody uses: then they are read by ``reference``, or, without
    one, the truncations by the extended model itself and the short-context column is left out.

    Args:
        checkpoint: what to measure.
        corpus: of the texts; each longer than the greatest length (longlora: all together).
        plan: from ``make_plan``.
        reference: the checkpoint as it was before it was extended and trained, with the same tokenizer.
        inside: instead of ``reference``, where the original is there no more: what ``window_losses`` found then. The
            truncations are read by the extended model itself.
        name: of what is measured; default the method's.
        spread: over documents or windows, perhaps on several processes.
        progress: called with what is being done and the cost done since the last call (``total_cost`` in all).

    Raises:
        CtxextError: as ``ctxext.patch`` and the evaluations do.
    """
    model = checkpoint.model
    saved = plan.method is None and already_extended(base_model(model).config) is not None
    measured = name or plan.method or (AS_SAVED if saved else UNPATCHED)
    remembered = inside is not None
    plain = None if remembered else _plain_model(checkpoint, plan, reference, saved)
    work = Work(plan, corpus, spread, progress, turning_point(model))
    provenance = provenance_of(checkpoint, corpus)
    readings: list[Timed] = []
    if plain is not None and measured != UNPATCHED:
        provenance = provenance.with_extension(UNPATCHED, plain)
        if work.has_control:
            readings.append(_timed(UNPATCHED, lambda: work.read(plain, UNPATCHED, dynamic=False)))
    began = time.perf_counter()
    truncations = work.read_truncated(model if plain is None else plain)
    seconds = (time.perf_counter() - began) / max(1, sum(one.passes for one in truncations.values()))
    readings += [(window_name(size), one, seconds * one.passes) for size, one in truncations.items()]
    with _patched(model, plan):
        provenance = provenance.with_extension(measured, model)
        found = _timed(measured, lambda: work.read(model, measured, dynamic=plan.dynamic))
        comparable = measured != UNPATCHED and (inside is not None or plain is not None)
        own = _inside(work, model, found) if comparable else None
    if plain is not None and own is not None:
        inside = _inside(work, plain, readings[0] if readings else (UNPATCHED, None, 0.0))
    change = document_difference(own, inside) if own is not None and inside is not None else None
    if truncations:
        readings.append((TRUNCATED, Losses(truncations[max(truncations)].at, 0, 0), 0.0))  # put together below
    readings.append(found)
    return PerplexityResult(
        mode=plan.mode,
        trained_length=plan.trained_length,
        lengths=plan.lengths,
        stride=plan.stride,
        readings=tuple(_reading(plan, one, found[1], truncations, measured, change) for one in readings),
        notes=_notes(checkpoint, corpus, plan, plain, reference, remembered),
        provenance=provenance,
    )


def window_losses(
    checkpoint: Checkpoint, corpus: Corpus, plan: Plan, *, progress: Progress = lambda *_: None
) -> tuple[Tensor, ...]:
    """The losses inside the trained window, nats per token, [tokens] for each text.

    Args:
        checkpoint: as it is before it is extended and trained.
        corpus: that it will be measured on.
        plan: that it will be measured by.
        progress: as for ``run``.
    """
    work = Work(plan, corpus, alone, progress, turning_point(checkpoint.model))
    return work.pass_over(checkpoint.model, UNPATCHED, work.window)


def total_cost(checkpoint: Checkpoint, corpus: Corpus, plan: Plan) -> float:
    """About what ``run`` reports to ``progress`` in all."""
    return Work(plan, corpus, alone, lambda *_: None, turning_point(checkpoint.model)).cost()


def _plain_model(checkpoint: Checkpoint, plan: Plan, reference: Checkpoint | None, saved: bool) -> nn.Module | None:
    """The model of the references, as far as there is one."""
    if reference is None:
        return None if saved else checkpoint.model
    if already_extended(base_model(reference.model).config):
        raise InvalidParameterError(f"The reference {reference.name} is extended itself; give the original checkpoint.")
    if reference.tokenizer.get_vocab() != checkpoint.tokenizer.get_vocab():
        raise InvalidParameterError(
            f"The reference {reference.name} has another tokenizer than {checkpoint.name}; losses per token cannot be "
            f"compared."
        )
    return reference.model


@contextlib.contextmanager
def _patched(model: nn.Module, plan: Plan) -> Iterator[None]:
    if plan.method is None:
        yield
        return
    ctxext.patch(model, plan.method, **plan.arguments)
    try:
        yield
    finally:
        ctxext.unpatch(model)


def _timed(name: str, read: Callable[[], Losses]) -> Timed:
    began = time.perf_counter()
    losses = read()
    return name, losses, time.perf_counter() - began


def _inside(work: Work, model: nn.Module, known: tuple[str, Losses | None, float]) -> Sequence[Tensor]:
    """The losses inside the trained window: out of what was read, or from a pass over just that."""
    name, losses, _ = known
    in_order = work.plan.mode == "position" or (window_of(name) is not None and work.plan.mode != "longlora")
    if losses is None or not in_order:
        return work.pass_over(model, name, work.window)
    nearest = next(scored for length, scored in losses.at.items() if length >= work.window)
    return [part[: work.window] for part in nearest.losses]


def _reading(
    plan: Plan,
    timed: Timed,
    measured: Losses,
    truncations: Truncations,
    name: str,
    inside: PairedDifference | None,
) -> Reading:
    own, losses, seconds = timed
    scores = _position_scores(plan, own, losses, truncations) if plan.mode == "position" else []
    for length, scored in losses.at.items():
        # The tokens that the protocol scores, averaged as the protocol does it, for the baselines too.
        weights = measured.at[length]
        beyond = truncations if length > plan.trained_length else {}
        cut = {window: _cut(one.at[length].losses, weights.losses) for window, one in beyond.items()}
        best = best_window(cut) if cut else None
        parts = cut[best] if own == TRUNCATED and best is not None else _cut(scored.losses, weights.losses)
        versus = None if best is None or own == TRUNCATED else _difference(plan, length, parts, cut[best], len(cut))
        scores.append(
            Score(
                kind=LENGTH,
                start=0,
                stop=length,
                tokens=sum(map(len, parts)),
                loss=weights.average(parts),
                versus_truncation=versus,
                window=_window(own, best),
            )
        )
    return Reading(
        name=own,
        scores=tuple(scores),
        in_window=inside if own == name else None,
        dynamic=plan.dynamic and own == name,
        passes=losses.passes,
        tokens=losses.tokens,
        seconds=seconds,
    )


def _cut(losses: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [part[: len(one)] for part, one in zip(losses, like, strict=True)]


def _window(name: str, best: int | None) -> int | None:
    """The window that a truncation sees beyond the trained length."""
    return None if best is None else best if name == TRUNCATED else window_of(name)


def _position_scores(plan: Plan, name: str, losses: Losses, truncations: Truncations) -> list[Score]:
    """Mean losses between consecutive lengths; a dynamic method's come from the pass at the greater one."""
    scores = []
    for start, stop in itertools.pairwise((0, *plan.lengths)):
        cut = {
            window: [part[start:stop] for part in one.at[stop].losses]
            for window, one in truncations.items()
            if start >= plan.trained_length or name == TRUNCATED
        }
        best = best_window(cut) if cut else None
        parts = [part[start:stop] for part in losses.at[stop].losses]
        difference = None
        if name == TRUNCATED and best is not None:
            parts = cut[best]
        elif best is not None:
            difference = document_difference(parts, cut[best], baselines=len(cut))
        tokens = sum(map(len, parts))
        mean = sum(part.double().sum().item() for part in parts) / tokens
        scores.append(
            Score(
                kind=POSITIONS,
                start=start,
                stop=stop,
                tokens=tokens,
                loss=mean,
                versus_truncation=difference,
                window=_window(name, best if start >= plan.trained_length else None),
            )
        )
    return scores


def _difference(
    plan: Plan, length: int, losses: list[Tensor], other: list[Tensor], baselines: int
) -> PairedDifference | None:
    if plan.mode != "longlora":
        return document_difference(losses, other, baselines=baselines)
    # Neighbouring windows hold the same tokens; runs as long as a window are as good as independent.
    run = -(-length // (plan.stride or length))
    sides = [[torch.cat(side[at : at + run]) for at in range(0, len(side), run)] for side in (losses, other)]
    return grouped_difference(*sides, over="runs", baselines=baselines) if len(sides[0]) > 1 else None


def _notes(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: Plan,
    plain: nn.Module | None,
    reference: Checkpoint | None,
    remembered: bool,
) -> tuple[str, ...]:
    found = [f"In front of each text: {corpus.prefix}. Weights and arithmetic: {checkpoint.dtype_note}."]
    if plan.dynamic and plan.mode == "position":
        found.append("Positions follow the length here: every length has a pass of its own, at that length.")
    if plan.mode == "yarn":
        form = "texts cut to the length" if plan.truncate else f"windows every {plan.stride} tokens"
        found.append(f"YaRN's published protocol ({form}): the mean loss of each window counts the same.")
    if plan.mode == "longlora":
        found.append(
            "LongLoRA's published protocol: texts joined, every window scores all its tokens, so this is the mean over "
            "all context lengths below the window's."
        )
    if remembered:
        found.append("The truncations are read by the extended model itself.")
    elif plain is None:
        found.append(
            "The checkpoint came extended, so the extended model itself reads the truncations; name the original "
            "with --reference to compare with that, inside the window too."
        )
    elif reference is not None:
        found.append(f"The references are read by {reference.name}.")
    if plan.cached is not None:
        found.append(f"To fit the memory budget, texts were read {plan.cached:,} tokens at a time with a KV cache.")
    return tuple(found)
