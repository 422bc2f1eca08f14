"""The contract of methods that bring an encoding of their own: a module, with or without weights, that is trained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.methods.base import Method
from ctxext.spec import EncodingSpec, OwnAttention, Pairs, PairScore, ScoreForm

EncodingForm = Literal["added", "columns", "places", "rows", "own"]


class Encoding(nn.Module):
    """What tells a model the order of its tokens, in the place of what it was trained with.

    It does so in one of two ways, or both: by vectors that are added to the states before the first layer, or by what
    is added to the score of every query and key. What it computes depends on positions, and on the queries and keys of
    the call where it needs them; so a cache of keys stays right. Its weights are parameters of its own, no layers:
    adapters that look for layers leave them alone.

    It may also have numbers of its own for each token, computed from what its layer is given, which are kept with the
    token's key for all queries to come.
    """

    def carried(self, states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq numbers"] | None:
        """Numbers of each token, from the states that its layer is given; None where there are none.

        ``heads`` are those of queries or of keys. Where they have a wider dtype than keys, a cache keeps more of their
        digits than of a key's, at three times the memory: float32 beside keys in 16 bits.
        """
        return None

    def added(self, positions: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"] | None:
        """What is added to the states of tokens at these positions; None where it adds nothing."""
        return None

    def score(self, pairs: Pairs) -> PairScore | None:
        """What is added to the scaled products of queries and keys; None where it adds nothing."""
        return None

    def seen(self, pairs: Pairs) -> tuple[str, Float[Tensor, "rows heads query key"]]:
        """What a picture of a text shows of each query and key, behind its name: the score, unless more tells more."""
        score = self.score(pairs)
        if score is None:
            raise NotImplementedError(f"{type(self).__name__} adds nothing to scores.")
        if isinstance(score, OwnAttention):
            return "share of attention", score.weights_of(slice(None))
        return "added to the score", score.rows(slice(None))


@dataclass(frozen=True, kw_only=True)
class EncodingMethod(Method):
    """A method that takes the place of a model's positions, and has to be trained before it is of any use.

    Class attributes of a method:
        shared: whether one module serves all layers; else each layer has its own, trained for itself.
        carries: whether its module has numbers of each token, which are kept with the keys (``Encoding.carried``).
        form: what its module does: ``"added"`` to states, or the form in which it gives a ``PairScore`` to
            attention; ``"own"`` for an attention of its own, which is no softmax of scores.
    """

    needs_training: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    carries: ClassVar[bool] = False
    form: ClassVar[EncodingForm]

    @property
    def is_table(self) -> bool:
        return False

    @property
    def score_form(self) -> ScoreForm:
        """The form of what attention is asked to add."""
        return "none" if self.form == "added" else self.form

    @abstractmethod
    def build(self, spec: EncodingSpec) -> Encoding:
        """A new module for a model, in float32, its weights drawn from torch's generator as its paper draws them.

        Raises:
            InvalidParameterError: if the parameters do not fit the model.
        """


@dataclass(frozen=True, eq=False)
class ByDistance(PairScore):
    """A score that depends on the head and on how far back the key stands, and on nothing else.

    Args:
        pairs: of the call.
        of: what the score is at distances ``[...]``, given as integers: ``[heads, ...]``, in float32 or float64.
        weights: what ``of`` is computed from.
        floats: numbers that one pair takes meanwhile.
        far_from: from which distance on ``of`` is the same; None if from none.
    """

    pairs: Pairs
    of: Callable[[Tensor], Tensor]
    weights: tuple[Tensor, ...]
    floats: int
    far_from: int | None = None

    def rows(self, queries: slice) -> Float[Tensor, "rows heads queries key"]:
        return self.of(self.pairs.distances(queries)).transpose(0, 1)

    def above_far(self) -> Float[Tensor, "1 heads 1 distances"]:
        assert self.far_from is not None
        by_distance = self.of(torch.arange(self.far_from + 1, device=self.pairs.q.device))
        return (by_distance[:, :-1] - by_distance[:, -1:])[None, :, None]
