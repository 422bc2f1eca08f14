"""RULER's prompts, as near to a length as a task's units allow and never above, answered by greedy generation."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.key_tokens import tokenizer_digest
from ctxext.evaluation.ruler.result import RulerReport, RulerResult, RulerTrial
from ctxext.evaluation.ruler.tasks import TASKS, choose
from ctxext.evaluation.ruler.tasks.base import Question, Setting, Sources, Task, largest_fit
from ctxext.files import digest
from ctxext.measuring.forward import SMALL_MODEL, Progress, pass_cost, ticking
from ctxext.measuring.provenance import Provenance, from_json
from ctxext.measuring.survey import Prompt, PromptJob, Survey, Trial
from ctxext.texts.corpus import special_prefix

# As in the generator's own configuration. 500 prompts per task and length are NVIDIA's; ten tell good from bad.
SEED, SAMPLES = 42, 10
NO_SOURCES = Sources()
# What one step of generation costs, in tokens of a long pass: it reads all weights for a single token.
STEP = 30


def draw(task: Task, *, index: int, seed: int, near: int | None = None) -> Question:
    """Draw prompt number ``index`` of a task, the longest that leaves room for the reply.

    The same task, length, seed and index give the same prompt, whatever else is drawn.

    Args:
        near: the size of another prompt of this task; the search for the size begins there.

    Raises:
        InvalidParameterError: if not even the smallest prompt fits (the message names the least length), or the
            largest that the sources allow does not fill the length.
    """
    length = task.setting.length
    room = length - task.tokens_to_generate

    def question(size: int) -> Question:
        return task.question(size, index, random.Random(f"ruler {task.name} {length} {seed} {index}"))

    @functools.cache
    def tokens(size: int) -> int:
        return task.setting.count(question(size).prompt)

    least = tokens(task.least)
    if least > room:
        raise InvalidParameterError(
            f"{task.name} needs at least {least + task.tokens_to_generate:,} tokens with this tokenizer, of which "
            f"{task.tokens_to_generate} are for the reply; found a length of {length:,}."
        )
    size = largest_fit(tokens, task.least, room, most=task.most, near=near)
    if size == task.most:
        raise InvalidParameterError(
            f"{task.name} has {task.most:,} {task.unit}, too few for {length:,} tokens: they make "
            f"{tokens(size) + task.tokens_to_generate:,}. Ask for a shorter length."
        )
    return replace(question(size), index=index, tokens=tokens(size), size=size)


def ask(
    model: nn.Module, tokenizer: Any, task: Task, question: Question, *, chat: bool = False, window: int | None = None
) -> RulerTrial:
    """Let the model reply to one prompt and score the reply.

    The end of the prompt and the reply fit into ``window`` tokens, with the special tokens in front; None feeds the
    whole prompt.
    """
    prompt = _ids(tokenizer, question.prompt, chat)
    if window is not None and window - task.tokens_to_generate < len(prompt):
        prefix = 0 if chat else len(special_prefix(tokenizer))
        kept = window - task.tokens_to_generate - prefix
        prompt = [*prompt[:prefix], *prompt[len(prompt) - kept :]]
    reply = reply_to(model, tokenizer, prompt, tokens=task.tokens_to_generate)
    score = task.score(reply, question.answers)
    return RulerTrial(task.name, task.setting.length, question.index, len(prompt), reply, question.answers, score)


def reply_to(model: nn.Module, tokenizer: Any, prompt: list[int], *, tokens: int) -> str:
    """Write what follows ``prompt``: the likeliest token each time, whatever the model's own settings say."""
    inner: Any = model
    device = next(inner.parameters()).device
    ids = torch.tensor([prompt], device=device)
    ends = inner.generation_config.eos_token_id
    greedy = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    with torch.no_grad():
        written = inner.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    text: str = tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True)
    return text


def _setting(tokenizer: Any, length: int, sources: Sources, chat: bool) -> Setting:
    if chat and not tokenizer.chat_template:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} has no chat template; measure without one (chat=False)."
        )

    def dress(text: str) -> str:
        message = [{"role": "user", "content": text}]
        dressed: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return dressed

    return Setting(length, lambda text: len(_ids(tokenizer, text, chat)), sources, dress if chat else str)


def _ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Return the token ids of a prompt as the model reads it; a chat template writes the special tokens itself."""
    prefix = [] if chat else special_prefix(tokenizer)
    return [*prefix, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]


@dataclass(frozen=True, eq=False, kw_only=True)
class RulerPrompt(Prompt):
    """One prompt of one task at one length, drawn when it is asked."""

    task: Task
    index: int
    seed: int
    near: int
    tokenizer: Any
    chat: bool
    turning_point: int

    def question(self) -> Question:
        """Draw the prompt."""
        return draw(self.task, index=self.index, seed=self.seed, near=self.near)

    def cost(self, tokens: int) -> float:
        """Estimate a pass over the prompt and a reply of full length."""
        return pass_cost(tokens, self.turning_point) + STEP * self.task.tokens_to_generate

    def ask(self, model: nn.Module, window: int | None, name: str, progress: Progress) -> Trial:
        """Return a ``RulerTrial`` as JSON values."""
        first = pass_cost(window or self.length, self.turning_point)
        reported = 0.0

        def tick(stage: str, done: float) -> None:
            """Count the first pass, which reads the prompt, as it is, and each later one, for a token, as ``STEP``."""
            nonlocal reported
            share = done if reported < 0.999 * first else done / first * STEP
            reported += share
            progress(stage, share)

        with ticking(model, name, first, tick):
            trial = ask(model, self.tokenizer, self.task, self.question(), chat=self.chat, window=window)
        progress(name, self.cost(window or self.length) - reported)  # replies end early
        return asdict(trial)


def ruler_prompts(
    tokenizer: Any,
    *,
    lengths: Iterable[int],
    tasks: Sequence[str] | None = None,
    samples: int = SAMPLES,
    seed: int = SEED,
    sources: Sources = NO_SOURCES,
    chat: bool = False,
    turning_point: int = SMALL_MODEL,
) -> list[RulerPrompt]:
    """Make prompts of every task at every length.

    The first prompt of each task and length is drawn at once, so that what cannot be drawn is said early.

    Args:
        lengths: tokens of prompt and reply together.
        tasks: names; None for all that ``sources`` allow.
        sources: the text to hide things in, and the data sets of the two question answering tasks.
        chat: put each prompt into the tokenizer's chat template, as is right for a model tuned for dialogue.

    Raises:
        InvalidParameterError: nothing to measure, a length that a task cannot fill, a task whose source is missing, or
            no chat template.
        UnknownNameError: an unknown task.
    """
    lengths = sorted(set(lengths))
    chosen = choose(tasks, sources)
    if not lengths or not chosen or samples < 1:
        raise InvalidParameterError(
            f"There is nothing to measure: {len(chosen)} tasks, {len(lengths)} lengths, {samples} samples. Give at "
            f"least one of each."
        )
    template = tokenizer.chat_template if chat else None
    depends = [seed, chat, tokenizer_digest(tokenizer), digest(template) if template else None]
    prompts = []
    for length, kind in itertools.product(lengths, chosen):
        task = kind(_setting(tokenizer, length, sources, chat))
        near, source = draw(task, index=0, seed=seed).size, _source(task, sources)
        prompts += [
            RulerPrompt(
                name=f"{task.name}, {length:,} tokens",
                length=length,
                identity=[task.name, index, *depends, source],
                task=task,
                index=index,
                seed=seed,
                near=near,
                tokenizer=tokenizer,
                chat=chat,
                turning_point=turning_point,
            )
            for index in range(samples)
        ]
    return prompts


def ruler_report(
    survey: Survey[PromptJob], provenance: Provenance, *, sources: Sources, chat: bool, left_out: dict[str, str]
) -> RulerReport:
    """Summarise a finished survey of RULER."""
    readings = [
        RulerResult(tuple(from_json(RulerTrial, trial) for trial in trials), reader.reading.name, reader.reading.label)
        for reader, trials in survey.trials()
    ]
    used = any(TASKS[task].source == "essay" for task in readings[0].tasks)
    return RulerReport(
        readings=tuple(readings),
        chat=chat,
        essay=sources.essay.name if sources.essay and used else None,
        trained_length=survey.readers[0].readings.trained_length,
        left_out=left_out,
        provenance=survey.with_extensions(provenance),
    )


def _source(task: Task, sources: Sources) -> str | None:
    """Hash the text or data set that a task is made from; return None if it needs none."""
    if task.source is None:
        return None
    if task.source == "essay" and sources.essay is not None:
        return digest(sources.essay.text)
    file: Path = getattr(sources, task.source)
    return digest(file.read_bytes())
