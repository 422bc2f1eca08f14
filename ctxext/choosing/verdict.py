"""What texts that were not chosen on say of a choice: differences to others, and whether they mean something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctxext.choosing.race import end_of
from ctxext.evaluation.statistics import PairedDifference, document_difference, mean_loss
from ctxext.evaluation.truncation import best_window

# The choice is held against two: the published YaRN and the runner-up.
COMPARED = 2


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The choice on texts that the race never read; differences are its loss minus that of another.

    Args:
        versus_usual: beyond the window, the published YaRN's; None where that is the choice.
        end_versus_usual: the same at the end of the texts, where one that stretches too little falls apart.
        versus_runner_up: beyond the window, the runner-up's.
        versus_truncation: at the end of the texts, the best truncation's.
        window: of that truncation, in tokens.
        damage: inside the window, the unpatched model's.
        usual_damage: of the published YaRN inside the window, likewise.
        loss: of the choice beyond the window.
        texts: how many were read.
        names: of the documents.
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
        """``better``, ``worse`` or ``no difference``; the chance of 5 percent is shared by both comparisons."""
        if difference is None:
            return "no difference"
        return difference.verdict_of_best(COMPARED) if difference.mean <= 0 else _mirrored(difference)

    @property
    def declares_winner(self) -> bool:
        """Whether the choice is called better than the published YaRN or than the runner-up."""
        return "better" in (self.verdict(self.versus_usual), self.verdict(self.versus_runner_up))


def _mirrored(difference: PairedDifference) -> str:
    """The verdict on a loss that is higher, held to what a lower one is held to."""
    needed = difference.errors_needed(COMPARED) * difference.standard_error
    return "worse" if difference.mean > needed else "no difference"


def by_document(texts: Sequence[Tensor], documents: Sequence[str]) -> list[Tensor]:
    """Losses of texts, those of one document together.

    Args:
        texts: nats per token.
        documents: which each text is of.
    """
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
    """Hold the choice against the others on texts that it was not chosen on.

    Args:
        losses: of whole texts, nats per token, one tensor per text, of the three readings.
        choice: name of the choice.
        usual: of the published YaRN.
        runner_up: of the runner-up; empty where there is none.
        unpatched: of the unextended model inside the window, one tensor per text.
        truncations: at the end of the texts, one tensor per text, by window.
        documents: which each text is of; the texts of one document count as one.
        trained: tokens of the window.
        same_documents: see ``HeldOut``.
    """

    def together(texts: Sequence[Tensor]) -> list[Tensor]:
        return by_document(texts, documents)

    def beyond(name: str) -> list[Tensor]:
        return together([text[trained:] for text in losses[name]])

    def inside(name: str) -> list[Tensor]:
        return together([text[:trained] for text in losses[name]])

    window = best_window(truncations)
    ends = together(truncations[window])
    tails = together(
        [text[-len(end) :] for text, end in zip(losses[choice], truncations[window], strict=True)],
    )
    start = end_of(trained, len(losses[choice][0]))
    last = {name: together([text[start:] for text in losses[name]]) for name in (choice, usual)}
    own, plain = beyond(choice), together(unpatched)
    return HeldOut(
        versus_usual=None if choice == usual else document_difference(own, beyond(usual)),
        end_versus_usual=None if choice == usual else document_difference(last[choice], last[usual]),
        versus_runner_up=document_difference(own, beyond(runner_up)) if runner_up else None,
        versus_truncation=document_difference(tails, ends, baselines=len(truncations)),
        window=window,
        damage=document_difference(inside(choice), plain),
        usual_damage=document_difference(inside(usual), plain),
        loss=mean_loss(own),
        texts=len(documents),
        names=tuple(dict.fromkeys(documents)),
        same_documents=same_documents,
    )
