"""The page of a choice: its sentences, its candidates, a search, who can load it, and a figure of the rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ctxext.choosing.choice import Candidate, Choice, duration, sentences
from ctxext.choosing.halving import INSIDE, MORE, SEARCH, WHOLE
from ctxext.choosing.search import SearchResult
from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.report.figures import COLOURS, DASHED, NOTE, OTHERS, Figure, draw_grid
from ctxext.evaluation.report.page import NONE, Code, Heading, Headline, Page, Part, TextTable, provenance_table
from ctxext.evaluation.statistics import PairedDifference

CHOSEN, USUAL, LEFT = COLOURS["yarn"], COLOURS["truncated"], "#B5B5B5"
# Rows of the short table of candidates.
SHOWN = 12


def choice_page(choice: Choice) -> Page:
    """Return the candidates that came furthest, everything that has to be said, and a figure; the rest as details."""
    title = f"{choice.provenance['checkpoint']}, {tokens_label(choice.trained_length)} to "
    title += f"{tokens_label(choice.target_length)} tokens"
    first, *rest = sentences(choice)
    header = ("", "inside the window", "beyond", "at the end", "keys", "came to")
    short = _rows(choice, _short_fate)
    others = f"{len(short) - SHOWN} more did not get as far; -o FILE.md lists them." if len(short) > SHOWN else ""
    figure = Figure(
        name="rounds",
        title=f"{title}: {choice.candidate(choice.name).label}",
        size=(13.0, 5.6),
        draw=lambda canvas: _draw(canvas, choice),
        caption="Left: what each candidate costs inside the window. Middle: the running mean beyond it, of those that "
        "read whole texts; a line ends where its candidate was stopped. Right: the verdict, with 95 percent intervals.",
        alternative="The rounds",
    )
    candidates = TextTable(
        header=header,
        rows=short[:SHOWN],
        title="Loss minus that of YaRN as published, nats per token ± standard error, on what each has read",
        caption=others,
        styles={choice.candidate(choice.name).label: "best"},
    )
    whole = TextTable(
        header=header,
        rows=_rows(choice, _fate),
        caption="What was only left behind was not shown to be worse: the budget did not last for it. What is worse is "
        "so on the texts that were chosen on; about other texts that says nothing.",
        prose=True,
    )
    runtimes = TextTable(
        header=("runtime", "computes the same", "how, or why not"),
        rows=[(one.name, "yes" if one.exact else "no", Code(one.says)) for one in choice.runtimes],
        prose=True,
    )
    details: list[Part] = [Heading("All candidates"), whole]
    if choice.search is not None:
        details += [Heading("The search"), _search(choice.search)]
    details += [Heading("Who can load it"), runtimes, Heading("What it was measured on"), _provenance(choice)]
    return Page(title, [candidates, Headline(first), *rest, figure], details)


def _rows(choice: Choice, fate: Callable[[Choice, Candidate], str]) -> list[list[str]]:
    """Return a row per candidate, those that came furthest first."""
    places = {name: place for place, name in enumerate(choice.finish.finalists)}
    rounds = {SEARCH: 0, MORE: 0, WHOLE: 1, INSIDE: 2}

    def place(candidate: Candidate) -> tuple[int, int, bool, float]:
        course = candidate.course
        gap = course.beyond or course.inside
        finalist = places.get(candidate.reading.name, len(places))
        return finalist, rounds[course.round], bool(course.worse_by), 0.0 if gap is None else gap.mean

    rows = []
    for candidate in sorted(choice.candidates, key=place):
        course = candidate.course
        gaps = [NONE if gap is None else str(gap) for gap in (course.inside, course.beyond, course.end)]
        keys = " ".join(f"{loss:.2f}" for loss in course.keys) or NONE
        rows.append([candidate.label, *gaps, keys, fate(choice, candidate)])
    return rows


def _search(search: SearchResult) -> TextTable:
    """Return what each start of a search came to."""
    rows = []
    for start in search.starts:
        tenth = max(1, len(start.losses) // 10)
        means = [sum(part) / tenth for part in (start.losses[:tenth], start.losses[-tenth:])]
        numbers = [f"{loss:.4f}" for loss in (*means, start.beyond)]
        divisors = " ".join(f"{divisor:.3g}" for divisor in start.method["long_factor"])
        rows.append([start.name, *numbers, divisors, f"{start.method['attention_factor']:.4g}"])
    return TextTable(
        header=("from", "first steps", "last steps", "beyond, texts chosen on", "divided by", "scale"),
        rows=rows,
        caption="Mean loss of the first and of the last tenth of the steps, each on the texts of its own, in nats per "
        "token; then that of the result, beyond the window, on whole texts that were chosen on; and the result: what "
        "each frequency is divided by, the fastest first.",
        prose=True,
    )


def _short_fate(choice: Choice, candidate: Candidate) -> str:
    course = candidate.course
    if candidate.reading.name == choice.name or not course.dropped:
        return _fate(choice, candidate)
    if course.round == SEARCH:
        return "not taken"
    if course.worse_by is None:
        return "left behind"
    return "stopped" if course.dropped.startswith("stopped") else "worse on these texts"


def _fate(choice: Choice, candidate: Candidate) -> str:
    course = candidate.course
    if candidate.reading.name == choice.name:
        return "chosen"
    if not course.dropped or course.worse_by is None:
        return course.dropped or "finalist"
    return f"{course.dropped}, on these texts: {course.worse_by} against {choice.candidate(course.by).label}"


def _provenance(choice: Choice) -> TextTable:
    sizes, spent, search = choice.sizes, choice.spent, choice.search
    facts = {
        "Trained_length": f"{choice.trained_length:,} tokens",
        "Chosen_on": few_of(choice.texts),
        "Judged_on": f"{choice.held_out.texts} stretches of {few_of(choice.held_out.names)}",
        "Rounds": f"{len(choice.candidates)} candidates; whole texts that {sizes.whole} of them and YaRN as published "
        f"read: {sizes.first}; that {sizes.finalists} read: {sizes.texts}; hidden keys: {sizes.keys}",
    }
    if search is not None:
        took = f"{search.sizes.steps} steps from each of {len(search.starts)} starts"
        rows = f"{search.sizes.rows} of {len(search.searched_on)} texts each"
        keys = "hidden keys in them" if search.needles else "no hidden keys (not asked for, or not read in the window)"
        facts["Search"] = f"{took}, {rows}, {keys}; on {few_of(search.searched_on)}"
        facts["Search_accepted_on"] = few_of(search.texts)
    facts["Spent"] = f"{spent.passes:.1f} passes, {duration(spent.seconds)}; budget {spent.budget or 'none'}"
    facts["Not_entered"] = "; ".join(f"{refusal.label}: {refusal.reason}" for refusal in choice.refusals)
    return provenance_table(choice.provenance, **facts)


def _draw(canvas: Any, choice: Choice) -> None:
    """Draw the rounds from left to right: inside the window, beyond it, and the verdict on other texts."""
    names = dict.fromkeys([choice.name, *choice.finish.finalists, choice.finish.runner_up])
    others = itertools.cycle(OTHERS)
    colours = {choice.usual: USUAL}  # candidates that it lacks are grey
    for name in names:
        if name and name != choice.usual:
            colours[name] = CHOSEN if name == choice.name else next(others)
    inside, beyond, verdict = canvas.subplots(1, 3, width_ratios=(1, 1.35, 1.15))
    _draw_inside(inside, choice, colours)
    _draw_beyond(beyond, choice, colours)
    _draw_verdict(verdict, choice)
    legend = {"frameon": False, "fontsize": 9, "labelcolor": "linecolor"}
    canvas.legend(*beyond.get_legend_handles_labels(), loc="outside lower center", ncols=3, **legend)


def _draw_inside(axes: Any, choice: Choice, colours: dict[str, str]) -> None:
    """Draw each candidate by how far it stretches and what it costs inside the window."""
    axes.axhline(0, color=USUAL, lw=1.2, ls=DASHED, zorder=2)
    left: list[tuple[float, float]] = []
    went: list[tuple[float, float]] = []
    for candidate in choice.candidates:
        course = candidate.course
        if candidate.stretch is None:
            continue
        place = (candidate.stretch, course.inside.mean if course.inside else 0.0)
        if candidate.reading.name in colours:
            axes.plot(*place, "o", ms=8, color=colours[candidate.reading.name], zorder=4)
        else:
            (left if course.round == INSIDE else went).append(place)
    for places, marker, colour, label in ((left, "x", LEFT, "left behind"), (went, "o", NOTE, "read whole texts")):
        if places:
            axes.plot(*zip(*places, strict=True), marker, ms=5, color=colour, label=label, zorder=3)
    means = sorted(mean for _, mean in [*left, *went])
    _clip(axes, means[0] if means else 0.0, [("", mean) for mean in means])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("what slow frequencies are divided by")
    axes.set_ylabel("loss minus that of YaRN as published, nats per token")
    axes.margins(x=0.1)
    if left or went:
        axes.legend(frameon=False, fontsize=9, loc="lower right", labelcolor="linecolor", handletextpad=0.2)
    draw_grid(axes, f"1  Inside the window: {len(choice.candidates)} candidates")


def _draw_beyond(axes: Any, choice: Choice, colours: dict[str, str]) -> None:
    """Draw running means beyond the window: a line ends where its candidate was stopped."""
    lines = {one.reading.name: one for one in choice.candidates if one.course.trace}
    usual = f"{choice.candidate(choice.usual).label}, as published"
    axes.axhline(0, color=USUAL, lw=1.6, ls=DASHED, label=usual)
    for name, candidate in sorted(lines.items(), key=lambda item: item[0] in colours):
        x, y = zip(*candidate.course.trace, strict=True)
        colour, is_chosen = colours.get(name, LEFT), name == choice.name
        label = candidate.label + (", chosen" if is_chosen else "") if name in colours else None
        axes.plot(x, y, color=colour, lw=2.6 if is_chosen else 1.6, label=label, zorder=4 if name in colours else 2)
        end = "x" if candidate.course.dropped.startswith("stopped") else "o"
        axes.plot(x[-1], y[-1], end, color=colour, ms=6, zorder=5)
    lowest = min((mean for candidate in lines.values() for _, mean in candidate.course.trace), default=0.0)
    _clip(axes, lowest, [(candidate.label, candidate.course.trace[-1][1]) for candidate in lines.values()])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: tokens_label(round(tokens)))
    axes.margins(x=0.05)
    axes.set_xlabel("tokens read beyond the window")
    draw_grid(axes, "2  Beyond it, on whole texts (x: stopped, beyond rescue)")


def _clip(axes: Any, lowest: float, values: Sequence[tuple[str, float]]) -> None:
    """Show what is near the best, and name what is far above: it would hide the differences that matter."""
    least = min(lowest, 0.0)
    most = max((value for _, value in values), default=0.0)
    top = min(max(0.02, -least), max(most, 0.0) + 0.15 * max(0.02, -least))
    axes.set_ylim(least - 0.12 * (top - least), top)
    hidden = [(name, value) for name, value in values if value > top]
    if hidden:
        named = [f"{name} {value:+.2f}" for name, value in hidden if name]
        more = f"\nand {len(named) - 4} more" if len(named) > 4 else ""
        note = "\n".join(named[:4]) + more if named else f"{len(hidden)}, up to {hidden[-1][1]:+.2f}"
        corner = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        axes.text(0.985, 0.985, f"off the scale: {note}", fontsize=8, color=NOTE, **corner)


def _draw_verdict(axes: Any, choice: Choice) -> None:
    """Draw what the choice gains and costs on texts that it was not chosen on, with 95 percent intervals."""
    held = choice.held_out
    kept = f"last {tokens_label(held.window)} tokens"
    rows: list[tuple[str, PairedDifference | None, str]] = [
        ("beyond: minus YaRN\nas published", held.versus_usual, CHOSEN),
        ("beyond: minus the\nrunner-up", held.versus_runner_up, CHOSEN),
        (f"at the end: minus the\nbest truncation\n({kept})", held.versus_truncation, CHOSEN),
        ("inside: minus the\nunextended model", held.damage, CHOSEN),
        ("the same, YaRN\nas published", held.usual_damage, USUAL),
    ]
    shown = [(name, gap, colour) for name, gap, colour in rows if gap is not None]
    axes.axvline(0, color=USUAL, lw=1.2, ls=DASHED)
    for place, (_, gap, colour) in enumerate(shown):
        axes.errorbar(gap.mean, place, xerr=gap.margin, fmt="o", ms=6, lw=1.8, color=colour)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(gap.mean, place - 0.17, str(gap), ha="center", va="bottom", fontsize=9, color=colour, bbox=box)
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown], fontsize=9)
    axes.set_ylim(len(shown) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.25)
    axes.set_xlabel("nats per token; left is better")
    texts = f"{held.texts} held-out stretch{'es' if held.texts > 1 else ''}"
    draw_grid(axes, f"3  Verdict on {texts}", axis="x")
