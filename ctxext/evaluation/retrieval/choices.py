"""Retrieval by choice: is the right answer likelier than wrong ones of the same form, behind the same long text?

A small model that writes no right answer may still know which one is right. Several questions are asked about a text,
which is read once, and all answers are scored behind each of them: the right answer to one question is a wrong one to
the others. An answer's loss is compared with its mean over the questions, so that a word that is likely anyway gains
nothing. Whether greedy decoding would write the right answer follows from the same logits, since with the
right answer fed in, the likeliest token is right at every step.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError, refuse_unknown
from ctxext.evaluation.retrieval import TASK_NAMES
from ctxext.evaluation.retrieval.questions import LEAST_CHOICES, MOST_CHOICES, TASKS, QuestionSet, alike_for
from ctxext.evaluation.trials import TrialReport, Trials, relative_effective_length, without
from ctxext.files import digest
from ctxext.measuring.forward import SMALL_MODEL, Progress, logits_of_answers, ticking
from ctxext.measuring.statistics import CHANCE, PairedDifference, check_finite, grouped_difference
from ctxext.measuring.survey import Prompt, Trial
from ctxext.texts.corpus import special_prefix, tokens_behind
from ctxext.texts.haystack import Haystack, hide, noise

SAMPLES, CHOICES = 10, 4


@dataclass(frozen=True, eq=False, kw_only=True)
class ChoicePrompt(Prompt):
    """One text and the questions about it; with the longest request and an answer it has exactly ``length`` tokens.

    Args:
        index: Number of the text within its task, from 0.
        text: Token ids of the text; nothing is to be added in front.
        answers: Token ids of the right answer to each question, all equally long.
    """

    task: str
    index: int
    questions: QuestionSet
    text: Int[Tensor, " text"]
    requests: tuple[Int[Tensor, " _request"], ...]
    answers: tuple[Int[Tensor, " answer"], ...]

    def ask(self, model: nn.Module, window: int | None, name: str, progress: Progress) -> Trial:
        """Return a ``ChoiceTrial`` as JSON values.

        Raises:
            IncompatibleError: the model gives no finite loss, or takes no cache.
        """
        device = next(model.parameters()).device
        text = without(self.text, self.dropped(window), prefix=self.prefix)
        requests, answers = ([part.to(device) for part in parts] for parts in (self.requests, self.answers))
        with ticking(model, name, self.cost(window or self.length), progress, passes=1):
            logits = logits_of_answers(model, text.to(device), requests, answers)
        losses = torch.tensor([list(map(_loss, rows, answers)) for rows in logits])
        check_finite(losses, name)
        right = [bool((rows[place].argmax(dim=-1) == answers[place]).all()) for place, rows in enumerate(logits)]
        matrix = tuple(map(tuple, losses.tolist()))
        return asdict(ChoiceTrial(self.task, self.length, self.index, self.questions.answers, matrix, sum(right)))


def _loss(logits: Tensor, answer: Tensor) -> float:
    return functional.cross_entropy(logits, answer, reduction="sum").item()


def make_prompts(
    tokenizer: Any,
    lengths: Iterable[int],
    *,
    tasks: Sequence[str] | None = None,
    samples: int = SAMPLES,
    choices: int = CHOICES,
    seed: int = 0,
    haystack: Haystack | None = None,
    turning_point: int = SMALL_MODEL,
) -> list[ChoicePrompt]:
    """Make prompts with the same questions at every length.

    Args:
        lengths: Tokens of text, request and answer together.
        samples: Texts of each task and length, at least 2, so that there is an error.
        choices: Questions about each text, and so answers to choose from, 2 to 8.
        seed: Seed of everything that is drawn; the same seed and tokenizer give the same prompts.
        haystack: Sentences that needles are hidden in where a task brings no text itself; None for noise.

    Raises:
        InvalidParameterError: a number out of range, a length that is too small, or too large for the text.
        UnknownNameError: an unknown task.
    """
    lengths, tasks = sorted(set(lengths)), TASK_NAMES if tasks is None else tuple(dict.fromkeys(tasks))
    refuse_unknown("retrieval task", tasks, TASKS)
    if not lengths or not tasks or samples < 2 or not LEAST_CHOICES <= choices <= MOST_CHOICES:
        raise InvalidParameterError(
            f"Retrieval needs a length, a task, 2 samples and {LEAST_CHOICES} to {MOST_CHOICES} choices; found "
            f"{len(lengths)} lengths, {len(tasks)} tasks, {samples} samples and {choices} choices."
        )
    haystack, alike, front = haystack or noise(tokenizer), alike_for(tokenizer), len(special_prefix(tokenizer))
    prompts = []
    for task, index in itertools.product(tasks, range(samples)):
        # Without the length in it: the same questions are asked at every length.
        drawn = f"retrieval {task} {choices} {seed} {index}"
        questions = TASKS[task](alike, choices, index, random.Random(drawn))
        requests = [tokens_behind(tokenizer, request) for request in questions.requests]
        answers = [tokens_behind(tokenizer, f" {answer}") for answer in questions.answers]
        needles = [tokens_behind(tokenizer, needle) for needle in questions.needles]
        places, behind = random.Random(f"{drawn} depths"), max(map(len, requests)) + len(answers[0])
        depths = sorted(places.random() for _ in needles)  # the same at every length, too
        for length in lengths:
            text, _ = hide(
                tokenizer,
                _others(tokenizer, questions, length) if questions.others else haystack,
                needles,
                depths,
                opening=questions.opening,
                length=length,
                behind=behind,
                generator=random.Random(f"{drawn} {length}"),
                kind=task,
            )
            prompts.append(
                ChoicePrompt(
                    name=f"{task} {index + 1}, {length:,} tokens",
                    length=length,
                    identity=[task, digest(json.dumps([text, requests, answers])), front],
                    least=front + behind + 1,
                    task=task,
                    index=index,
                    questions=questions,
                    text=torch.tensor(text),
                    requests=tuple(map(torch.tensor, requests)),
                    answers=tuple(map(torch.tensor, answers)),
                    prefix=front,
                    turning_point=turning_point,
                )
            )
    return sorted(prompts, key=lambda prompt: prompt.length)


def _others(tokenizer: Any, questions: QuestionSet, length: int) -> Haystack:
    """Return a haystack of the questions' own texts, as many as a length may need; the first follows the last."""
    sentences: list[tuple[int, ...]] = []
    read = 0
    for text in itertools.cycle(questions.others):
        sentences.append(tuple(tokens_behind(tokenizer, text)))
        read += len(sentences[-1])
        if read > length:
            break
    return Haystack("others", tuple(sentences), repeated=False)


@dataclass(frozen=True)
class ChoiceTrial:
    """The outcome of all questions about one text.

    Args:
        length: Tokens of text, request and answer together.
        answers: Right answer to each question.
        losses: Losses by question and by answer, nats over all tokens of the answer.
        writes: Questions whose right answer greedy decoding would write.
    """

    task: str
    length: int
    index: int
    answers: tuple[str, ...]
    losses: tuple[tuple[float, ...], ...]
    writes: int

    @property
    def row(self) -> str:
        """The task."""
        return self.task

    @property
    def gains(self) -> list[list[float]]:
        """Each loss below the answer's mean over all questions, by question and by answer, nats."""
        means = [sum(column) / len(column) for column in zip(*self.losses, strict=True)]
        return [[mean - loss for mean, loss in zip(means, row, strict=True)] for row in self.losses]

    @property
    def chosen(self) -> list[int | None]:
        """The answer to each question that gains most, by its place; None for a tie."""
        best = [max(row) for row in self.gains]
        return [row.index(most) if row.count(most) == 1 else None for row, most in zip(self.gains, best, strict=True)]

    @property
    def right(self) -> int:
        """The number of questions whose right answer gains most; a tie counts as lost."""
        return sum(map(operator.eq, range(len(self.chosen)), self.chosen))

    @property
    def by_chance(self) -> list[float]:
        """The probability of each number of right choices, were the answers dealt out to the questions by chance."""
        choices, ways = len(self.chosen), np.poly1d([1])
        for answer in range(choices):  # coefficient n: the ways to deal out n answers rightly, and the others anyhow
            ways *= np.poly1d([self.chosen.count(answer), 1])
        shares = [way / math.perm(choices, right) for right, way in enumerate(ways.coeffs[::-1])]
        # Inclusion and exclusion: a number that is dealt out rightly in any case may have more that are.
        exactly = sum(np.poly1d([1, -1]) ** right * share for right, share in enumerate(shares))
        return list(map(float, exactly.coeffs[::-1]))

    @property
    def score(self) -> float:
        """The percentage of right choices."""
        return 100 * self.right / len(self.chosen)

    @property
    def margin(self) -> float:
        """The mean gain of right answers minus the mean gain of wrong ones, nats; 0 on average for guesses."""
        gains, choices = self.gains, len(self.answers)
        right = sum(row[place] for place, row in enumerate(gains))
        return right / choices - (sum(map(sum, gains)) - right) / (choices * (choices - 1))


@dataclass(frozen=True)
class RetrievalResult(Trials):
    """All choices of one way to read; ``score`` is the percentage of right ones."""

    trials: tuple[ChoiceTrial, ...]

    @property
    def chance(self) -> float:
        """The share that guessing chooses right."""
        return 1 / len(self.trials[0].answers)

    @property
    def luck(self) -> float:
        """The probability that guessing chooses as many right, or more; exact for any number of texts."""
        totals = np.ones(1)
        for trial in self.trials:
            totals = np.convolve(totals, trial.by_chance)
        return float(totals[sum(trial.right for trial in self.trials) :].sum())

    @property
    def margin(self) -> PairedDifference:
        """The mean margin in nats, above 0 where the right answer is likelier, with its error over texts."""
        return _difference([trial.margin for trial in self.trials])

    @property
    def writes(self) -> int:
        """Questions whose right answer greedy decoding would write."""
        return sum(trial.writes for trial in self.trials)

    def beyond(self, other: RetrievalResult, *, margin: bool = False) -> PairedDifference | None:
        """Compare with another reading over the same texts; above 0 where this one is the better one.

        Args:
            margin: True to compare margins, nats, and not scores, points.

        Returns:
            The difference; None where the other one did not read the same texts.
        """
        asked = [[(trial.task, trial.length, trial.index) for trial in result.trials] for result in (self, other)]
        if asked[0] != asked[1] or not asked[0]:
            return None
        pairs = zip(self.trials, other.trials, strict=True)
        read = operator.attrgetter("margin" if margin else "score")
        return _difference([read(mine) - read(theirs) for mine, theirs in pairs])

    def effective_length(self, base: int) -> int | None:
        """Return the longest length that keeps 85 percent of the accuracy above chance at the base length.

        Accuracy above chance is 0 for guessing and 1 for no mistake. All tasks count together.

        Returns:
            Tokens; None where guessing would choose as many right at the base length in more than 2.5 percent, so that
            there is nothing to keep.

        Source: Modarressi et al., arXiv:2502.05167, section 4, whose base is the best score of 250, 500 and 1K tokens
            and whose scores have no chance level.
        """
        if base not in self.lengths or self.only(length=base).luck > CHANCE / 2:
            return None
        scores = {length: self.only(length=length).score for length in self.lengths if length >= base}
        return relative_effective_length({at: max(0.0, score - 100 * self.chance) for at, score in scores.items()})


def _difference(values: Sequence[float]) -> PairedDifference:
    """Average differences over texts, with a standard error."""
    return grouped_difference([torch.tensor([value]) for value in values], [torch.zeros(1)] * len(values), over="texts")


@dataclass(frozen=True, kw_only=True)
class RetrievalReport(TrialReport):
    """A whole measurement of choices.

    Args:
        base: Tokens of the length whose score is the measure of a reading's effective length.
    """

    TITLE, KIND, FORMAT = "a retrieval report", "retrieval", 1

    readings: tuple[RetrievalResult, ...]
    base: int
    haystack: str
