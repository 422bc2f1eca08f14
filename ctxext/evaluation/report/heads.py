"""The report on heads that retrieve: the best groups, the agreement of the probes, and a map of all groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ctxext.attention.heads import HeadScores, best_first
from ctxext.evaluation.report.figures import INK, NOTE, Panel, paneled
from ctxext.evaluation.report.page import Headline, Page, TextTable, provenance_table
from ctxext.methods.retrieval_heads import SHARE

MOST_ROWS = 20
RETRIEVES, IDLE = 0.1, 0.02
# From sand to a dark blue, lighter to darker in grey as well.
DEPTHS = ("#F6F2E7", "#CFE0E4", "#8DB8D6", "#3C82B8", "#1F5A94", "#0B2C54")


def heads_page(scores: HeadScores) -> Page:
    """Return the report: the share that the best groups hold, their table, sentences and the map."""
    provenance = scores.settings.get("provenance", {})
    name = provenance.get("checkpoint", "this model")
    best, values, known = scores.chosen(share=SHARE), scores.scores, scores.chosen(share=1)
    held = sum(values[group] for group in best) / (sum(values[group] for group in known) or 1.0)
    headline = Headline(
        f"The best fifth, {len(best)} of {len(known)} key-value groups, pays {held:.0%} of all attention to what a "
        f"text said before."
    )
    panels = [_map(scores, probe, best) for probe in scores.probes]
    caption = (
        "Each square is a key-value group: attention that its best query head pays to where the text said the same "
        "before, from 0 to 1, mean over seeds. A ring marks the best fifth, by the mean of the probes."
    )
    caption += " White: layers that look back over a window only." if scores.windowed else ""
    figure = paneled("heads", f"Heads that retrieve: {name}", panels, across=1, caption=caption)
    details = [provenance_table(provenance)] if provenance else []
    return Page(f"Heads that retrieve: {name}", [headline, _table(scores, best), *sentences(scores), figure], details)


def sentences(scores: HeadScores) -> list[str]:
    """Return how many groups retrieve, how far the probes agree, and how far the scores vary over seeds."""
    # Groups of layers with a window, which score 0 in every probe, would make the probes seem to agree.
    known, best = scores.chosen(share=1), scores.chosen(share=SHARE)
    values = [scores.scores[group] for group in known]
    above, below = sum(value >= RETRIEVES for value in values), sum(value < IDLE for value in values)
    said = [f"{above} groups score {RETRIEVES} or more, {below} less than {IDLE}."]
    if scores.windowed:
        said.append(
            f"{sum(scores.kv_heads) - len(known)} more groups, of layers that look back over a window only, do not "
            f"count."
        )
    if len(scores.probes) > 1 and len(values) > 2:
        (first, ours), (second, theirs) = (
            (name, [probe[group] for group in known]) for name, probe in list(scores.probes.items())[:2]
        )
        shared = len(set(best_first(ours)[: len(best)]) & set(best_first(theirs)[: len(best)]))
        said.append(
            f"The probes {first} and {second} agree with a rank correlation of {_rank_correlation(ours, theirs):.2f}; "
            f"{shared} of the {len(best)} best groups by one are among the {len(best)} best by the other."
        )
    if scores.spread:
        spreads = [spread[group] for spread in scores.spread.values() for group in best]
        said.append(
            f"Over {len(scores.settings['seeds'])} seeds, the scores of the best groups vary by "
            f"{statistics.fmean(spreads):.3f} on average and by {max(spreads):.3f} at most (standard deviations)."
        )
    return said


def _table(scores: HeadScores, best: Sequence[int]) -> TextTable:
    """Return the best groups, best first, with the score of each probe and its spread over seeds."""
    shown = [group for group in scores.ranked() if group in best][:MOST_ROWS]
    means, rows = scores.scores, []
    for rank, group in enumerate(shown, 1):
        layer, index = scores.place(group)
        cells = []
        for name, values in scores.probes.items():
            spread = f" ± {scores.spread[name][group]:.3f}" if name in scores.spread else ""
            cells.append(f"{values[group]:.3f}{spread}")
        rows.append([str(rank), str(layer), str(index), str(group), *cells, f"{means[group]:.3f}"])
    left_out = f" {len(best) - len(shown)} more are in the JSON." if len(shown) < len(best) else ""
    return TextTable(
        header=["", "layer", "group", "number", *scores.probes, "mean"],
        rows=rows,
        title="Best key-value groups",
        caption=f"Layers, groups in a layer, and the numbers of groups through all layers begin at 0.{left_out}",
    )


def _map(scores: HeadScores, probe: str, best: Sequence[int]) -> Panel:
    """Return a map of one probe's scores: layers from left to right, the groups of each from above."""
    values, layers, most = scores.probes[probe], len(scores.kv_heads), max(scores.kv_heads)
    known = scores.chosen(share=1)
    width, height = max(5.5, 0.27 * layers + 1.6), max(0.75, 0.27 * most) + 0.95

    def draw(axes: Any) -> None:
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        shades = LinearSegmentedColormap.from_list("attention", DEPTHS).with_extremes(bad="white")
        grid = np.full((most, layers), np.nan)
        for group in known:
            layer, index = scores.place(group)
            grid[index, layer] = values[group]
        # Most groups are near 0, where a linear scale would show no difference.
        image = axes.imshow(grid, cmap=shades, norm=PowerNorm(0.5, 0, 1), aspect="equal")
        for layer in range(1, layers):
            axes.axvline(layer - 0.5, color="white", lw=1.2)
        for index in range(1, most):
            axes.axhline(index - 0.5, color="white", lw=1.2)
        for layer, index in map(scores.place, best):
            ink = "white" if grid[index, layer] > 0.25 else INK
            axes.plot(layer, index, "o", ms=5.5, mfc="none", mec=ink, mew=1.1)
        every = max(1, math.ceil(layers / 16))
        axes.set_xticks(range(0, layers, every))
        axes.set_yticks(range(0, most, max(1, math.ceil(most / 8))))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("attention layer")
        axes.set_ylabel("group")
        axes.set_title(f"{probe}, {scores.settings['tokens'][probe]:,} tokens", loc="left", fontsize=10.5)
        bar = axes.figure.colorbar(image, ax=axes, ticks=[0, 0.05, 0.2, 0.5, 1], fraction=0.025, pad=0.015)
        bar.ax.set_yticklabels(["0", "0.05", "0.2", "0.5", "1"], fontsize=8, color=NOTE)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)

    ranked = sorted(known, key=lambda group: -values[group])[:3]
    words = ", ".join("layer {} group {} {:.2f}".format(*scores.place(group), values[group]) for group in ranked)
    return Panel(draw, f"{probe}: best are {words}", (width, height))


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values rank by their number."""
    ranks = [{group: rank for rank, group in enumerate(best_first(values))} for values in (first, second)]
    return statistics.correlation(*([rank[group] for group in range(len(first))] for rank in ranks))
