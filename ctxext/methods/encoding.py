"""The contract of methods that bring a position encoding: a module, with or without weights, to train with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.methods.base import Method

ENCODING = "ctxext_encoding"
"""The name of an encoding on the module that it serves: in front of its weights in ``state_dict``."""

EncodingForm = Literal["input", "scores", "attention"]


@dataclass(frozen=True, kw_only=True)
class EncodingSpec:
    """Facts about a model that a method with a position encoding may use.

    Args:
        hidden_size: width of the states between layers.
        num_heads: query heads.
        num_kv_heads: key heads; divides ``num_heads``.
        head_dim: dimensions of a head of queries and keys.
        num_layers: attention layers.
        trained_length: tokens that the checkpoint was trained for, at least 1.
        embedding_std: standard deviation that token embeddings are initialised with, above 0.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    trained_length: int
    embedding_std: float = 0.02


@dataclass(frozen=True, eq=False)
class Pairs:
    """The queries and keys of one attention call, for whose pairs an encoding has a score.

    Args:
        q: queries, as attention gets them.
        k: keys; ``kv_heads`` divides ``heads``.
        query_positions: tokens from the start of the document; one row where all rows of the batch are alike.
        key_positions: tokens from the start of the document, arbitrary at padding, which is masked.
        scale: factor of attention on ``q . k``.
        visible: function from a slice of the queries to the mask of the keys that each sees, ``[rows, queries, key]``.
        places: index of the key at which each query stands, arbitrary at padding.
        carried: numbers of every key that the encoding computed from the states of its layer, cached with the keys;
            arbitrary but finite at padding, for the heads of queries or of keys. None if it caches none.
        key_documents: number of each key's document, negative at padding; None if all keys are of one document. The
            tokens of a document are in order, with nothing but padding between them.
    """

    q: Float[Tensor, "batch heads query head_dim"]
    k: Float[Tensor, "batch kv_heads key head_dim"]
    query_positions: Int[Tensor, "rows query"]
    key_positions: Int[Tensor, "rows key"]
    scale: float
    visible: Callable[[slice], Tensor]
    places: Int[Tensor, "rows query"]
    carried: Float[Tensor, "batch any_heads key numbers"] | None = None
    key_documents: Int[Tensor, "rows key"] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the scores: float32, or float64 for queries in float64."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def like_scores(self, weight: Tensor) -> Tensor:
        """Convert a weight to the queries' device and the scores' dtype."""
        return weight.to(self.q.device, self.dtype)

    def of_queries(self, keys: Float[Tensor, "batch heads key numbers"]) -> Float[Tensor, "batch heads query numbers"]:
        """Gather a per-key tensor at the queries' places."""
        places = self.places[:, None, :, None].expand(keys.shape[0], keys.shape[1], -1, keys.shape[3])
        return keys.gather(2, places)

    def without_padding(self, keys: Float[Tensor, "batch heads key numbers"]) -> Tensor:
        """Set a per-key tensor to 0 at padding."""
        return keys if self.key_documents is None else keys * (self.key_documents >= 0)[:, None, :, None]

    def distances(self, queries: slice) -> Int[Tensor, "rows queries key"]:
        """Return the distance in tokens from each of these queries back to each key, at least 0."""
        return (self.query_positions[:, queries, None] - self.key_positions[:, None, :]).clamp(min=0)


class Weighting(ABC):
    """Attention of one call as an encoding computes it, with the help of a backend.

    Attributes:
        reads_all: True if a query needs all tokens before it; the cache of a sliding window keeps the last ones only.
    """

    reads_all: bool = False

    @abstractmethod
    def attend(self, call: Any, backend: Any) -> Float[Tensor, "batch heads query head_dim"]:
        """Compute a ``kernels.Call`` by a ``kernels.AttentionBackend`` that serves encodings."""

    @abstractmethod
    def seen(self) -> tuple[str, Float[Tensor, "rows heads query key"]]:
        """Return the name and the values that a picture shows for each query and key."""


class Encoding(nn.Module):
    """Position encoding that replaces the one a model was trained with.

    An encoding adds vectors to the states before the first layer, or changes how queries and keys are weighed, or
    both. The result depends on positions, and on the queries and keys of the call where the encoding needs them; so a
    cache of keys stays right. The weights are parameters, not layers: adapters that look for layers leave the weights
    alone.

    An encoding may also compute numbers for each token from the input of its layer; these are cached with the token's
    key for all later queries.
    """

    def carried(self, states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq numbers"] | None:
        """Compute numbers for each token from the states that its layer gets; return None if the encoding has none.

        ``heads`` counts the heads of queries or of keys. Where the numbers have a wider dtype than keys, a cache keeps
        more digits of the numbers than of a key, at three times the memory: float32 with keys in 16 bits.
        """
        return None

    def added(self, positions: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"] | None:
        """Compute the vectors to add to the states of tokens at these positions; return None if there are none."""
        return None

    def score(self, pairs: Pairs) -> Weighting | None:
        """Build what weighs queries and keys; return None if attention stays as it is."""
        return None

    def seen(self, pairs: Pairs) -> tuple[str, Float[Tensor, "rows heads query key"]]:
        """Return the name and the values that a picture shows for each query and key."""
        score = self.score(pairs)
        if score is None:
            raise NotImplementedError(f"{type(self).__name__} leaves attention as it is.")
        return score.seen()


@dataclass(frozen=True, kw_only=True)
class EncodingMethod(Method):
    """A method that replaces a model's position encoding; the model has to be trained before it is of any use.

    Class attributes of a method:
        shared: True if one module serves all layers; else each layer has a module and trains it alone.
        carries: True if the module has numbers for each token, cached with the keys (``Encoding.carried``).
        form: the module's place: vectors are added to the ``"input"``, a term to ``"scores"``, or the whole
            ``"attention"`` is its.
    """

    needs_training = True
    shared: ClassVar[bool] = True
    carries: ClassVar[bool] = False
    form: ClassVar[EncodingForm]

    @property
    def is_table(self) -> bool:
        return False

    @abstractmethod
    def build(self, spec: EncodingSpec) -> Encoding:
        """Build a new module for a model, in float32, with weights drawn from torch's generator as in the paper.

        Raises:
            InvalidParameterError: if the parameters do not fit the model.
        """
