"""What the laboratory found: every score, and how sure a mean or a difference of two is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ctxext.evaluation.provenance import Report
from ctxext.evaluation.statistics import PairedDifference
from ctxext.laboratory.tasks import MULTIPLES, REACH, TASKS, TEXT

LEAST = 0.05
"""What counts as having learned something: so many nats, or so large a share of the answers above chance."""

Scores = tuple[tuple[tuple[float, ...], ...], ...]


def octaves_of(trained: int) -> tuple[int, ...]:
    """Positions at which the length has doubled, from the trained length on."""
    return tuple(trained * 2**place for place in range(int(math.log2(REACH)) + 1))


def blocks_of(trained: int) -> tuple[int, ...]:
    """Edges of the blocks of positions that a loss is averaged over, from 1/8 of the trained length on.

    Two to every doubling inside the trained length, where a block has few bytes, and four beyond it.
    """
    first = trained / REACH
    doublings = int(math.log2(REACH * REACH))
    parts = [2 if place < doublings // 2 else 4 for place in range(doublings)]
    edges = [first * 2**place * (1 + part / parts[place]) for place in range(doublings) for part in range(parts[place])]
    return tuple(sorted({0, *(int(edge) for edge in edges), trained * REACH}))


@dataclass(frozen=True, kw_only=True)
class LabReading:
    """How one way to know the order of tokens did on one task.

    Args:
        task: its name.
        subject: who was trained.
        kind: ``rotation``, ``encoding`` or ``recurrent``.
        extension: the method that was put on at the end, without training; empty for none.
        parameters: weights of the model.
        steps: of training.
        seconds: of one processor, for one seed.
        seeds: of the weights and of what was trained on.
        scores: by seed, by window or puzzle, and by block of positions (text: nats per byte) or by length (puzzles: the
            share of the answers that is right).
        truncated: likewise, by doubling of the length, where the model sees the last bytes of its trained length alone;
            empty for puzzles and extensions.
        order: by seed and window: how much worse the loss is when what was read before is shuffled, nats; likewise.
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
    order: tuple[tuple[float, ...], ...]

    @property
    def name(self) -> str:
        """Of the subject, and of its extension."""
        return f"{self.subject} + {self.extension}" if self.extension else self.subject

    @property
    def values(self) -> Float[Tensor, "seeds rows columns"]:
        """The scores, to compute with."""
        return torch.tensor(self.scores, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LabResult(Report):
    """Everything that was measured.

    Args:
        preset: what the settings are called.
        settings: how much was trained and tested.
        readings: one after the other, by task.
        documents: names of the texts.
        text_sha256: of all bytes that were used; empty where no text was.
        seconds: of one processor, for all cells.
        provenance: versions, machine, command and date.
    """

    TITLE: ClassVar[str] = "a result of the laboratory"
    KIND: ClassVar[str | None] = "laboratory"
    FORMAT: ClassVar[int] = 1

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
        """What was measured, text first."""
        return list(dict.fromkeys(reading.task for reading in self.readings))

    @property
    def puzzles(self) -> list[str]:
        """The tasks but for the text."""
        return [task for task in self.tasks if task != TEXT]

    def of(self, task: str) -> list[LabReading]:
        """The readings of one task."""
        return [reading for reading in self.readings if reading.task == task]

    def find(self, task: str, name: str) -> LabReading | None:
        """One reading; None where it was not measured."""
        return next((reading for reading in self.of(task) if reading.name == name), None)

    def at(self, reading: LabReading, multiple: float | int) -> Float[Tensor, "seeds rows"]:
        """The scores at so many times the trained length.

        Of text it is the loss over the last doubling of the length: at 2, from once to twice the trained length.
        """
        values = reading.values
        if reading.task != TEXT:
            return values[:, :, MULTIPLES.index(multiple)]
        edges = torch.tensor(blocks_of(self.trained))
        stop = multiple * self.trained
        inside = (edges[:-1] >= stop / 2) & (edges[1:] <= stop)
        widths = (edges[1:] - edges[:-1]).double() * inside
        return (values * widths).sum(-1) / widths.sum()

    def truncated_at(self, reading: LabReading, multiple: float | int) -> Float[Tensor, "seeds rows"]:
        """The loss there, where the model sees the last bytes of its trained length alone."""
        place = octaves_of(1).index(int(multiple)) - 1
        return torch.tensor(reading.truncated, dtype=torch.float64)[:, :, place]

    def evidence(self, reading: LabReading) -> PairedDifference:
        """What says that order was learned inside the trained length, by the models of these very seeds.

        Text: how much worse the loss is when what was read before is shuffled. Puzzles: the share that is right, above
        chance. The error is over windows or puzzles: what models of other seeds would learn is not asked here.
        """
        plain = self.find(reading.task, reading.subject)
        assert plain is not None, "an extension is read where the model without it is"
        if reading.task == TEXT:
            found = torch.tensor(plain.order, dtype=torch.float64)
        else:
            found = self.at(plain, 1) - TASKS[reading.task].chance
        return paired(found.mean(0, keepdim=True))

    def has_learned(self, reading: LabReading) -> bool:
        """Whether order was learned inside the trained length, by more than chance and by enough to matter."""
        found = self.evidence(reading)
        return found.mean >= LEAST and found.mean > found.margin

    def reciprocal_rank(self, name: str) -> float:
        """The mean of 1 / rank over all puzzles and all lengths beyond the trained one; 1 is the best everywhere."""
        ranks = []
        for task in self.puzzles:
            reading = self.find(task, name)
            for multiple in (one for one in MULTIPLES if one > 1):
                others = [self.at(one, multiple).mean().item() for one in self.of(task)]
                own = -1.0 if reading is None else self.at(reading, multiple).mean().item()
                ranks.append(1 + sum(other > own + 1e-9 for other in others))
        return sum(1 / rank for rank in ranks) / len(ranks)


def over_seeds(values: Float[Tensor, "seeds rows"]) -> tuple[float, float | None]:
    """The mean, and its standard error over seeds; None where there is one seed alone."""
    means = values.mean(1)
    error = None if len(means) < 2 else (means.std() / math.sqrt(len(means))).item()
    return means.mean().item(), error


def paired(differences: Float[Tensor, "seeds rows"]) -> PairedDifference:
    """The mean of differences on the same windows or puzzles, whose error knows both seeds and windows.

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
