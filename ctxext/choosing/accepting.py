"""Whether what a search found becomes the choice: on texts that neither the race nor the search has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ctxext.choosing.choice import SearchResult
from ctxext.choosing.losses import MeasuredLosses
from ctxext.choosing.race import SEARCH, Course, Finish, is_worse, keys_lost
from ctxext.choosing.search import Search, SearchedStart
from ctxext.choosing.texts import TextStretch
from ctxext.choosing.verdict import by_document
from ctxext.evaluation.statistics import CHANCE, PairedDifference, document_difference

# Standard errors by which what was found must be better than the choice of the race, or more where texts are few.
NEEDED = 2.0


def accept(
    search: Search,
    starts: Sequence[SearchedStart],
    finish: Finish,
    *,
    usual: str,
    texts: Sequence[TextStretch],
    label: str,
) -> tuple[SearchResult, Finish]:
    """Hold the best that a search found against the choice of the race.

    Args:
        search: that found them.
        starts: the best first.
        finish: of the race.
        usual: name of the published YaRN.
        texts: kept back for this.
        label: of the race's choice, in few words.

    Returns:
        What was found, and the race's finish with it: as its choice where it was taken.
    """
    losses, rival = search.losses, finish.choice
    name = search.reading_of(starts[0]).name
    read = {one: losses.texts(one, texts) for one in dict.fromkeys([name, rival, usual])}
    documents = [one.document for one in texts]
    gain = _beyond(losses, read[name], read[rival], documents)
    course = Course(name=name, rung=SEARCH, keys=losses.keys(name))
    course = course.beside(read[usual], read[name], trained=losses.trained, length=losses.length)
    damage, end = course.inside, course.end
    assert damage is not None
    assert end is not None
    keys = {name: course.keys, rival: losses.keys(rival)}
    reason = why_not(gain, damage, end, keys, name=name, label=label)
    if reason:
        course = replace(course, dropped=reason, by=rival)
    result = SearchResult(
        starts=tuple(starts),
        rival=rival,
        why_not=reason,
        gain=gain,
        damage=damage,
        texts=tuple(one.text.name for one in texts),
        searched_on=tuple(one.text.name for one in search.texts),
        needles=search.needles,
        sizes=search.sizes,
    )
    finish = replace(finish, courses=(*finish.courses, course))
    if result.accepted:
        finish = replace(finish, choice=name, runner_up=rival, finalists=(name, *finish.finalists))
    return result, finish


def why_not(
    gain: PairedDifference,
    damage: PairedDifference,
    end: PairedDifference,
    keys: Mapping[str, Sequence[float]],
    *,
    name: str,
    label: str,
) -> str:
    """Why what was found is not taken; empty where it is.

    Args:
        gain: beyond the window, its loss minus that of the race's choice.
        damage: inside, its loss minus that of the published YaRN.
        end: the same at the end of the texts.
        keys: loss of each hidden key, of both.
        name: of what was found.
        label: of the race's choice.
    """
    if not gain.mean < -max(NEEDED, gain.errors_needed()) * gain.standard_error:
        return f"not better than {label} by two standard errors: {gain}"
    if is_worse(damage, CHANCE, 1):
        return f"more damage inside the window than YaRN as published: {damage}"
    if is_worse(end, CHANCE, 1):
        return f"worse at the end of the texts than YaRN as published: {end}"
    lost = keys_lost(keys)[name]
    if lost:
        return f"{lost} of {len(keys[name])} hidden keys lost that {label} reads"
    return ""


def _beyond(
    losses: MeasuredLosses, own: Sequence[Tensor], other: Sequence[Tensor], documents: Sequence[str]
) -> PairedDifference:
    mine, theirs = ([text[losses.trained :] for text in side] for side in (own, other))
    return document_difference(by_document(mine, documents), by_document(theirs, documents))
