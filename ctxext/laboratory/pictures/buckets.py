"""The bucket of each distance, as a model was trained and with its buckets stretched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ctxext.core.subject import text_of
from ctxext.errors import IncompatibleError
from ctxext.laboratory.pictures.picture import AFTER, BEFORE, Picture, distances_to, quiet, tokens_axis
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.measuring.readings import name_for
from ctxext.methods import BucketMethod
from ctxext.methods.formulas import buckets_of
from ctxext.spec import BucketSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketPicture(Picture):
    """Buckets of keys before the query, where each direction has its own.

    Args:
        trained_last: tokens from which all distances share the last bucket, as trained.
        last: likewise, with the method.
        trained: the bucket of each distance, as trained.
        buckets: likewise, with the method.
    """

    kind = "buckets"
    size = 8.4, 4.2
    caption = (
        "Distances that share a bucket share a learned score: no head can tell them apart. Where a line has become "
        "flat, all that lies farther back is one. These are an encoder's buckets for keys before the query; those "
        "after it have as many of their own."
    )

    trained_length: int
    target_length: int
    trained_last: int
    last: int
    distances: Int[Tensor, " distances"]
    trained: Int[Tensor, " distances"]
    buckets: Int[Tensor, " distances"]

    @classmethod
    def of(cls, method: BucketMethod, request: PictureRequest) -> BucketPicture:
        """Compute the bucket of each distance, before and after.

        Raises:
            IncompatibleError: the config of the checkpoint names no buckets.
        """
        spec = _buckets(request)
        target = method.target_length(spec.trained_length)

        def bucket(distances: Int[Tensor, " distances"], largest: int) -> Int[Tensor, " distances"]:
            exact = buckets_of(-distances.double(), buckets=spec.buckets, max_distance=largest, both_ways=True)
            return (exact + 1e-9).floor().long()

        trained, stretched = (
            (int(bucket(torch.arange(largest + 1), largest).argmax()), bucket(distances_to(target), largest))
            for largest in (spec.max_distance, method.max_distance(spec))
        )
        return cls(
            method=method,
            model=request.model,
            trained_length=spec.trained_length,
            target_length=target,
            trained_last=trained[0],
            last=stretched[0],
            distances=distances_to(target),
            trained=trained[1],
            buckets=stretched[1],
        )

    @property
    def sentence(self) -> str:
        begin = f"{self.model}: with" if self.model else "With"
        return (
            f"{begin} {name_for(self.method)} the last bucket begins at {self.last:,} tokens back, not at "
            f"{self.trained_last:,}"
        )

    def draw(self, figure: Any) -> None:
        axes, shown = figure.subplots(), self.distances >= 1
        apart, label = self.distances[shown].tolist(), name_for(self.method)
        for buckets, colour, name in ((self.trained, BEFORE, "as trained"), (self.buckets, AFTER, label)):
            axes.plot(apart, buckets[shown].tolist(), color=colour, lw=2, drawstyle="steps-post", label=name)
        tokens_axis(axes, self.target_length)
        title = "Bucket of each distance, of an encoder's keys before the query"
        quiet(axes, title, x="tokens between query and key", y="bucket", grid="both")
        axes.legend(fontsize=8.5, frameon=False, loc="upper left")


def _buckets(request: PictureRequest) -> BucketSpec:
    """Return the buckets of a checkpoint, or those of T5."""
    if request.checkpoint is None:
        return BucketSpec(buckets=32, max_distance=128, trained_length=request.trained_length or 512)
    config = text_of(request.config)
    buckets = getattr(config, "relative_attention_num_buckets", None)
    most = getattr(config, "relative_attention_max_distance", None)
    if not isinstance(buckets, int) or not isinstance(most, int):
        raise IncompatibleError(f"The config of {request.checkpoint} names no buckets of relative distances.")
    return BucketSpec(buckets, most, request.trained_length or getattr(config, "n_positions", None) or 512)
