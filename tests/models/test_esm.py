"""ESM-2: frequencies among the weights, against the formulas in float64, and as plain transformers loads them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM

import ctxext
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import IncompatibleError, PatchStateError

TRAINED, FACTOR, HALF, BASE = 66, 2.0, 4, 10_000.0
IDS = torch.arange(100)[None] % 20 + 4


def esm(rounded: bool = False) -> EsmForMaskedLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"intermediate_size": 48, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
    model = EsmForMaskedLM(EsmConfig(**shape, **special, max_position_embeddings=TRAINED)).eval()
    if rounded:  # as Meta's checkpoints have them
        model.esm.rotary_embeddings.inv_freq = model.esm.rotary_embeddings.inv_freq.half().float()
    return model


def expected(method: str) -> list[float]:
    """The ratio of each new frequency to the old one."""
    ratios = []
    for pair in range(HALF):
        turns = TRAINED * BASE ** (-pair / HALF) / (2 * math.pi)
        share = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
        of = {"pi": 1 / FACTOR, "ntk": FACTOR ** (-pair / (HALF - 1)), "abf": (BASE / 5e5) ** (pair / HALF)}
        ratios.append((of | {"ntk_by_parts": (1 - share) / FACTOR + share})[method])
    return ratios


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("method", ["pi", "ntk", "abf", "ntk_by_parts"])
def test_frequencies_are_those_of_the_paper_and_load_bit_for_bit(method: str, rounded: bool, tmp_path: Path) -> None:
    model, options = esm(rounded), {"base": 5e5} if method == "abf" else {}
    model.save_pretrained(tmp_path / "plain")
    old, plain = model.esm.rotary_embeddings.inv_freq.clone(), model(IDS).logits
    ctxext.patch(model, method, factor=FACTOR, **options)
    new, long = model.esm.rotary_embeddings.inv_freq, model(IDS).logits
    torch.testing.assert_close(new.double() / old.double(), torch.tensor(expected(method)).double(), rtol=2e-7, atol=0)
    ctxext.save(model, tmp_path / "saved")
    patch_checkpoint(tmp_path / "plain", tmp_path / "written", method, factor=FACTOR, **options)
    for place in ("saved", "written"):
        for read in (EsmForMaskedLM.from_pretrained, ctxext.load):
            assert torch.equal(read(tmp_path / place)(IDS).logits, long)
    assert model.bfloat16().esm.rotary_embeddings.inv_freq.dtype == torch.float32
    model = ctxext.unpatch(ctxext.load(tmp_path / "plain", method, factor=FACTOR, **options))
    assert torch.equal(model(IDS).logits, plain)
    with pytest.raises(PatchStateError, match="Load the original checkpoint"):
        ctxext.unpatch(ctxext.load(tmp_path / "saved"))


def test_frequencies_that_are_not_in_memory_are_never_filled_in_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device they come with the weights, as all weights do."""
    config = esm().config
    with torch.device("meta"):
        model = EsmForMaskedLM(config)
    monkeypatch.setattr("ctxext.core.override.fill_in", None)
    ctxext.patch(model, "pi", factor=FACTOR).to_empty(device="cpu")
    model.load_state_dict((live := ctxext.patch(esm(), "pi", factor=FACTOR)).state_dict())
    assert torch.equal(model.eval()(IDS).logits, live(IDS).logits)


@pytest.mark.parametrize("other", ["plain", "pi"])
def test_frequencies_of_another_model_are_refused(other: str) -> None:
    """Among the weights, they would take the place of the extension's, and the config would go on naming it."""
    model, weights = ctxext.patch(esm(), "ntk", factor=FACTOR), esm()
    if other == "pi":
        ctxext.patch(weights, "pi", factor=FACTOR)
    before = model(IDS).logits
    with pytest.raises(PatchStateError, match=r"esm\.rotary_embeddings\.inv_freq of another extension than 'ntk'"):
        model.load_state_dict(weights.state_dict())
    assert torch.equal(model(IDS).logits, before)
    model.load_state_dict({name: value.half() for name, value in model.state_dict().items()})
    ctxext.unpatch(model).load_state_dict(esm().state_dict())
    assert torch.equal(model(IDS).logits, esm()(IDS).logits)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_an_offloaded_model_keeps_the_frequencies_that_it_gets(offload_buffers: bool) -> None:
    """A hook that brings buffers too would bring the plain ones."""
    model, live, how = esm(), ctxext.patch(esm(), "pi", factor=FACTOR), {"offload_buffers": offload_buffers}
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"), **how)
    if offload_buffers:
        with pytest.raises(IncompatibleError, match=r"of this esm are offloaded\. .* without offload_buffers"):
            ctxext.patch(model, "pi", factor=FACTOR)
        assert torch.equal(model(IDS).logits, esm()(IDS).logits)
    else:
        assert torch.equal(ctxext.patch(model, "pi", factor=FACTOR)(IDS).logits, live(IDS).logits)
