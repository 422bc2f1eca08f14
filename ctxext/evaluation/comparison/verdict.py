"""Yes, no, or not to be told: whether the best extension predicts better than cutting the old tokens off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ctxext.evaluation._student import CHANCE, students_quantile
from ctxext.evaluation.perplexity import PairedDifference, paired_difference
from ctxext.evaluation.truncation import best_window

__all__ = ["NO", "YES", "Verdict", "judge", "standard_errors_needed"]

YES, NO, UNDECIDED = "yes", "no", "undecided"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best extension at one length, against the best truncation there.

    Args:
        length: tokens.
        best: name of the reading with the least loss at the end of that length.
        window: of the truncation with the least loss there, in tokens.
        versus_truncation: its loss minus that truncation's, same tokens.
        beats: ``yes``, ``no``, or ``undecided`` where this text cannot show a difference.
        standard_errors: how many a gain must exceed to count; more candidates need more, since the best of many is
            partly the luckiest. Luck among them cannot make the best look worse than it is, luck among the truncations
            can: a loss must exceed what so many candidates would need as there are windows.
        candidates: how many extensions competed.
        as_good: names of other readings whose difference to the best this text cannot show.
    """

    length: int
    best: str
    window: int
    versus_truncation: PairedDifference
    beats: str
    standard_errors: float
    candidates: int
    as_good: tuple[str, ...]


def judge(
    length: int,
    losses: Mapping[str, Float[Tensor, "documents positions"]],
    truncations: Mapping[int, Float[Tensor, "documents positions"]],
    *,
    block: int | None,
) -> Verdict:
    """Find the best of several readings of the same tokens and hold it against the best truncation.

    Args:
        length: tokens, for the record.
        losses: nats per token, by name; at least one.
        truncations: of the same tokens, by window; at least one.
        block: see ``paired_difference``.
    """
    window = best_window({tokens: [own] for tokens, own in truncations.items()})
    versus = {
        name: paired_difference(own, truncations[window], block=block, baselines=len(truncations))
        for name, own in losses.items()
    }
    best = min(versus, key=lambda name: versus[name].mean)
    units = versus[best].units
    needed = standard_errors_needed(len(losses), units)
    others = {name: paired_difference(own, losses[best], block=block) for name, own in losses.items() if name != best}
    return Verdict(
        length=length,
        best=best,
        window=window,
        versus_truncation=versus[best],
        beats={"better": YES, "worse": NO}.get(versus[best].verdict_of_best(len(losses)), UNDECIDED),
        standard_errors=needed,
        candidates=len(losses),
        as_good=tuple(name for name, gap in others.items() if gap.mean <= needed * gap.standard_error),
    )


def standard_errors_needed(candidates: int, units: int) -> float:
    """Standard errors that a difference must exceed to be a finding at 5 percent, two-sided.

    Args:
        candidates: differences looked at; the chance is divided among them (Bonferroni).
        units: independent groups behind each standard error, at least 2: with few, the error itself is uncertain.
    """
    return students_quantile(CHANCE / candidates, units - 1)
