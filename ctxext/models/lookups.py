"""Watch the rows of a table that a text looks up, while a twin without weights reads it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from ctxext.core.rebuild import FAILURES
from ctxext.core.subject import field_of
from ctxext.probe.layers import WIDTHS, readers_of, reads_an_encoder

TOKENS = 6  # length of the text that shows the first row
BOTH_SIDES = "decoder_input_ids"  # an argument of models that read two texts at once


def table_of(model: nn.Module, name: str) -> Tensor:
    """Return the weight or buffer of this name."""
    table: Tensor = getattr(*field_of(model, name))
    return table


class _Enough(Exception):
    """Signal that ends a forward pass after the first lookup."""


class _Lookups(TorchFunctionMode):
    """Function mode that records lookups of rows of a table, and computes with zeros for weights on the meta device.

    Rows are looked up by an embedding, by indexing or by ``index_select``, so that three functions are watched.
    Position ids may be computed from the text, so everything except weights is real.
    """

    def __init__(self, table: Tensor, only_first: bool) -> None:
        super().__init__()
        self.table, self.only_first = table, only_first
        self.rows: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and _argument(args, kwargs, 1, "weight") is self.table:
            self._note(_argument(args, kwargs, 0, "input"))
        elif func is Tensor.__getitem__ and args[0] is self.table:
            rows = args[1][0] if isinstance(args[1], tuple) else args[1]
            self._note(rows if isinstance(rows, Tensor) else torch.arange(len(self.table))[rows])
        elif func is Tensor.index_select and args[0] is self.table:
            self._note(_argument(args, kwargs, 2, "index"))
        if str(kwargs.get("device")) == "meta":  # created on the device of the weights, but read for its values
            kwargs = {**kwargs, "device": "cpu"}
        if not any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return tree_map_only(Tensor, _zeros, func(*args, **kwargs))

    def _note(self, rows: Any) -> None:
        self.rows.append(torch.as_tensor(rows).detach().clone())
        if self.only_first:
            raise _Enough


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor


def lookups(twin: PreTrainedModel, name: str, text: list[int], *, only_first: bool = False) -> list[Tensor]:
    """Return the rows of a table that a text looks up, one tensor for each lookup."""
    owner, _ = field_of(twin, name)
    readers = [reader for reader in readers_of(twin, name) if reader is not owner]
    reads_two = [BOTH_SIDES in inspect.signature(reader.forward).parameters for reader in readers]
    tokens = torch.tensor([text])
    # Outer models first, since they may pass position ids to their parts. Models that read two texts last, since their
    # decoder may need states of the encoder.
    for two, reader in sorted(zip(reversed(reads_two), reversed(readers), strict=True), key=lambda pair: pair[0]):
        both = {"input_ids": tokens[:, -1:].expand(1, TOKENS), BOTH_SIDES: tokens}
        for texts in [both] if two else ({"input_ids": tokens} | more for more in _encoder_states(reader)):
            watch = _Lookups(table_of(twin, name), only_first)
            behind = contextlib.suppress(_Enough, *FAILURES)  # errors after the lookup do not matter
            with behind, torch.inference_mode(False), torch.no_grad(), watch:
                reader(**texts)
            if watch.rows:
                return watch.rows
    return []


def _encoder_states(reader: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield no extra arguments, then for a decoder with cross-attention encoder states of each possible width."""
    yield {}
    if reads_an_encoder(reader):
        config: Any = reader.config
        parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
        widths = [width for part in parts for name in WIDTHS if (width := getattr(part, name, None))]
        yield from ({"encoder_hidden_states": torch.zeros(1, 1, width)} for width in dict.fromkeys(widths))
