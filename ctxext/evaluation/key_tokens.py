"""Key tokens: those that a model predicts much better when it sees a long context than when it sees a short one.

Most tokens of a text need a few words before them and nothing more; averaged over all tokens, a perplexity hardly moves
when a model loses its long context. Key tokens are found once, by a model inside the window that it was trained for,
and kept in a file, so that every extension is measured on the same ones.

Differences to the paper and its code: the model is its own evaluator (or another one with the same tokenizer is), where
theirs is Llama-3.1-8B or larger and key tokens are carried from tokenizer to tokenizer by characters; a BOS token
stands in front of short contexts too, where theirs begin without one; and the long context is at most the trained
window, where theirs is the whole text.

Source: Fang et al., arXiv:2410.23771, section 4.1 and appendix A.1; PKU-ML/LongPPL@1decd2a, longppl/longppl.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ctxext import patching
from ctxext.errors import InvalidParameterError, PatchStateError
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.forward import Progress, pass_cost, ticking, turning_point
from ctxext.evaluation.loss import loss_by_position
from ctxext.evaluation.provenance import Report
from ctxext.evaluation.statistics import check_finite
from ctxext.texts.corpus import Corpus, TokenisedDocument

# The thresholds of the paper.
ALPHA, BETA = 2.0, -2.0
FINDING = "key tokens"


@dataclass(frozen=True)
class KeyPassage:
    """The key tokens of one text.

    Args:
        name: of the text.
        sha256: of the tokens that the evaluator read, the end of the text.
        from_end: the key tokens, each as the number of tokens that follow it in the text; increasing.
    """

    name: str
    sha256: str
    from_end: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KeyTokens(Report):
    """The key tokens of some texts, and how they were found.

    Args:
        passages: one per text.
        window: tokens of the long context, at most.
        short: tokens of the short context, at least; at most ``short + stride - 1``.
        stride: tokens that share a short context.
        alpha: how much better the long context has to be, in nats.
        beta: the log-likelihood that the long context has to give, in nats.
        evaluator: name of the checkpoint that found them.
        evaluator_sha256: its digest.
        tokenizer_sha256: see ``tokenizer_digest``.
    """

    TITLE, KIND, FORMAT = "a file of key tokens", "key tokens", 1

    passages: tuple[KeyPassage, ...]
    window: int
    short: int
    stride: int
    alpha: float
    beta: float
    evaluator: str
    evaluator_sha256: str
    tokenizer_sha256: str

    @property
    def tokens(self) -> int:
        """Key tokens in all texts."""
        return sum(len(passage.from_end) for passage in self.passages)

    @property
    def searched(self) -> int:
        """Tokens of each text that could have become key tokens."""
        return self.window - self.short + 1

    def check(self, checkpoint: Checkpoint, corpus: Corpus) -> None:
        """Raise ``InvalidParameterError`` unless these are key tokens of this corpus in this tokenizer."""
        if self.tokenizer_sha256 != (here := tokenizer_digest(checkpoint.tokenizer)):
            raise InvalidParameterError(
                f"The key tokens were found by {self.evaluator} with another tokenizer (sha256 "
                f"{self.tokenizer_sha256}, that of {checkpoint.name} is {here}): tokens of one are no tokens of the "
                f"other. Find them anew, into another file."
            )
        found = [(document.name, _digest(ending(document, self.window))) for document in corpus.documents]
        known = [(passage.name, passage.sha256) for passage in self.passages]
        if found != known:
            different = next((name for (name, _), pair in zip(found, known, strict=False) if (name, _) != pair), None)
            what = f"the end of {different!r} is another" if different else f"{len(known)} texts then, {len(found)} now"
            raise InvalidParameterError(
                f"The key tokens belong to other texts ({what}). The texts, --skip and the greatest --length must be "
                f"those of the run that found them; or find them anew, into another file."
            )

    @classmethod
    def load(cls, path: Path) -> KeyTokens:
        """Read a file.

        Raises:
            InvalidParameterError: a file that is missing or holds something else.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"Cannot read key tokens from {str(path)!r}: {error}") from error
        if not isinstance(saved, dict):
            raise InvalidParameterError(f"{str(path)!r} is not a file of key tokens.")
        return cls.from_dict(saved)


def find_key_tokens(
    evaluator: Checkpoint,
    corpus: Corpus,
    *,
    window: int | None = None,
    short: int | None = None,
    stride: int | None = None,
    alpha: float = ALPHA,
    beta: float = BETA,
    progress: Progress = lambda *_: None,
) -> KeyTokens:
    """Find the tokens at the end of each text that need a long context.

    The model reads the last ``window`` tokens of a text once as a whole and once in pieces: ``stride`` tokens at a
    time, with ``short`` to ``short + stride - 1`` tokens of context. A token is a key token if the long context lowers
    its loss by more than ``alpha`` and leaves it a log-likelihood above ``beta``, so that it is not merely less
    surprising.

    Args:
        evaluator: unpatched; with the tokenizer of the models that are to be measured.
        corpus: texts of more than ``window`` tokens.
        window: tokens of the long context; default, and at most, those that the evaluator was trained for.
        short: tokens of the short context; default a quarter of the window.
        stride: tokens that share a short context; default a quarter of the short context.
        alpha: nats, above 0.
        beta: nats, at most 0.
        progress: called with what is being done and the cost done since the last call (``search_cost`` in all).

    Raises:
        PatchStateError: the evaluator is extended.
        InvalidParameterError: an argument out of range, or no key token at all.
    """
    model = evaluator.model
    described = patching.describe(model)
    if described.method is not None:
        raise PatchStateError(
            f"{evaluator.name} is extended, and key tokens are found by a model in the window that it was trained for. "
            f"Unpatch it, or give its original."
        )
    window, short, stride = _sizes(described.trained_length, window, short, stride)
    if alpha <= 0 or beta > 0:
        raise InvalidParameterError(f"alpha must be above 0 and beta at most 0 nats, found {alpha} and {beta}.")
    point = turning_point(model)
    passages = []
    for document in corpus.documents:
        ids = ending(document, window)
        with ticking(model, FINDING, pass_cost(window, point), progress):
            full = loss_by_position(model, ids, start=short - 1)[0]
        with ticking(model, FINDING, pass_cost(short + stride, point), progress):
            cut = _short_losses(model, ids, short=short, stride=stride, prefix=document.prefix)
        for losses in (full, cut):
            check_finite(losses, f"{evaluator.name}, which finds key tokens, {document.name}")
        cut = torch.cat([full[:stride], cut])
        (key,) = torch.nonzero((cut - full > alpha) & (full < -beta), as_tuple=True)
        from_end = sorted(len(full) - 1 - int(place) for place in key)
        passages.append(KeyPassage(document.name, _digest(ids), tuple(from_end)))
    found = KeyTokens(
        passages=tuple(passages),
        window=window,
        short=short,
        stride=stride,
        alpha=alpha,
        beta=beta,
        evaluator=evaluator.name,
        evaluator_sha256=evaluator.sha256,
        tokenizer_sha256=tokenizer_digest(evaluator.tokenizer),
    )
    if not found.tokens:
        raise InvalidParameterError(
            f"None of {len(passages) * found.searched:,} tokens is a key token (alpha={alpha:g}, beta={beta:g}): "
            f"nothing in these texts needs more than {short:,} tokens of context. Give other texts, or a smaller short "
            f"context or alpha."
        )
    return found


def _short_losses(model: nn.Module, input_ids: Tensor, *, short: int, stride: int, prefix: int) -> Tensor:
    """The losses after ``short`` to ``short + stride - 1`` tokens, at the positions from ``short - 1 + stride`` on.

    A pass scores ``stride`` positions; each keeps the first ``prefix`` tokens of the text in front.
    """
    positions = input_ids.shape[1] - 1
    pieces = []
    for first in range(short - 1 + stride, positions, stride):
        stop = min(first + stride, positions)
        kept = [input_ids[:, :prefix], input_ids[:, first - short + 1 + prefix : stop + 1]]
        pieces.append(loss_by_position(model, torch.cat(kept, dim=1), start=short - 1)[0])
    return torch.cat(pieces)


def ending(document: TokenisedDocument, length: int) -> Int[Tensor, "1 tokens"]:
    """The prefix and the last tokens of a text: ``length`` to read, and one more to predict.

    Raises:
        InvalidParameterError: if the text is too short.
    """
    if document.tokens < length + 1:
        raise InvalidParameterError(
            f"The text {document.name!r} has {document.tokens:,} tokens; this length needs {length + 1:,}."
        )
    kept = length + 1 - document.prefix
    return torch.cat([document.input_ids[:, : document.prefix], document.input_ids[:, -kept:]], dim=1)


def tokenizer_digest(tokenizer: Any) -> str:
    """Twelve hexadecimal digits of a tokenizer's vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:12]


def search_cost(
    model: nn.Module, documents: int, *, window: int | None = None, short: int | None = None, stride: int | None = None
) -> float:
    """About what ``find_key_tokens`` reports to ``progress`` in all; arguments as there."""
    window, short, stride = _sizes(patching.describe(model).trained_length, window, short, stride)
    point = turning_point(model)
    pieces = -(-(window - short + 1 - stride) // stride)
    return documents * (pass_cost(window, point) + pieces * pass_cost(short + stride, point))


def _sizes(trained: int | None, window: int | None, short: int | None, stride: int | None) -> tuple[int, int, int]:
    """Window, short context and stride, with their defaults."""
    window = window or trained
    if window is None:
        raise InvalidParameterError("The config does not say for how many tokens the model was trained; give a window.")
    short = window // 4 if short is None else short
    stride = max(1, short // 4) if stride is None else stride
    if short < 1 or stride < 1 or short + stride > window or (trained is not None and window > trained):
        raise InvalidParameterError(
            f"Key tokens need a short context and a stride of at least 1 token, together at most the window"
            f"{f', and that at most the trained {trained:,}' if trained else ''}; found short={short:,}, "
            f"stride={stride:,}, window={window:,}."
        )
    return window, short, stride


def _digest(ids: Tensor) -> str:
    return TokenisedDocument("", ids, 0).sha256
