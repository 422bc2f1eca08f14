"""What the commands of retrieval have in common: who reads, the work with a bar, an interruption, the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ctxext.cli.options import SlidingWindowChoice
from ctxext.cli.outputs import check_outputs
from ctxext.errors import InvalidParameterError

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint
    from ctxext.evaluation.corpus import Document
    from ctxext.evaluation.provenance import Provenance
    from ctxext.evaluation.retrieval.readers import Panel
    from ctxext.evaluation.survey import Prompt, Survey, Team

__all__ = ["Scene", "conduct", "first_document", "provenance_with", "set_up"]


@dataclass(frozen=True, eq=False)
class Scene:
    """A loaded checkpoint and who reads with it.

    Args:
        checkpoint: to measure.
        panel: the readers.
        team: the processes that share the work.
        console: quiet in all processes but the main one.
        trials: the file that keeps finished trials; None where no output was named.
    """

    checkpoint: Checkpoint
    panel: Panel
    team: Team
    console: Console
    trials: Path | None


def set_up(
    checkpoint: str | None,
    *,
    output: Sequence[Path] | None,
    as_json: bool,
    as_csv: bool,
    dtype: str,
    device: str | None,
    trust: bool,
    reference: str | None,
    sliding_window: SlidingWindowChoice | None,
    **panel: Any,
) -> Scene:
    """Load what the options name; ``panel`` goes to ``make_panel``.

    Raises:
        CtxextError: whatever cannot be right, before anything is measured.
    """
    from ctxext.evaluation.checkpoint import load_checkpoint
    from ctxext.evaluation.retrieval.readers import make_panel
    from ctxext.evaluation.survey import team_of_launcher

    check_outputs(output, as_json, as_csv)
    team = team_of_launcher()
    if team.processes > 1 and not output:
        raise InvalidParameterError("Several processes exchange what they find through files; give --output FILE.")
    console = Console(stderr=as_json or as_csv, quiet=not team.is_main, highlight=False)
    how: dict[str, Any] = {"dtype": dtype, "device": device or team.device, "trust_remote_code": trust}
    with console.status("Loading the checkpoint ..."):
        loaded = load_checkpoint(checkpoint, **how)
        original = None if reference is None else load_checkpoint(reference, **how)
    readers = make_panel(
        loaded, reference=original, sliding_window=sliding_window.value if sliding_window else None, **panel
    )
    trials = output[0].with_name(f"{output[0].stem}.trials.jsonl") if output else None
    return Scene(loaded, readers, team, console, trials)


def conduct(scene: Scene, made_by: str, prompts: Sequence[Prompt], *, where: str) -> Survey:
    """Ask everything that is not yet answered, with a bar and the time left.

    Args:
        scene: from ``set_up``.
        made_by: the command.
        prompts: what is asked.
        where: in what things are hidden, to show.

    Raises:
        CtxextError: as the measurement does; finished trials are kept.
        Exit: with code 130 on Ctrl-C.
    """
    from ctxext.evaluation.journal import TrialStore
    from ctxext.evaluation.labels import tokens_label
    from ctxext.evaluation.report.sentences import all_of
    from ctxext.evaluation.survey import Survey
    from ctxext.progress import StageBar

    console, panel = scene.console, scene.panel
    store = TrialStore(scene.trials, scene.team.process)
    survey = Survey(made_by, scene.checkpoint, panel, prompts, store=store, team=scene.team)
    mine = survey.begin()
    finished = len(survey.keys & survey.store.finished().keys())
    console.print(
        f"[bold]{scene.checkpoint.name}[/], trained to {tokens_label(panel.trained_length)} tokens, in "
        f"{scene.checkpoint.dtype_note}, is asked at {all_of([tokens_label(n) for n in panel.lengths])} tokens, "
        f"{where}."
    )
    console.print(
        f"Readings: {all_of([one.reading.label for one in panel.readers])}; {len(survey.keys)} trials"
        + (f", {finished} of them finished before" if finished else "")
        + (f"; {len(mine)} for this process of {scene.team.processes}" if scene.team.processes > 1 else "")
        + (f". Each is kept in {scene.trials}." if scene.trials else ". --output FILE would keep each finished trial.")
    )
    try:
        with StageBar(Console(stderr=True, quiet=console.quiet), sum(job.cost for job in mine)) as bar:
            survey.measure(mine, progress=bar)
    except KeyboardInterrupt:
        kept = len(survey.keys & survey.store.finished().keys()) if scene.trials else 0
        console.print(
            f"Interrupted. {kept} of {len(survey.keys)} trials are finished and kept"
            + (
                f" in {scene.trials}; run the same command again to go on."
                if scene.trials
                else ": there is no --output."
            )
        )
        raise typer.Exit(130) from None
    return survey


def first_document(text: str | None, split: str | None, column: str | None) -> Document | None:
    """The first document of a source; None where no source is named.

    Raises:
        InvalidParameterError: it cannot be read, or holds no text.
    """
    from ctxext.evaluation.corpus import read_documents

    if text is None:
        return None
    document = next(read_documents([text], split=split, column=column), None)
    if document is None:
        raise InvalidParameterError(f"{text!r} holds no text to hide anything in.")
    return document


def provenance_with(checkpoint: Checkpoint, document: Document | None, seed: int) -> Provenance:
    """The provenance of prompts that are drawn, with the text that they hide things in."""
    import hashlib

    from ctxext.evaluation.corpus import prefix_label, special_prefix
    from ctxext.evaluation.provenance import provenance_of

    tokenizer = checkpoint.tokenizer
    found = replace(provenance_of(checkpoint, seed=seed), prefix=prefix_label(tokenizer, special_prefix(tokenizer)))
    if document is None:
        return found
    digest = hashlib.sha256(document.text.encode()).hexdigest()[:12]
    return replace(found, documents=(document.name,), corpus_sha256=digest)
