"""The verdict on a choice, by texts that it was not chosen on: differences to others, and whether they mean much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctxext.choosing.halving import end_of
from ctxext.measuring.statistics import PairedDifference, document_difference, mean_loss
from ctxext.measuring.truncation import best_window

# The choice is compared with two: the published YaRN and the runner-up.
COMPARED = 2


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The choice on texts that were never read before; differences are its loss minus that of another.

    Args:
        versus_usual: beyond the window, the published YaRN's; None where that is the choice.
        end_versus_usual: likewise at the end of the texts, where one that stretches too little falls apart.
        versus_runner_up: beyond the window, the runner-up's.
        versus_truncation: at the end of the texts, the best truncation's.
        window: of that truncation, in tokens.
        damage: inside the window, the unpatched model's.
        usual_damage: likewise of the published YaRN.
        same_documents: whether they are other parts of the documents that were chosen on.
    """

    versus_usual: PairedDifference | None
    end_versus_usual: PairedDifference | None
    versus_runner_up: PairedDifference | None
    versus_truncation: PairedDifference
    window: int
    damage: PairedDifference
    usual_damage: PairedDifference
    loss: float
    texts: int
    names: tuple[str, ...]
    same_documents: bool

    def verdict(self, difference: PairedDifference | None) -> str:
        """Return ``better``, ``worse`` or ``no difference``; both comparisons share the chance of 5 percent."""
        if difference is None:
            return "no difference"
        if difference.mean <= 0:
            return difference.verdict_of_best(COMPARED)
        needed = difference.errors_needed(COMPARED) * difference.standard_error
        return "worse" if difference.mean > needed else "no difference"

    @property
    def declares_winner(self) -> bool:
        """True where the choice is called better than the published YaRN or than the runner-up."""
        return "better" in (self.verdict(self.versus_usual), self.verdict(self.versus_runner_up))


def by_document(texts: Sequence[Tensor], documents: Sequence[str]) -> list[Tensor]:
    """Join the losses of texts, [tokens] each, that are of one document."""
    return [
        torch.cat([text for text, own in zip(texts, documents, strict=True) if own == name])
        for name in dict.fromkeys(documents)
    ]


def judge_held_out(
    losses: Mapping[str, Sequence[Tensor]],
    *,
    choice: str,
    usual: str,
    runner_up: str,
    unpatched: Sequence[Tensor],
    truncations: Mapping[int, Sequence[Tensor]],
    documents: Sequence[str],
    trained: int,
    same_documents: bool,
) -> HeldOut:
    """Compare the choice with others on texts that it was not chosen on.

    Losses are in nats per token, one tensor per text: of whole texts by the names of readings, of the unpatched model
    inside the window, and of truncations at the end of the texts by their windows. The texts of one document count as
    one. An empty ``runner_up`` is none.
    """
    window = best_window(truncations)
    end = len(truncations[window][0])

    def difference(name: str, other: Sequence[Tensor], part: slice, *, baselines: int = 1) -> PairedDifference:
        own = by_document([text[part] for text in losses[name]], documents)
        return document_difference(own, by_document(other, documents), baselines=baselines)

    def versus(name: str, start: int) -> PairedDifference | None:
        if name in ("", choice):
            return None
        return difference(choice, [text[start:] for text in losses[name]], slice(start, None))

    return HeldOut(
        versus_usual=versus(usual, trained),
        end_versus_usual=versus(usual, end_of(trained, len(losses[choice][0]))),
        versus_runner_up=versus(runner_up, trained),
        versus_truncation=difference(choice, truncations[window], slice(-end, None), baselines=len(truncations)),
        window=window,
        damage=difference(choice, unpatched, slice(trained)),
        usual_damage=difference(usual, unpatched, slice(trained)),
        loss=mean_loss(by_document([text[trained:] for text in losses[choice]], documents)),
        texts=len(documents),
        names=tuple(dict.fromkeys(documents)),
        same_documents=same_documents,
    )
