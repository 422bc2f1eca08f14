"""The passes of a perplexity measurement: every mode's losses at every length, and the same tokens truncated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.evaluation.corpus import Corpus
from ctxext.evaluation.perplexity import loss_by_position
from ctxext.evaluation.perplexity_plan import Plan, groups_by_positions
from ctxext.evaluation.progress import Progress, pass_cost, ticking
from ctxext.evaluation.protocols import Scored, Spread, longlora, longlora_windows, sliding, yarn
from ctxext.evaluation.truncation import passes_beyond, stride_of, tail_losses, tails_cost, window_name, windows_of

__all__ = ["Losses", "Work"]


@dataclass(frozen=True, eq=False)
class Losses:
    """What one reading gave.

    Args:
        at: by length, in increasing order.
        passes: forward passes.
        tokens: that went through the model.
    """

    at: dict[int, Scored]
    passes: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Work:
    """What can be asked of a model for one plan and corpus.

    Args:
        plan: from ``make_plan``.
        corpus: of the texts.
        spread: over documents or windows.
        progress: called with what is being done and its cost.
        turning_point: of the model's cost, see ``pass_cost``.
    """

    plan: Plan
    corpus: Corpus
    spread: Spread
    progress: Progress
    turning_point: int

    @property
    def texts(self) -> list[Tensor]:
        """Token ids of each text, [1, tokens], the prefix in front."""
        return [document.input_ids for document in self.corpus.documents]

    @property
    def prefix(self) -> int:
        """Tokens in front of each text that are not of the text."""
        return self.corpus.documents[0].prefix

    @property
    def bare(self) -> list[Tensor]:
        """Token ids of each text without the prefix: published protocols put one in front themselves, or none."""
        return [ids[:, self.prefix :] for ids in self.texts]

    @property
    def bos(self) -> int | None:
        """The token of the prefix; None where there is none."""
        return int(self.texts[0][0, 0]) if self.prefix else None

    @property
    def window(self) -> int:
        """Positions inside the trained window that every text has, up to the greatest length."""
        return min(self.plan.trained_length, self.plan.length, *(ids.shape[1] - 1 for ids in self.texts))

    @property
    def has_control(self) -> bool:
        """Whether the unextended model is read beyond its window too, to see it break."""
        plan = self.plan
        return plan.mode == "position" and plan.unpatched and plan.length > plan.trained_length

    def cost(self) -> float:
        """About what the readings cost, in the units of ``pass_cost``; for a progress bar."""
        plan, window = self.plan, self.plan.trained_length
        sizes = [ids.shape[1] - 1 for ids in self.texts]
        own = 0.0
        for length in groups_by_positions(plan) if plan.mode == "position" else plan.lengths:
            own += self._windows(length, sizes) * pass_cost(length, self.turning_point)
        control = len(sizes) * pass_cost(plan.length, self.turning_point) if self.has_control else 0.0
        if plan.mode == "position" or plan.truncate:
            sizes = [min(size, plan.length) for size in sizes]
        if plan.mode == "longlora":
            sizes = [n - 1 for n in plan.lengths for _ in range(self._windows(n, sizes)) if n > window]
        prefix = 0 if plan.mode == "longlora" else self.prefix
        beyond = sum(
            pass_cost(window, self.turning_point) + tails_cost(size, window, prefix, self.turning_point)
            for size in sizes
        )
        return own + control + (beyond if plan.length > window else 0.0)

    def read(self, model: nn.Module, name: str, *, dynamic: bool) -> Losses:
        """The losses at every length, as the mode has it.

        Args:
            model: as it is to be read.
            name: to show.
            dynamic: whether its positions follow the length of the text, so that one pass does not serve all lengths.
        """
        plan = self.plan
        if plan.mode != "position":
            at = {length: self._protocol(model, name, length) for length in plan.lengths}
            return Losses(at, sum(one.passes for one in at.values()), sum(one.tokens for one in at.values()))
        groups = groups_by_positions(plan) if dynamic else {plan.length: list(plan.lengths)}
        at = {}
        for longest, lengths in groups.items():
            whole = self.pass_over(model, name, longest)
            at |= {
                length: Scored(tuple(one[:length] for one in whole), None, len(whole), longest) for length in lengths
            }
        documents = len(self.texts)
        return Losses(dict(sorted(at.items())), len(groups) * documents, sum(groups) * documents)

    def read_truncated(self, model: nn.Module) -> dict[int, Losses]:
        """The losses of the tokens that ``read`` scores, by window, when the model sees only the last so many tokens.

        Inside the trained window nothing is dropped. Empty where nothing lies beyond it.

        Args:
            model: that is shown the last tokens.
        """
        lengths = [length for length in self.plan.lengths if length > self.plan.trained_length]
        if not lengths:
            return {}
        if self.plan.mode == "longlora":
            by_length = {
                length: self._truncated(model, self.stream_of(length), prefix=0, most=length - 1) for length in lengths
            }
            return {
                window: Losses(
                    {length: found[window] for length, found in by_length.items()},
                    sum(found[window].passes for found in by_length.values()),
                    sum(found[window].tokens for found in by_length.values()),
                )
                for window in windows_of(self.plan.trained_length)
            }
        most = self.plan.length if self.plan.mode == "position" or self.plan.truncate else None
        whole = self._truncated(model, self.texts, prefix=self.prefix, most=most)
        shown = self.plan.lengths if self.plan.mode == "position" else lengths
        return {
            window: Losses(dict.fromkeys(shown, scored), scored.passes, scored.tokens)
            for window, scored in whole.items()
        }

    def pass_over(self, model: nn.Module, name: str, positions: int) -> tuple[Tensor, ...]:
        """The losses of the first ``positions`` positions of each text, from one pass each."""
        cut = [ids[:, : positions + 1] for ids in self.texts]
        with ticking(model, name, pass_cost(positions, self.turning_point), self.progress):
            return tuple(self.spread(cut, lambda ids: loss_by_position(model, ids, cached=self.plan.cached)[0]))

    def stream_of(self, length: int) -> list[Tensor]:
        """LongLoRA's windows, [1, length] each."""
        stride = self.plan.stride or length
        return [one.input_ids for one in longlora_windows(self.bare, length=length, stride=stride)]

    def _windows(self, length: int, sizes: list[int]) -> int:
        """Passes of a mode at one length over texts of so many positions."""
        stride = self.plan.stride or length
        if self.plan.mode == "position" or self.plan.truncate:
            return len(sizes)
        if self.plan.mode == "longlora":
            return max(0, len(range(0, sum(sizes) - length, stride)) - 1)
        return sum(1 + -(-max(0, size - length) // stride) for size in sizes)

    def _truncated(self, model: nn.Module, texts: list[Tensor], *, prefix: int, most: int | None) -> dict[int, Scored]:
        """Every window over the first ``most`` positions of each text; inside the trained one they are read once."""
        trained, cached = self.plan.trained_length, self.plan.cached
        cut = [ids[:, : None if most is None else most + 1] for ids in texts]
        name = window_name(trained)
        with ticking(model, name, pass_cost(trained, self.turning_point), self.progress):
            options = {"length": trained, "stride": stride_of(trained, prefix), "prefix": prefix}
            whole = sliding(model, cut, spread=self.spread, cached=cached, **options)
        found = {}
        for window in windows_of(trained)[:-1]:
            with ticking(model, window_name(window), pass_cost(window, self.turning_point), self.progress):

                def tail(ids: Tensor, window: int = window) -> Tensor:
                    sizes = {"window": window, "trained_length": trained, "prefix": prefix}
                    return tail_losses(model, ids, cached=cached, **sizes)[0]

                tails = self.spread(cut, tail)
            losses = [torch.cat([head[:trained], own]) for head, own in zip(whole.losses, tails, strict=True)]
            sizes = {"start": trained, "prefix": prefix}
            passes = sum(passes_beyond(window, positions=len(one), **sizes) for one in losses)
            found[window] = Scored(tuple(losses), None, passes, passes * window)
        return found | {trained: whole}

    def _protocol(self, model: nn.Module, name: str, length: int) -> Scored:
        plan = self.plan
        options: dict[str, Any] = {
            "length": length,
            "stride": plan.stride,
            "spread": self.spread,
            "cached": plan.cached,
        }
        with ticking(model, name, pass_cost(length, self.turning_point), self.progress):
            if plan.mode == "sliding":
                return sliding(model, self.texts, prefix=self.prefix, **options)
            if plan.mode == "yarn":
                return yarn(model, self.bare, bos=self.bos, truncate=plan.truncate, **options)
            return longlora(model, self.bare, **options)
