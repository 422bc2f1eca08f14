"""Ask a model RULER's questions, one prompt at a time, by its own greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ctxext.errors import InvalidParameterError
from ctxext.evaluation._reach import check_reach
from ctxext.evaluation.corpus import special_prefix
from ctxext.evaluation.ruler._registry import choose
from ctxext.evaluation.ruler.base import Setting, Sources, Task
from ctxext.evaluation.ruler.result import RulerResult, RulerTrial
from ctxext.evaluation.ruler.samples import Sample, draw

__all__ = ["reply_to", "run"]

# As in the generator's own configuration. 500 prompts per task and length are NVIDIA's; ten tell good from bad.
SEED, SAMPLES = 42, 10
NO_SOURCES = Sources()


def run(
    model: nn.Module,
    tokenizer: Any,
    *,
    lengths: Iterable[int],
    tasks: Sequence[str] | None = None,
    samples: int = SAMPLES,
    seed: int = SEED,
    sources: Sources = NO_SOURCES,
    chat: bool = False,
    beyond: bool = False,
    finished: Iterable[RulerTrial] = (),
    on_trial: Callable[[RulerTrial], None] | None = None,
) -> RulerResult:
    """Measure every task at every length.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        lengths: tokens of prompt and reply together.
        tasks: names; None for all that ``sources`` allow.
        samples: prompts per task and length, at least 1.
        seed: of the prompts; the same seed gives the same prompts to every model with this tokenizer.
        sources: the text to hide things in, and the data sets of the two question answering tasks.
        chat: put each prompt into the tokenizer's chat template, as is right for a model tuned for dialogue.
        beyond: allow lengths for which the model is not meant, to see how it fails.
        finished: trials of an earlier run with the same arguments; they are not repeated.
        on_trial: called after each new trial.

    Raises:
        InvalidParameterError: nothing to measure, a length that a task cannot fill or that the model is not meant for,
            a task whose source is missing, or no chat template.
        UnknownNameError: an unknown task.
    """
    lengths = sorted(set(lengths))
    chosen = choose(tasks, sources)
    if not lengths or not chosen or samples < 1:
        raise InvalidParameterError(
            f"There is nothing to measure: {len(chosen)} tasks, {len(lengths)} lengths, {samples} samples. Give at "
            f"least one of each."
        )
    check_reach(model, lengths[-1], beyond=beyond)
    made = [task(_setting(tokenizer, length, sources, chat)) for length in lengths for task in chosen]
    # What cannot be drawn is said before anything is computed.
    sizes = {id(task): draw(task, index=0, seed=seed).size for task in made}
    known = {(trial.task, trial.length, trial.index): trial for trial in finished}
    trials = []
    for task in made:
        for index in range(samples):
            trial = known.get((task.name, task.setting.length, index))
            if trial is None:
                trial = _ask(model, tokenizer, task, draw(task, index=index, seed=seed, near=sizes[id(task)]), chat)
                if on_trial is not None:
                    on_trial(trial)
            trials.append(trial)
    essay = sources.essay.name if sources.essay else None
    return RulerResult(tuple(trials), seed=seed, chat=chat, essay=essay)


def reply_to(model: nn.Module, tokenizer: Any, prompt: list[int], *, tokens: int) -> str:
    """What the model writes after ``prompt``: the likeliest token each time, whatever its own settings say.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        prompt: token ids.
        tokens: to write at most; an end-of-text token ends the reply earlier.
    """
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


def _ask(model: nn.Module, tokenizer: Any, task: Task, sample: Sample, chat: bool) -> RulerTrial:
    prompt = _ids(tokenizer, sample.prompt, chat)
    reply = reply_to(model, tokenizer, prompt, tokens=task.tokens_to_generate)
    score = task.score(reply, sample.answers)
    return RulerTrial(sample.task, sample.length, sample.index, sample.prompt_tokens, reply, sample.answers, score)


def _setting(tokenizer: Any, length: int, sources: Sources, chat: bool) -> Setting:
    if chat and not tokenizer.chat_template:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} has no chat template; measure without one (chat=False)."
        )

    def dress(text: str) -> str:
        message = [{"role": "user", "content": text}]
        dressed: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return dressed

    def count(text: str) -> int:
        return len(_ids(tokenizer, text, chat))

    return Setting(length, count, sources, dress if chat else str)


def _ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """As the model reads it. A chat template writes its own special tokens."""
    prefix = [] if chat else special_prefix(tokenizer)
    return [*prefix, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
