"""Encoders, and what holds of each that reads both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel

import ctxext
from ctxext.errors import CheckpointError
from tests._models import tokens
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

LENGTH = 2 * TRAINED_LENGTH + 10


def encoder(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model whose tokens see both ways, in float64."""
    config = tiny_config(model_type, **changes)
    if model_type in ("llama", "mistral"):
        config.is_causal = False
        return tiny_model(config).double()
    return tiny_model(config, loader=AutoModelForMaskedLM).double()


@torch.no_grad()
def logits(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, **arguments).logits
    return found


def keep_of(*rows: tuple[int, int]) -> Tensor:
    at = torch.arange(LENGTH)
    return torch.stack([(at >= start) & (at < stop) for start, stop in rows])


def require_alone_in_a_pack(model: PreTrainedModel, lengths: list[int]) -> None:
    """Hold each document of a packed row to itself alone."""
    ids, positions = tokens(sum(lengths)), torch.cat([torch.arange(length) for length in lengths])[None]
    alone = torch.cat([logits(model, document) for document in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(logits(model, ids, position_ids=positions), alone, rtol=1e-9, atol=1e-9)


def require_saved_and_undone(model: PreTrainedModel, extend: Callable[[], object], folder: Path) -> None:
    """Extend a model, save and reload it, see that plain code refuses it, and undo the extension bit for bit."""
    model.save_pretrained(folder / "plain")  # which writes into the config
    before = State.of(model, tokens(LENGTH))
    extend()
    extended = logits(model, tokens(LENGTH))
    model.save_pretrained(folder)
    loaded = ctxext.load(folder)
    assert torch.equal(logits(loaded, tokens(LENGTH)), extended)
    assert type(loaded) is type(model)
    with pytest.raises(CheckpointError, match=r"ctxext\.load"):
        type(model).from_pretrained(folder)
    for one in (model, loaded):
        ctxext.unpatch(one)
    assert before.difference(model) is None
    assert torch.equal(logits(loaded, tokens(LENGTH)), logits(model, tokens(LENGTH)))
