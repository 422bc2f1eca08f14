"""A choice in a terminal, as a page of Markdown, and as a figure of the race."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console

from ctxext.choosing.choice import Candidate, Choice, duration, sentences
from ctxext.choosing.race import INSIDE, MORE, SEARCH, WHOLE
from ctxext.evaluation.labels import few_of, tokens_label
from ctxext.evaluation.report.markdown import code, escaped, table
from ctxext.evaluation.report.style import (
    COLOURS,
    DASHED,
    NOTE,
    OTHERS,
    draw_grid,
    plain_table,
    saved_figure,
    say,
)
from ctxext.evaluation.statistics import PairedDifference

NONE = "\N{EN DASH}"
CHOSEN, LEFT = COLOURS["yarn"], "#B5B5B5"
# Rows of the terminal's table: more are in the files.
SHOWN = 12


def show_choice(choice: Choice, console: Console) -> None:
    """Print those that came furthest, and everything that has to be said."""
    header, rows = _table(choice, _short_fate)
    shown = rows[:SHOWN]
    console.print("\nLoss minus that of YaRN as published, nats per token ± standard error, on what each has read\n")
    console.print(plain_table(header, shown, {choice.candidate(choice.name).label: "bold"}))
    if len(rows) > len(shown):
        console.print(f"\n{len(rows) - len(shown)} more did not get as far; -o FILE.md lists them.", style="dim")
    say(console, sentences(choice))


def page(choice: Choice, figure: str | None = None) -> str:
    """One page of Markdown with all that was found.

    Args:
        choice: what to tell of.
        figure: a picture of the race to show, by its name beside the page; None for none.
    """
    title = f"# {escaped(choice.provenance['checkpoint'])} to {tokens_label(choice.target_length)} tokens"
    first, *rest = sentences(choice)
    told = [title, f"**{escaped(first)}**", *(f"- {escaped(one)}" for one in rest)]
    seen = (
        "Left: what each candidate costs inside the window. Middle: the running mean beyond it, of those that read "
        "whole texts; a line ends where its candidate was stopped. Right: the verdict, with 95 percent intervals."
    )
    picture = [f"![The race]({quote(figure)})", seen] if figure else []
    header, rows = _table(choice, _fate)
    facts = list(_facts(choice).items())
    runtimes = [(one.name, "yes" if one.exact else "no", code(one.says, in_table=True)) for one in choice.runtimes]
    parts = [
        told[0],
        told[1],
        "\n".join(told[2:]),
        *picture,
        "## The race",
        "Loss minus that of YaRN as published, in nats per token ± standard error, on what each has read. What was "
        "only left behind was not shown to be worse: the budget did not last for it. What is worse is so on the texts "
        "that the race read; about other texts that says nothing.",
        table(header, rows),
        *_search_page(choice),
        "## Who can load it",
        table(("runtime", "computes the same", "how, or why not"), runtimes),
        "## What it was measured on",
        table(("", ""), facts),
    ]
    return "\n\n".join(parts) + "\n"


def _table(choice: Choice, fate: Callable[[Choice, Candidate], str]) -> tuple[list[str], list[list[str]]]:
    """Candidates, those that came furthest first."""
    header = ["", "inside the window", "beyond", "at the end", "keys", "came to"]
    places = {name: place for place, name in enumerate(choice.finish.finalists)}
    rungs = {SEARCH: 0, MORE: 0, WHOLE: 1, INSIDE: 2}

    def place(one: Candidate) -> tuple[int, int, bool, float]:
        course = one.course
        gap = course.beyond or course.inside
        mean = 0.0 if gap is None else gap.mean
        finalist = places.get(one.reading.name, len(places))
        return finalist, rungs[course.rung], bool(course.worse_by), mean

    rows = []
    for one in sorted(choice.candidates, key=place):
        course = one.course
        keys = " ".join(f"{loss:.2f}" for loss in course.keys) or NONE
        rows.append([one.label, _gap(course.inside), _gap(course.beyond), _gap(course.end), keys, fate(choice, one)])
    return header, rows


def _search_page(choice: Choice) -> list[str]:
    """What each start of a search came to."""
    if choice.search is None:
        return []
    header = ["from", "first steps", "last steps", "beyond, texts chosen on", "divided by", "scale"]
    rows = []
    for one in choice.search.starts:
        tenth = max(1, len(one.losses) // 10)
        first, last = (sum(part) / tenth for part in (one.losses[:tenth], one.losses[-tenth:]))
        divisors = " ".join(f"{divisor:.3g}" for divisor in one.method["long_factor"])
        rows.append(
            [
                one.name,
                f"{first:.4f}",
                f"{last:.4f}",
                f"{one.beyond:.4f}",
                divisors,
                f"{one.method['attention_factor']:.4g}",
            ]
        )
    told = (
        "Mean loss of the first and of the last tenth of the steps, each on the texts of its own, in nats per token; "
        "then that of what was found, beyond the window, on whole texts that were chosen on; and what was found: what "
        "each frequency is divided by, the fastest first."
    )
    return ["## The search", told, table(header, rows)]


def _short_fate(choice: Choice, one: Candidate) -> str:
    course = one.course
    if one.reading.name == choice.name or not course.dropped:
        return _fate(choice, one)
    if course.rung == SEARCH:
        return "not taken"
    if course.worse_by is None:
        return "left behind"
    return "stopped" if course.dropped.startswith("stopped") else "worse on these texts"


def _fate(choice: Choice, one: Candidate) -> str:
    course = one.course
    if one.reading.name == choice.name:
        return "chosen"
    if not course.dropped:
        return "finalist"
    if course.worse_by is None:
        return course.dropped
    by = choice.candidate(course.by).label
    return f"{course.dropped}, on these texts: {course.worse_by} against {by}"


def _gap(gap: PairedDifference | None) -> str:
    return NONE if gap is None else str(gap)


def _facts(choice: Choice) -> dict[str, str]:
    found, sizes, spent = choice.provenance, choice.sizes, choice.spent
    return {
        "Checkpoint": f"{found['checkpoint']}, sha256 {found['checkpoint_sha256']}",
        "Trained length": f"{choice.trained_length:,} tokens",
        "Texts": f"{few_of(found['documents'])}; sha256 {found['corpus_sha256']}",
        "Chosen on": few_of(choice.texts),
        "Judged on": f"{choice.held_out.texts} stretches of {few_of(choice.held_out.names)}",
        "Race": f"{len(choice.candidates)} candidates; whole texts that {sizes.whole} of them and YaRN as published "
        f"read: {sizes.first}; that {sizes.finalists} read: {sizes.texts}; hidden keys: {sizes.keys}",
        **_search_facts(choice),
        "Seed": str(found["seed"]),
        "Spent": f"{spent.passes:.1f} passes, {duration(spent.seconds)}; budget {spent.budget or 'none'}",
        "dtype": found["dtype"],
        "Device": f"{found['device']}; {found['machine']}",
        "Versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "Not entered": "; ".join(f"{one.label}: {one.reason}" for one in choice.refusals) or "none",
        "Command": code(found["command"], in_table=True),
        "Date": found["date"],
    }


def _search_facts(choice: Choice) -> dict[str, str]:
    found = choice.search
    if found is None:
        return {}
    sizes, starts = found.sizes, len(found.starts)
    told = f"{sizes.steps} steps from each of {starts} starts, {sizes.rows} of {len(found.searched_on)} texts each"
    keys = "hidden keys in them" if found.needles else "no hidden keys (none asked for, or none read inside the window)"
    return {
        "Search": f"{told}, {keys}; on {few_of(found.searched_on)}",
        "Search accepted on": few_of(found.texts),
    }


def save_race_figure(choice: Choice, path: Path) -> None:
    """Draw the race from left to right: inside the window, beyond it, and the verdict on other texts.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    looks = _finalists(choice)
    title = f"{choice.provenance['checkpoint']}, {tokens_label(choice.trained_length)} to "
    title += f"{tokens_label(choice.target_length)} tokens: {choice.candidate(choice.name).label}"
    with saved_figure(path, (13.0, 5.6), title) as figure:
        inside, beyond, verdict = figure.subplots(1, 3, width_ratios=(1, 1.35, 1.15))
        _draw_inside(inside, choice, looks)
        _draw_beyond(beyond, choice, looks)
        _draw_verdict(verdict, choice)
        handles, labels = beyond.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor="linecolor"
        )


def _finalists(choice: Choice) -> dict[str, str]:
    """A colour for each finalist and for whoever the verdict is about; the others are grey."""
    names = dict.fromkeys([choice.name, *choice.finish.finalists, choice.finish.runner_up])
    others = itertools.cycle(OTHERS)
    colours = {choice.usual: COLOURS["truncated"]}
    for name in names:
        if name and name != choice.usual:
            colours[name] = CHOSEN if name == choice.name else next(others)
    return colours


def _draw_inside(axes: Any, choice: Choice, looks: dict[str, str]) -> None:
    """Each candidate by how far it stretches and what it costs inside the window."""
    axes.axhline(0, color=COLOURS["truncated"], lw=1.2, ls=DASHED, zorder=2)
    left: list[tuple[float, float]] = []
    went: list[tuple[float, float]] = []
    for one in choice.candidates:
        if one.stretch is None:
            continue
        place = (one.stretch, one.course.inside.mean if one.course.inside else 0.0)
        if one.reading.name in looks:
            axes.plot(*place, "o", ms=8, color=looks[one.reading.name], zorder=4)
        else:
            (left if one.course.rung == INSIDE else went).append(place)
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


def _draw_beyond(axes: Any, choice: Choice, looks: dict[str, str]) -> None:
    """Running means beyond the window: a line ends where its candidate was stopped."""
    lines = {one.reading.name: one.course for one in choice.candidates if one.course.trace}
    usual = f"{choice.candidate(choice.usual).label}, as published"
    axes.axhline(0, color=COLOURS["truncated"], lw=1.6, ls=DASHED, label=usual)
    for name, course in sorted(lines.items(), key=lambda item: item[0] in looks):
        x, y = zip(*course.trace, strict=True)
        colour, is_chosen = looks.get(name, LEFT), name == choice.name
        label = choice.candidate(name).label + (", chosen" if is_chosen else "") if name in looks else None
        axes.plot(x, y, color=colour, lw=2.6 if is_chosen else 1.6, label=label, zorder=4 if name in looks else 2)
        end = "x" if course.dropped.startswith("stopped") else "o"
        axes.plot(x[-1], y[-1], end, color=colour, ms=6, zorder=5)
    ends = [(choice.candidate(name).label, course.trace[-1][1]) for name, course in lines.items()]
    lowest = min((mean for course in lines.values() for _, mean in course.trace), default=0.0)
    _clip(axes, lowest, ends)
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
        axes.text(
            0.985,
            0.985,
            f"off the scale: {note}",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
            color=NOTE,
        )


def _draw_verdict(axes: Any, choice: Choice) -> None:
    """What the choice gains and costs on texts that it was not chosen on, with 95 percent intervals."""
    held = choice.held_out
    kept = f"last {tokens_label(held.window)} tokens"
    rows: list[tuple[str, PairedDifference | None, str]] = [
        ("beyond: minus YaRN\nas published", held.versus_usual, CHOSEN),
        ("beyond: minus the\nrunner-up", held.versus_runner_up, CHOSEN),
        (f"at the end: minus the\nbest truncation\n({kept})", held.versus_truncation, CHOSEN),
        ("inside: minus the\nunextended model", held.damage, CHOSEN),
        ("the same, YaRN\nas published", held.usual_damage, COLOURS["truncated"]),
    ]
    shown = [(name, gap, colour) for name, gap, colour in rows if gap is not None]
    axes.axvline(0, color=COLOURS["truncated"], lw=1.2, ls=DASHED)
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
