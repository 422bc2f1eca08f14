"""The report on a comparison: tables, sentences and figures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctxext.evaluation.comparison import ComparisonResult, FactorSeries, Row, Score
from ctxext.evaluation.report.figures import (
    COLOURS,
    DASHED,
    NOTE,
    OTHERS,
    Figure,
    Line,
    Panel,
    differences_panel,
    draw_grid,
    lines_panel,
    paneled,
)
from ctxext.evaluation.report.page import (
    NONE,
    POSITION_AXIS,
    Heading,
    Headline,
    Page,
    Part,
    TextTable,
    provenance_table,
)
from ctxext.evaluation.report.retrieval import KEYS, passkey_panel
from ctxext.measuring.labels import all_of, capitalised, perplexity_label, tokens_label
from ctxext.measuring.loss_table import NO, YES, Verdict
from ctxext.measuring.readings import TIMES, Reading
from ctxext.measuring.statistics import Bucket, PairedDifference, perplexity
from ctxext.measuring.truncation import SELECTED, TRUNCATED, UNPATCHED, is_short

# Beyond this ratio to the perplexity inside the window, a perplexity counts as broken.
BROKEN = 2.0


def comparison_page(result: ComparisonResult) -> Page:
    """Return the answer, the sentences and the main table of a result, and in the details all the rest."""
    last = tokens_label(result.lengths[-1])
    lines = [verdict_line(result, verdict) for verdict in result.verdicts] if len(result.verdicts) > 1 else []
    details: list[Part] = [
        Heading("Figures"),
        *_figures(result),
        Heading("Numbers"),
        _whole_texts(result),
        *([_single_documents(result)] if result.texts > 1 else []),
        _methods(result),
        Heading("How to read this"),
        *_explanations(result),
        Heading("Provenance"),
        _provenance(result),
    ]
    parts: list[Part] = [Headline(headline(result)), *lines, *sentences(result), _main_table(result)]
    return Page(f"{result.provenance['checkpoint']}, read to {last} tokens", parts, details)


def _explanations(result: ComparisonResult) -> list[str]:
    windows, several = windows_in_words(result, "or"), result.texts > 1
    texts = "these" if several else "this one"
    others = "" if result.unit == "documents" else ", not how other texts would differ"
    return [
        f"Best truncation: what anybody can do without an extension. The model, {_plain(result)}, sees only the last "
        f"{windows} tokens, whichever predicts the compared tokens best. To choose on those very tokens is more than "
        f"anybody could do beforehand, so an extension that beats it beats each of them. An extension that does not "
        f"beat it adds nothing to plain prediction, however flat its curve; it may still find what truncation has "
        f"thrown away, which is what the passkeys test.",
        f"Differences: taken on the same tokens, so that the difficulty of the text falls out. The standard error is "
        f"over {result.unit}: it says how sure the difference is for texts such as {texts}{others}. The best of many "
        f"is partly the luckiest, so a verdict asks for more than two standard errors: "
        f"{result.verdicts[-1].standard_errors:.2f} here.",
        "One pass: a pass over the longest text gives the loss at every position, and so at every shorter length. "
        "Methods whose positions follow the length of the text (dynamic ones) are measured by a pass of their own at "
        "each length.",
    ]


def _provenance(result: ComparisonResult) -> TextTable:
    made, verdict = result.made, result.verdicts[-1]
    truncations = sum(is_short(row.reading.name) for row in result.rows)
    processes = f"{made['processes']} process" + ("es" if made["processes"] > 1 else "")
    return provenance_table(
        {**result.provenance, **made},
        Trained_length=f"{result.trained_length:,} tokens",
        Standard_errors=f"over {result.unit}; at {verdict.standard_errors:.2f} of them a gain counts (5 percent, "
        f"Bonferroni for {verdict.candidates} candidates), and a loss at "
        f"{verdict.versus_truncation.errors_needed(truncations):.2f} (for {truncations} baselines)",
        Computing=f"{made['seconds']:,.0f} s in {processes}",
    )


def headline(result: ComparisonResult) -> str:
    """Answer for the greatest length, in a sentence."""
    verdict = result.verdicts[-1]
    row = result.row(verdict.best)
    window, length = tokens_label(verdict.window), tokens_label(verdict.length)
    name = f"the checkpoint {row.reading.label}" if row.reading.is_reference else row.reading.label
    kind = "extension" if row.reading.is_reference else "zero-shot extension"
    best = f"At {length} tokens, the {f'best {kind} is {name}' if verdict.candidates > 1 else f'{kind} is {name}'}"
    difference = verdict.versus_truncation
    gap = f"{abs(difference.mean):.3f} ± {difference.standard_error:.3f} nats per token"
    where = difference.scope(result.texts)
    truncation = f"the best truncation, seeing only the last {window} tokens"
    if verdict.selected:
        truncation = f"chunks chosen within {window} tokens, the best of truncations and selection"
    if verdict.beats == YES:
        return f"{best}. It uses its window{where}: it predicts better than {truncation}, by {gap}."
    if verdict.beats == NO:
        return f"{best}. It predicts worse{where} than {truncation}, by {gap}."
    return f"{best}. No difference to {truncation} was found on {_these_texts(result)}: {difference} nats per token."


def windows_in_words(result: ComparisonResult, last: str = "and") -> str:
    """Name the truncations that the baseline is the best of, such as ``2K, 4K, 6K and 8K``."""
    *first, longest = [tokens_label(row.reading.window) for row in result.rows if row.reading.window is not None]
    return f"{', '.join(first)} {last} {longest}" if first else longest


def verdict_line(result: ComparisonResult, verdict: Verdict) -> str:
    """Give the verdict at one length in one line."""
    row = result.row(verdict.best)
    kind = "best" if row.reading.is_reference else "best zero-shot"
    where = verdict.versus_truncation.scope(result.texts)
    answer = {YES: f"yes{where}, by", NO: f"no{where}, by"}.get(
        verdict.beats, f"no difference that {_these_texts(result)} can show,"
    )
    seen = f"{'selected chunks within' if verdict.selected else 'the last'} {tokens_label(verdict.window)}"
    return (
        f"{tokens_label(verdict.length)}: {kind}: {row.reading.label}; beats the best truncation ({seen}): "
        f"{answer} {verdict.versus_truncation} nats"
    )


def sentences(result: ComparisonResult) -> list[str]:
    """Return everything else that the numbers say, in the order of importance."""
    verdict = result.verdicts[-1]
    best = result.row(verdict.best)
    lines = []
    if verdict.as_good:
        names = [result.row(name).reading.label for name in verdict.as_good]
        lines.append(f"As good, as far as {_these_texts(result)} can show: {all_of(names)}.")
    lines += _unneeded_sentence(result, verdict)
    lines.append(_short_context_sentence(result, best))
    if any(row.passkeys for row in result.rows):
        lines += _passkey_sentences(result, best)
    if not result.row(UNPATCHED).reading.is_candidate:
        read = (item for item in result.panels[-1].series if item.name == UNPATCHED)
        lines += [unpatched_sentence(result, item.buckets[-1]) for item in read]
    lines += [f"Not measured: {refusal.label}. {refusal.reason}" for refusal in result.refusals]
    return lines


def unpatched_sentence(result: ComparisonResult, last: Bucket) -> str:
    """Say whether the unpatched model breaks beyond its window, by the last positions there."""
    inside = result.row(UNPATCHED).inside
    ratio = perplexity(last.loss - inside.loss)
    start, stop = tokens_label(last.start), tokens_label(last.stop)
    numbers = (
        f"from {inside.perplexity:.3g} inside its trained {tokens_label(result.trained_length)} tokens to "
        f"{last.perplexity:.3g} at {start}-{stop}"
    )
    if ratio < BROKEN:
        return f"Unpatched, the perplexity goes {numbers}: this model does not break at that length."
    return f"Unpatched, the perplexity goes {numbers}, {ratio:.3g} times as much: it breaks beyond its window."


def _plain(result: ComparisonResult) -> str:
    """Say how the references are read."""
    return "as saved" if result.row(UNPATCHED).reading.is_candidate else UNPATCHED


def hidden_keys(row: Row) -> tuple[int, int]:
    """Count the passkeys that were found, and all, where truncation cuts the key off."""
    return sum(score.hidden_found for score in row.passkeys), sum(score.hidden for score in row.passkeys)


def _these_texts(result: ComparisonResult) -> str:
    return "this text" if result.texts == 1 else "these texts"


def _unneeded_sentence(result: ComparisonResult, verdict: Verdict) -> list[str]:
    """Say so where the unpatched model reads the length no worse than the best extension."""
    plain = result.row(UNPATCHED)
    score = plain.at(verdict.length)
    gap = score.versus_truncation if score else None
    if plain.reading.is_candidate or gap is None or gap.mean > verdict.versus_truncation.mean:
        return []
    length = tokens_label(verdict.length)
    return [
        f"The unpatched model reads {length} tokens no worse ({gap} against the best truncation): it needs no "
        f"extension there."
    ]


def _short_context_sentence(result: ComparisonResult, best: Row) -> str:
    if best.reading.is_reference:
        return f"Inside the trained window, its perplexity is {best.inside.perplexity:.4g}."
    gap, plain = best.short_context, result.row(UNPATCHED)
    free = [row.reading for row in result.candidates if row.short_context.mean == 0 and row not in (best, plain)]
    labels = ["the dynamic methods"] if len(free) > 3 and all(r.dynamic for r in free) else [r.label for r in free]
    size = f"{'costs' if gap.mean > 0 else 'gains'} {abs(gap.mean):.3f} ± {gap.standard_error:.3f} nats per token"
    cost = f"{size if gap.mean else 'changes nothing'} inside the trained window"
    cost += ", against the model as saved" if plain.reading.is_candidate else ""
    tail = f"; {all_of(labels)} change{'s' if len(free) == 1 else ''} nothing there" if free and gap.mean else ""
    return capitalised(f"{best.reading.label} {cost}{tail}.")


def _passkey_sentences(result: ComparisonResult, best: Row) -> list[str]:
    keys = {row.reading.name: hidden_keys(row) for row in result.rows if row.passkeys}
    asked = max(trials for _, trials in keys.values())
    if not asked:
        window = tokens_label(result.trained_length)
        return [f"Every passkey lies in the last {window} tokens, which truncation reads, too; ask for smaller depths."]
    competing = [row for row in result.candidates if keys[row.reading.name][1] == asked]
    most = max((keys[row.reading.name][0] for row in competing), default=0)
    winners = [row.reading.label for row in competing if keys[row.reading.name][0] == most]
    plain = result.row(UNPATCHED).reading
    others = [plain] if keys.get(plain.name, (0, 0))[1] and plain not in [row.reading for row in competing] else []
    others += [best.reading] if best.reading.label not in winners else []
    named = all_of(winners) if len(winners) <= 4 else f"{len(winners)} of {len(competing)} extensions"
    subject = named if most else "no extension"
    compared = ", ".join(f"{reading.label} {keys[reading.name][0]}" for reading in others)
    verb = "finds" if len(winners) == 1 or not most else "find"
    passkeys = f"{asked} passkey{'s' if asked > 1 else ''}"
    aside = f" ({compared})" if compared else ""
    return [f"Of {passkeys} that truncation cuts off, {subject} {verb} {most or 'any'}{aside}."]


def _main_table(result: ComparisonResult) -> TextTable:
    """Return perplexity in the window and at each length, differences to truncation and keys, one row per reading."""
    beyond = [verdict.length for verdict in result.verdicts]
    window = tokens_label(result.trained_length)
    ends = [score.end for score in result.row(TRUNCATED).scores if score.length in beyond]
    header = [f"inside {window}", f"vs {_plain(result)}"]
    for end in ends:
        header += [f"{tokens_label(end.start)}-{tokens_label(end.stop)}", "vs best truncation"]
    with_keys = any(hidden_keys(row)[1] for row in result.rows)
    header += ["hidden keys"] if with_keys else []

    def cells(row: Row) -> list[str]:
        texts = [perplexity_label(row.inside.perplexity), NONE if row.reading.is_reference else str(row.short_context)]
        for length in beyond:
            score = row.at(length)  # None where the method does not reach
            chosen = score is not None and score.selected
            texts.append(_with_window(row, score.end.perplexity, score.window, chosen) if score else NONE)
            is_baseline = row.reading.name == TRUNCATED
            texts.append(str(score.versus_truncation) if score and not is_baseline else NONE)
        keys, asked = hidden_keys(row)
        return texts + ([f"{keys}/{asked}" if asked else NONE] if with_keys else [])

    caption = (
        f"Perplexity inside the trained {window} tokens and at the end of each length; differences of loss in "
        f"nats per token ± standard error over {result.unit}; best truncation: whichever of the last "
        f"{windows_in_words(result, 'or')} tokens{_or_selected(result)} predicts those best"
        + ("; passkeys found where truncation cuts the key off" if with_keys else "")
        + "."
    )
    return _table(result, caption, header, cells)


def _ordered(result: ComparisonResult) -> list[Row]:
    """Sort the rows: references first, then methods that reach furthest, the best of them first."""

    def place(row: Row) -> tuple[bool, int, float]:
        last = row.scores[-1]
        gap = last.versus_truncation.mean if last.versus_truncation else 0.0
        return (False, 0, 0.0) if row.reading.is_reference else (True, -last.length, gap)

    return sorted(result.rows, key=place)


def _table(
    result: ComparisonResult, caption: str, header: Sequence[str], cells: Callable[[Row], Sequence[str]]
) -> TextTable:
    """Return a table with a row per reading, whose label is its first cell."""
    rows, best = _ordered(result), result.row(result.verdicts[-1].best).reading.label
    return TextTable(
        header=["", *header],
        rows=[[row.reading.label, *cells(row)] for row in rows],
        caption=caption,
        styles={row.reading.label: "reference" for row in rows if row.reading.is_reference} | {best: "best"},
    )


def _whole_texts(result: ComparisonResult) -> TextTable:
    def cells(row: Row) -> list[str]:
        scores = [row.at(length) for length in result.lengths]
        return [
            _with_window(row, score.whole.perplexity, score.window_of_whole, score.selected_of_whole) if score else NONE
            for score in scores
        ]

    caption = (
        "Perplexity of all tokens up to each length, as published curves have it: more context and other text mixed."
    )
    return _table(result, caption, [tokens_label(length) for length in result.lengths], cells)


def _single_documents(result: ComparisonResult) -> TextTable:
    last = result.verdicts[-1].length
    names = result.provenance["documents"]

    def cells(row: Row) -> list[str]:
        score = row.at(last)
        gaps = score.by_document if score and row.reading.name != TRUNCATED else ()
        return [f"{gap:+.3f}" for gap in gaps] or [NONE] * len(names)

    caption = (
        f"Loss minus the best truncation's at the end of {tokens_label(last)} tokens, in each document, nats per token."
    )
    return _table(result, caption, names, cells)


def _methods(result: ComparisonResult) -> TextTable:
    noted = [row.reading.notes for row in result.candidates]
    of_all = [note for note in noted[0] if all(note in notes for notes in noted)] if noted else []  # said once, below

    def cells(row: Row) -> list[str]:
        method = dict(row.reading.method or {})
        name = str(method.pop("method", NONE))
        parameters = ", ".join(f"{key}={_short(value)}" for key, value in method.items()) or NONE
        attention = [f"Attention: {row.reading.attention}."] if row.reading.attention else []
        notes = _sentences([*attention, *(note for note in row.reading.notes if note not in of_all)]) or NONE
        return [name, parameters, row.reading.fingerprint or NONE, notes]

    caption = "What was measured, with a fingerprint of its frequencies."
    caption += f" Of every method: {_sentences(of_all)}" if of_all else ""
    return replace(_table(result, caption, ["method", "parameters", "frequencies", "notes"], cells), prose=True)


def _sentences(notes: Sequence[str]) -> str:
    return " ".join(f"{note.rstrip('.')}." for note in notes)


def _with_window(row: Row, perplexity: float, window: int | None, selected: bool) -> str:
    """Return a perplexity, and for the best truncation which window it has, or that it is the selection."""
    if row.reading.name != TRUNCATED or window is None:
        return perplexity_label(perplexity)
    return f"{perplexity_label(perplexity)} ({'selected' if selected else f'last {tokens_label(window)}'})"


def _or_selected(result: ComparisonResult) -> str:
    return ", or of selected chunks," if any(row.reading.name == SELECTED for row in result.rows) else ""


def _short(value: object) -> str:
    return f"<{len(value)} values>" if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _figures(result: ComparisonResult) -> list[Figure]:
    """Return all figures: distances to truncation, losses by position, perplexity at each length, and passkeys."""
    figures = [_distances(result, verdict) for verdict in reversed(result.verdicts)]
    for panel in result.panels:
        figures += [_by_position(result, panel), _against_truncation(result, panel)]
    figures.append(_at_length(result))
    maps = [
        passkey_panel(
            row.reading.label,
            [(key.depth, key.length, key.found, key.trials, key.loss) for key in row.passkeys],
            result.trained_length,
        )
        for row in result.rows
        if row.passkeys
    ]
    return [*figures, *([paneled("passkeys", "Passkeys found", maps, caption=KEYS)] if maps else [])]


Names = Mapping[str, tuple[str, str]]
"""Method, which decides the colour, and label of each reading, by its name."""


def _names(result: ComparisonResult, panel: FactorSeries) -> Names:
    """Return methods, and labels without the factor, which the title of the figure names."""
    readings = (result.row(item.name).reading for item in panel.drawn)
    return {item.name: (_method(item), re.sub(rf" {TIMES}[\d.]+", "", item.label)) for item in readings}


def _method(reading: Reading) -> str:
    """Return the method of a reading, whatever its factor, or the name of a reference."""
    if is_short(reading.name):
        return TRUNCATED
    return reading.name if reading.is_reference or reading.method is None else str(reading.method["method"])


def _distances(result: ComparisonResult, verdict: Verdict) -> Figure:
    """Return the distance of every reading to the best truncation, the best first."""
    scored = [(row, row.at(verdict.length)) for row in result.rows if row.reading.name != TRUNCATED]
    rows = [(row, score, score.versus_truncation) for row, score in scored if score and score.versus_truncation]
    rows.sort(key=lambda item: item[2].mean)
    end, window = tokens_label(verdict.length), tokens_label(verdict.window)
    words = "; ".join(f"{row.reading.label} {gap}" for row, _, gap in rows)
    dots = " Small dots: each document." if result.texts > 1 else ""
    seen, truncations = "chunks within" if verdict.selected else "the last", windows_in_words(result)
    panel = Panel(lambda axes: _draw_distances(axes, rows), words, (5.4, 0.7 + 0.29 * len(rows)))
    return paneled(
        f"truncation-{verdict.length}",
        f"Against the best truncation, at {end} tokens",
        [panel],
        caption=f"Loss minus that of the best truncation, seeing only {seen} {window} tokens, on the same tokens, with "
        f"95 percent intervals. Left of the line, the older text helps. Grey: truncation to the last {truncations} "
        f"tokens{_or_selected(result) or ','} the best of which is the line.{dots}",
    )


def _draw_distances(axes: Any, rows: Sequence[tuple[Row, Score, PairedDifference]]) -> None:
    gaps = [gap for _, _, gap in rows]
    nearest = min(abs(gap.mean) + gap.margin for row, _, gap in rows if not is_short(row.reading.name))
    limit = min(max(0.15, 5 * nearest), 1.05 * max(gap.mean + gap.margin for gap in gaps))
    low = min(-0.25 * limit, *(gap.mean - gap.margin for gap in gaps)) * 1.1
    axes.axvline(0, color=COLOURS[TRUNCATED], lw=1.4, ls=DASHED, zorder=2)
    for place, (row, score, gap) in enumerate(rows):
        colour = COLOURS.get(_method(row.reading), OTHERS[0])  # the method's colour, whatever the factor
        if gap.mean > limit:
            axes.plot(limit * 0.985, place, marker=">", ms=6, color=colour, clip_on=False)
        else:
            axes.errorbar(gap.mean, place, xerr=gap.margin, fmt="o", ms=5.5, lw=1.8, color=colour, zorder=4)
            if len(score.by_document) > 1:
                dots = [value for value in score.by_document if low < value < limit]
                axes.plot(dots, [place] * len(dots), ".", ms=4, color=NOTE, zorder=5)
        axes.text(1.02, place, str(gap), transform=axes.get_yaxis_transform(), va="center", fontsize=9.5)
    axes.set_yticks(range(len(rows)), [row.reading.label for row, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(low, limit)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("nats per token; left: better than the best truncation")
    draw_grid(axes, axis="x")


def _by_position(result: ComparisonResult, panel: FactorSeries) -> Figure:
    names = _names(result, panel)
    dynamic = [names[item.name][1] for item in panel.drawn if item.dynamic]
    caption = "How well each token is predicted, by its position. Shaded: the trained window."
    if dynamic:
        caption += (
            f" {capitalised(all_of(dynamic))} here with the positions of {tokens_label(panel.length)} throughout."
        )
    lines = []
    for item in panel.drawn:
        # Inside the window truncation is the unpatched model itself.
        first = result.trained_length if item.name == TRUNCATED else 0
        buckets = [bucket for bucket in item.curve if bucket.start >= first]
        points = [((bucket.start + bucket.stop) / 2, bucket.perplexity) for bucket in buckets]
        lines.append(Line(*names[item.name], points))
    stop, step = panel.drawn[0].curve[-1].stop, max(1, result.trained_length // 4)
    while stop / step > 9:
        step *= 2
    ticks, trained = range(0, stop + 1, step), result.trained_length
    drawn = lines_panel(lines, x_label=POSITION_AXIS, ticks=ticks, trained_length=trained)
    title = f"Perplexity by position{_of_factor(panel)}"
    return paneled(f"loss{_suffix(panel)}", title, [drawn], caption=caption)


def _against_truncation(result: ComparisonResult, panel: FactorSeries) -> Figure:
    methods = [item for item in panel.drawn if result.row(item.name).reading.is_candidate]
    best = next(item for item in panel.series if item.name == TRUNCATED)
    chosen = all_of(
        [
            "selected" if selected else f"the last {tokens_label(window)}"
            for window, selected in itertools.zip_longest(best.windows, best.selected)
        ]
    )
    names = _names(result, panel)
    groups = [(*names[item.name], item.versus_truncation) for item in methods]
    spans = [f"{tokens_label(bucket.start)}-{tokens_label(bucket.stop)}" for bucket in methods[0].buckets[1:]]
    return paneled(
        f"difference{_suffix(panel)}",
        f"Against the best truncation{_of_factor(panel)}",
        [differences_panel(spans, groups)],
        caption=f"The same tokens, minus their loss under the best truncation (in these stretches {chosen} "
        f"tokens), with 95 percent intervals.",
    )


def _at_length(result: ComparisonResult) -> Figure:
    end, panels = result.row(TRUNCATED).scores[-1].end, []
    for panel in result.panels:
        rows = [result.row(item.name) for item in panel.drawn]
        names = _names(result, panel)
        lines = [
            Line(*names[row.reading.name], [(score.length, score.end.perplexity) for score in row.scores])
            for row in rows
        ]
        title = "" if panel.factor is None else f"factor {panel.factor:g}"
        panels.append(lines_panel(lines, title=title, x_label="length, tokens", ticks=result.lengths, doubling=True))
    return paneled(
        "perplexity-at-length",
        "Perplexity at length",
        panels,
        across=1,
        caption=f"Of the last {tokens_label(end.stop - end.start)} positions before each length. Other positions are "
        f"other words: compare methods at one length, not lengths.",
    )


def _of_factor(panel: FactorSeries) -> str:
    return "" if panel.factor is None else f", factor {panel.factor:g}"


def _suffix(panel: FactorSeries) -> str:
    return "" if panel.factor is None else f"-x{panel.factor:g}".replace(".", "_")
