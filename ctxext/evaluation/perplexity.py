"""Measure the perplexity of an extended model, and of the references that it has to beat."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctxext import patching
from ctxext.architectures import architecture_of
from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.forward import (
    Progress,
    cached_tokens_for,
    fitted_length_of,
    follows_length,
    pass_cost,
    ticking,
    turning_point,
)
from ctxext.evaluation.loss import (
    STRIDE,
    Scored,
    Spread,
    alone,
    longlora,
    longlora_windows,
    loss_by_position,
    sliding,
    yarn,
)
from ctxext.evaluation.perplexity_result import LENGTH, POSITIONS, PerplexityReading, PerplexityResult, PerplexityScore
from ctxext.evaluation.provenance import provenance_of
from ctxext.evaluation.readings import check_reference, known_trained_length
from ctxext.evaluation.statistics import PairedDifference, check_finite, document_difference
from ctxext.evaluation.truncation import (
    AS_SAVED,
    TRUNCATED,
    UNPATCHED,
    best_window,
    stride_of,
    tail_losses,
    tail_passes,
    tails_cost,
    window_name,
    window_of,
    windows_of,
)
from ctxext.patching import patched_state
from ctxext.saved import already_extended
from ctxext.surgery.wrappers import base_model
from ctxext.texts.corpus import Corpus

MODES = ("position", "sliding", "yarn", "longlora")
PARTS = 4


@dataclass(frozen=True, kw_only=True)
class PerplexityPlan:
    """What is measured, at which lengths and how, checked against the model by ``make_plan``.

    Args:
        mode: one of ``MODES``.
        trained_length: tokens of the longest truncation.
        lengths: tokens, increasing.
        stride: tokens between windows; None in position mode.
        truncate: YaRN's option of that name.
        method: to extend by; None measures the checkpoint as it is.
        arguments: of ``ctxext.patch`` beside the method.
        dynamic: whether the extension's positions follow the length.
        fitted_lengths: for each length, the length that its positions are made for.
        cached: tokens per cached call; None for uncached passes.
        unpatched: whether the unextended model also reads beyond its window, as a negative control.
    """

    mode: str
    trained_length: int
    lengths: tuple[int, ...]
    stride: int | None = None
    truncate: bool = False
    method: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False
    fitted_lengths: Mapping[int, int] = field(default_factory=dict)
    cached: int | None = None
    unpatched: bool = True

    @property
    def length(self) -> int:
        """The greatest length."""
        return self.lengths[-1]


def make_plan(
    model: nn.Module,
    *,
    mode: str = "position",
    lengths: Sequence[int] = (),
    stride: int | None = None,
    truncate: bool = False,
    method: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    memory: int | None = None,
    unpatched: bool = True,
) -> PerplexityPlan:
    """Check what was asked for against the model; the model is at the end what it was.

    Args:
        model: as it was loaded.
        mode: one of ``MODES``.
        lengths: tokens; default what the extended model is meant for. In position mode one length is divided into
            seven spans: up to a quarter, a half and the whole of the trained window, and four equal ones beyond.
        stride: tokens between windows; default an eighth of the shortest length (sliding) or 256 (yarn, longlora).
        truncate: YaRN's option of that name.
        method: to extend by; None measures the checkpoint as it is.
        arguments: of ``ctxext.patch`` beside the method; without factor and target length, the greatest length is
            the target.
        memory: budget in bytes for weights and passes; None for no limit.
        unpatched: see ``PerplexityPlan``.

    Raises:
        CtxextError: as ``ctxext.patch``.
        UnknownNameError: an unknown mode.
        InvalidParameterError: a length, stride or option out of range, or one that the mode does not have.
    """
    if mode not in MODES:
        raise UnknownNameError.of("mode", mode, MODES)
    if (stride is not None and mode == "position") or (truncate and mode != "yarn"):
        raise InvalidParameterError(f"{'truncate' if truncate else 'stride'} has no meaning in mode {mode!r}.")
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    if method is None and given.keys() - {"trained_length"}:
        raise InvalidParameterError(f"{', '.join(given)}: only with a method.")
    trained = known_trained_length(model, given.get("trained_length"))
    if method is not None and not given.keys() & {"factor", "target_length"} and max(lengths, default=0) > trained:
        given["target_length"] = max(lengths)
    reach, dynamic, fitted = _extension(model, method, given, trained)
    chosen = _lengths(mode, lengths, trained, reach, stride)
    _require_reach(model, chosen[-1], reach, dynamic, trained, method)
    return PerplexityPlan(
        mode=mode,
        trained_length=trained,
        lengths=chosen,
        stride=None if mode == "position" else stride or (STRIDE if mode != "sliding" else max(1, chosen[0] // 8)),
        truncate=truncate,
        method=method,
        arguments=given if method is not None else {},
        dynamic=dynamic,
        fitted_lengths={length: fitted(length) for length in chosen},
        cached=cached_tokens_for(model, chosen[-1], memory),
        unpatched=unpatched,
    )


def groups_by_positions(plan: PerplexityPlan) -> dict[int, list[int]]:
    """The lengths of a plan that one pass serves because their positions are the same, by the longest of them."""
    found: dict[int, list[int]] = {}
    for length in plan.lengths:
        found.setdefault(plan.fitted_lengths[length], []).append(length)
    return {max(group): group for group in found.values()}


def _extension(
    model: nn.Module, method: str | None, given: Mapping[str, Any], trained: int
) -> tuple[int | None, bool, Callable[[int], int]]:
    """How far the model reaches once extended, whether it is dynamic, and what lengths share their positions."""
    with patching.patched(model, method, **given) if method is not None else contextlib.nullcontext():
        base = base_model(model)
        found, dynamic = patching.describe(model), follows_length(base)
        extended = dynamic or patched_state(base) is not None or already_extended(base.config) is not None
        return (found.target_length if extended else None), dynamic, fitted_length_of(base, trained)


def _lengths(mode: str, lengths: Sequence[int], trained: int, reach: int | None, stride: int | None) -> tuple[int, ...]:
    asked = sorted(set(lengths)) or [max(reach or 0, trained)]
    if asked[0] < 2 or (stride is not None and stride < 1):
        raise InvalidParameterError(
            f"A length is at least 2 tokens and a stride at least 1, found length={asked[0]}, stride={stride}."
        )
    if mode != "position":
        return tuple(asked)
    if len(asked) > 1:
        return tuple(sorted({*asked, *({trained} if asked[-1] > trained else ())}))
    inside = min(asked[0], trained)
    beyond = [trained + (asked[0] - trained) * part // PARTS for part in range(1, PARTS + 1)]
    spans = {inside // 4, inside // 2, inside, *(beyond if asked[0] > trained else ())}
    return tuple(sorted(length for length in spans if length >= 2))


def _require_reach(
    model: nn.Module, length: int, reach: int | None, dynamic: bool, trained: int, method: str | None
) -> None:
    """Refuse a length that an extension is not meant for, or that the model has no positions for."""
    if reach is not None and length > reach and not dynamic:
        raise InvalidParameterError(
            f"A length of {length:,} tokens is beyond what the model is extended for: {reach:,}. Raise --factor, or "
            f"ask for a smaller --length."
        )
    if method is None and length > trained:
        architecture_of(base_model(model))


def run(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: PerplexityPlan,
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
    plain = None if remembered or saved else model
    if reference is not None and not remembered:
        check_reference(checkpoint, reference)
        plain = reference.model
    work = Passes(plan, corpus, spread, progress, turning_point(model))
    provenance = provenance_of(checkpoint, corpus, trained_length=plan.trained_length)
    readings: list[Losses] = []
    if plain is not None and measured != UNPATCHED:
        provenance = provenance.with_extension(UNPATCHED, plain)
        if work.has_control:
            readings.append(work.read(plain, UNPATCHED, dynamic=False))
    truncations = work.read_truncated(model if plain is None else plain)
    readings += truncations.values()
    with patching.patched(model, plan.method, **plan.arguments) if plan.method else contextlib.nullcontext():
        provenance = provenance.with_extension(measured, model)
        found = work.read(model, measured, dynamic=plan.dynamic)
        comparable = measured != UNPATCHED and (inside is not None or plain is not None)
        own = _inside(work, model, found) if comparable else None
    if plain is not None and own is not None:
        inside = _inside(work, plain, readings[0] if readings else None)
    change = document_difference(own, inside) if own is not None and inside is not None else None
    if truncations:
        readings.append(Losses(TRUNCATED, truncations[max(truncations)].at))  # each score takes the best there
    readings.append(found)
    scoring = _Scoring(plan, found, truncations, change)
    return PerplexityResult(
        mode=plan.mode,
        trained_length=plan.trained_length,
        lengths=plan.lengths,
        stride=plan.stride,
        readings=tuple(map(scoring.reading, readings)),
        notes=_notes(checkpoint, corpus, plan, plain, reference, remembered),
        provenance=provenance,
    )


def window_losses(
    checkpoint: Checkpoint, corpus: Corpus, plan: PerplexityPlan, *, progress: Progress = lambda *_: None
) -> tuple[Tensor, ...]:
    """The losses inside the trained window, nats per token, [tokens] for each text.

    Args:
        checkpoint: as it is before it is extended and trained.
        corpus: that it will be measured on.
        plan: that it will be measured by.
        progress: as for ``run``.
    """
    work = Passes(plan, corpus, alone, progress, turning_point(checkpoint.model))
    return work.pass_over(checkpoint.model, UNPATCHED, work.window)


def total_cost(checkpoint: Checkpoint, corpus: Corpus, plan: PerplexityPlan) -> float:
    """About what ``run`` reports to ``progress`` in all."""
    return Passes(plan, corpus, alone, lambda *_: None, turning_point(checkpoint.model)).cost()


def _inside(work: Passes, model: nn.Module, known: Losses | None) -> Sequence[Tensor]:
    """The losses inside the trained window: out of what was read, or from a pass over just that."""
    name = UNPATCHED if known is None else known.name
    windows_in_order = work.plan.mode != "longlora" and not work.unscored
    in_order = work.plan.mode == "position" or (window_of(name) is not None and windows_in_order)
    if known is None or not in_order:
        return work.pass_over(model, name, work.window)
    nearest = next(scored for length, scored in known.at.items() if length >= work.window)
    return [part[: work.window] for part in nearest.losses]


@dataclass(frozen=True, eq=False)
class _Scoring:
    """Turns losses into scores: averaged as the protocol does, and held against the best truncation."""

    plan: PerplexityPlan
    measured: Losses
    truncations: Mapping[int, Losses]
    inside: PairedDifference | None

    def reading(self, own: Losses) -> PerplexityReading:
        """All scores of a reading: in position mode those between consecutive lengths, then those of the lengths."""
        is_measured = own is self.measured
        spans = [(LENGTH, 0, length) for length in own.at]
        if self.plan.mode == "position":
            spans = [(POSITIONS, *span) for span in itertools.pairwise((0, *self.plan.lengths))] + spans
        return PerplexityReading(
            name=own.name,
            scores=tuple(self._score(own, *span) for span in spans),
            in_window=self.inside if is_measured else None,
            dynamic=self.plan.dynamic and is_measured,
            passes=own.passes,
            tokens=own.tokens,
            seconds=own.seconds,
        )

    def _score(self, own: Losses, kind: str, start: int, stop: int) -> PerplexityScore:
        # The tokens that the protocol scores of the measured model, averaged as it does, are those of the others too.
        # Between two lengths, a dynamic method's losses come from the pass at the greater one.
        weights = self.measured.at[stop]

        def counted(losses: Losses) -> list[Tensor]:
            both = zip(losses.at[stop].losses, weights.losses, strict=True)
            return [part[start : len(measured)] for part, measured in both]

        parts, versus, window = counted(own), None, None
        trained = self.plan.trained_length
        if self.truncations and (start >= trained or (kind == LENGTH and stop > trained)):
            truncated = {window: counted(one) for window, one in self.truncations.items()}
            compared = {window: self._texts(one) for window, one in truncated.items()}
            best = best_window(compared)
            if own.name == TRUNCATED:
                parts, window = truncated[best], best
            else:
                versus = document_difference(self._texts(parts), compared[best], baselines=len(self.truncations))
                window = window_of(own.name)
        return PerplexityScore(
            kind=kind,
            start=start,
            stop=stop,
            tokens=sum(map(len, parts)),
            loss=weights.average(parts),
            versus_truncation=versus,
            window=window,
        )

    def _texts(self, losses: list[Tensor]) -> list[Tensor]:
        """Return what is compared: losses by document, or of LongLoRA's stream, where windows score a token together.

        Neighbouring windows hold the same tokens, so that they would be no independent groups.
        """
        if self.plan.mode != "longlora":
            return losses
        stride = self.plan.stride or len(losses[0])
        places = torch.cat([torch.arange(len(part)) + number * stride for number, part in enumerate(losses)])
        total, count = (
            torch.zeros(int(places.max()) + 1, dtype=torch.float64).index_add_(0, places, part)
            for part in (torch.cat(losses).double(), torch.ones(len(places), dtype=torch.float64))
        )
        return [(total / count)[count > 0]]


def _notes(
    checkpoint: Checkpoint,
    corpus: Corpus,
    plan: PerplexityPlan,
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


@dataclass(frozen=True, eq=False)
class Losses:
    """What one reading gave.

    Args:
        name: of the reading.
        at: by length, in increasing order.
        passes: forward passes.
        tokens: that went through the model.
        seconds: that it took.
    """

    name: str
    at: dict[int, Scored]
    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Passes:
    """What can be asked of a model for one plan and corpus.

    Args:
        plan: from ``make_plan``.
        corpus: of the texts.
        spread: over documents or windows.
        progress: called with what is being done and its cost.
        turning_point: of the model's cost, see ``pass_cost``.
    """

    plan: PerplexityPlan
    corpus: Corpus
    spread: Spread
    progress: Progress
    turning_point: int

    @property
    def texts(self) -> list[Tensor]:
        """Token ids of each text, [1, tokens], the prefix in front."""
        return [document.input_ids for document in self.corpus.documents]

    @property
    def prefix(self) -> int:
        """Tokens in front of each text that are not of the text."""
        return self.corpus.documents[0].prefix

    @property
    def unscored(self) -> int:
        """Positions at the start of each text that YaRN's protocol does not score: they predict prefix tokens."""
        return max(0, self.prefix - 1) if self.plan.mode == "yarn" else 0

    @property
    def bare(self) -> list[Tensor]:
        """Token ids of each text without the prefix: published protocols put one in front themselves, or none."""
        return [ids[:, self.prefix :] for ids in self.texts]

    @property
    def window(self) -> int:
        """Positions inside the trained window that every text has, up to the greatest length."""
        return min(self.plan.trained_length, self.plan.length, *(ids.shape[1] - 1 for ids in self.texts))

    @property
    def has_control(self) -> bool:
        """Whether the unextended model is read beyond its window too, to see it break."""
        plan = self.plan
        return plan.mode == "position" and plan.unpatched and plan.length > plan.trained_length

    def cost(self) -> float:
        """About what the readings cost, in the units of ``pass_cost``; for a progress bar."""
        plan, window, point = self.plan, self.plan.trained_length, self.turning_point
        lengths = groups_by_positions(plan) if plan.mode == "position" else plan.lengths
        own = sum(self._windows(length) * pass_cost(length, point) for length in lengths)
        control = len(self.texts) * pass_cost(plan.length, point) if self.has_control else 0.0
        beyond = sum(
            pass_cost(window, point)
            + tails_cost(
                windows_of(window), start=window, positions=ids.shape[1] - 1, prefix=prefix, turning_point=point
            )
            for _, texts, prefix in self._truncatable()
            for ids in texts
        )
        return own + control + beyond

    def read(self, model: nn.Module, name: str, *, dynamic: bool) -> Losses:
        """The losses at every length, as the mode has it.

        Args:
            model: as it is to be read.
            name: to show.
            dynamic: whether its positions follow the length of the text, so that one pass does not serve all lengths.
        """
        plan, documents, began = self.plan, len(self.texts), time.perf_counter()
        at: dict[int, Scored] = {}
        if plan.mode == "position":
            groups = groups_by_positions(plan) if dynamic else {plan.length: list(plan.lengths)}
            for longest, lengths in groups.items():
                whole = self.pass_over(model, name, longest)
                at |= {length: Scored(tuple(one[:length] for one in whole), None, 0, 0) for length in lengths}
            passes, tokens = len(groups) * documents, sum(groups) * documents
        else:
            at = {length: self._protocol(model, name, length) for length in plan.lengths}
            passes, tokens = sum(one.passes for one in at.values()), sum(one.tokens for one in at.values())
        return Losses(name, dict(sorted(at.items())), passes, tokens, time.perf_counter() - began)

    def read_truncated(self, model: nn.Module) -> dict[int, Losses]:
        """The losses of the tokens that ``read`` scores, by window, when the model sees only the last so many tokens.

        Inside the trained window nothing is dropped. Empty where nothing lies beyond it.

        Args:
            model: that is shown the last tokens.
        """
        found: dict[int, Losses] = {}
        began = time.perf_counter()
        for lengths, texts, prefix in self._truncatable():
            for window, scored in self._truncated(model, texts, prefix).items():
                before = found.get(window, Losses(window_name(window), {}))
                at = before.at | dict.fromkeys(lengths, scored)
                found[window] = Losses(before.name, at, before.passes + scored.passes, before.tokens + scored.tokens)
        seconds = (time.perf_counter() - began) / max(1, sum(one.passes for one in found.values()))
        return {window: replace(one, seconds=seconds * one.passes) for window, one in found.items()}

    def pass_over(self, model: nn.Module, name: str, positions: int) -> tuple[Tensor, ...]:
        """The losses of the first ``positions`` positions of each text, from one pass each."""
        cut = [ids[:, : positions + 1] for ids in self.texts]
        with self._ticking(model, name, positions):
            found = self.spread(cut, lambda ids: loss_by_position(model, ids, cached=self.plan.cached)[0])
        self._check_finite(name, found)
        return tuple(found)

    def _check_finite(self, name: str, losses: Sequence[Tensor]) -> None:
        """Raise ``IncompatibleError``, with the reading and the text, where a loss is no number."""
        names = [document.name for document in self.corpus.documents]
        for number, own in enumerate(losses):
            # LongLoRA joins the texts, so that its losses are of windows.
            text = f"window {number + 1}" if self.plan.mode == "longlora" else names[number]
            check_finite(own, f"{name}, {text}")

    def _ticking(self, model: nn.Module, name: str, tokens: int) -> AbstractContextManager[None]:
        return ticking(model, name, pass_cost(tokens, self.turning_point), self.progress)

    def _truncatable(self) -> list[tuple[Sequence[int], list[Tensor], int]]:
        """What truncations are read of: the lengths at which it counts, texts, and the tokens that stay in front.

        Nothing where nothing lies beyond the trained window.
        """
        plan = self.plan
        beyond = [length for length in plan.lengths if length > plan.trained_length]
        if plan.mode == "longlora":
            return [([length], self._stream(length), 0) for length in beyond]
        most = plan.length + 1 if plan.mode == "position" or plan.truncate else None
        lengths = plan.lengths if plan.mode == "position" else beyond
        return [(lengths, [ids[:, :most] for ids in self.texts], self.prefix)] if beyond else []

    def _stream(self, length: int) -> list[Tensor]:
        """LongLoRA's windows, [1, length] each."""
        stride = self.plan.stride or length
        return [one.input_ids for one in longlora_windows(self.bare, length=length, stride=stride)]

    def _windows(self, length: int) -> int:
        """Passes of a mode at one length."""
        if self.plan.mode == "position" or self.plan.truncate:
            return len(self.texts)
        if self.plan.mode == "longlora":
            return len(self._stream(length))
        return sum(1 + -(-max(0, ids.shape[1] - 1 - length) // (self.plan.stride or length)) for ids in self.texts)

    def _truncated(self, model: nn.Module, texts: list[Tensor], prefix: int) -> dict[int, Scored]:
        """Every window over each text; inside the trained one they are read once."""
        trained, cached = self.plan.trained_length, self.plan.cached
        with self._ticking(model, window_name(trained), trained):
            options = {"length": trained, "stride": stride_of(trained, prefix), "prefix": prefix}
            whole = sliding(model, texts, spread=self.spread, cached=cached, **options)
        self._check_finite(window_name(trained), whole.losses)
        found = {}
        for window in windows_of(trained)[:-1]:
            with self._ticking(model, window_name(window), window):

                def tail(ids: Tensor, window: int = window) -> Tensor:
                    return tail_losses(model, ids, window=window, start=trained, prefix=prefix, cached=cached)[0]

                tails = self.spread(texts, tail)
            self._check_finite(window_name(window), tails)
            losses = [torch.cat([head[:trained], own]) for head, own in zip(whole.losses, tails, strict=True)]
            passes = sum(tail_passes(window, start=trained, positions=len(one), prefix=prefix) for one in losses)
            found[window] = Scored(tuple(losses), None, passes, passes * window)
        found[trained] = whole
        return {
            window: replace(one, losses=tuple(losses[self.unscored :] for losses in one.losses))
            for window, one in found.items()
        }

    def _protocol(self, model: nn.Module, name: str, length: int) -> Scored:
        plan = self.plan
        options: dict[str, Any] = {"length": length, "stride": plan.stride}
        options |= {"spread": self.spread, "cached": plan.cached}
        with self._ticking(model, name, length):
            if plan.mode == "sliding":
                found = sliding(model, self.texts, prefix=self.prefix, **options)
            elif plan.mode == "yarn":
                front = self.texts[0][0, : self.prefix].tolist()
                found = yarn(model, self.bare, front=front, truncate=plan.truncate, **options)
            else:
                found = longlora(model, self.bare, **options)
        self._check_finite(name, found.losses)
        return found
