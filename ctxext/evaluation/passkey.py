"""Passkey retrieval: can the model repeat a number that it read a given distance ago?

A prompt is built from tokens, not characters: an opening, a haystack with the key between two of its sentences, a
question. The haystack is repeated noise, which is easy to tell from the key, or any text, which is a needle test.
Length and depth are explicit, the key has always five digits, and every cell has a separate seed, so that a cell
can be repeated alone.

Source of the task: Mohtashami & Jaggi, arXiv:2305.16300, appendix; wording and construction are our own.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.core.subject import Subject
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.trials import TrialReport, Trials, without
from ctxext.files import digest
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import (
    SMALL_MODEL,
    Progress,
    check_reach,
    fitted_length_of,
    logits_in_chunks,
    ticking,
    turning_point,
)
from ctxext.measuring.readings import Reader, Reading, Readings
from ctxext.measuring.statistics import check_finite
from ctxext.measuring.survey import Prompt, PromptJob, Survey, Trial, jobs_of
from ctxext.measuring.truncation import UNPATCHED
from ctxext.texts.corpus import special_prefix, tokens_behind
from ctxext.texts.haystack import Haystack, hide, noise

OPENING = "A pass key is hidden somewhere in the long text below. Find it and remember it. You will be asked for it.\n"
KEY_BEFORE = "\nThe pass key is"
KEY_AFTER = ". Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DIGITS = 5
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# How `measure` finds out what greedy decoding would write: part of the key of every kept trial.
JUDGED = "every step with the positions that it has then"
# Tokens of a length that a prompt leaves for the answer.
ANSWER_ROOM = 8


@dataclass(frozen=True, eq=False)
class Passkey:
    """One prompt and the key that it asks for.

    Args:
        prompt: Token ids, [tokens]; nothing is to be added in front.
        depth: Depth of the key as it was given, 0 (key at the start) to 1 (key at the end).
    """

    prompt: Int[Tensor, " prompt"]
    answer: Int[Tensor, " answer"]
    key: str
    depth: float
    key_position: int

    @property
    def length(self) -> int:
        """Tokens in the prompt."""
        return self.prompt.shape[0]

    @property
    def distance(self) -> int:
        """Tokens between the key and the place where the answer begins."""
        return self.length - self.key_position

    @cached_property
    def sha256(self) -> str:
        """The first 12 hexadecimal digits of a hash of the tokens of prompt and answer."""
        tokens = [*self.prompt.tolist(), -1, *self.answer.tolist()]
        return digest(" ".join(map(str, tokens)))


@dataclass(frozen=True, eq=False, kw_only=True)
class PasskeyPrompt(Prompt):
    """One passkey prompt of a grid."""

    seed: int
    passkey: Passkey

    def ask(self, model: nn.Module, window: int | None, name: str, progress: Progress) -> Trial:
        """Return a ``PasskeyTrial`` as JSON values.

        Raises:
            IncompatibleError: the model gives no finite loss.
        """
        asked, dropped = self.passkey, self.dropped(window)
        shown = without(asked.prompt, dropped, prefix=self.prefix)
        asked = replace(asked, prompt=shown, key_position=asked.key_position - dropped)
        with ticking(model, name, self.cost(window or self.length) / len(_steps(model, self.passkey)), progress):
            trial = measure(model, asked, seed=self.seed)
        check_finite(torch.tensor(trial.loss), name)
        return asdict(replace(trial, length=self.length))


def build(tokenizer: Any, *, length: int, depth: float, seed: int = 0, haystack: Haystack | None = None) -> Passkey:
    """Build a prompt of exactly ``length`` tokens.

    The key stands between two sentences, as near as they allow to the fraction ``depth`` of the haystack's tokens. The
    last sentence is cut so that the length fits.
    Special tokens that the tokenizer puts in front of a text come first in the prompt and count.

    Args:
        depth: Place of the key, from 0 (right after the opening) to 1 (right before the question).
        seed: Seed that decides, with length and depth, the key and the place where the haystack starts.

    Raises:
        InvalidParameterError: a length that is too small, or too large for the text; a depth outside 0..1; or a
            tokenizer that cannot write digits.
    """
    if not 0 <= depth <= 1:
        raise InvalidParameterError(f"depth must be from 0 to 1, found {depth}.")
    generator = random.Random(f"passkey {seed} {length} {depth}")
    key = str(generator.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    answer, lead = tokens_behind(tokenizer, f" {key}"), tokens_behind(tokenizer, KEY_BEFORE)
    if tokenizer.decode(answer).strip() != key:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} does not write digits faithfully: {key!r} becomes "
            f"{tokenizer.decode(answer)!r}, so no passkey can be hidden. Take another tokenizer."
        )
    question = tokens_behind(tokenizer, QUESTION)
    text, (place,) = hide(
        tokenizer,
        haystack or noise(tokenizer),
        [[*lead, *answer, *tokens_behind(tokenizer, KEY_AFTER)]],
        [depth],
        opening=OPENING,
        length=length,
        behind=len(question),
        generator=generator,
        kind="a passkey",
    )
    return Passkey(torch.tensor([*text, *question]), torch.tensor(answer), key, float(depth), place + len(lead))


@torch.no_grad()
def measure(model: nn.Module, passkey: Passkey, *, seed: int = 0) -> PasskeyTrial:
    """Ask one prompt, with the right answer fed in.

    Greedy decoding produces the key if and only if, with the right answer fed in, the most likely token is the right
    one at every step: as long as it is, both see the same tokens. So no decoding loop is needed where positions do not
    depend on the length of the text: one pass over prompt and answer judges every step. Where they do (dynamic
    methods), each step is judged by a pass over as many tokens as decoding would have then; steps whose positions are
    the same share a pass. (Left out is what stock transformers does with ``rope_type: dynamic`` in a config when ctxext
    did not extend the model: its positions depend on the longest text that it has ever read.)

    Raises:
        IncompatibleError: as in ``perplexity.loss_by_position``.
    """
    device = next(model.parameters()).device
    answer = passkey.answer.to(device)
    tokens = torch.cat([passkey.prompt.to(device), answer])[None]
    pieces = []
    # The step that writes token i of the answer sees the prompt and the i tokens before it.
    for steps in _steps(model, passkey):
        seen = tokens[:, : passkey.length + steps[-1]]
        start = passkey.length + steps[0] - 1
        pieces += [piece for _, piece in logits_in_chunks(model, seen, start=start, chunk=len(answer))]
    logits = torch.cat(pieces, dim=1)[0].float()
    correct = bool((logits.argmax(dim=-1) == answer).all())
    loss = functional.cross_entropy(logits, answer).item()
    return PasskeyTrial(passkey.length, passkey.depth, passkey.distance, seed, passkey.key, correct, loss)


def _steps(model: nn.Module, passkey: Passkey) -> list[list[int]]:
    """Group the steps of decoding the answer by the positions that they see."""
    fitted = fitted_length_of(Subject.of(model))
    steps = itertools.groupby(range(len(passkey.answer)), lambda step: fitted(passkey.length + step))
    return [list(group) for _, group in steps]


def make_prompts(
    tokenizer: Any,
    lengths: Iterable[int],
    depths: Iterable[float],
    *,
    trials: int = 1,
    seed: int = 0,
    haystack: Haystack | None = None,
    turning_point: int = SMALL_MODEL,
) -> tuple[PasskeyPrompt, ...]:
    """Make passkey prompts at every length and depth.

    Args:
        trials: Prompts per length and depth; they use the seeds ``seed``, ``seed + 1``, ...

    Raises:
        InvalidParameterError: as ``build``.
    """
    haystack, front = haystack or noise(tokenizer), len(special_prefix(tokenizer))

    def make(length: int, depth: float, number: int) -> PasskeyPrompt:
        passkey = build(tokenizer, length=length - ANSWER_ROOM, depth=depth, seed=number, haystack=haystack)
        return PasskeyPrompt(
            name=f"{length:,} tokens at {100 * passkey.depth:g}%" + (f", seed {number}" if trials > 1 else ""),
            length=length,
            identity=[passkey.sha256, front, JUDGED],
            least=front + ANSWER_ROOM + 1,
            seed=number,
            passkey=passkey,
            prefix=front,
            turning_point=turning_point,
        )

    places = itertools.product(dict.fromkeys(lengths), dict.fromkeys(depths), range(seed, seed + trials))
    return tuple(itertools.starmap(make, places))


def prepare(
    checkpoint: Checkpoint,
    *,
    lengths: Sequence[int],
    depths: Iterable[float] = DEPTHS,
    name: str = UNPATCHED,
    **given: Any,
) -> Survey[PromptJob]:
    """Lay out every length at every depth for a model as it is; ``trials_of(PasskeyResult, survey)`` has the result.

    Args:
        given: More arguments of ``make_prompts``.

    Raises:
        InvalidParameterError: nothing to measure, an argument of ``build`` out of range, or a length that the model is
            not meant for.
    """
    point = turning_point(checkpoint.subject)
    prompts = make_prompts(checkpoint.tokenizer, lengths, depths, turning_point=point, **given)
    if not prompts:
        raise InvalidParameterError("There is no cell to measure; give at least one length, one depth and one trial.")
    check_reach(checkpoint.subject, max(lengths))
    readings = Readings(checkpoint, windows=())
    reader = Reader(Reading(name=name, label=name), readings, tuple(lengths), apply=contextlib.nullcontext)
    return Survey("ctxext eval passkey", checkpoint, jobs_of([reader], prompts))


@dataclass(frozen=True)
class PasskeyTrial:
    """The outcome of one prompt.

    Args:
        distance: Tokens between the key and the answer.
        correct: True if greedy decoding would produce the key.
        loss: Mean loss of the key's tokens, nats, which changes before ``correct`` does.
    """

    length: int
    depth: float
    distance: int
    seed: int
    key: str
    correct: bool
    loss: float

    @property
    def row(self) -> float:
        """The depth of the key."""
        return self.depth

    @property
    def score(self) -> float:
        """100 for a key that is found, 0 for any other."""
        return 100.0 * self.correct


@dataclass(frozen=True)
class PasskeyResult(Trials):
    """All trials of one way to read."""

    trials: tuple[PasskeyTrial, ...]
    haystack: str = "noise"

    @property
    def correct(self) -> int:
        """Trials in which greedy decoding would produce the key."""
        return sum(trial.correct for trial in self.trials)

    @property
    def accuracy(self) -> float:
        """Fraction of correct trials."""
        return self.correct / len(self.trials)

    @property
    def loss(self) -> float:
        """Mean loss of the trials, nats per token of the key."""
        return sum(trial.loss for trial in self.trials) / len(self.trials)


@dataclass(frozen=True, kw_only=True)
class PasskeyReport(TrialReport):
    """A whole measurement of passkeys."""

    # Format 1 judged dynamic methods with the positions of prompt and answer together.
    TITLE, KIND, FORMAT = "a passkey report", "passkey", 2

    readings: tuple[PasskeyResult, ...]
