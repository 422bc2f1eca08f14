"""``ctxext eval perplexity``; with several processes: ``accelerate launch -m ctxext eval perplexity``."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ctxext.cli.eval.common import Session, texts_in_words
from ctxext.cli.options import (
    SELECT_SAYS,
    ExtensionOptions,
    OutputOptions,
    Reference,
    SourceOptions,
    TextOptions,
    Unpatched,
    grouped,
    option,
    token_option,
)
from ctxext.errors import InvalidParameterError
from ctxext.quantities import parse_bytes

if TYPE_CHECKING:
    from ctxext.evaluation.perplexity import PerplexityPlan
    from ctxext.measuring.checkpoint import Checkpoint as Loaded
    from ctxext.texts.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """Lengths, and how a text is read."""

    length: list[int] | None = token_option(
        "Tokens to read. Repeatable. Default: the length of the extended model.", "--length", "-l"
    )
    mode: Literal["position", "sliding", "yarn", "longlora"] = option(
        "How a text is read: position (one pass gives the loss at every position), sliding (windows that are nearly "
        "full at every token), or the published protocols yarn and longlora.",
        default="position",
    )
    stride: int | None = token_option("Tokens between windows; default length / 8 (sliding), 256 (yarn, longlora).")
    truncate: bool = option("In mode yarn: cut each text to one window.", "--truncate", default=False)
    tokens: int | None = token_option("Tokens of each text that windows slide over; default twice the length.")
    unpatched: Unpatched = True
    select: bool = option(SELECT_SAYS, "--select", default=False)
    memory: str | None = option("Budget for weights and passes, such as 2GiB.", show_default="no limit")


@grouped
def perplexity(
    *,
    texts: TextOptions,
    extension: ExtensionOptions,
    reading: PerplexityOptions,
    reference: Reference = None,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure perplexity by position, or by a published protocol, against the best of several truncations.

    With --output, every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval perplexity Llama-3-8B --text book.txt --method yarn --factor 4 -o loss.png
    """
    from ctxext.evaluation.perplexity import make_plan, prepare
    from ctxext.evaluation.perplexity_result import perplexity_page

    memory = None if reading.memory is None else parse_bytes(reading.memory)
    session = Session(source, results, reference=reference, methods=[extension.method])
    planned = functools.partial(
        make_plan,
        mode=reading.mode,
        lengths=reading.length or (),
        stride=reading.stride,
        truncate=reading.truncate,
        method=extension.method,
        arguments={name: value for name, value in extension.arguments().items() if name != "method"},
        memory=memory,
        unpatched=reading.unpatched,
        select=reading.select,
    )
    plan = planned(session.checkpoint.model)
    corpus = _corpus(session.checkpoint, texts, plan, reading.tokens)
    # Prepared twice: mistakes in the options are reported before the weights are loaded.
    prepare(session.checkpoint, corpus, plan, reference=session.reference)
    session.load_weights()
    loaded = session.checkpoint
    plan = planned(loaded.model)
    session.announce(loaded, plan.trained_length, f"reads {corpus.tokens:,} tokens of {texts_in_words(corpus)}.")
    survey = prepare(loaded, corpus, plan, reference=session.reference, journal=session.journal, group=session.group)
    session.measure(survey)
    session.finish(survey.result(), perplexity_page)


def _corpus(loaded: Loaded, texts: TextOptions, plan: PerplexityPlan, tokens: int | None) -> Corpus:
    """Read the texts, as long as the mode needs them, with the prefix that the mode puts in front."""
    whole = plan.mode != "position"
    if not whole and tokens is not None:
        raise InvalidParameterError("--tokens is for windows that slide. In mode position, give --length.")
    if plan.mode == "longlora" and texts.bos not in ("auto", "none"):
        raise InvalidParameterError(
            f"LongLoRA's protocol has nothing in front of its texts; leave out --bos {texts.bos}."
        )
    if plan.mode == "longlora":
        texts = replace(texts, bos="none")
    elif plan.mode == "yarn" and texts.bos == "auto":  # its code adds the tokenizer's BOS wherever there is one
        texts = replace(texts, bos="none" if loaded.tokenizer.bos_token is None else "bos")
    least = 2 if plan.mode == "longlora" else plan.length + 1
    most = 2 * plan.length if tokens is None else tokens
    if whole and most < least:
        raise InvalidParameterError(f"--tokens must be at least {least:,}, one more than the length; found {most:,}.")
    corpus = texts.read(loaded, tokens=least, whole=whole, shorter=not whole)
    return corpus.cut(most) if whole else corpus
