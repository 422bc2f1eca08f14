"""The one table of losses: several readings of the same tokens, compared with each other and with the best truncation.

Every measurement of losses is a selection of such a table: a span of positions, the key tokens, the masked tokens of a
stretch. In each selection the best truncation is chosen on the selected tokens; see ``ctxext.measuring.truncation``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ctxext.measuring.statistics import Bucket, PairedDifference, document_difference
from ctxext.measuring.truncation import SELECTED, TRUNCATED, best_short, is_short, window_of

YES, NO, UNDECIDED = "yes", "no", "undecided"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best of several readings, against the best truncation of the same tokens.

    Args:
        length: Tokens that were read.
        best: Name of the reading with the least loss.
        window: Tokens that the best truncation sees.
        selected: True where the selection is better than each truncation.
        beats: ``yes``, ``no``, or ``undecided`` where this text cannot show a difference.
        standard_errors: Number of standard errors that a gain must exceed to count; more candidates need more, since
            the best of many is partly the luckiest. Luck among them cannot make the best look worse than it is, luck
            among the truncations can: a loss must exceed the number that as many candidates need as there are windows.
        as_good: Names of other readings whose difference to the best this text cannot show.
    """

    length: int
    best: str
    window: int
    versus_truncation: PairedDifference
    beats: str
    standard_errors: float
    candidates: int
    as_good: tuple[str, ...]
    selected: bool = False


class LossTable:
    """Losses of several readings of the same tokens, one tensor per text, in nats per token.

    Args:
        names: Names of the readings. An extension has to beat each that ``is_short``.
        read: Function that returns the losses of a reading by its name. All at once may not fit into memory.
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], Sequence[Tensor]]) -> None:
        self.names, self._read = tuple(names), read
        self.short = tuple(name for name in names if is_short(name))

    @classmethod
    def of(cls, losses: Mapping[str, Sequence[Tensor]]) -> LossTable:
        """Return the table of losses that are in memory."""
        return cls(tuple(losses), losses.__getitem__)

    def span(self, start: int, stop: int | None = None) -> LossTable:
        """Return the table of the positions ``start <= i < stop``, read when they are needed."""
        return LossTable(self.names, lambda name: [text[start:stop] for text in self._read(name)])

    def select(self, take: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> LossTable:
        """Return the table of the tokens that a function takes from the texts of each reading, kept in memory."""
        return LossTable.of({name: take(self._read(name)) for name in self.names})

    @cached_property
    def best_short(self) -> str:
        """Name of the best truncation, or of the selection where that is better; there must be one."""
        return best_short({name: self._read(name) for name in self.short})

    @property
    def window(self) -> int:
        """Tokens that the best truncation or the selection sees."""
        return window_of(self.best_short) or self.longest

    @property
    def longest(self) -> int:
        """Tokens of the longest truncation, and of the selection."""
        return max(window_of(name) or 0 for name in self.short)

    @property
    def selected(self) -> bool:
        """True where the selection is better than each truncation."""
        return self.best_short == SELECTED

    def losses(self, name: str) -> Sequence[Tensor]:
        """Return the losses of a reading; ``truncated`` names the best truncation."""
        return self._read(self.best_short if name == TRUNCATED else name)

    def window_of(self, name: str) -> int | None:
        """Return the tokens that a truncation sees, the best one too; None for another reading."""
        return self.window if name == TRUNCATED else window_of(name)

    def tokens(self, name: str) -> int:
        """Count the tokens of all texts."""
        return sum(map(len, self.losses(name)))

    def mean(self, name: str) -> float:
        """Return the mean loss, every token weighing the same."""
        return torch.cat(list(self.losses(name))).double().mean().item()

    def bucket(self, name: str, start: int, stop: int) -> Bucket:
        """Return the mean loss of a reading, as a bucket of the positions ``start <= i < stop`` of this table."""
        losses = torch.cat(list(self.losses(name)))
        return Bucket(start, stop, len(losses), losses.double().mean().item())

    def difference(self, name: str, other: str = TRUNCATED) -> PairedDifference:
        """Return the loss of a reading minus the loss of another, by default the best truncation.

        Raises:
            InvalidParameterError: different tokens, or fewer than two.
            IncompatibleError: a loss is NaN or infinite.
        """
        baselines = len(self.short) if other == TRUNCATED else 1
        return document_difference(self.losses(name), self.losses(other), baselines=baselines)

    def versus(self, name: str, other: str = TRUNCATED) -> PairedDifference | None:
        """Return the ``difference``; None for ``other`` itself, and for a single token, which has no standard error."""
        return None if name == other or self.tokens(name) < 2 else self.difference(name, other)

    def judge(self, names: Sequence[str], length: int) -> Verdict:
        """Find the best of several readings and compare it with the best truncation."""
        versus = {name: self.difference(name) for name in names}
        best = min(versus, key=lambda name: versus[name].mean)
        needed = versus[best].errors_needed(len(names))
        others = {name: self.difference(name, best) for name in names if name != best}
        return Verdict(
            length=length,
            best=best,
            window=self.window,
            versus_truncation=versus[best],
            beats={"better": YES, "worse": NO}.get(versus[best].verdict_of_best(len(names)), UNDECIDED),
            standard_errors=needed,
            candidates=len(names),
            as_good=tuple(name for name, gap in others.items() if gap.mean <= needed * gap.standard_error),
            selected=self.selected,
        )
