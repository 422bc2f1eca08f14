"""Remap positions in layers of which some heads read far, and the others the first and the newest tokens only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ctxext.attention.attend import Tried, as_autocast_wants
from ctxext.attention.remap import HeadPieces, RemapAttend, settled_for_kernel
from ctxext.caches.bounded import SETTLED, Reach, SplitLayer
from ctxext.errors import InvalidParameterError
from ctxext.kernels import Layout
from ctxext.kernels.groups import SplitGroups
from ctxext.kernels.step import StepPlan, attend_split, plan_split, plan_step
from ctxext.methods.remap import Piece
from ctxext.methods.retrieval_heads import RetrievalHeads

SHOWN_GROUPS = 24
"""Groups that a note lists."""


@dataclass(frozen=True, kw_only=True)
class SplitAttend(RemapAttend):
    """Attention of a layer of which some heads attend in the pieces of one method, and the others in another's.

    Args:
        near: Pieces of the heads that do not read far.
        heads: Groups of both kinds.
    """

    near: HeadPieces
    heads: SplitGroups

    @property
    def _all_pieces(self) -> tuple[Piece, ...]:
        return (*super()._all_pieces, *self.near.pieces)

    @property
    def reach(self) -> Reach | None:
        return self.near.reach

    def _dropping(self, reach: Reach, cached: DynamicLayer) -> SplitLayer:
        return SplitLayer(reach, self.heads, cached)

    def _sharpened(self, q: Tensor, layout: Layout, precise: torch.dtype) -> Tensor:
        """Return the queries of all heads, with the temperature in those that read far."""
        sharp = super()._sharpened(q, layout, precise)
        return sharp if sharp is q else torch.where(self.heads.far_heads(q), sharp, q)

    def _plan(self, q: Tensor, layout: Layout, precise: torch.dtype) -> StepPlan:
        far, near = (heads.turned(layout, precise, form=self.form) for heads in (self.far, self.near))
        return plan_step(layout, far, q, few=near, many=self.heads.far_groups(q.device))

    def _all_heads(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, cached: Any, *, by_kernel: bool, **how: Any
    ) -> Tensor:
        self.heads.far_groups(q.device)  # before a graph, which may not keep what it makes
        if not by_kernel:
            return self._apart(q, k, v, layout, cached, by_kernel=False, **how)
        if getattr(cached, "near", None) is None:
            return self._step(q, k, v, layout, **how)
        return self._step_of_split(q, k, v, layout, cached, **how)

    def _step_of_split(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, cached: SplitLayer, **how: Any) -> Tensor:
        """Compute a few queries of all heads by the kernel, from a layer that is split."""
        assert cached.near is not None
        precise, held = torch.promote_types(k.dtype, torch.float32), cached.near.held(layout)
        far, near = (heads.turned(at, precise, form=self.form) for heads, at in ((self.far, layout), (self.near, held)))
        plan = layout.memo(("step", self.far, self.near), lambda: plan_split(layout, far, held, near, q))
        k, how["settled"] = settled_for_kernel(cached, k, layout, far)
        q, *kv = as_autocast_wants(self._sharpened(q, layout, precise), k, v, cached.near.keys, cached.near.values)
        return attend_split(q, (kv[0], kv[1]), (kv[2], kv[3], self.heads.places(q.device)), plan, **how)

    def _apart(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, cached: Any, *, sinks: Tensor | None, **how: Any
    ) -> Tensor:
        """Compute the heads that read far and the others, each in their pieces."""
        far, near = self.heads.far, self.heads.near
        bounded = cached.near if isinstance(cached, SplitLayer) else None
        if bounded is None:  # k and v are those of all heads, and stay as the model rotated them
            if cached is not None:
                vars(cached).pop(SETTLED, None)
            far_kv, near_kv, settling = (far.of(k), far.of(v)), (near.of(k), near.of(v)), None
        else:
            far_kv, near_kv, settling = (k, v), (bounded.keys, bounded.values), cached
        far_sinks, near_sinks = (
            None if sinks is None else kind.of(sinks[None, :, None, None]).flatten() for kind in (far, near)
        )
        return self.heads.joined(
            self._attend(self.far, far.of(q), *far_kv, layout, settling, sinks=far_sinks, **how),
            self._attend(self.near, near.of(q), *near_kv, layout, bounded, sinks=near_sinks, **how),
        )


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
            f"{shown}.",
            f"A step at {target:,} tokens reads {share:.2f} of the keys that plain attention reads there.",
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
                shared = {each.name: getattr(attend, each.name) for each in fields(attend)}
                own = {"near": near, "heads": SplitGroups.of(far, count), "kind": f"{far} of {count}"}
                layers[path] = SplitAttend(**shared | own)
        return layers
