"""The demo's measurements: one model, patched and unpatched in place, on the same tokens each time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import ctxext
from ctxext.errors import InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.comparison import Series, edges_for, summarise
from ctxext.evaluation.corpus import TokenisedDocument
from ctxext.evaluation.passkey import PasskeyTrial
from ctxext.evaluation.perplexity import loss_by_position
from ctxext.evaluation.progress import Progress, pass_cost, ticking
from ctxext.evaluation.provenance import machine, versions
from ctxext.evaluation.truncation import (
    TRUNCATED,
    UNPATCHED,
    all_tails,
    is_reference,
    join_best,
    tails_cost,
    window_name,
    windows_of,
)
from ctxext.methods import Method

__all__ = ["DemoResult", "PasskeyRow", "Plan", "make_plan", "run_demo"]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Args:
        methods: applied in turn, each to the unpatched model.
        trained_length: tokens the checkpoint was trained for.
        length: tokens to measure, above the trained length.
        passkey_method: index into ``methods`` of the one that the passkey is asked of, None for no passkey.
        passkey_length: tokens in a passkey prompt.
        depths: of the key in the prompt, 0 to 1.
        seed: of the passkeys.
    """

    methods: tuple[Method, ...]
    trained_length: int
    length: int
    passkey_method: int | None
    passkey_length: int
    depths: tuple[float, ...]
    seed: int = 0

    def cost(self, documents: int) -> float:
        """Total cost in the units of ``pass_cost``."""
        texts = (1 + len(self.methods)) * pass_cost(self.length) + tails_cost(self.length, self.trained_length)
        keys = 0 if self.passkey_method is None else 2 * len(self.depths)
        return documents * texts + keys * pass_cost(self.passkey_length)


@dataclass(frozen=True)
class PasskeyRow:
    """What one way of reading did with the passkeys."""

    name: str
    trials: tuple[PasskeyTrial, ...]
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured, and what it was measured on."""

    checkpoint: str
    texts: tuple[str, ...]
    trained_length: int
    length: int
    factor: float
    series: tuple[Series, ...]
    passkeys: tuple[PasskeyRow, ...]
    seconds: float
    text_sha256: tuple[str, ...]
    fingerprints: dict[str, str]
    dtype: str
    device: str
    seed: int
    made_by: str = "ctxext demo"
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""

    def of(self, name: str) -> Series:
        """The series of one name."""
        return next(series for series in self.series if series.name == name)

    @property
    def extended(self) -> tuple[Series, ...]:
        """The series of the methods, without the references."""
        return tuple(series for series in self.series if not is_reference(series.name))


def make_plan(
    model: nn.Module, methods: Sequence[str], *, factor: float, length: int | None, with_passkey: bool, seed: int = 0
) -> Plan:
    """Check what the user asked for against the checkpoint, before anything is computed.

    Raises:
        UnknownNameError: an unknown method.
        InvalidParameterError: a factor or length out of range, a method twice, or no method at all.
    """
    trained = ctxext.describe(model).trained_length
    if trained is None:
        raise InvalidParameterError("The checkpoint's config does not say for how many tokens it was trained.")
    if not methods or len(set(methods)) != len(methods):
        raise InvalidParameterError(f"Give each method once, and at least one; found {', '.join(methods) or 'none'}.")
    built = tuple(ctxext.method(name, factor=factor) for name in methods)
    reach = int(trained * factor + 1e-6)
    wanted = reach if length is None else length
    if not trained < wanted <= reach:
        raise InvalidParameterError(
            f"length must be above the trained length of {trained:,} tokens and at most {reach:,} (factor {factor:g} "
            f"times it), found {wanted:,}. Raise --factor to go further."
        )
    edges_for(trained, wanted)
    key_length = min(wanted - 16, trained * 3 // 2)
    beyond = max(0.0, 1 - trained / key_length)
    depths = tuple(round(part * beyond, 2) for part in (0.0, 0.6))
    index = (methods.index("yarn") if "yarn" in methods else len(methods) - 1) if with_passkey else None
    return Plan(built, trained, wanted, index, key_length, tuple(dict.fromkeys(depths)), seed)


def run_demo(
    checkpoint: Checkpoint, passages: Sequence[TokenisedDocument], plan: Plan, *, progress: Progress = lambda *_: None
) -> DemoResult:
    """Measure the unpatched model, the truncations and every method, then ask for the passkeys.

    The model is patched and unpatched in place and is at the end what it was at the start.

    Args:
        checkpoint: what to measure.
        passages: each of ``plan.length + 1`` tokens.
        plan: from ``make_plan``.
        progress: called with what is being done and the cost done since the last call (``Plan.cost`` is the total).

    Raises:
        CtxextError: as ``ctxext.patch`` and the evaluations do.
    """
    began = time.perf_counter()
    device = next(checkpoint.model.parameters()).device
    model, trained = checkpoint.model, plan.trained_length
    prompts = _prompts(checkpoint, plan)
    references, seconds = _references(model, passages, plan, progress)
    unpatched = references[UNPATCHED]
    truncations = {window: references[window_name(window)] for window in windows_of(trained)}
    truncated = join_best(truncations, edges_for(trained, plan.length)[1:])

    def series(name: str, losses: Tensor, seconds: float, dynamic: bool = False) -> Series:
        return summarise(
            name,
            losses,
            unpatched=unpatched,
            truncated=truncated,
            trained_length=trained,
            dynamic=dynamic,
            seconds=seconds,
        )

    measured = [series(name, losses, seconds[name]) for name, losses in references.items()]
    measured.append(series(TRUNCATED, truncated.losses, 0.0))
    passkeys = [_ask(model, UNPATCHED, prompts, plan, progress)] if prompts else []
    fingerprints = {}
    for index, method in enumerate(plan.methods):
        ctxext.patch(model, method)
        try:
            fingerprints[method.name] = ctxext.describe(model).fingerprint
            start = time.perf_counter()
            losses = _whole(model, passages, method.name, progress)
            measured.append(series(method.name, losses, time.perf_counter() - start, method.dynamic))
            if index == plan.passkey_method:
                passkeys.append(_ask(model, method.name, prompts, plan, progress))
        finally:
            ctxext.unpatch(model)
    return DemoResult(
        checkpoint=checkpoint.name,
        texts=tuple(passage.name for passage in passages),
        trained_length=trained,
        length=plan.length,
        factor=plan.methods[0].factor,
        series=tuple(measured),
        passkeys=tuple(passkeys),
        seconds=time.perf_counter() - began,
        text_sha256=tuple(passage.sha256 for passage in passages),
        fingerprints=fingerprints,
        dtype=checkpoint.dtype_note,
        device=device.type,
        seed=plan.seed,
        versions=versions(),
        machine=machine(device.type),
    )


def _references(
    model: nn.Module, passages: Sequence[TokenisedDocument], plan: Plan, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Losses and seconds of the unpatched model on the whole text, and on so many of the last tokens only."""
    start = time.perf_counter()
    unpatched = _whole(model, passages, UNPATCHED, progress)
    middle = time.perf_counter()
    trained = plan.trained_length
    texts = [passage.input_ids for passage in passages]
    tails = all_tails(model, texts, trained_length=trained, prefix=passages[0].prefix, progress=progress)
    each = (time.perf_counter() - middle) / len(tails)
    head = unpatched[:, :trained]
    losses = {UNPATCHED: unpatched} | {window_name(w): torch.cat([head, tail], dim=1) for w, tail in tails.items()}
    return losses, {UNPATCHED: middle - start} | dict.fromkeys(map(window_name, tails), each)


def _whole(model: nn.Module, passages: Sequence[TokenisedDocument], name: str, progress: Progress) -> Tensor:
    with ticking(model, name, pass_cost(passages[0].input_ids.shape[1] - 1), progress):
        return torch.cat([loss_by_position(model, passage.input_ids) for passage in passages])


def _prompts(checkpoint: Checkpoint, plan: Plan) -> list[passkey.Passkey]:
    if plan.passkey_method is None:
        return []
    length, seed = plan.passkey_length, plan.seed
    return [passkey.build(checkpoint.tokenizer, length=length, depth=depth, seed=seed) for depth in plan.depths]


def _ask(model: nn.Module, name: str, prompts: Sequence[passkey.Passkey], plan: Plan, progress: Progress) -> PasskeyRow:
    start = time.perf_counter()
    trials = []
    for prompt in prompts:
        cost = pass_cost(plan.passkey_length) / passkey.passes(model, prompt)
        with ticking(model, f"passkey, {name}", cost, progress):
            trials.append(passkey.measure(model, prompt, seed=plan.seed))
    return PasskeyRow(name, tuple(trials), time.perf_counter() - start)
