"""``ctxext eval perplexity``; with several processes: ``accelerate launch -m ctxext eval perplexity``."""

from __future__ import annotations

import functools

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
    option_group,
    token_option,
)
from ctxext.quantities import parse_bytes


@option_group
class PerplexityOptions:
    """Lengths, references and memory."""

    length: list[int] | None = token_option(
        "Tokens to read. Repeatable. Default: the length of the extended model.", "--length", "-l"
    )
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
    """Measure perplexity by position, against the best of several truncations.

    With --output, every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval perplexity Llama-3-8B --text book.txt --method yarn --factor 4 -o loss.png
    """
    from ctxext.evaluation.perplexity import make_plan, prepare
    from ctxext.evaluation.perplexity_result import perplexity_page

    memory = None if reading.memory is None else parse_bytes(reading.memory)
    session = Session(source, results, reference=reference, methods=[extension.method])
    planned = functools.partial(
        make_plan,
        lengths=reading.length or (),
        method=extension.method,
        arguments={name: value for name, value in extension.arguments().items() if name != "method"},
        memory=memory,
        unpatched=reading.unpatched,
        select=reading.select,
    )
    plan = planned(session.checkpoint.model)
    corpus = texts.read(session.checkpoint, tokens=plan.length + 1, shorter=True)
    # Prepared twice: mistakes in the options are reported before the weights are loaded.
    prepare(session.checkpoint, corpus, plan, reference=session.reference)
    session.load_weights()
    loaded = session.checkpoint
    plan = planned(loaded.model)
    session.announce(plan.trained_length, f", reads {corpus.tokens:,} tokens of {texts_in_words(corpus)}.")
    survey = prepare(loaded, corpus, plan, reference=session.reference, journal=session.journal, group=session.group)
    session.measure(survey)
    session.finish(survey.result(), perplexity_page)
