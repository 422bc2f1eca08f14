"""RULER's prompts, as near to a length as a task's units allow and never above, answered by greedy generation."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.ruler.tasks import choose
from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, all_of, largest_fit
from ctxext.evaluation.trials import TrialReport, Trials, relative_effective_length, without
from ctxext.files import digest
from ctxext.measuring.forward import GREEDY, SMALL_MODEL, Progress, check_known, ticking
from ctxext.measuring.statistics import check_finite
from ctxext.measuring.survey import Prompt, Trial
from ctxext.texts.conversations import content_for
from ctxext.texts.corpus import special_prefix, tokenizer_digest
from ctxext.texts.documents import Document

# As in the generator's own configuration. 500 prompts per task and length are NVIDIA's; ten tell good from bad.
SEED, SAMPLES = 42, 10
# What one step of generation costs, in tokens of a long pass: it reads all weights for a single token.
STEP = 30
WORDS = "wonderwords"  # the package whose lists most tasks draw from
# What else a checkpoint's generation_config may say, by which a greedy reply would not be the model's own.
UNCHANGED: dict[str, Any] = {"remove_invalid_values": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
UNCHANGED |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}
UNCHANGED |= {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
UNCHANGED |= dict.fromkeys(("stop_strings", "max_time", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens"))
UNCHANGED |= dict.fromkeys(("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id"))
UNCHANGED |= dict.fromkeys(("exponential_decay_length_penalty", "guidance_scale", "watermarking_config"))


def draw(task: Task, *, index: int, seed: int, near: int | None = None) -> Question:
    """Draw prompt number ``index`` of a task, the longest that leaves room for the reply.

    The same task, length, seed and index give the same prompt, whatever else is drawn.

    Args:
        near: Size of another prompt of this task, at which the search for the size begins.

    Raises:
        InvalidParameterError: if not even the smallest prompt fits (the message names the least length), or the
            largest that there is does not fill the length.
    """
    length = task.setting.length
    room = length - task.tokens_to_generate

    def question(size: int) -> Question:
        return task.question(size, random.Random(f"ruler {task.name} {length} {seed} {index}"))

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
    room = len(prompt) if window is None else window - task.tokens_to_generate
    prompt = without(prompt, max(0, len(prompt) - room), prefix=_prefix(tokenizer, prompt))
    reply = reply_to(model, tokenizer, prompt.tolist(), tokens=task.tokens_to_generate)
    score = all_of(reply, question.answers)
    return RulerTrial(task.name, task.setting.length, question.index, len(prompt), reply, question.answers, score)


def reply_to(model: nn.Module, tokenizer: Any, prompt: list[int], *, tokens: int) -> str:
    """Write what follows ``prompt``: the likeliest token each time, whatever the model's own settings say.

    Raises:
        IncompatibleError: the model gives NaN.
        InvalidParameterError: the model lacks a token of the prompt.
    """
    inner: Any = model
    device = next(inner.parameters()).device
    ids = torch.tensor([prompt], device=device)
    check_known(model, ids)
    with torch.no_grad():
        written = inner.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[_finite],
            **GREEDY,
            **UNCHANGED,
            max_new_tokens=tokens,
            eos_token_id=inner.generation_config.eos_token_id,
            pad_token_id=tokenizer.pad_token_id or 0,
        )
    text: str = tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True)
    return text


def _finite(_: Tensor, scores: Tensor) -> Tensor:
    """Return the logits of a step, or refuse NaN, which greedy decoding takes for the likeliest token."""
    check_finite(scores.float().logsumexp(-1), "while it wrote a reply")
    return scores


def _setting(tokenizer: Any, length: int, essay: Document | None, chat: bool) -> Setting:
    if chat and not tokenizer.chat_template:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} has no chat template; measure without one (chat=False)."
        )

    content = content_for(tokenizer)

    def dress(text: str) -> str:
        message = [{"role": "user", "content": content(text)}]
        dressed: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return dressed

    return Setting(length, lambda text: len(_ids(tokenizer, text, chat)), essay, dress if chat else str)


def _ids(tokenizer: Any, text: str, chat: bool) -> Int[Tensor, " tokens"]:
    """Return the token ids of a prompt as the model reads it; a chat template writes the special tokens itself."""
    prefix = [] if chat else special_prefix(tokenizer)
    return torch.tensor([*prefix, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids])


def _prefix(tokenizer: Any, prompt: Int[Tensor, " tokens"]) -> int:
    """Count the special tokens in front of a prompt, where a chat template may write them too."""
    own = special_prefix(tokenizer) or [tokenizer.bos_token_id]
    return len(own) if prompt[: len(own)].tolist() == own else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class RulerPrompt(Prompt):
    """One prompt of one task at one length, drawn when it is asked."""

    task: Task
    index: int
    seed: int
    near: int
    tokenizer: Any
    chat: bool

    def question(self) -> Question:
        """Draw the prompt."""
        return draw(self.task, index=self.index, seed=self.seed, near=self.near)

    def cost(self, tokens: int) -> float:
        """Estimate a pass over the prompt and a reply of full length."""
        return super().cost(tokens) + STEP * self.task.tokens_to_generate

    def ask(self, model: nn.Module, window: int | None, name: str, progress: Progress) -> Trial:
        """Return a ``RulerTrial`` as JSON values."""
        first = super().cost(window or self.length)
        with ticking(model, name, first, progress, passes=1):  # the pass that reads the prompt
            trial = ask(model, self.tokenizer, self.task, self.question(), chat=self.chat, window=window)
        progress(name, self.cost(window or self.length) - first)
        return asdict(trial)


def ruler_prompts(
    tokenizer: Any,
    *,
    lengths: Iterable[int],
    tasks: Sequence[str] | None = None,
    samples: int = SAMPLES,
    seed: int = SEED,
    essay: Document | None = None,
    chat: bool = False,
    turning_point: int = SMALL_MODEL,
) -> list[RulerPrompt]:
    """Make prompts of every task at every length.

    The first prompt of each task and length is drawn at once, so that what cannot be drawn is said early.

    Args:
        lengths: Tokens of prompt and reply together.
        tasks: Names of tasks; None for all that can be made with this essay.
        essay: Text to hide things in.
        chat: True to put each prompt into the tokenizer's chat template, which is right for a model tuned for dialogue.

    Raises:
        InvalidParameterError: nothing to measure, a length that a task cannot fill, a task whose essay is missing, or
            no chat template.
        UnknownNameError: an unknown task.
    """
    lengths = sorted(set(lengths))
    chosen = choose(tasks, essay)
    if not lengths or not chosen or samples < 1:
        raise InvalidParameterError(
            f"There is nothing to measure: {len(chosen)} tasks, {len(lengths)} lengths, {samples} samples. Give at "
            f"least one of each."
        )
    template = tokenizer.chat_template if chat else None
    lists = metadata.version(WORDS) if find_spec(WORDS) else None
    depends = [seed, chat, tokenizer_digest(tokenizer), digest(template) if template else None, lists]
    prompts = []
    for length, kind in itertools.product(lengths, chosen):
        task = kind(_setting(tokenizer, length, essay, chat))
        # The other prompts have about the size of the first, so the search for their sizes begins there.
        first, source = draw(task, index=0, seed=seed), digest(essay.text) if task.in_essay and essay else None
        ids = _ids(tokenizer, first.prompt, chat)  # they show the order of merges, which a vocabulary does not
        prefix = _prefix(tokenizer, ids)
        prompts += [
            RulerPrompt(
                name=f"{task.name}, {length:,} tokens",
                length=length,
                identity=[task.name, index, *depends, source, prefix, digest(str(ids.tolist()))],
                least=prefix + task.tokens_to_generate + 1,
                task=task,
                index=index,
                seed=seed,
                near=first.size,
                tokenizer=tokenizer,
                chat=chat,
                prefix=prefix,
                turning_point=turning_point,
            )
            for index in range(samples)
        ]
    return prompts


@dataclass(frozen=True)
class RulerTrial:
    """One prompt and the reply to it.

    Args:
        length: Tokens of prompt and reply together, as they were given.
        answers: Strings that a right reply contains.
        score: Score from 0 to 100.
    """

    task: str
    length: int
    index: int
    prompt_tokens: int
    reply: str
    answers: tuple[str, ...]
    score: float

    @property
    def row(self) -> str:
        """The task."""
        return self.task


@dataclass(frozen=True)
class RulerResult(Trials):
    """All replies of one way to read."""

    trials: tuple[RulerTrial, ...]

    @property
    def empty(self) -> int:
        """Replies without any text."""
        return sum(not trial.reply.strip() for trial in self.trials)

    @property
    def relative_effective_length(self) -> int | None:
        """The relative effective length of the averages over all tasks, in tokens."""
        return relative_effective_length(self.averages)


@dataclass(frozen=True, kw_only=True)
class RulerReport(TrialReport):
    """A whole measurement of RULER.

    Args:
        chat: True if prompts stood in the model's chat template.
        essay: Text used instead of NVIDIA's essays, None where no task needed one.
        left_out: Reasons why tasks were not measured, by their names.
    """

    TITLE, KIND, FORMAT = "a RULER report", "ruler", 1

    readings: tuple[RulerResult, ...]
    chat: bool
    essay: str | None
    left_out: Mapping[str, str]
