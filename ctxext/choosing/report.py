"""The page of a choice: its candidates, the verdict and its reasons, who can load it, and a figure of the rounds."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from ctxext.choosing.halving import INSIDE, STOPPED
from ctxext.choosing.verdict import Choice
from ctxext.evaluation.report.figures import COLOURS, DASHED, NOTE, OTHERS, Figure, draw_grid
from ctxext.evaluation.report.page import NONE, Code, Heading, Headline, Page, Part, TextTable, provenance_table
from ctxext.measuring.labels import few_of, tokens_label
from ctxext.methods import known_methods
from ctxext.recommended import to_take

CHOSEN, USUAL, LEFT = COLOURS["yarn"], COLOURS["truncated"], "#B5B5B5"
# Rows of the short table of candidates.
SHOWN = 12
HEADER = ("", "inside the window", "beyond", "at the end", "keys", "came to", "why")


def choice_page(choice: Choice) -> Page:
    """Return the candidates that came furthest, the choice with its reasons, and a figure; the rest as details."""
    title = f"{choice.provenance['checkpoint']}, {tokens_label(choice.trained_length)} to "
    title += f"{tokens_label(choice.target_length)} tokens"
    chosen = choice.label(choice.name)
    rows = [_row(choice, row) for row in choice.rows()]
    short = TextTable(
        header=HEADER[:-1],
        rows=[row[:-1] for row in rows[:SHOWN]],
        title="Loss minus that of YaRN as published, nats per token ± standard error, on what each has read",
        caption=f"{len(rows) - SHOWN} more did not get as far; -o FILE.md lists them." if len(rows) > SHOWN else "",
        styles={chosen: "best"},
    )
    # Held-out texts compare the winner of the rounds, even where they overrule it and YaRN is the choice.
    winner = choice.label(choice.finish.choice)
    reasons = TextTable(header=(f"{winner}, on {choice.judged_on}", ""), rows=choice.reasons(), prose=True)
    figure = Figure(
        name="rounds",
        title=f"{title}: {chosen}",
        size=(13.0, 5.6),
        draw=lambda canvas: _draw(canvas, choice),
        caption="Left: what each candidate costs inside the window. Middle: the running mean beyond it, of those that "
        "read whole texts; a line ends where its candidate was stopped. Right: the verdict, with 95 percent intervals.",
        alternative="The rounds",
    )
    candidates = TextTable(
        header=HEADER,
        rows=rows,
        caption="A candidate that was left behind was not shown to be worse: the budget did not last for it. A worse "
        "one is worse on the texts that were chosen on; about other texts that says nothing.",
        styles={chosen: "best"},
        prose=True,
    )
    runtimes = TextTable(
        header=("runtime", "computes the same", "how, or why not"),
        rows=[(runtime.name, "yes" if runtime.exact else "no", Code(runtime.says)) for runtime in choice.runtimes],
        prose=True,
    )
    details: list[Part] = [Heading("All candidates"), candidates, Heading("Who can load it"), runtimes]
    details += [Heading("What it was measured on"), _provenance(choice)]
    unmeasured = f"To take without measuring: {' '.join(map(str, to_take(known_methods())))}"
    return Page(title, [short, Headline(choice.sentence), reasons, unmeasured, figure], details)


def _provenance(choice: Choice) -> TextTable:
    sizes = choice.sizes
    return provenance_table(
        choice.provenance,
        Trained_length=f"{choice.trained_length:,} tokens",
        Chosen_on=few_of(choice.texts),
        Judged_on=f"{choice.held_out.texts} stretches of {few_of(choice.held_out.names)}",
        Rounds=f"{len(choice.candidates)} candidates; whole texts that {sizes.whole} of them and YaRN as published "
        f"read: {sizes.first}; that {sizes.finalists} read: {sizes.texts}; hidden keys: {sizes.keys}",
        Not_entered="; ".join(f"{refusal.label}: {refusal.reason}" for refusal in choice.refusals),
    )


def _row(choice: Choice, row: dict[str, Any]) -> list[str]:
    """Return a candidate's row as the page shows it."""
    course = choice.finish.course(row["candidate"])
    why = course.dropped if row["fate"] != "chosen" else ""
    if why and course.worse_by is not None:
        why += f": {course.worse_by} against {choice.label(course.by)}"
    gaps = [NONE if gap is None else str(gap) for gap in (course.inside, course.beyond, course.end)]
    return [row["label"], *gaps, " ".join(f"{loss:.2f}" for loss in course.keys) or NONE, row["fate"], why]


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
    # Of its axes: one of the canvas would cover the caption.
    beyond.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=9, labelcolor="linecolor")


def _draw_inside(axes: Any, choice: Choice, colours: dict[str, str]) -> None:
    """Draw each candidate by how far it stretches and what it costs inside the window."""
    means = []
    for candidate in choice.candidates:
        if candidate.stretch is not None:
            name = candidate.reading.name
            course = choice.finish.course(name)
            means.append(course.inside.mean if course.inside else 0.0)
            marker, grey = ("x", LEFT) if course.round == INSIDE else ("o", NOTE)
            size, colour = (8, colours[name]) if name in colours else (5, grey)
            axes.plot(candidate.stretch, means[-1], marker, ms=size, color=colour, zorder=2 + (name in colours))
    _near_the_best(axes, means, means)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("what slow frequencies are divided by (x: left behind)")
    axes.set_ylabel("loss minus that of YaRN as published, nats per token")
    axes.margins(x=0.1)
    draw_grid(axes, f"1  Inside the window: {len(choice.candidates)} candidates")


def _draw_beyond(axes: Any, choice: Choice, colours: dict[str, str]) -> None:
    """Draw running means beyond the window: a line ends where its candidate was stopped."""
    axes.plot([], [], color=USUAL, ls=DASHED, label=f"{choice.candidate(choice.usual).label}, as published")
    ends, means = [], [0.0]
    for candidate in choice.candidates:
        name = candidate.reading.name
        course = choice.finish.course(name)
        if not course.trace:
            continue
        x, y = zip(*course.trace, strict=True)
        style = {"color": colours.get(name, LEFT), "zorder": 2 + (name in colours)}
        chosen = ", chosen" if name == choice.name else ""
        label = candidate.label + chosen if name in colours else None
        axes.plot(x, y, lw=2.6 if chosen else 1.6, label=label, **style)
        axes.plot(x[-1], y[-1], "x" if course.fate == STOPPED else "o", ms=6, **style)
        ends.append(y[-1])
        means += y
    _near_the_best(axes, means, ends)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: tokens_label(round(tokens)))
    axes.margins(x=0.05)
    axes.set_xlabel("tokens read beyond the window")
    draw_grid(axes, "2  Beyond it, on whole texts (x: stopped, beyond rescue)")


def _near_the_best(axes: Any, values: Sequence[float], ends: Sequence[float]) -> None:
    """Show the values near the best, and count the rest: far values would hide the differences that matter."""
    axes.axhline(0, color=USUAL, lw=1.4, ls=DASHED, zorder=2)
    least = min(0.0, *values, 0.0)
    top = min(max(0.02, -least), max(0.0, *ends, 0.0) + 0.15 * max(0.02, -least))
    axes.set_ylim(least - 0.12 * (top - least), top)
    hidden = [value for value in ends if value > top]
    if hidden:
        note = f"off the scale: {len(hidden)}, up to {max(hidden):+.2f}"
        axes.text(0.985, 0.985, note, transform=axes.transAxes, fontsize=8, color=NOTE, ha="right", va="top")


def _draw_verdict(axes: Any, choice: Choice) -> None:
    """Draw what the choice gains and costs on texts that it was not chosen on, with 95 percent intervals."""
    held = choice.held_out
    shown = list(held.compared())
    axes.axvline(0, color=USUAL, lw=1.2, ls=DASHED)
    for place, (_, gap, _) in enumerate(shown):
        colour = CHOSEN if gap is not held.usual_damage else USUAL
        axes.errorbar(gap.mean, place, xerr=gap.margin, fmt="o", ms=6, lw=1.8, color=colour)
        axes.text(gap.mean, place - 0.17, str(gap), ha="center", va="bottom", fontsize=9, color=colour)
    axes.set_yticks(range(len(shown)), [textwrap.fill(name, 22) for name, _, _ in shown], fontsize=9)
    axes.set_ylim(len(shown) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.25)
    axes.set_xlabel("nats per token; left is better")
    texts = f"{held.texts} held-out stretch{'es' if held.texts > 1 else ''}"
    draw_grid(axes, f"3  Verdict on {texts}", axis="x")
