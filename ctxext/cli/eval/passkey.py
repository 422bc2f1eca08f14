"""``ctxext eval passkey``; with several processes: ``accelerate launch -m ctxext eval passkey``."""

from __future__ import annotations

from ctxext.cli.eval.asking import Asking
from ctxext.cli.options import (
    HaystackOptions,
    OutputOptions,
    ReaderOptions,
    Seed,
    SourceOptions,
    grouped,
    option,
    option_group,
)


@option_group
class PasskeyOptions:
    """Keys to hide."""

    depth: list[float] | None = option(
        "Positions of the key in the text, 0 (start) to 1 (end). Repeatable. Default: 0, 0.25, 0.5, 0.75, 1."
    )
    trials: int = option("Keys per length and depth.", default=1, min=1)
    seed: Seed = 0


@grouped
def passkey(
    *,
    asked: ReaderOptions,
    keys: PasskeyOptions,
    haystack: HaystackOptions,
    source: SourceOptions,
    results: OutputOptions,
) -> None:
    """Measure whether five hidden digits are found, at every length and depth: unpatched, truncated, and extended.

    With --output, every finished job is kept: run the same command again after an interruption, and it goes on.

    [bold]Example[/]: ctxext eval passkey Llama-3-8B --method yarn --factor 4 -o passkey.json -o passkey.png
    """
    from ctxext.evaluation.passkey import DEPTHS, PasskeyReport, make_prompts
    from ctxext.evaluation.report.retrieval import passkey_page

    session = Asking(asked, haystack, source, results)
    lengths, depths, text = session.lengths, keys.depth or DEPTHS, session.haystack
    prompts = session.draw(make_prompts, lengths, depths=depths, trials=keys.trials, seed=keys.seed, haystack=text)
    in_each = {"haystack": text.name}
    session.ask(PasskeyReport, prompts, f"keys in {text.name}", passkey_page, seed=keys.seed, in_each=in_each)
