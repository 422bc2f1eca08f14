"""ALiBi in the place of rotation where tokens see both ways: encoders, and decoders turned into encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods.formulas import alibi_slopes
from ctxext.spec import AlibiSpec
from tests._models import RECENT, tiny, tokens
from tests.attention._encoders import (
    LENGTH,
    encoder,
    keep_of,
    logits,
    require_alone_in_a_pack,
    require_saved_and_undone,
)
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

ENCODERS = ("eurobert", "llama", *(("gte", "nomic_bert") if RECENT else ()))
KINDS = ("symmetric", "halves")

every_kind = pytest.mark.parametrize("kind", KINDS)
every_encoder = pytest.mark.parametrize("model_type", ENCODERS)


def by_hand(kind: str, keep: Tensor) -> Any:
    """Attention in the signature that transformers calls, one query and one head at a time."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        batch, heads = q.shape[:2]
        out = torch.zeros_like(q)
        for row in range(batch):
            for head in range(heads):
                keys, values = (part[row, head * k.shape[1] // heads] for part in (k, v))
                exponent = -8 * (head + 1) / heads
                if kind == "halves":
                    exponent = -8 * (head % (heads // 2) + 1) / (heads // 2)
                for i in torch.nonzero(keep[row]).flatten().tolist():
                    sees = keep[row].clone()
                    if kind == "halves" and head < heads // 2:
                        sees[i + 1 :] = False
                    elif kind == "halves":
                        sees[:i] = False
                    js = torch.nonzero(sees).flatten()
                    scores = scaling * (keys[js] @ q[row, head, i]) - 2.0**exponent * abs(js - i)
                    weights = scores.exp() / scores.exp().sum()
                    out[row, head, i] = weights @ values[js]
        return out.transpose(1, 2), None

    return attention


@pytest.mark.slow
@every_kind
@every_encoder
def test_equals_what_is_written_out_by_hand(model_type: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding on the left, on the right, on both sides and on none."""
    keep = keep_of((0, LENGTH), (30, LENGTH), (0, LENGTH - 50), (3, 20))
    ids = tokens(LENGTH, rows=len(keep))
    oracle = encoder(model_type)
    for _, rotary in Subject(oracle).rotaries:
        rotary.inv_freq.zero_()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "by_hand", by_hand(kind, keep))
    oracle.config._attn_implementation_internal = "by_hand"
    expected = logits(oracle, ids)
    for backend in ("sdpa", "reference"):
        model = ctxext.patch(encoder(model_type), "alibi", factor=4.0, both_ways=kind, attention=backend)
        found = logits(model, ids, attention_mask=keep.long())
        torch.testing.assert_close(found[keep], expected[keep], rtol=1e-8, atol=1e-8)


@every_kind
@pytest.mark.parametrize("model_type", ["eurobert", "llama"])
def test_a_document_alone_is_the_document_in_a_packed_row(model_type: str, kind: str) -> None:
    model = ctxext.patch(encoder(model_type), "alibi", factor=4.0, both_ways=kind)
    require_alone_in_a_pack(model, [50, 1, LENGTH - 51])


@pytest.mark.skipif(not RECENT, reason="a type of the newest transformers")
@every_kind
def test_packing_by_a_rule_of_the_model_s_own_is_refused_when_it_comes(kind: str) -> None:
    """ESMC tells documents apart by ids of its own, in a mask function of its own."""
    model = ctxext.patch(encoder("esmc"), "alibi", factor=4.0, both_ways=kind)
    assert logits(model, tokens(20)).isfinite().all()
    with pytest.raises(IncompatibleError, match="a mask function of the model's own"):
        logits(model, tokens(20), sequence_id=torch.tensor([[0] * 8 + [1] * 12]))


@pytest.mark.slow
@every_kind
@every_encoder
def test_gradients_are_those_of_the_oracle(model_type: str, kind: str) -> None:
    found = []
    for backend in ("sdpa", "reference"):
        model = ctxext.patch(encoder(model_type), "alibi", factor=4.0, both_ways=kind, attention=backend)
        keep = keep_of((0, LENGTH), (30, LENGTH))
        out = model(input_ids=tokens(LENGTH, rows=2), attention_mask=keep.long()).logits
        out[keep].square().mean().backward()
        found.append({name: part.grad for name, part in model.named_parameters() if part.grad is not None})
    assert found[0]
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.slow
@every_kind
@every_encoder
def test_undone_bit_for_bit_and_saved_and_reloaded(model_type: str, kind: str, tmp_path: Path) -> None:
    model = encoder(model_type).float()
    require_saved_and_undone(model, lambda: ctxext.patch(model, "alibi", factor=4.0, both_ways=kind), tmp_path)


@pytest.mark.slow
def test_a_description_says_what_distance_is() -> None:
    for kind, said in (("symmetric", "equally with distance to both sides"), ("halves", "the other half")):
        notes = ctxext.describe(ctxext.patch(encoder("eurobert"), "alibi", factor=4.0, both_ways=kind)).notes
        assert any(said in note for note in notes)
    causal = ctxext.describe(ctxext.patch(tiny(), "alibi", factor=4.0)).notes
    assert not any("both" in note for note in causal)


def test_a_head_of_a_classifier_is_served() -> None:
    model = tiny_model(tiny_config("eurobert"), loader=AutoModelForSequenceClassification)
    plain = logits(model, tokens(LENGTH))
    ctxext.patch(model, "alibi", factor=4.0)
    assert not torch.equal(logits(model, tokens(LENGTH)), plain)


@pytest.mark.slow
def test_one_key_head_serves_both_halves() -> None:
    model = encoder("eurobert", num_key_value_heads=1)
    found = [
        logits(ctxext.patch(model, "alibi", factor=4.0, both_ways="halves", attention=backend), tokens(LENGTH))
        for backend in ("sdpa", "reference")
        if ctxext.describe(model).method is None or ctxext.unpatch(model) is not None
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_halves_refuse_a_cache_and_symmetric_distances_take_one() -> None:
    """A decoder turned into an encoder may be asked for a cache: new tokens then see all that is in it."""
    model = encoder("llama")
    ids = tokens(40)
    ctxext.patch(model, "alibi", factor=4.0)
    with torch.no_grad():
        first = model(ids[:, :30], use_cache=True)
        second = model(ids[:, 30:], past_key_values=first.past_key_values, use_cache=True)
    assert second.logits.isfinite().all()
    ctxext.unpatch(model)
    ctxext.patch(model, "alibi", factor=4.0, both_ways="halves")
    with torch.no_grad():
        first = model(ids[:, :30], use_cache=True)
    with pytest.raises(IncompatibleError, match="cannot use a cache"):
        model(ids[:, 30:], past_key_values=first.past_key_values, use_cache=True)


def test_alibi_that_was_trained_causally_refuses_to_look_ahead() -> None:
    model = tiny("bloom")
    ctxext.patch(model, "alibi", factor=4.0, trained_length=TRAINED_LENGTH)
    model.config.is_causal = False
    with pytest.raises(IncompatibleError, match="not causal here"):
        logits(model, tokens(20), use_cache=False)


def test_a_shard_is_refused() -> None:
    model = ctxext.patch(encoder("llama"), "alibi", factor=4.0)
    with pytest.raises(IncompatibleError, match="makes attention causal"):
        logits(model, tokens(20), position_ids=torch.arange(20)[None], ctxext_sharded=True, ctxext_length=40)


def test_slopes_of_halves_are_those_of_half_the_heads() -> None:
    slopes = ctxext.method("alibi", both_ways="halves").slopes(AlibiSpec(12, 64), 64)
    assert torch.equal(slopes, alibi_slopes(6).repeat(2))
