"""``ctxext eval passages``: embedding models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from typer import Argument

from ctxext.cli.eval.common import Session, lengths_of
from ctxext.cli.options import (
    REQUIRED,
    Dtype,
    HaystackOptions,
    MethodOptions,
    OutputOptions,
    Seed,
    SourceOptions,
    grouped,
    option,
)


@dataclass(frozen=True, kw_only=True)
class EmbedderOptions(SourceOptions):
    """Embedding model."""

    checkpoint: Annotated[
        str, Argument(help="An embedding model of sentence-transformers: a directory, or a name on the hub.")
    ] = REQUIRED
    dtype: Dtype = option("auto is fp32.", default="auto")


@dataclass(frozen=True, kw_only=True)
class PassageOptions:
    """Documents to search."""

    documents: int = option("Documents of each length.", "--documents", "-n", default=50)
    seed: Seed = 0


@grouped
def passages(
    *,
    source: EmbedderOptions,
    asked: MethodOptions,
    documents: PassageOptions,
    haystack: HaystackOptions,
    results: OutputOptions,
) -> None:
    """Find one person's document among long ones: by an extended embedding model, by its first tokens, and by chunks.

    With --output, every finished part is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval passages all-MiniLM-L6-v2 -m pi -m tile -f 4 -o passages.json -o passages.png
    """
    from ctxext.evaluation.passages import load_embedder, make_passages, passage_jobs, passage_readers, passage_report
    from ctxext.evaluation.report.passages import passage_page
    from ctxext.measuring.labels import all_of, tokens_label
    from ctxext.measuring.provenance import provenance_of
    from ctxext.measuring.survey import Survey
    from ctxext.texts.haystack import noise, of_text

    document = haystack.document()
    session = Session(source, results, load=load_embedder)
    embedder, checkpoint = session.checkpoint, session.checkpoint.checkpoint
    readers = passage_readers(embedder, **asked.arguments())
    lengths, tokenizer = lengths_of(readers), checkpoint.tokenizer
    text = noise(tokenizer) if document is None else of_text(tokenizer, document.name, document.text)
    sets = [
        make_passages(tokenizer, length=length, haystack=text, documents=documents.documents, seed=documents.seed)
        for length in lengths
    ]
    jobs = passage_jobs(embedder, readers, sets)
    survey = Survey("ctxext eval passages", checkpoint, jobs, journal=session.journal, group=session.group)
    each = all_of([tokens_label(length) for length in lengths])
    about = f"reads {documents.documents} documents each of {each} tokens."
    session.announce(checkpoint, readers[0].readings.trained_length, about)
    session.measure(survey)
    provenance = provenance_of(checkpoint, seed=documents.seed)
    if document is not None:
        provenance = replace(provenance, documents=(document.name,))
    session.finish(passage_report(survey, text.name, provenance), passage_page)
