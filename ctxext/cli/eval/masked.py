"""``ctxext eval masked``: models that read to both sides."""

from __future__ import annotations

from typing import Annotated

from rich.text import Text
from typer import Option

from ctxext.cli.eval.common import Session, amount_of_work, cost_of, told_on_interrupt, trials_beside
from ctxext.cli.options import (
    Checkpoint,
    Factors,
    Methods,
    OutputOptions,
    Reference,
    Seed,
    SourceOptions,
    TextOptions,
    Trained,
    Trust,
    grouped,
)


@grouped
def masked(
    checkpoint: Checkpoint,
    *,
    texts: TextOptions,
    method: Methods = None,
    factor: Factors = None,
    length: Annotated[
        list[int] | None,
        Option(
            "--length",
            "-l",
            help="Tokens to read, beside the trained length. Repeatable. Default: what each method reaches.",
        ),
    ] = None,
    every: Annotated[int, Option(help="One token in so many is masked.")] = 7,
    passes: Annotated[int, Option(help="How often each text is read, each time with others masked.")] = 1,
    reference: Reference = None,
    trained_length: Trained = None,
    seed: Seed = 0,
    dtype: Annotated[str, Option(help="auto (bf16 where it is safe), bf16, fp16 or fp32.")] = "fp32",
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:1, ...; default cuda if there is one.")] = None,
    trust: Trust = False,
    results: OutputOptions,
) -> None:
    """Measure the loss of masked tokens by position and by distance to the end, against windows around each of them.

    With --output, every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval masked bert-base-uncased -t books.parquet -m pi -m hierarchical -f 4 -o loss.png
    """
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.labels import all_of, few_of, tokens_label
    from ctxext.evaluation.masked import masked_jobs, masked_readers, masked_report, masked_texts, tokens_needed
    from ctxext.evaluation.provenance import provenance_of
    from ctxext.evaluation.report.masked import masked_page
    from ctxext.evaluation.survey import Survey

    source = SourceOptions(checkpoint=checkpoint, dtype=dtype, device=device, trust=trust)
    session = Session(source, results, reference=reference, masked=True)
    loaded, console = session.checkpoint, session.console
    readers = masked_readers(
        loaded,
        methods=method or (),
        factors=factor or (),
        lengths=length or (),
        reference=session.reference,
        trained_length=trained_length,
    )
    lengths = sorted({one for reader in readers for one in reader.lengths})
    corpus = texts.read(loaded, tokens=tokens_needed(loaded.tokenizer, lengths[-1]))
    jobs = masked_jobs(
        readers,
        lambda tokens: masked_texts(loaded.tokenizer, corpus, tokens, every=every, passes=passes, seed=seed),
        loaded,
    )
    journal = Journal(trials_beside(results), session.group.process)
    survey = Survey("ctxext eval masked", loaded, jobs, corpus=corpus, journal=journal, group=session.group)
    mine = survey.begin()
    about = (
        f", trained to {tokens_label(readers[0].readings.trained_length)} tokens, in "
        f"{loaded.dtype_note}, reads {all_of(list(map(tokens_label, lengths)))} tokens of "
        f"{few_of([one.name for one in corpus.documents])}; {amount_of_work(survey, mine)}."
    )
    console.print(Text.assemble((loaded.name, "bold"), about))
    with told_on_interrupt(console, survey), session.bar(cost_of(mine)) as bar:
        survey.measure(mine, progress=bar)
    report = masked_report(survey, provenance_of(loaded, corpus, seed=seed), every=every, passes=passes)
    session.finish(report, masked_page)
