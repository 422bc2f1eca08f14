"""The contract of methods that bring their own position encoding: a module, with or without weights, to train with."""

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

ENCODING = "ctxext_encoding"
"""The name of an encoding on the module that it serves: in front of its weights in ``state_dict``."""

EncodingForm = Literal["added", "columns", "places", "rows", "own"]


class Encoding(nn.Module):
    """Position encoding that replaces the one a model was trained with.

    An encoding adds vectors to the states before the first layer, or a term to the score of every query and key, or
    both. The result depends on positions, and on the queries and keys of the call where the encoding needs them; so a
    cache of keys stays right. The weights are parameters, not layers: adapters that look for layers leave the weights
    alone.

    An encoding may also compute numbers for each token from the input of its layer; these are cached with the token's
    key for all later queries.
    """

    def carried(self, states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq numbers"] | None:
        """Compute numbers for each token from the states that its layer gets; return None if the encoding has none.

        ``heads`` are those of queries or of keys. Where the numbers have a wider dtype than keys, a cache keeps more
        digits of the numbers than of a key, at three times the memory: float32 beside keys in 16 bits.
        """
        return None

    def added(self, positions: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"] | None:
        """Compute the vectors to add to the states of tokens at these positions; return None if there are none."""
        return None

    def score(self, pairs: Pairs) -> PairScore | None:
        """Build the term to add to the scaled products of queries and keys; return None if there is none."""
        return None

    def seen(self, pairs: Pairs) -> tuple[str, Float[Tensor, "rows heads query key"]]:
        """Return the name and the values that a picture shows for each query and key: the score, by default."""
        score = self.score(pairs)
        if score is None:
            raise NotImplementedError(f"{type(self).__name__} adds nothing to scores.")
        if isinstance(score, OwnAttention):
            return "share of attention", score.weights_of(slice(None))
        return "added to the score", score.rows(slice(None))


@dataclass(frozen=True, kw_only=True)
class EncodingMethod(Method):
    """A method that replaces a model's position encoding; the model has to be trained before it is of any use.

    Class attributes of a method:
        shared: True if one module serves all layers; else each layer has a module and trains it alone.
        carries: True if the module has numbers for each token, cached with the keys (``Encoding.carried``).
        form: effect of the module: ``"added"`` to states, or the form in which attention gets its ``PairScore``;
            ``"own"`` for an attention of its own, which is no softmax of scores.
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
        """Form of the ``PairScore`` that attention has to add."""
        return "none" if self.form == "added" else self.form

    @abstractmethod
    def build(self, spec: EncodingSpec) -> Encoding:
        """Build a new module for a model, in float32, with weights drawn from torch's generator as in the paper.

        Raises:
            InvalidParameterError: if the parameters do not fit the model.
        """


@dataclass(frozen=True, eq=False)
class ByDistance(PairScore):
    """A score that depends only on the head and on the distance from the query back to the key.

    Args:
        pairs: queries and keys of the call.
        of: function from integer distances ``[...]`` to scores ``[heads, ...]``, in float32 or float64.
        weights: parameters that ``of`` uses.
        floats: numbers per pair that ``rows`` holds while it computes.
        far_from: distance from which on ``of`` is constant; None if it never is.
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
