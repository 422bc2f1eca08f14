"""``ctxext eval longppl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ctxext.cli.eval.common import Session, trials_beside
from ctxext.cli.options import (
    Factors,
    Lengths,
    Methods,
    OutputOptions,
    Reference,
    SourceOptions,
    TextOptions,
    Trained,
    grouped,
)
from ctxext.errors import InvalidParameterError
from ctxext.files import write_whole

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint as Loaded
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.key_tokens import KeyTokens
    from ctxext.texts.corpus import Corpus


@grouped
def longppl(
    *,
    texts: TextOptions,
    method: Methods = None,
    factor: Factors = None,
    length: Lengths = None,
    keys: Annotated[
        Path | None,
        Option(help="File of key tokens: reused where it exists, else written.", show_default="none"),
    ] = None,
    evaluator: Annotated[
        str | None,
        Option(help="The checkpoint that finds key tokens; default the one measured, or its --reference."),
    ] = None,
    reference: Reference = None,
    short: Annotated[
        int | None, Option(help="Tokens of a short context; default a quarter of the trained window.")
    ] = None,
    stride: Annotated[
        int | None, Option(help="Tokens that share a short context; default a quarter of --short.")
    ] = None,
    alpha: Annotated[
        float | None,
        Option(help="Least that a key token gains by the long context, nats; default the paper's 2."),
    ] = None,
    beta: Annotated[
        float | None,
        Option(help="Least log-likelihood of a key token in the long context, nats; default the paper's -2."),
    ] = None,
    trained_length: Trained = None,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure perplexity over key tokens: those that need a long context, found by the unextended model.

    Key tokens kept with --keys are the same for every method and checkpoint with this tokenizer.

    [bold]Example[/]: ctxext eval longppl Llama-3-8B --text books.parquet --keys keys.json -m yarn -m ntk --factor 2
    """
    from ctxext.evaluation import longppl as evaluation
    from ctxext.evaluation.journal import Journal
    from ctxext.evaluation.readings import chosen_methods, factors_for, known_trained_length
    from ctxext.evaluation.report.longppl import longppl_page
    from ctxext.patching import describe

    if keys is not None and not keys.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {keys.parent}", param_hint="--keys")
    session = Session(source, results, reference=reference)
    loaded = session.checkpoint
    trained = known_trained_length(loaded.model, trained_length)
    factors = factors_for(method or (), factor or (), length or (), trained)
    methods = chosen_methods(loaded.model, method, factors) if method else ()
    reach = int(trained * min(factors)) if method else describe(loaded.model).target_length
    lengths = length or [reach or trained]
    corpus = texts.read(loaded, tokens=max(lengths) + 1)
    finder = session.reference or loaded if evaluator is None else session.load(evaluator)
    journal = Journal(trials_beside(results), session.group.process)
    search = {"window": trained_length, "short": short, "stride": stride, "alpha": alpha, "beta": beta}
    search = {name: value for name, value in search.items() if value is not None}
    survey = evaluation.prepare(
        loaded,
        corpus,
        _key_tokens(session, finder, corpus, keys, search, journal),
        lengths=lengths,
        methods=methods,
        reference=session.reference,
        trained_length=trained_length,
        journal=journal,
        group=session.group,
    )
    session.measure(survey)
    session.finish(survey.result(), longppl_page)


def _key_tokens(
    session: Session, finder: Loaded, corpus: Corpus, path: Path | None, search: dict[str, Any], journal: Journal
) -> KeyTokens:
    """Read the key tokens of the file, or find them and keep them there before anything else is computed."""
    from ctxext.evaluation.journal import explain_disk_error
    from ctxext.evaluation.key_tokens import KeyTokens, prepare_search

    if path is not None and path.exists():
        kept = KeyTokens.load(path)
        for name, value in search.items():
            if getattr(kept, name) != value:
                raise InvalidParameterError(
                    f"{str(path)!r} holds key tokens found with {name}={getattr(kept, name)}, and {name}={value} is "
                    f"asked for. Leave it out, or name another file."
                )
        session.console.print(f"{kept.tokens:,} key tokens out of {path}, found by {kept.evaluator}.")
        return kept
    survey = prepare_search(finder, corpus, **search, measured=session.checkpoint, journal=journal, group=session.group)
    session.measure(survey)
    keys = survey.result()
    if path is not None and session.group.is_main:
        with explain_disk_error(path, lambda: 0, "key tokens"):
            write_whole(path, json.dumps(keys.to_dict(), indent=1) + "\n")
    where = f", kept in {path}" if path else ""
    session.console.print(f"{keys.tokens:,} key tokens found by {finder.name}{where}.")
    return keys
