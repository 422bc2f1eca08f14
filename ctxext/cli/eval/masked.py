"""``ctxext eval masked``: models that read to both sides."""

from __future__ import annotations

import functools

from ctxext.cli.eval.common import Session, lengths_of, texts_in_words
from ctxext.cli.options import (
    REQUIRED,
    Checkpoint,
    Dtype,
    MethodOptions,
    OutputOptions,
    Reference,
    Seed,
    SourceOptions,
    TextOptions,
    grouped,
    option,
    option_group,
)


@option_group
class MaskingOptions:
    """Tokens that are masked."""

    every: int = option("Mask one token in this many.", default=7)
    passes: int = option("Passes over each text, each with other tokens masked.", default=1)
    seed: Seed = 0


@option_group
class EncoderOptions(SourceOptions):
    """Checkpoint that fills in masked tokens."""

    checkpoint: Checkpoint = REQUIRED
    dtype: Dtype = option("auto is bf16 where that is safe and fast.", default="fp32")


@grouped
def masked(
    *,
    source: EncoderOptions,
    texts: TextOptions,
    asked: MethodOptions,
    masking: MaskingOptions,
    reference: Reference = None,
    results: OutputOptions,
) -> None:
    """Measure the loss of masked tokens by position, against windows around each of them.

    With --output, every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval masked bert-base-uncased -t books.parquet -m pi -m hierarchical -f 4 -o loss.png
    """
    from ctxext.evaluation.masked import (
        masked_jobs,
        masked_page,
        masked_readers,
        masked_report,
        masked_texts,
        tokens_needed,
    )
    from ctxext.measuring.labels import all_of, tokens_label
    from ctxext.measuring.provenance import provenance_of
    from ctxext.measuring.survey import Survey

    session = Session(source, results, reference=reference, masked=True, methods=asked.method or ())
    loaded = session.checkpoint
    # Readers are made twice: mistakes in the options are reported before the weights are loaded.
    readers = masked_readers(loaded, reference=session.reference, **asked.arguments())
    lengths = lengths_of(readers)
    corpus = texts.read(loaded, tokens=tokens_needed(loaded.tokenizer, lengths[-1]))
    cut = functools.cache(lambda tokens: masked_texts(loaded.tokenizer, corpus, tokens, **vars(masking)))
    list(map(cut, lengths))  # likewise
    session.load_weights()
    loaded = session.checkpoint
    readers = masked_readers(loaded, reference=session.reference, **asked.arguments())
    jobs = masked_jobs(readers, cut, loaded)
    survey = Survey("ctxext eval masked", loaded, jobs, corpus=corpus, journal=session.journal, group=session.group)
    about = f", reads {all_of([tokens_label(length) for length in lengths])} tokens of {texts_in_words(corpus)}."
    session.announce(readers[0].readings.trained_length, about)
    session.measure(survey)
    provenance = provenance_of(loaded, corpus, seed=masking.seed)
    report = masked_report(survey, provenance, every=masking.every, passes=masking.passes)
    session.finish(report, masked_page)
