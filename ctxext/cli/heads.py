"""``ctxext heads``: the key-value groups of a checkpoint whose heads retrieve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ctxext.cli.eval.common import Session
from ctxext.cli.options import HaystackOptions, OutputOptions, SourceOptions, grouped, option, option_group


@option_group
class HeadsTextOptions(HaystackOptions):
    """Text that needles are hidden in, and passes of each probe."""

    text: str | None = option(
        "Hide needles in this text, such as a novel.",
        "--text",
        "-t",
        show_default="random tokens, hidden in random tokens",
    )
    seeds: int = option("Passes of each probe, each over different tokens.", default=3, min=1)


@grouped
def heads(*, haystack: HeadsTextOptions, source: SourceOptions, results: OutputOptions) -> None:
    """Find retrieval heads: score each key-value group by two probes, in a few passes of up to 2,048 tokens.

    The first probe repeats random tokens, the second hides needles and asks for them. Each counts the attention to
    where the same tokens stood before. No text is needed, and nothing is trained. An extension that the checkpoint was
    saved with is taken off first.

    [bold]Example[/]: ctxext heads Llama-3-8B -o heads.json -o heads.png
    """
    document = haystack.document()  # before torch is imported: a mistake is answered quickly
    session = Session(source, results)

    from ctxext.attention.heads import heads as score
    from ctxext.attention.heads import require_scorable
    from ctxext.core.patching import patched_state, unpatch
    from ctxext.evaluation.report.heads import heads_page

    probes: dict[str, Any] = {"text": None if document is None else document.text, "seeds": range(haystack.seeds)}

    def plan() -> tuple[Any, Any]:
        model, tokenizer = session.checkpoint.model, session.checkpoint.tokenizer
        if patched_state(model) is not None:
            unpatch(model)
        require_scorable(model, tokenizer, **probes)
        return model, tokenizer

    plain = session.planned(plan)
    with session.console.status("Reading ..."):
        scores = score(*plain, **probes)
    provenance = session.provenance(document, 0).to_dict() | {"seed": None}
    session.finish(replace(scores, settings=scores.settings | {"provenance": provenance}), heads_page)
