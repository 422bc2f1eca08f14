"""Passkey retrieval: can the model repeat a number that it read a given distance ago?

A prompt is built from tokens, not characters: an opening, noise, the key, more noise, a question. Length and depth
are explicit, the key has always five digits, and every cell has its own seed, so that a cell can be repeated alone.

Source of the task: Mohtashami & Jaggi, arXiv:2305.16300, appendix; wording and construction are our own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError
from ctxext.evaluation._logits import logits_in_chunks
from ctxext.evaluation.corpus import special_prefix

__all__ = ["Passkey", "PasskeyResult", "PasskeyTrial", "build", "measure", "run"]

OPENING = "A pass key is hidden somewhere in the long text below. Find it and remember it. You will be asked for it.\n"
NOISE = (
    " The rain falls on the hills.",
    " The river runs to the sea.",
    " A cart goes down the road.",
    " The bread is in the oven.",
    " Here and there a dog barks.",
)
KEY_BEFORE = "\nThe pass key is"
KEY_AFTER = ". Remember it.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DIGITS = 5


@dataclass(frozen=True, eq=False)
class Passkey:
    """One prompt and what it asks for.

    Args:
        prompt: token ids, [tokens]; nothing is to be added in front.
        answer: token ids of the key, [tokens], exactly as they stand in the prompt.
        key: the five digits.
        depth: asked for, 0 (key at the start) to 1 (key at the end).
        key_position: index of the first token of the key in the prompt.
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


@dataclass(frozen=True)
class PasskeyTrial:
    """The outcome of one prompt.

    Args:
        length: tokens in the prompt.
        depth: 0 to 1, as asked for.
        distance: tokens between the key and the answer.
        seed: of this cell.
        key: the five digits.
        correct: whether greedy decoding would produce the key.
        loss: mean over the key's tokens, nats; it moves before ``correct`` does.
    """

    length: int
    depth: float
    distance: int
    seed: int
    key: str
    correct: bool
    loss: float


@dataclass(frozen=True)
class PasskeyResult:
    """All trials of a run, in the order they were made."""

    trials: tuple[PasskeyTrial, ...]

    @property
    def accuracy(self) -> float:
        """Fraction of correct trials."""
        return sum(trial.correct for trial in self.trials) / len(self.trials)

    @property
    def loss(self) -> float:
        """Mean loss of the trials, nats per token of the key."""
        return sum(trial.loss for trial in self.trials) / len(self.trials)


def build(tokenizer: Any, *, length: int, depth: float, seed: int = 0) -> Passkey:
    """Build a prompt of exactly ``length`` tokens.

    The noise repeats five short sentences, starting at a random one; the key stands between two sentences, after the
    fraction ``depth`` of the noise. The last sentence is cut so that the length fits.
    Special tokens that the tokenizer itself puts in front of a text stand in front of the prompt and count.

    Args:
        tokenizer: a transformers tokenizer.
        length: tokens in the prompt, including special tokens; at least what the fixed parts and one noise cycle need.
        depth: 0 (right after the opening) to 1 (right before the question).
        seed: decides, with length and depth, the key and where the noise starts.

    Raises:
        InvalidParameterError: a length that is too small, a depth outside 0..1, or a tokenizer that cannot write
            digits.
    """
    if not 0 <= depth <= 1:
        raise InvalidParameterError(f"depth must be from 0 to 1, found {depth}.")
    generator = random.Random(f"passkey {seed} {length} {depth}")
    key = str(generator.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    question = _encode(tokenizer, QUESTION)
    answer = _key_tokens(tokenizer, key)
    needle = [*_encode(tokenizer, KEY_BEFORE), *answer, *_encode(tokenizer, KEY_AFTER)]
    opening = [*special_prefix(tokenizer), *_encode(tokenizer, OPENING)]
    cycle = [_encode(tokenizer, sentence) for sentence in NOISE]
    room = length - len(opening) - len(needle) - len(question)
    least = sum(map(len, cycle))
    if room < least:
        raise InvalidParameterError(
            f"A passkey prompt needs at least {length - room + least} tokens with this tokenizer, found "
            f"length={length}."
        )
    sentences = _noise(cycle, generator.randrange(len(cycle)), room)
    before = round(depth * len(sentences))
    head = [*opening, *(token for sentence in sentences[:before] for token in sentence)]
    tail = [token for sentence in sentences[before:] for token in sentence]
    prompt = [*head, *needle, *tail, *question]
    key_position = len(head) + len(_encode(tokenizer, KEY_BEFORE))
    return Passkey(torch.tensor(prompt), torch.tensor(answer), key, float(depth), key_position)


@torch.no_grad()
def measure(model: nn.Module, passkey: Passkey, *, seed: int = 0) -> PasskeyTrial:
    """Ask one prompt, by one forward pass over prompt and answer.

    Greedy decoding produces the key if and only if, with the right answer fed in, the most likely token is the right
    one at every step: as long as it is, both see the same tokens. So no decoding loop is needed.

    Args:
        model: a causal language model in eval mode.
        passkey: from ``build``.
        seed: noted in the result.

    Raises:
        IncompatibleError: as in ``perplexity.loss_by_position``.
    """
    device = next(model.parameters()).device
    answer = passkey.answer.to(device)
    tokens = torch.cat([passkey.prompt.to(device), answer])[None]
    pieces = logits_in_chunks(model, tokens[:, :-1], start=passkey.length - 1, chunk=len(answer))
    logits = torch.cat([piece for _, piece in pieces], dim=1)[0].float()
    correct = bool((logits.argmax(dim=-1) == answer).all())
    loss = functional.cross_entropy(logits, answer).item()
    return PasskeyTrial(passkey.length, passkey.depth, passkey.distance, seed, passkey.key, correct, loss)


def run(
    model: nn.Module,
    tokenizer: Any,
    *,
    lengths: Iterable[int],
    depths: Iterable[float],
    trials: int = 1,
    seed: int = 0,
    on_trial: Callable[[PasskeyTrial], None] | None = None,
) -> PasskeyResult:
    """Measure every length at every depth, ``trials`` times.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        lengths: prompt lengths, in tokens.
        depths: each from 0 to 1.
        trials: prompts per cell, at least 1; they use the seeds ``seed``, ``seed + 1``, ...
        seed: of the first trial of each cell.
        on_trial: called after each trial, for progress.

    Raises:
        InvalidParameterError: nothing to measure, or an argument of ``build`` out of range.
        IncompatibleError: as in ``measure``.
    """
    depths = tuple(depths)
    cells = [(length, depth, seed + n) for length in lengths for depth in depths for n in range(trials)]
    if not cells:
        raise InvalidParameterError("There is no cell to measure; give at least one length, one depth and one trial.")
    prompts = [(build(tokenizer, length=length, depth=depth, seed=n), n) for length, depth, n in cells]
    done = []
    for prompt, n in prompts:
        done.append(measure(model, prompt, seed=n))
        if on_trial is not None:
            on_trial(done[-1])
    return PasskeyResult(tuple(done))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _key_tokens(tokenizer: Any, key: str) -> list[int]:
    tokens = _encode(tokenizer, f" {key}")
    if tokenizer.decode(tokens).strip() != key:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} does not write digits faithfully: {key!r} becomes "
            f"{tokenizer.decode(tokens)!r}, so a passkey cannot be asked for."
        )
    return tokens


def _noise(cycle: list[list[int]], offset: int, room: int) -> list[list[int]]:
    """Sentences of ``room`` tokens in total; the last one is cut at its end to make that exact."""
    sentences: list[list[int]] = []
    for sentence in itertools.cycle([*cycle[offset:], *cycle[:offset]]):
        if room <= 0:
            break
        sentences.append(sentence[:room])
        room -= len(sentence)
    return sentences
