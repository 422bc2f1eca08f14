"""``ctxext eval longppl``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ctxext.cli.eval.common import Session
from ctxext.cli.options import (
    MethodOptions,
    OutputOptions,
    Reference,
    SourceOptions,
    TextOptions,
    grouped,
    option,
    token_option,
)
from ctxext.errors import InvalidParameterError
from ctxext.files import write_whole

if TYPE_CHECKING:
    from ctxext.evaluation.key_tokens import KeyTokens
    from ctxext.measuring.journal import Journal
    from ctxext.texts.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Key tokens: where they are kept, and how they are found."""

    keys: Path | None = option("File of key tokens: reused if it exists, else written.", show_default="none")
    evaluator: str | None = option(
        "The checkpoint that finds key tokens; default the one measured, or its --reference."
    )
    short: int | None = token_option("Tokens of a short context; default a quarter of the trained window.")
    stride: int | None = token_option("Tokens that share a short context; default a quarter of --short.")
    alpha: float | None = option("Least gain of a key token from the long context, nats; default the paper's 2.")
    beta: float | None = option(
        "Least log-likelihood of a key token in the long context, nats; default the paper's -2."
    )

    def search(self, window: int | None) -> dict[str, Any]:
        """Return the arguments of a search for key tokens, without those that are left out."""
        given = {"window": window} | {name: getattr(self, name) for name in ("short", "stride", "alpha", "beta")}
        return {name: value for name, value in given.items() if value is not None}


@grouped
def longppl(
    *,
    texts: TextOptions,
    asked: MethodOptions,
    keys: KeyOptions,
    reference: Reference = None,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure perplexity over key tokens: those that need a long context, found by the unextended model.

    Key tokens kept with --keys are the same for every method and checkpoint with this tokenizer.

    [bold]Example[/]: ctxext eval longppl Llama-3-8B --text books.parquet --keys keys.json -m yarn -m ntk --factor 2
    """
    from ctxext.core.patching import describe
    from ctxext.evaluation import longppl as evaluation
    from ctxext.evaluation.longppl import longppl_page
    from ctxext.measuring.readers import factors_for
    from ctxext.measuring.readings import chosen_methods, known_trained_length

    if keys.keys is not None and not keys.keys.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {keys.keys.parent}", param_hint="--keys")
    session = Session(source, results, reference=reference, methods=asked.method or ())
    loaded = session.checkpoint
    trained = known_trained_length(loaded.subject, asked.trained_length)
    factors = factors_for(asked.method or (), asked.factor or (), asked.length or (), trained)
    methods = chosen_methods(loaded.subject, asked.method, factors, trained) if asked.method else ()
    reach = int(trained * min(factors)) if asked.method else describe(loaded.model).target_length
    lengths = asked.length or [reach or trained]
    corpus = texts.read(loaded, tokens=max(lengths) + 1)
    evaluation.check(loaded, lengths, methods, session.reference, asked.trained_length)
    session.load_weights()
    loaded = session.checkpoint
    journal = session.journal
    survey = evaluation.prepare(
        loaded,
        corpus,
        _key_tokens(session, keys, corpus, keys.search(asked.trained_length), journal),
        lengths=lengths,
        methods=methods,
        reference=session.reference,
        trained_length=asked.trained_length,
        journal=journal,
        group=session.group,
    )
    session.measure(survey)
    session.finish(survey.result(), longppl_page)


def _key_tokens(
    session: Session, options: KeyOptions, corpus: Corpus, search: dict[str, Any], journal: Journal
) -> KeyTokens:
    """Read the key tokens of the file, or find them and keep them there before anything else is computed."""
    from ctxext.evaluation.key_tokens import KeyTokens, prepare_search
    from ctxext.measuring.journal import explain_disk_error

    path = options.keys
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
    finder = session.load(options.evaluator) if options.evaluator else session.reference or session.checkpoint
    survey = prepare_search(finder, corpus, **search, measured=session.checkpoint, journal=journal, group=session.group)
    session.measure(survey)
    keys = survey.result()
    if path is not None and session.group.is_main:
        with explain_disk_error(path, lambda: 0, "key tokens"):
            write_whole(path, json.dumps(keys.to_dict(), indent=1) + "\n")
    where = f", kept in {path}" if path else ""
    session.console.print(f"{keys.tokens:,} key tokens found by {finder.name}{where}.")
    return keys
