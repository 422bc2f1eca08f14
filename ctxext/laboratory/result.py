"""Results of the laboratory: every score, and how sure a mean or a difference of two is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.laboratory.tasks import MULTIPLES, REACH, TASKS, TEXT
from ctxext.measuring.provenance import Report
from ctxext.measuring.statistics import PairedDifference

LEAST = 0.05
"""Least that counts as learned: so many nats, or so large a share of the answers above chance."""

Scores = Sequence[Sequence[Sequence[float]]]
BySeed = Float[Tensor, "seeds rows"]


def octaves_of(trained: int) -> tuple[int, ...]:
    """Return positions at which the length has doubled, from the trained length on."""
    return tuple(trained * 2**place for place in range(int(math.log2(REACH)) + 1))


def blocks_of(trained: int) -> tuple[int, ...]:
    """Return edges of the blocks of positions that a loss is averaged over, from 1/8 of the trained length on.

    Two to every doubling inside the trained length, where a block has few bytes, and four beyond it.
    """
    first = trained / REACH
    doublings = int(math.log2(REACH * REACH))
    parts = [2 if place < doublings // 2 else 4 for place in range(doublings)]
    edges = [first * 2**place * (1 + part / parts[place]) for place in range(doublings) for part in range(parts[place])]
    return tuple(sorted({0, *(int(edge) for edge in edges), trained * REACH}))


@dataclass(frozen=True, kw_only=True)
class LabReading:
    """Scores of one way to know the order of tokens on one task.

    Args:
        extension: Method that was put on at the end, without training; empty for none.
        scores: Numbers by seed, by window or puzzle, and by block of positions (text: nats per byte) or by length
            (puzzles: share of the answers that is right).
        truncated: Scores by doubling of the length, where the model sees the last bytes of its trained length alone;
            empty for puzzles and extensions.
        order: Nats by seed and window that a loss rises by when the text before is shuffled; empty likewise.
    """

    task: str
    subject: str
    kind: str
    extension: str
    parameters: int
    steps: int
    seconds: float
    seeds: tuple[int, ...]
    scores: Scores
    truncated: Scores
    order: Sequence[Sequence[float]]

    @property
    def name(self) -> str:
        """Name of the subject, and of its extension."""
        return f"{self.subject} + {self.extension}" if self.extension else self.subject

    @property
    def values(self) -> Float[Tensor, "seeds rows columns"]:
        """Scores as a tensor."""
        return torch.tensor(self.scores, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LabResult(Report):
    """All readings of the laboratory, with the settings and the text that they were measured on."""

    TITLE = "a result of the laboratory"
    KIND = "laboratory"
    FORMAT = 1

    preset: str
    settings: Mapping[str, Any]
    readings: tuple[LabReading, ...]
    documents: tuple[str, ...]
    text_sha256: str
    seconds: float
    provenance: Mapping[str, Any]

    @property
    def trained(self) -> int:
        """Bytes of text that are read at once in training."""
        return int(self.settings["length"])

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that were measured, text first."""
        return list(dict.fromkeys(reading.task for reading in self.readings))

    @property
    def puzzles(self) -> list[str]:
        """The tasks but for the text."""
        return [task for task in self.tasks if task != TEXT]

    def of(self, task: str) -> list[LabReading]:
        """Return the readings of one task."""
        return [reading for reading in self.readings if reading.task == task]

    def find(self, task: str, name: str) -> LabReading | None:
        """Return one reading; None where it was not measured."""
        return next((reading for reading in self.of(task) if reading.name == name), None)

    def at(self, reading: LabReading, multiple: float | int) -> BySeed:
        """Return the scores at so many times the trained length.

        Of text they are the losses over the last doubling of the length: at 2, from once to twice the trained length.
        """
        values = reading.values
        if reading.task != TEXT:
            return values[:, :, MULTIPLES.index(multiple)]
        edges = torch.tensor(blocks_of(self.trained))
        stop = multiple * self.trained
        inside = (edges[:-1] >= stop / 2) & (edges[1:] <= stop)
        widths = (edges[1:] - edges[:-1]).double() * inside
        return (values * widths).sum(-1) / widths.sum()

    def truncated_at(self, reading: LabReading, multiple: float | int) -> BySeed:
        """Return the losses there, where the model sees the last bytes of its trained length alone."""
        place = octaves_of(1).index(int(multiple)) - 1
        return torch.tensor(reading.truncated, dtype=torch.float64)[:, :, place]

    def evidence(self, reading: LabReading) -> PairedDifference:
        """Return the evidence that these very models learned order inside the trained length.

        Text: how much worse the loss is when what was read before is shuffled. Puzzles: the share that is right, above
        chance. The error is over windows or puzzles: what models of other seeds would learn is not asked here.
        """
        plain = self.find(reading.task, reading.subject)
        assert plain is not None, "an extension is read where the model without it is"
        if reading.task == TEXT:
            differences = torch.tensor(plain.order, dtype=torch.float64)
        else:
            differences = self.at(plain, 1) - TASKS[reading.task].chance
        return paired(differences.mean(0, keepdim=True))

    def has_learned(self, reading: LabReading) -> bool:
        """Return whether order was learned inside the trained length, by more than chance and by enough to matter."""
        evidence = self.evidence(reading)
        return evidence.mean >= LEAST and evidence.mean > evidence.margin

    def reciprocal_rank(self, name: str) -> float:
        """Average 1 / rank over all puzzles and all lengths beyond the trained one; 1 is the best everywhere."""
        ranks = []
        for task in self.puzzles:
            reading = self.find(task, name)
            for multiple in (multiple for multiple in MULTIPLES if multiple > 1):
                shares = [self.at(rival, multiple).mean().item() for rival in self.of(task)]
                share = -1.0 if reading is None else self.at(reading, multiple).mean().item()
                ranks.append(1 + sum(other > share + 1e-9 for other in shares))
        return sum(1 / rank for rank in ranks) / len(ranks)


def over_seeds(values: BySeed) -> tuple[float, float | None]:
    """Return the mean, and its standard error over seeds; None where there is one seed alone."""
    means = values.mean(1)
    error = None if len(means) < 2 else (means.std() / math.sqrt(len(means))).item()
    return means.mean().item(), error


def paired(differences: BySeed) -> PairedDifference:
    """Average differences on the same windows or puzzles, with an error that knows both seeds and windows.

    The two variances add: another seed and another window would both have changed the mean. The interval is as wide as
    the smaller number of the two asks for, which few seeds make wide whether they agree or not: that two of them agree
    may be chance. So a verdict is wrong in 5 percent at most, whatever part either has in the variance. With one seed
    the error is over windows alone.

    Source: Mickey & Brown, Annals of Mathematical Statistics 37 (1966), 639-642, for the smaller number.
    """
    by_window, by_seed = differences.mean(0), differences.mean(1)
    parts = [means for means in (by_window, by_seed) if len(means) > 1]
    return PairedDifference(
        differences.mean().item(),
        math.sqrt(sum((means.var() / len(means)).item() for means in parts)),
        differences.numel(),
        min(map(len, parts)),
        "windows and seeds" if len(by_seed) > 1 else "windows",
    )
