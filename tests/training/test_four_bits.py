"""How weights in 4 bits are stored where FSDP is to share them out; bitsandbytes itself is not needed."""

from __future__ import annotations

import pytest
import torch

from ctxext.training.checkpoint import four_bits


@pytest.mark.parametrize(("said", "storage"), [("true", torch.bfloat16), (None, None), ("false", None)])
def test_fsdp_gets_numbers_that_it_can_shard(
    monkeypatch: pytest.MonkeyPatch, said: str | None, storage: torch.dtype | None
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if said is not None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", said)
    found = four_bits("nf4", torch.bfloat16)
    assert found.get("bnb_4bit_quant_storage") == storage
    assert found["bnb_4bit_compute_dtype"] == torch.bfloat16
    assert found["load_in_4bit"]
