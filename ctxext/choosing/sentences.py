"""What a choice says about itself; each sentence depends on what was measured."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from ctxext.choosing.budget import parse_budget
from ctxext.choosing.race import INSIDE, MORE, READ, SEARCH, WHOLE
from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.statistics import PairedDifference

if TYPE_CHECKING:
    from ctxext.choosing.choice import Choice

__all__ = ["duration", "headline", "sentences", "who_loads"]

RUNGS = {INSIDE: "inside the window", WHOLE: "on whole texts", MORE: "on more texts", SEARCH: "after the search"}


def headline(choice: Choice) -> str:
    """What was chosen, and by how much it beats YaRN as published."""
    name, usual = choice.candidate(choice.name).label, choice.candidate(choice.usual).label
    held, gap = choice.held_out, choice.held_out.versus_usual
    chosen = f"Chosen for {tokens_label(choice.target_length)} tokens: {name}."
    if gap is None:
        return f"{chosen} It is YaRN as published: no other of {len(choice.candidates)} candidates was chosen over it."
    texts = _texts(choice)
    if choice.is_overruled:
        other = choice.candidate(choice.finish.choice).label
        end = held.end_versus_usual
        if held.verdict(gap) == "worse" or end is None:
            return f"{chosen} The race had chosen {other}, which on {texts} is worse, by {_size(gap)}."
        return f"{chosen} The race had chosen {other}, which at the end of {texts} is worse, by {_size(end)}."
    verdict = held.verdict(gap)
    if verdict == "better":
        return f"{chosen} On {texts} it is better than {usual} as published, by {_size(gap)}."
    return f"{chosen} On {texts} no difference to {usual} as published can be shown: {_signed(gap)}."


def sentences(choice: Choice) -> list[str]:
    """Everything that has to be said, the headline first."""
    said = [headline(choice), *_search(choice), *_versus_runner_up(choice), _versus_truncation(choice)]
    said += _keys(choice)
    said += [_damage(choice), _dropped(choice), _spent(choice), _form(choice), *_cautions(choice)]
    return said


def _texts(choice: Choice) -> str:
    held, documents = choice.held_out, len(choice.held_out.names)
    if held.same_documents:
        count = f"{held.texts} other stretches" if held.texts > 1 else "another stretch"
        return f"{count} of the text that it was chosen on"
    if documents == 1 and held.texts == 1:
        return "a text that it was not chosen on"
    stretches = f"{held.texts} stretches of " if held.texts > documents else ""
    texts = f"{documents} texts" if documents > 1 else "a text"
    return f"{stretches}{texts} that it was not chosen on"


def _size(gap: PairedDifference) -> str:
    return f"{abs(gap.mean):.3f} ± {gap.standard_error:.3f} nats per token"


def _signed(gap: PairedDifference) -> str:
    return f"{gap} nats per token"


def _versus_runner_up(choice: Choice) -> list[str]:
    gap, name = choice.held_out.versus_runner_up, choice.finish.runner_up
    if gap is None or choice.is_overruled:
        return []
    told = {"better": "better, by", "worse": "worse, by"}.get(choice.held_out.verdict(gap), "not shown to differ:")
    size = _size(gap) if told.endswith("by") else _signed(gap)
    return [f"Against the runner-up, {choice.candidate(name).label}, it is {told} {size}."]


def _search(choice: Choice) -> list[str]:
    """What a search did, and whether it was taken."""
    found = choice.search
    if found is None:
        return []
    sizes, best, rival = found.sizes, found.starts[0], choice.candidate(found.rival).label
    where = " and ".join(one.name for one in found.starts)
    on = f"{sizes.rows} texts at a time" if sizes.rows > 1 else "one text at a time"
    keys = ", keys hidden in them" if found.needles else ""
    kept = f"{len(found.texts)} texts" if len(found.texts) > 1 else "a text"
    did = f"A search of the frequencies took {sizes.steps} steps from each of {where}, {on}{keys}."
    if found.accepted:
        return [
            f"{did} What it found from {best.name} was taken: on {kept} kept back for that it is better than {rival}, "
            f"which won the race, by {_size(found.gain)}."
        ]
    best_of = f"The best, from {best.name}, was judged on {kept} kept back for that"
    return [f"{did} Nothing of it was taken. {best_of}: {found.why_not}."]


def _versus_truncation(choice: Choice) -> str:
    gap = choice.held_out.versus_truncation
    kept = f"dropping all but the last {tokens_label(choice.held_out.window)} tokens"
    whose = choice.candidate(choice.finish.choice).label if choice.is_overruled else "it"
    verdict = gap.verdict
    where = gap.scope(choice.held_out.texts)
    if verdict == "better":
        return f"At the end of the texts {whose} predicts better{where} than {kept}, by {_size(gap)}."
    if verdict == "worse":
        return (
            f"For plain prediction at the end of the texts, {kept} is better{where}, by {_size(gap)}: the longer "
            f"context pays where something far back is asked for."
        )
    return f"At the end of the texts no difference to {kept} can be shown: {_signed(gap)}."


def _keys(choice: Choice) -> list[str]:
    losses = choice.finish.course(choice.name).keys
    if not losses:
        return []
    found = sum(loss < READ for loss in losses)
    told = ", ".join(f"{loss:.2f}" for loss in losses)
    where = f"hidden in {tokens_label(choice.target_length)} tokens"
    if len(losses) == 1:
        verb = "reads" if found else "does not read"
        return [f"A key {where}, at the very start, it {verb} at better than even odds (loss {told} nats)."]
    return [
        f"Of {len(losses)} keys {where}, the first at the very start, it reads {found} at better than even odds (loss "
        f"{told} nats)."
    ]


def _damage(choice: Choice) -> str:
    held = choice.held_out
    own = held.usual_damage if choice.is_overruled or choice.name == choice.usual else held.damage
    beside = "" if choice.name == choice.usual else f" YaRN as published costs {held.usual_damage}."
    return f"Inside the window it costs {_signed(own)} against the unextended model.{beside}"


def _dropped(choice: Choice) -> str:
    kinds: Counter[str] = Counter()
    for course in choice.finish.courses:
        if course.dropped:
            shown = "shown to be worse" if course.worse_by else "left behind, not shown to be worse"
            kinds[f"{RUNGS[course.rung]} ({shown})"] += 1
    twins = sum(len(one.twins) for one in choice.candidates)
    same = f" ({twins} more have the frequencies of one of them)" if twins else ""
    told = "; ".join(f"{count} {where}" for where, count in kinds.items())
    return f"Of {len(choice.candidates)} candidates{same} these were dropped: {told or 'none'}."


def duration(seconds: float) -> str:
    """Seconds as a reader wants them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _spent(choice: Choice) -> str:
    spent = choice.spent
    limit = f", of the budget of {spent.budget}" if spent.budget else ""
    passes = f"{spent.passes:.1f} passes over {tokens_label(choice.target_length)} tokens"
    took = f"{duration(spent.seconds)} of computing"
    if parse_budget(spent.budget or None).seconds is None:
        return f"It took as much as {passes}{limit}, and {took}."
    return f"It took {took}{limit}: as much as {passes}."


def who_loads(choice: Choice) -> str:
    """Which runtimes are known to compute the same, in a few words."""
    able = [one.name for one in choice.runtimes if one.exact]
    return ", ".join(able) if able else "only ctxext"


def _form(choice: Choice) -> str:
    if choice.rope_parameters is None:
        return f"It has no stock form: {who_loads(choice)} loads it."
    return f"It is the stock dictionary {json.dumps(choice.rope_parameters)}; known to load it: {who_loads(choice)}."


def _cautions(choice: Choice) -> list[str]:
    held, said = choice.held_out, []
    gap = held.versus_usual or held.versus_truncation
    if gap.over != "documents":
        these = "this text" if len(held.names) == 1 else "these texts"
        said.append(
            f"The verdict is about {these} ({few_of(held.names)}): five documents or more would say something about "
            f"others."
        )
    if choice.finish.course(choice.finish.choice).tokens and choice.sizes.texts == 1:
        said.append("It was chosen on one text; with more, the choice among near equals is surer.")
    return said
