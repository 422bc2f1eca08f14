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

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ctxext.core import patching
from ctxext.errors import InvalidParameterError, PatchStateError
from ctxext.files import parse_json
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import Window
from ctxext.measuring.provenance import Report
from ctxext.measuring.readings import Reader, Reading, Readings
from ctxext.measuring.survey import LossJob, ProcessGroup, Survey
from ctxext.measuring.truncation import UNPATCHED
from ctxext.texts.corpus import Corpus, TokenisedDocument, tokenizer_digest

# The thresholds of the paper.
ALPHA, BETA = 2.0, -2.0


@dataclass(frozen=True)
class KeyPassage:
    """The key tokens of one text.

    Args:
        sha256: Hash of the tokens that the evaluator read, the end of the text.
        from_end: Key tokens, each as the number of tokens that follow it in the text; increasing.
    """

    name: str
    sha256: str
    from_end: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KeyTokens(Report):
    """The key tokens of some texts, and how they were found.

    Args:
        window: Tokens of the long context, at most.
        short: Tokens of the short context, at least; at most ``short + stride - 1``.
        stride: Tokens that share a short context.
        alpha: Least gain by the long context, in nats.
        beta: Least log-likelihood in the long context, in nats.
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
        texts = [(document.name, ending(document, self.window).sha256) for document in corpus.documents]
        known = [(passage.name, passage.sha256) for passage in self.passages]
        if texts != known:
            different = next((name for (name, _), pair in zip(texts, known, strict=False) if (name, _) != pair), None)
            what = f"the end of {different!r} is another" if different else f"{len(known)} texts then, {len(texts)} now"
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
            saved = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"Cannot read key tokens from {str(path)!r}: {error}") from error
        if not isinstance(saved, dict):
            raise InvalidParameterError(f"{str(path)!r} is not a file of key tokens.")
        return cls.from_dict(saved)


@dataclass(eq=False, kw_only=True)
class KeySearch(Survey[LossJob]):
    """A planned search for key tokens; ``begin`` it, ``measure`` what is pending, then ask for its ``result``."""

    keys_sought: KeyTokens

    def result(self) -> KeyTokens:
        """Compare the losses with the long and the short context.

        Raises:
            InvalidParameterError: no key token at all.
        """
        losses, keys = self.losses(), self.keys_sought
        passages = []
        for long, short in zip(self.jobs[::2], self.jobs[1::2], strict=True):
            full, cut = losses[long.key], losses[short.key]
            # The first positions have a short context in any case.
            gains = torch.cat([full[: keys.stride], cut]) - full
            (places,) = torch.nonzero((gains > keys.alpha) & (full < -keys.beta), as_tuple=True)
            from_end = tuple(sorted(len(full) - 1 - int(place) for place in places))
            passages.append(KeyPassage(long.text.name, long.text.sha256, from_end))
        keys = replace(keys, passages=tuple(passages))
        if not keys.tokens:
            raise InvalidParameterError(
                f"None of {len(passages) * keys.searched:,} tokens is a key token (alpha={keys.alpha:g}, "
                f"beta={keys.beta:g}): nothing in these texts needs more than {keys.short:,} tokens of context. Give "
                f"other texts, or a smaller short context or alpha."
            )
        return keys


def prepare_search(
    evaluator: Checkpoint,
    corpus: Corpus,
    *,
    window: int | None = None,
    short: int | None = None,
    stride: int | None = None,
    alpha: float = ALPHA,
    beta: float = BETA,
    measured: Checkpoint | None = None,
    journal: Journal | None = None,
    group: ProcessGroup | None = None,
) -> KeySearch:
    """Lay out the search for the tokens at the end of each text that need a long context.

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

    Raises:
        PatchStateError: the evaluator is extended.
        InvalidParameterError: an argument out of range, or a text that is too short.
    """
    described = patching.describe(evaluator.model)
    if described.method is not None:
        raise PatchStateError(
            f"{evaluator.name} is extended, and key tokens are found by a model in the window that it was trained for. "
            f"Unpatch it, or give its original."
        )
    window, short, stride = _sizes(described.trained_length, window, short, stride)
    if alpha <= 0 or beta > 0:
        raise InvalidParameterError(f"alpha must be above 0 and beta at most 0 nats, found {alpha} and {beta}.")
    readings = Readings(evaluator, trained_length=window, windows=())
    reader = Reader(Reading(name=UNPATCHED, label=evaluator.name), readings, (window,))
    point = turning_point(evaluator.subject)
    jobs: list[LossJob] = []
    for text in (ending(document, window) for document in corpus.documents):
        name = f"{evaluator.name}, which finds key tokens, {text.name}"
        firsts = range(short - 1 + stride, window, stride)
        stops = [min(first + stride, window) for first in firsts]
        pieces = [
            Window(first - short + 1 + text.prefix, stop + 1, stop - first, text.prefix)
            for first, stop in zip(firsts, stops, strict=True)
        ]
        jobs.append(
            LossJob.of(reader, text, [Window(0, window + 1, window - short + 1)], name=name, turning_point=point)
        )
        jobs.append(LossJob.of(reader, text, pieces, name=name, turning_point=point))
    return KeySearch(
        "longppl.py",
        measured or evaluator,
        jobs,
        corpus=corpus,
        journal=journal or Journal(None),
        group=group or ProcessGroup(),
        keys_sought=KeyTokens(
            passages=(),
            window=window,
            short=short,
            stride=stride,
            alpha=alpha,
            beta=beta,
            evaluator=evaluator.name,
            evaluator_sha256=evaluator.sha256,
            tokenizer_sha256=tokenizer_digest(evaluator.tokenizer),
        ),
    )


def ending(document: TokenisedDocument, length: int) -> TokenisedDocument:
    """Cut a text to its prefix and its last tokens: ``length`` to read, and one more to predict.

    Raises:
        InvalidParameterError: if the text is too short.
    """
    if document.tokens < length + 1:
        raise InvalidParameterError(
            f"The text {document.name!r} has {document.tokens:,} tokens; this length needs {length + 1:,}."
        )
    return document.take(length + 1, skip=document.tokens - length - 1)


def _sizes(trained: int | None, window: int | None, short: int | None, stride: int | None) -> tuple[int, int, int]:
    """Return window, short context and stride, with their defaults."""
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
