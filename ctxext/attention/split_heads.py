"""Remap positions in layers where some heads read far, and the others the first and the newest tokens only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ctxext.attention.attend import Tried
from ctxext.attention.engines import RemapAttend
from ctxext.attention.remap import HeadPieces
from ctxext.errors import InvalidParameterError
from ctxext.kernels.groups import SplitGroups
from ctxext.methods.retrieval_heads import RetrievalHeads

SHOWN_GROUPS = 24
"""Groups that a note lists."""


@dataclass(frozen=True)
class Groups:
    """The key-value groups of the layers that reach far, and which of them read far.

    Args:
        far: Groups of each layer that read far, by the path of the layer and counted from 0 in it.
    """

    count: Mapping[str, int]
    far: Mapping[str, tuple[int, ...]]
    number: Mapping[str, int]

    @classmethod
    def of(cls, method: RetrievalHeads, tried: Tried, reaching: Collection[str]) -> Groups:
        """Find the groups of a method by their numbers, which run through all attention layers.

        ``reaching`` holds the paths of the layers that reach far.

        Raises:
            InvalidParameterError: if the model has no group of such a number, or none of them reaches far.
        """
        assert isinstance(method.heads, tuple)
        total = sum(layer.key_heads for layer in tried.layers.values())
        if method.heads[-1] >= total:
            raise InvalidParameterError(
                f"heads must be numbers of key-value groups, of which this model has {total} (0 to {total - 1}), found "
                f"{method.heads[-1]}. Score this model's own heads: ctxext.heads(model), ctxext heads CHECKPOINT."
            )
        first, far, number = 0, dict[str, tuple[int, ...]](), dict[str, int]()
        for index, (path, layer) in enumerate(tried.layers.items()):
            if path in reaching:
                groups = range(first, first + layer.key_heads)
                far[path] = tuple(group - first for group in method.heads if group in groups)
                number[path] = index
            first += layer.key_heads
        if not any(far.values()):
            raise InvalidParameterError(
                f"None of heads={list(method.heads)} lies in a layer that reaches far; these are the attention layers "
                f"{', '.join(map(str, number.values()))}. Take groups of those, or score them: ctxext.heads(model)."
            )
        return cls({path: tried.layers[path].key_heads for path in reaching}, far, number)

    @property
    def total(self) -> int:
        """Number of groups of the layers that reach far."""
        return sum(self.count.values())

    @property
    def names(self) -> list[str]:
        """Names of the groups that read far, as layer.group."""
        return [f"{self.number[path]}.{group}" for path, groups in self.far.items() for group in groups]

    def notes(self, attend: RemapAttend, near: HeadPieces) -> tuple[str, ...]:
        """Return the notes for a user about the heads that read far, their pieces, and the saving."""
        total, far = self.total, self.names
        others = near.notes(" of the other groups", drops=attend.drops) if len(far) < total else ()
        layers = sum(bool(numbers) for numbers in self.far.values())
        shown = ", ".join(far[:SHOWN_GROUPS]) + (", ..." if len(far) > SHOWN_GROUPS else "")
        target, reach = attend.method.target_length(attend.far.spec.trained_length), near.reach
        assert reach is not None
        seen = target if target <= reach.whole_before else min(target, reach.first + reach.newest)
        share = (len(far) + (total - len(far)) * seen / target) / total
        return (
            f"{len(far)} of {total} key-value groups read far, in {layers} of {len(self.count)} layers (layer.group): "
            f"{shown}. A step at {target:,} tokens reads {share:.2f} of the keys that plain attention reads.",
            *attend.far.notes(" of these groups"),
            *others,
        )

    def attends(self, attend: RemapAttend, near: HeadPieces) -> dict[str, RemapAttend]:
        """Return the attention of each layer, by its path, under a method by which some heads read far."""
        layers = {}
        for path, count in self.count.items():
            far = self.far[path]
            if len(far) == count:
                layers[path] = attend
            elif not far:
                layers[path] = replace(attend, far=near, kind="near")
            else:
                groups = SplitGroups.of(far, count)
                layers[path] = replace(attend, near=near, heads=groups, kind=f"{far} of {count}")
        return layers
