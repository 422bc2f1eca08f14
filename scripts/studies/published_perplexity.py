"""Perplexity by the windows of published numbers: sliding ones, YaRN's sweep, LongLoRA's stream of all texts.

    python scripts/studies/published_perplexity.py Llama-3-8B -t books.parquet -m yarn -f 4 --mode yarn -w 8192 -o yarn

Use it to compare with a paper's table. ``ctxext eval perplexity`` says more: the loss at each position, against the
best truncation. Every finished text is kept in the output folder: the same command goes on.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.eval.common import Session, texts_in_words
from ctxext.cli.options import ExtensionOptions, SourceOptions, TextOptions, grouped, option, run_script, token_option
from ctxext.core import patching
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.perplexity import make_plan
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import turning_point
from ctxext.measuring.journal import Journal
from ctxext.measuring.labels import label_of, perplexity_label, tokens_label
from ctxext.measuring.loss import Window, truncation_windows
from ctxext.measuring.readings import Reader, Reading, Readings
from ctxext.measuring.survey import LossJob, Survey
from ctxext.measuring.truncation import AS_SAVED, UNPATCHED
from ctxext.texts.corpus import Corpus, TokenisedDocument
from scripts.bench import machine, markdown_table

Mode = Literal["sliding", "yarn", "longlora"]
STRIDE = 256
"""Tokens between the starts of windows in both published protocols."""


def yarn_windows(
    tokens: int, *, length: int, stride: int = STRIDE, prefix: int = 0, truncate: bool = False
) -> tuple[Window, ...]:
    """Lay out one text as ``eval/perplexity.py`` of YaRN does for one ``--max-tokens``.

    Windows of ``length`` tokens, BOS included, start every ``stride`` tokens; each scores the tokens of the text that
    no earlier one scored. The published number is the mean of the windows' means (``mean_of_windows``): *each window*
    counts the same, whether it scored ``length`` tokens (the first), the stride, or a ragged rest. With ``truncate``,
    which made the published figures, every text is cut to its first window: then the number is the cumulative mean
    over the first ``length`` tokens, averaged over texts.

    Args:
        tokens: Tokens of the text, ``prefix`` included.
        length: tokens in a window, at least 2.
        stride: tokens between the starts of windows (the paper's "sliding window of 256"), at most what a window
            holds of the text.
        prefix: leading tokens, placed in front of every window and not scored: BOS, or all that the tokenizer puts
            in front. Without any, the first token of each text has no loss.

    Raises:
        InvalidParameterError: a length or stride out of range.

    Source: Peng et al., arXiv:2309.00071, section 4.3.1; jquesnelle/yarn@995db5b, eval/perplexity.py.
    """
    _check_window(length, stride)
    room = length - prefix
    tokens -= prefix
    if truncate:
        tokens, stride = min(tokens, room), room
    most = room if truncate or prefix else room - 1
    if not 1 <= stride <= most:
        raise InvalidParameterError(
            f"stride must be from 1 to {most} for windows of {length} tokens, found {stride}: a longer one leaves "
            f"tokens without a loss."
        )
    windows: list[Window] = []
    scored = 0
    for begin in range(0, tokens, stride):
        end = min(begin + room, tokens)
        # The token at index i is predicted at position i - 1; the very first one of a window has no prediction.
        positions = prefix + end - begin - 1
        if positions:
            windows.append(Window(prefix + begin, prefix + end, min(positions, end - scored), prefix))
        scored = end
        if end == tokens:
            break
    return tuple(windows)


def longlora_starts(tokens: int, *, length: int, stride: int = STRIDE) -> range:
    """Return where the windows begin that LongLoRA's ``eval.py`` reads for one ``--seq_len`` with ``--batch_size 1``.

    All texts are *one* stream of tokens without BOS, and windows of ``length`` tokens start every ``stride`` tokens,
    across the seams between texts; the last window is dropped. Every window scores *all* of its tokens, so each token
    is scored by up to ``length / stride`` windows, with everything from no context to nearly the full window: the
    published number is the mean over all context lengths from 1 to ``length - 1``, not the loss at ``length``, and
    cannot be compared with YaRN's or with a sliding window. (The script prints ``2.71828 ** loss``, ours differs from
    it in the sixth digit. With a larger batch it averages means of batches, and the last batch may be smaller.)

    Raises:
        InvalidParameterError: a length or stride out of range, or fewer tokens than two windows need.

    Source: Chen et al., arXiv:2309.12307; dvlab-research/LongLoRA@d4eb344, eval.py.
    """
    _check_window(length, stride)
    starts = range(0, tokens - length, stride)[:-1]
    if not starts:
        raise InvalidParameterError(
            f"LongLoRA's protocol drops the last window, so it needs more than {length + stride:,} tokens in all for "
            f"windows of {length:,}; found {tokens:,}."
        )
    return starts


def mean_of_windows(losses: Sequence[Tensor], scored: Sequence[Sequence[int]]) -> float:
    """Return the mean of the means of windows, each counting the same, as both published protocols average.

    Args:
        losses: Nats per token, [tokens], one tensor per text.
        scored: Numbers of losses that each window gave, for each text.
    """
    means = [
        part.mean()
        for text, sizes in zip(losses, scored, strict=True)
        for part in torch.split(text.double(), list(sizes))
    ]
    return torch.stack(means).mean().item()


def _check_window(length: int, stride: int) -> None:
    if length < 2 or stride < 1:
        raise InvalidParameterError(
            f"A window needs at least 2 tokens and a stride of at least 1, found length={length}, stride={stride}."
        )


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A way to cut texts into windows, and to average their losses.

    Args:
        stride: Tokens between windows; None for an eighth of the shortest length (sliding), or ``STRIDE``.
        truncate: True to cut each text to one window, as made YaRN's published figures.
    """

    mode: Mode = "sliding"
    stride: int | None = None
    truncate: bool = False

    def texts(self, corpus: Corpus, length: int, stride: int) -> list[TokenisedDocument]:
        """Return the texts that are read at one length, of which all tokens count."""
        if self.mode != "longlora":
            return [replace(document, answers=None) for document in corpus.documents]
        stream = torch.cat([document.input_ids[:, document.prefix :] for document in corpus.documents], dim=1)
        starts = enumerate(longlora_starts(stream.shape[1], length=length, stride=stride), start=1)
        return [TokenisedDocument(f"window {number}", stream[:, at : at + length], 0) for number, at in starts]

    def windows(self, text: TokenisedDocument, length: int, stride: int) -> tuple[Window, ...]:
        """Return the passes over one text."""
        if self.mode == "longlora":
            return (Window(0, length, length - 1),)
        if self.mode == "sliding":
            return truncation_windows(text.tokens - 1, window=length, stride=stride, prefix=text.prefix)
        return yarn_windows(text.tokens, length=length, stride=stride, prefix=text.prefix, truncate=self.truncate)

    def average(self, jobs: Sequence[LossJob], losses: Sequence[Tensor]) -> float:
        """Return the mean over tokens (sliding), or over windows, in nats."""
        if self.mode == "sliding":
            return torch.cat(list(losses)).double().mean().item()
        return mean_of_windows(losses, [[window.scored for window in job.windows] for job in jobs])

    def read(self, texts: TextOptions, loaded: Checkpoint, length: int, tokens: int | None) -> Corpus:
        """Read the texts with the mode's prefix, and of each ``tokens``, by default two windows.

        Raises:
            InvalidParameterError: a prefix that the mode does not have, or too few tokens.
        """
        if self.mode == "longlora":
            if texts.bos not in ("auto", "none"):
                raise InvalidParameterError(
                    f"LongLoRA's protocol has nothing before a text: leave out --bos {texts.bos}."
                )
            texts = replace(texts, bos="none")
        elif self.mode == "yarn" and texts.bos == "auto":  # its code adds the tokenizer's BOS wherever there is one
            texts = replace(texts, bos="none" if loaded.tokenizer.bos_token is None else "bos")
        least = 2 if self.mode == "longlora" else length + 1
        most = 2 * length if tokens is None else tokens
        if most < least:
            raise InvalidParameterError(f"--tokens must be at least {least:,}, one more than a window; found {most:,}.")
        return texts.read(loaded, tokens=least, whole=True).cut(most)


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Lengths, and how windows slide over a text."""

    window: list[int] | None = token_option(
        "Tokens in a window. Repeatable. Default: the length of the extended model.", "--window", "-w"
    )
    mode: Mode = option("sliding (nearly full at every token), or the protocol of a paper.", default="sliding")
    stride: int | None = token_option("Tokens between windows; default window / 8 (sliding), 256 (yarn, longlora).")
    truncate: bool = option("In mode yarn: cut each text to one window.", "--truncate", default=False)
    tokens: int | None = token_option("Tokens of each text; default two windows.")


@grouped
def main(
    *,
    texts: TextOptions,
    extension: ExtensionOptions,
    windows: WindowOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is finished, and the table.")],
    source: SourceOptions,
) -> None:
    """Measure perplexity as published numbers are measured."""
    if windows.truncate and windows.mode != "yarn":
        raise InvalidParameterError(f"truncate has no meaning in mode {windows.mode!r}.")
    protocol = Protocol(mode=windows.mode, stride=windows.stride, truncate=windows.truncate)
    session = Session(source, methods=[extension.method])
    arguments = {name: value for name, value in extension.arguments().items() if name != "method"}
    plan = session.planned(
        lambda: make_plan(
            session.checkpoint.model, lengths=windows.window or (), method=extension.method, arguments=arguments
        )
    )
    checkpoint = session.checkpoint
    lengths = sorted(set(windows.window or [plan.length]))
    stride = windows.stride or (max(1, lengths[0] // 8) if windows.mode == "sliding" else STRIDE)
    corpus = protocol.read(texts, checkpoint, lengths[-1], windows.tokens)
    session.announce(plan.trained_length, f", reads {corpus.tokens:,} tokens of {texts_in_words(corpus)}.")
    model = Readings(checkpoint, trained_length=plan.trained_length, windows=())
    as_is = UNPATCHED if model.extended is None else AS_SAVED
    readers = [Reader(Reading(name=as_is, label=label_of(as_is)), model, tuple(lengths), apply=contextlib.nullcontext)]
    if plan.method is not None:
        reading = Reading(name=plan.method, label=label_of(plan.method), **vars(plan.extension))
        apply = partial(patching.patched, checkpoint.model, plan.method, **plan.arguments)
        readers.append(Reader(reading, model, tuple(lengths), apply=apply))
    point = turning_point(checkpoint.subject)
    cut = {length: protocol.texts(corpus, length, stride) for length in lengths}
    jobs = {
        (reader, length): [
            LossJob.of(
                reader,
                text,
                protocol.windows(text, length, stride),
                name=f"{reader.reading.name}, {text.name}",
                turning_point=point,
            )
            for text in cut[length]
        ]
        for reader in readers
        for length in lengths
    }
    journal = Journal(output / "cells.jsonl", session.group.process, identity="study.json")
    every = list({job.key: job for each in jobs.values() for job in each}.values())
    survey = Survey("published_perplexity.py", checkpoint, every, corpus=corpus, journal=journal, group=session.group)
    session.measure(survey)
    if not session.group.is_main:
        return
    losses, rows = survey.losses(), []
    for reader in readers:
        own = [jobs[reader, length] for length in lengths]
        means = [protocol.average(each, [losses[job.key] for job in each]) for each in own]
        rows.append([reader.reading.label, *(perplexity_label(math.exp(mean)) for mean in means)])
    form = "each text cut to a window" if windows.truncate else f"windows every {stride} tokens"
    where = machine(next(checkpoint.model.parameters()).device.type)
    title = f"Perplexity, {windows.mode}, {form}; {checkpoint.name}, {where}"
    written = markdown_table(title, ["reading", *map(tokens_label, lengths)], rows)
    (output / "table.md").write_text(written, encoding="utf-8")
    session.console.print(written, markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_script(main)
