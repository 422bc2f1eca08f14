"""``ctxext eval passages``: embedding models."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

from ctxext.cli.eval.common import amount_of_work, cost_of, first_document, told_on_interrupt, trials_beside
from ctxext.cli.options import Column, Factors, Methods, OutputOptions, Seed, Split, Trained, Trust, grouped
from ctxext.progress import StageBar, terminal


@grouped
def passages(
    checkpoint: Annotated[
        str, Argument(help="An embedding model of sentence-transformers: a directory, or a name on the hub.")
    ],
    *,
    method: Methods = None,
    factor: Factors = None,
    length: Annotated[
        list[int] | None,
        Option(
            "--length",
            "-l",
            help="Tokens of each document. Repeatable. Default: the trained length and what each method reaches.",
        ),
    ] = None,
    documents: Annotated[int, Option("--documents", "-n", help="Documents of each length.")] = 50,
    text: Annotated[
        str | None, Option("--text", "-t", help="Make documents of this text. Default: repeated noise.")
    ] = None,
    split: Split = None,
    column: Column = None,
    trained_length: Trained = None,
    seed: Seed = 0,
    dtype: Annotated[str, Option(help="auto (fp32), bf16, fp16 or fp32.")] = "auto",
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:1, ...; default cuda if there is one.")] = None,
    trust: Trust = False,
    results: OutputOptions,
) -> None:
    """Find one person's document among long ones: by an extended embedding model, by its first tokens, and by chunks.

    With --output, every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval passages all-MiniLM-L6-v2 -m pi -m tile -f 4 -o passages.json -o passages.png
    """
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.labels import all_of, tokens_label
    from ctxext.evaluation.passages import load_embedder, make_shelf, passage_jobs, passage_readers, passage_report
    from ctxext.evaluation.provenance import provenance_of
    from ctxext.evaluation.report.passages import passage_page
    from ctxext.evaluation.survey import Survey
    from ctxext.texts.haystack import noise, of_text

    results.check()
    document = first_document(text, split, column)
    console = terminal(stderr=results.as_json)
    with console.status("Loading the model ..."):
        embedder = load_embedder(checkpoint, dtype=dtype, device=device, trust_remote_code=trust)
    readers = passage_readers(
        embedder, methods=method or (), factors=factor or (), lengths=length or (), trained_length=trained_length
    )
    tokenizer = embedder.checkpoint.tokenizer
    haystack = noise(tokenizer) if document is None else of_text(tokenizer, document.name, document.text)
    lengths = sorted({one for reader in readers for one in reader.lengths})
    shelves = [make_shelf(tokenizer, length=one, documents=documents, seed=seed, haystack=haystack) for one in lengths]
    survey = Survey(
        "ctxext eval passages",
        embedder.checkpoint,
        passage_jobs(embedder, readers, shelves),
        journal=Journal(trials_beside(results)),
    )
    mine = survey.begin()
    about = (
        f", trained to {tokens_label(readers[0].readings.trained_length)} tokens, "
        f"reads {documents} documents each of {all_of(list(map(tokens_label, lengths)))} tokens; "
        f"{amount_of_work(survey, mine)}."
    )
    console.print(Text.assemble((embedder.checkpoint.name, "bold"), about))
    with told_on_interrupt(console, survey), StageBar(terminal(stderr=True), cost_of(mine)) as bar:
        survey.measure(mine, progress=bar)
    provenance = provenance_of(embedder.checkpoint, seed=seed)
    if document is not None:
        provenance = replace(provenance, documents=(document.name,))
    report = passage_report(survey, haystack.name, provenance)
    results.write(report, passage_page(report), console)
