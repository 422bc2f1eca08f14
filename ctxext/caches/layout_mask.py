"""The object that replaces an attention mask, from the decoder to its layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ctxext.caches.travelling import Travelling
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.kernels import Layout

UNPATCH = "Unpatch the model for such inputs."


class MaskReadError(IncompatibleError, AttributeError):
    """A layer computes with its mask: the keys of a query depend on more than positions, which are all of a layout."""

    @classmethod
    def of(cls, use: str) -> MaskReadError:
        """Build the message from an expression of the layer's code."""
        return cls(
            f"Its code computes with the attention mask ({use}), so more than positions may decide which keys "
            f"a query sees. ctxext's attention knows positions alone. {UNPATCH}"
        )


class LayoutMask:
    """A layout, passed to layers instead of an attention mask.

    It is not a dataclass: engines that cast a layer's inputs descend into those, and would copy the layout per layer.

    Args:
        layout: the positions of queries and keys; None where a layout cannot say what the mask does.
        window: tokens that a query would see under the replaced mask; None for all.
        is_plain: True if the replaced mask is causal or full and hides padding only.
        crosses: True if the keys come from an encoder, so that they belong to another text than the queries.
        travels: the numbers of an encoding for each token of this layer.
        refusal: why there is no layout. A layer whose attention is not replaced needs none.
    """

    ndim = 2

    def __init__(
        self,
        layout: Layout | None,
        length: int | Sequence[int] | None = None,
        window: int | None = None,
        replaced: dict[str, Any] | None = None,
        *,
        is_plain: bool = False,
        crosses: bool = False,
        travels: Travelling | None = None,
        refusal: str | None = None,
    ) -> None:
        self._layout, self.length, self.window, self.crosses = layout, length, window, crosses
        self.travels, self.replaced, self.is_plain, self.refusal = travels, replaced or {}, is_plain, refusal
        self._rebuilt: dict[str, Any] = {}
        self._queries: slice | None = None  # of the replaced mask, where not all

    @property
    def layout(self) -> Layout:
        """Positions of queries and keys.

        Raises:
            IncompatibleError: if a layout cannot say what the mask does.
        """
        if self._layout is None:
            raise IncompatibleError(f"{self.refusal} {UNPATCH}")
        return self._layout

    def _with(self, **changes: Any) -> LayoutMask:
        mask = copy.copy(self)
        vars(mask).update(changes)
        return mask

    def to(self, *args: Any, **kwargs: Any) -> LayoutMask:
        """Move the layout to a device, as models and device hooks do with masks; a dtype is ignored."""
        target = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device | str | int)), None)
        if target is None or torch.empty(0, device=target).device == self.device:
            return self
        place = torch.device(target)
        layout = None if self._layout is None else self._layout.memo(("to", str(place)), lambda: self.layout.to(place))
        return self._with(_layout=layout, replaced=self.replaced | {"device": place}, _rebuilt={})

    @property
    def device(self) -> torch.device:
        """Device of the positions."""
        if self._layout is None:
            return torch.device(self.replaced.get("device") or "cpu")
        return self._layout.query_positions.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, as in copies
            raise AttributeError(name)
        raise MaskReadError.of(f"mask.{name}")

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, LayoutMask):
            return self is other
        raise MaskReadError.of("mask == ...")

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskReadError.of(f"torch's {getattr(func, '__name__', func)}")

    def __getitem__(self, index: Any) -> LayoutMask:
        """Return the mask of some queries, as ``mask[:, :, queries, :]``: some layers compute the last ones only.

        Raises:
            MaskReadError: for any other index.
        """
        everything = slice(None)
        if not isinstance(index, tuple) or len(index) != 4 or (*index[:2], index[3]) != (everything,) * 3:
            raise MaskReadError.of("mask[...]")
        queries: slice = index[2]
        if queries in (everything, slice(0, None)):
            return self
        layout = self._layout
        if layout is not None:
            documents = layout.query_documents
            layout = layout.memo(
                ("queries", queries.start, queries.stop),
                lambda: Layout.of(
                    self.layout.query_positions[:, queries],
                    self.layout.key_positions,
                    None if documents is None else documents[:, queries],
                    self.layout.key_documents,
                    sees=self.layout.sees,
                ),
            )
        replaced = self.replaced | {"allow_is_causal_skip": False}
        return self._with(_layout=layout, replaced=replaced, _queries=queries, _rebuilt={})

    def carrying(self, travels: Travelling) -> LayoutMask:
        """Return a copy for one layer, with the numbers of an encoding for each of its tokens."""
        return self._with(travels=travels)

    def is_plain_before(self, stop: int) -> bool:
        """Return whether the replaced mask has the same visible pairs, and all queries lie before position ``stop``."""
        layout = self.layout
        return self.is_plain and layout.memo(("plain", stop), lambda: _is_one_text_before(layout, stop))

    def under(self, implementation: str) -> Any:
        """Build the replaced mask for an attention implementation of transformers, once per forward pass."""
        if implementation not in self._rebuilt:
            mask_of = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
            mask = None if mask_of is None else mask_of(**self.replaced)
            if self._queries is not None and isinstance(mask, Tensor) and mask.ndim == 4:
                mask = mask[:, :, self._queries]
            self._rebuilt[implementation] = None if mask is None else mask.to(self.device)
        return self._rebuilt[implementation]


def _is_one_text_before(layout: Layout, stop: int) -> bool:
    """Return whether each row is one document, and all queries lie before position ``stop``."""
    if layout.external_causality:
        return False
    documents = layout.query_documents
    if documents is None and layout.from_zero and layout.consecutive and layout.spans:
        return all(key[1] - key[0] <= stop for _, _, key in layout.spans)  # known without a copy to the host
    fits = layout.query_positions < stop
    if documents is not None:
        fits = torch.where(documents == 0, fits, documents < 0)
    return bool(fits.all())


def layout_of(attention_mask: Any) -> LayoutMask:
    """Return the layout that a layer received as its mask.

    Raises:
        PatchStateError: if code between the decoder and the layer replaced the mask.
    """
    if isinstance(attention_mask, LayoutMask):
        return attention_mask
    raise PatchStateError(
        f"The attention of a model patched by ctxext received {type(attention_mask).__name__} instead of a layout. "
        f"Call the model itself, not a part of its decoder, and do not change its _attn_implementation."
    )
