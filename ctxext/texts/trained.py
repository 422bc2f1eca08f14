"""Texts that a checkpoint was trained on, which its run wrote down: a loss measured on them tells nothing."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.files import JsonObject, read_json
from ctxext.texts.documents import installed_texts
from ctxext.texts.folders import split_named

RUN, SETTINGS = "run.json", "settings.json"  # written at the end of a run, and at its beginning
SAVED = re.compile(r"adapter|merged|model|checkpoint-\d+")  # folders of a run that hold a checkpoint


def record_of(sources: Sequence[str], split: str | None, checkpoint: str | None = None) -> JsonObject:
    """Return what a run writes down of the texts that it reads: absolute paths, names on the hub, and the split.

    Args:
        checkpoint: Checkpoint that the run begins from. Its record becomes a part of this one.
    """
    record: JsonObject = {"sources": [_absolute(source) for source in sources], "split": split}
    earlier = next((each for _, each in _records(checkpoint or "")), None)
    return record if earlier is None else record | {"earlier": earlier}


def refuse_trained(checkpoint: str, sources: Sequence[str], split: str | None) -> None:
    """Refuse texts that a checkpoint was trained on, as the files of its run tell, finished or not.

    Args:
        checkpoint: Directory of a checkpoint or an adapter; anything else has no record and passes.
        sources: Sources of ``read_documents``; none means the installed plays.
        split: Split of them that is read; None for the only one.

    Raises:
        InvalidParameterError: a source is one that was trained on, lies in its folder, or holds its file, and both are
            read in the same split.
    """
    for path, trained in _records(checkpoint):
        measured = sources or [str(path) for path in installed_texts()]
        trained_split = trained.get("split")
        for _, other in _shared(measured, split, trained.get("sources", ()), trained_split):
            of = f", split {trained_split}" if trained_split else ""
            raise InvalidParameterError(
                f"{checkpoint} was trained on {other}{of}, as {path} tells. A loss measured there tells nothing; "
                f"give another text or split."
            )


def _records(checkpoint: str) -> Iterator[tuple[Path, JsonObject]]:
    """Yield the records of a checkpoint's run, and of the runs before it, each with the file that holds it."""
    place = Path(checkpoint).absolute()  # "." has no name
    run = place.parent if SAVED.fullmatch(place.name) else place
    for path in (run / RUN, run / SETTINGS) if checkpoint else ():
        record = None
        with contextlib.suppress(CheckpointError):  # other programs have files of these names, too
            record = read_json(path).get("texts") if path.is_file() else None
        while isinstance(record, dict):
            yield path, record
            record = record.get("earlier")


def refuse_shared(sources: Sequence[str], split: str | None, learned: Sequence[str], learned_split: str | None) -> None:
    """Refuse texts to measure on that the same run learns from.

    Raises:
        InvalidParameterError: as ``refuse_trained``.
    """
    for source, other in _shared(sources, split, [*map(_absolute, learned)], learned_split):
        raise InvalidParameterError(
            f"evaluation.text {source} is trained on: data.train names {other}. A loss measured there tells nothing; "
            f"give another text or split."
        )


def _shared(
    measured: Sequence[str], split: str | None, learned: Sequence[str], learned_split: str | None
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of sources, the measured one first, that share texts as far as their paths and splits tell."""
    for source, other in itertools.product(map(_absolute, measured), learned):
        if _are_same(Path(source), split, Path(other), learned_split):
            yield source, other


def _are_same(one: Path, split: str | None, other: Path, other_split: str | None) -> bool:
    """Return whether two sources share texts, as far as their paths and splits tell."""
    if one == other:
        return split == other_split or None in (split, other_split)
    for folder, of, file, name in ((one, split, other, other_split), (other, other_split, one, split)):
        if file.is_relative_to(folder):
            inside = name or split_named(file.relative_to(folder))
            return of == inside or None in (of, inside)
    return False


def _absolute(source: str) -> str:
    return str(Path(source).resolve()) if Path(source).exists() else source
