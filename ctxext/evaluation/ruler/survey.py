"""RULER asked of several readers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from ctxext.evaluation import ruler
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.forward import Progress, pass_cost, ticking, turning_point
from ctxext.evaluation.key_tokens import tokenizer_digest
from ctxext.evaluation.provenance import Provenance
from ctxext.evaluation.ruler import (
    SAMPLES,
    SEED,
    TASKS,
    Drawer,
    RulerReport,
    RulerResult,
    RulerTrial,
    Sources,
    Task,
    make_drawers,
)
from ctxext.evaluation.survey import Prompt, Survey, Trial

__all__ = ["ruler_prompts", "ruler_report"]

# What one step of generation costs, in tokens of a long pass: it reads all weights for a single token.
STEP = 30


def ruler_prompts(
    checkpoint: Checkpoint,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] | None = None,
    samples: int = SAMPLES,
    seed: int = SEED,
    sources: Sources,
    chat: bool = False,
) -> list[Prompt]:
    """Prompts of every task at every length; arguments and errors as for ``ruler.run``."""
    tokenizer = checkpoint.tokenizer
    read = functools.partial(pass_cost, turning_point=turning_point(checkpoint.model))
    depends = [seed, chat, tokenizer_digest(tokenizer), _digest(tokenizer.chat_template.encode()) if chat else None]
    drawers = make_drawers(
        tokenizer, lengths=lengths, tasks=tasks, samples=samples, seed=seed, sources=sources, chat=chat
    )

    def cost(drawer: Drawer, tokens: int) -> float:
        return read(tokens) + STEP * drawer.task.tokens_to_generate

    def ask(drawer: Drawer, index: int, model: nn.Module, window: int | None, progress: Progress, name: str) -> Trial:
        task = drawer.task
        first = read(window or task.setting.length)
        told = 0.0

        def tick(stage: str, done: float) -> None:  # the first pass reads the prompt, the others write a token each
            nonlocal told
            share = done if told < 0.999 * first else done / first * STEP
            told += share
            progress(stage, share)

        with ticking(model, name, first, tick):
            trial = ruler.ask(model, tokenizer, task, drawer.sample(index), chat=chat, window=window)
        progress(name, cost(drawer, window or task.setting.length) - told)  # replies end early
        return asdict(trial)

    return [
        Prompt(
            name=f"{drawer.task.name}, {drawer.task.setting.length:,} tokens",
            length=drawer.task.setting.length,
            identity=[drawer.task.name, index, *depends, _source(drawer, sources)],
            cost=functools.partial(cost, drawer),
            ask=functools.partial(ask, drawer, index),
        )
        for drawer in drawers
        for index in range(samples)
    ]


def ruler_report(
    survey: Survey, provenance: Provenance, *, sources: Sources, chat: bool, left_out: dict[str, str]
) -> RulerReport:
    """What a finished survey of RULER found."""
    readings = [
        RulerResult(tuple(map(RulerTrial.from_dict, trials)), reader.reading.name, reader.reading.label)
        for reader, trials in survey.trials()
    ]
    used = any(_is_of_prose(TASKS[task], sources) for task in readings[0].tasks)
    return RulerReport(
        readings=tuple(readings),
        chat=chat,
        essay=sources.essay.name if sources.essay and used else None,
        trained_length=survey.panel.trained_length,
        left_out=left_out,
        provenance=survey.with_extensions(provenance),
    )


def _is_of_prose(task: type[Task] | Task, sources: Sources) -> bool:
    return task.why_not(replace(sources, essay=None)) is not None


def _source(drawer: Drawer, sources: Sources) -> str | None:
    """Digest of the text or data set that a task is made from; None where it needs none."""
    if sources.essay is not None and _is_of_prose(drawer.task, sources):
        return _digest(sources.essay.text.encode())
    file: Path | None = getattr(sources, getattr(drawer.task, "option", ""), None)
    return None if file is None else _file_digest(file)


@functools.cache
def _file_digest(path: Path) -> str:
    return _digest(path.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
