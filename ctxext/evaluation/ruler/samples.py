"""Prompts of an exact length: as near to it as a task's units allow, and never above."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.ruler.tasks.base import Task, largest_fit

__all__ = ["Sample", "draw", "largest_fit"]


@dataclass(frozen=True)
class Sample:
    """One prompt with what a right reply contains.

    Args:
        task: its name.
        length: tokens asked for, of prompt and reply together.
        index: which of the task's prompts, from 0.
        prompt: the complete text, without the tokenizer's special tokens.
        answers: strings.
        prompt_tokens: as the model reads it; ``length`` less this and the reply's tokens is what no unit fitted.
        size: units in the prompt, see ``Task.unit``.
    """

    task: str
    length: int
    index: int
    prompt: str
    answers: tuple[str, ...]
    prompt_tokens: int
    size: int


def draw(task: Task, *, index: int, seed: int, near: int | None = None) -> Sample:
    """Prompt number ``index`` of a task, the longest that leaves room for the reply.

    The same task, length, seed and index give the same prompt, whatever else is drawn.

    Args:
        task: of the length that is wanted.
        index: which prompt, from 0.
        seed: of all prompts.
        near: the size of another prompt of this task; the search for the size begins there.

    Raises:
        InvalidParameterError: if not even the smallest prompt fits (the message names the least length), or the
            largest that the sources allow does not fill the length.
    """
    length = task.setting.length
    room = length - task.tokens_to_generate

    def question(size: int) -> tuple[str, tuple[str, ...]]:
        made = task.question(size, index, random.Random(f"ruler {task.name} {length} {seed} {index}"))
        return made.prompt, made.answers

    @functools.cache
    def tokens(size: int) -> int:
        return task.setting.count(question(size)[0])

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
    prompt, answers = question(size)
    return Sample(task.name, length, index, prompt, answers, tokens(size), size)
