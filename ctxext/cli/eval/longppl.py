"""``ctxext eval longppl``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ctxext.cli.eval.common import load_both
from ctxext.cli.options import (
    Device,
    Dtype,
    Factors,
    Measured,
    Methods,
    Reference,
    Text,
    TextOptions,
    Trained,
    Trust,
    grouped,
)
from ctxext.cli.outputs import OutputOptions

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint as Loaded
    from ctxext.evaluation.corpus import Corpus
    from ctxext.evaluation.key_tokens import KeyTokens

__all__ = ["longppl"]


@grouped
def longppl(
    *,
    checkpoint: Measured = None,
    text: Text = None,
    method: Methods = None,
    factor: Factors = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            "-l",
            help="Tokens; repeatable. Default: what the extended model is meant for.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", help="File of key tokens: reused where it exists, else written.", show_default="none"),
    ] = None,
    evaluator: Annotated[
        str | None,
        typer.Option(
            "--evaluator", help="Who finds key tokens; default the checkpoint, or its --reference.", show_default=False
        ),
    ] = None,
    reference: Reference = None,
    short: Annotated[
        int | None, typer.Option("--short", help="Tokens of a short context; default a quarter of the trained window.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", help="Tokens that share a short context; default a quarter of --short.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Nats that the long context must gain; default the paper's 2.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option("--beta", help="Least log-likelihood, nats; default the paper's -2.")
    ] = None,
    texts: TextOptions,
    trained_length: Trained = None,
    dtype: Dtype = "auto",
    device: Device = None,
    results: OutputOptions,
    trust: Trust = False,
) -> None:
    """Measure perplexity over key tokens: those that need a long context, found by the unextended model.

    Key tokens kept with --keys are the same for every method and checkpoint with this tokenizer.

    [bold]Example[/]: ctxext eval longppl Llama-3-8B --text books.parquet --keys keys.json -m yarn -m ntk --factor 2
    """
    from ctxext.evaluation import longppl as evaluation
    from ctxext.evaluation.readings import chosen_methods
    from ctxext.evaluation.report.longppl import save_figure, show
    from ctxext.progress import StageBar

    results.check()
    if keys is not None and not keys.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {keys.parent}", param_hint="--keys")
    console = Console(stderr=results.to_stdout, highlight=False)
    loaded, original = load_both(console, checkpoint, reference, dtype, device, trust)
    lengths, factors = _asked(loaded, method or [], factor or [], length or [], trained_length)
    methods = chosen_methods(loaded.model, method, factors) if method else ()
    corpus = texts.read(loaded, text, tokens=max(lengths) + 1)
    finder = original or loaded if evaluator is None else load_both(console, evaluator, None, dtype, device, trust)[0]
    search = {"window": trained_length, "short": short, "stride": stride, "alpha": alpha, "beta": beta}
    found = _key_tokens(console, finder, corpus, keys, {k: v for k, v in search.items() if v is not None})
    total = evaluation.total_cost(loaded, corpus, found, lengths=lengths, methods=max(1, len(methods)))
    with StageBar(Console(stderr=True), total) as bar:
        result = evaluation.run(
            loaded,
            corpus,
            found,
            lengths=lengths,
            methods=methods,
            reference=original,
            trained_length=trained_length,
            progress=bar,
        )
    results.write(result, show=lambda: show(result, console), draw=lambda path: save_figure(result, path))


def _asked(
    loaded: Loaded, methods: list[str], factors: list[float], lengths: list[int], trained_length: int | None
) -> tuple[list[int], list[float]]:
    """Lengths and factors, with their defaults."""
    from ctxext import patching
    from ctxext.evaluation.readings import factors_for, known_trained_length

    described = patching.describe(loaded.model)
    trained = known_trained_length(loaded.model, trained_length)
    wanted = factors_for(methods, factors, lengths, trained)
    reach = int(trained * min(wanted)) if methods else described.target_length or trained
    return lengths or [reach], wanted


def _key_tokens(
    console: Console, finder: Loaded, corpus: Corpus, path: Path | None, search: dict[str, Any]
) -> KeyTokens:
    """Those of the file, or new ones, kept there before anything else is computed."""
    import json

    from ctxext.errors import InvalidParameterError
    from ctxext.evaluation.journal import explain_disk_error
    from ctxext.evaluation.key_tokens import KeyTokens, find_key_tokens, search_cost
    from ctxext.files import write_whole
    from ctxext.progress import StageBar

    if path is not None and path.exists():
        found = KeyTokens.load(path)
        for name, value in search.items():
            if getattr(found, name) != value:
                raise InvalidParameterError(
                    f"{str(path)!r} holds key tokens found with {name}={getattr(found, name)}, and {name}={value} is "
                    f"asked for. Leave it out, or name another file."
                )
        console.print(f"{found.tokens:,} key tokens out of {path}, found by {found.evaluator}.")
        return found
    sizes = {name: search[name] for name in ("window", "short", "stride") if name in search}
    with StageBar(Console(stderr=True), search_cost(finder.model, len(corpus.documents), **sizes)) as bar:
        found = find_key_tokens(finder, corpus, **search, progress=bar)
    if path is not None:
        with explain_disk_error(path, lambda: 0, "key tokens"):
            write_whole(path, json.dumps(found.to_dict(), indent=1) + "\n")
    console.print(f"{found.tokens:,} key tokens found by {finder.name}" + (f", kept in {path}." if path else "."))
    return found
