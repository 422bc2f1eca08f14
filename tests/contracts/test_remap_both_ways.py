"""Remapping where tokens see both ways: encoders, and decoders turned into encoders, against dense attention."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.methods import METHODS
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from tests._models import RECENT, tokens
from tests._products import crossed
from tests._remap import ROPE, dense, relative_positions, spec_of
from tests.attention._encoders import LENGTH, keep_of, logits, require_alone_in_a_pack, require_saved_and_undone
from tests.attention._encoders import encoder as encoder_of
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

REMAPS = [cls for cls in METHODS.values() if issubclass(cls, RemapMethod) and cls is not RetrievalHeads]
OTHERS = [cls for cls in REMAPS if cls is not SelfExtend]
WHOLE = ("eurobert", "llama", *(("esmc", "gte", "jina_embeddings_v3", "nomic_bert") if RECENT else ()))
WINDOWED = ("modernbert", "gemma3_text", *(("neomme", "ultrabert") if RECENT else ()))  # beside layers that see all
TYPES = (*WHOLE, *WINDOWED)
ROWS = ((0, LENGTH), (30, LENGTH), (0, LENGTH - 20), (3, 20))

every_pair = pytest.mark.parametrize(("cls", "model_type"), crossed([SelfExtend, *OTHERS], TYPES))


def encoder(model_type: str) -> PreTrainedModel:
    """An encoder of a type, in float64; EmbeddingGemma is a Gemma 3 that reads both ways."""
    if model_type == "gemma3_text":
        return tiny_model(tiny_config(model_type, use_bidirectional_attention=True)).double()
    return encoder_of(model_type, **({"local_attention": 16} if model_type == "modernbert" else {}))


def extended(cls: type[RemapMethod], model_type: str = "eurobert") -> PreTrainedModel:
    model = encoder(model_type)
    return ctxext.patch(model, cls.example(spec_of(model)))


@pytest.mark.nightly
@every_pair
def test_logits_and_gradients_are_those_of_dense_attention(cls: type[RemapMethod], model_type: str) -> None:
    """A whole model, with padding on the left, on the right, on both sides and on none."""
    oracle = encoder(model_type)
    method = cls.example(spec_of(oracle))
    length = min(LENGTH, method.target_length(TRAINED_LENGTH))
    ids, keep = tokens(length, rows=len(ROWS)), keep_of(*ROWS)[:, :length]
    up = torch.randn(*ids.shape, oracle.config.vocab_size, generator=torch.Generator().manual_seed(0)).double()

    def outcome(model: PreTrainedModel) -> list[Tensor]:
        found = model(input_ids=ids, attention_mask=keep.long()).logits[keep]
        found.backward(up[keep])
        return [found.detach(), *(part.grad for part in model.parameters() if part.grad is not None)]

    with dense(oracle, method, both_ways=True):
        expected = outcome(oracle)
    for backend in ("sdpa", "reference"):
        found = outcome(ctxext.patch(encoder(model_type), method, attention=backend))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9 * max(1.0, 10 * float(other.abs().max())))


@pytest.mark.slow
def test_an_encoder_that_caps_its_scores() -> None:
    """T5Gemma's, which has a window in every other layer, which its own code rounds, and a soft cap in all."""
    config, keep, method = tiny_config("t5gemma"), keep_of(*ROWS), SelfExtend(factor=4.0)
    config.encoder.attn_logit_softcapping = 1.0
    model = tiny_model(config).double().get_encoder()
    model.set_attn_implementation("eager")  # older transformers take sdpa, which forgets the cap

    def states() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(tokens(LENGTH, rows=len(ROWS)), attention_mask=keep.long()).last_hidden_state
        return found[keep]

    with dense(model, method, both_ways=True):
        expected = states()
    ctxext.patch(model, method)
    torch.testing.assert_close(states(), expected, rtol=0, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["eurobert", "llama"])
def test_a_temperature_that_follows_the_length_is_that_of_the_whole_text(model_type: str) -> None:
    ids, keep = tokens(LENGTH, rows=len(ROWS)), keep_of(*ROWS)
    oracle, method = encoder(model_type), SelfExtend(factor=4.0, temperature="logn")
    with dense(oracle, method, both_ways=True):
        expected = logits(oracle, ids, attention_mask=keep.long())
    found = logits(ctxext.patch(encoder(model_type), method), ids, attention_mask=keep.long())
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-9, atol=1e-9)
    require_alone_in_a_pack(ctxext.patch(encoder(model_type), method), [50, LENGTH - 50])


def test_relative_positions_are_those_of_the_past_with_the_other_sign() -> None:
    """Written out by formula for one method of each kind of region."""
    length, trained = 150, ROPE.trained_length
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    late, early, sign = torch.maximum(i, j), torch.minimum(i, j), (i - j).sign()
    near = (late - early < 23) | (late < trained)
    groups = torch.where(near, late - early, late // 7 + 23 - 23 // 7 - early // 7)
    extend = SelfExtend(factor=4, window=23, group=7)
    chunk, local, period = 48, 8, 40
    apart = late // period - early // period
    far = torch.where(apart == 1, (late % period + period).clamp(max=chunk), torch.tensor(chunk)) - early % period
    chunks = torch.where(apart == 0, late - early, far)
    for method, wanted in ((extend, groups), (DualChunk(factor=4, chunk=chunk, local=local), chunks)):
        found = relative_positions(method, ROPE, 256, length, both_ways=True)
        assert torch.equal(found, (sign * wanted).double()[..., None].expand_as(found)), method.name
    streaming = relative_positions(Streaming(factor=4, sinks=4, window=48), ROPE, 256, length, both_ways=True)
    seen = ~streaming[..., 0].isnan()
    assert torch.equal(seen, (late - early < 48) | ((j < 4) & (i > j)))


@pytest.mark.slow
@every_pair
def test_a_short_text_is_read_bit_for_bit_as_before(cls: type[RemapMethod], model_type: str) -> None:
    for implementation in ("sdpa", "eager") if cls is SelfExtend else ("sdpa",):
        plain = encoder(model_type).float()
        plain.set_attn_implementation(implementation)
        method = cls.example(spec_of(plain))
        model = ctxext.patch(copy.deepcopy(plain), method)
        exact = min(method.exact_length(spec_of(plain)), TRAINED_LENGTH)
        assert exact >= 16
        ids, keep = tokens(LENGTH, rows=2), torch.ones(2, exact, dtype=torch.long)
        keep[0, exact - 4 :] = keep[1, :3] = 0
        for mask in (None, keep):
            found, wanted = (logits(each, ids[:, :exact], attention_mask=mask) for each in (model, plain))
            assert torch.equal(found, wanted)
        assert float((logits(model, ids) - logits(plain, ids)).abs().max()) > 1e-3, "beyond, it does something"


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[20, 30], [70, 90, 1], [150, 10]])
@pytest.mark.parametrize("model_type", WINDOWED)
def test_windows_to_both_sides_end_where_a_document_does(model_type: str, lengths: list[int]) -> None:
    require_alone_in_a_pack(extended(SelfExtend, model_type), lengths)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_description_says_which_layers_are_remapped(model_type: str) -> None:
    notes = ctxext.describe(extended(SelfExtend, model_type)).notes
    assert any("attention layers are remapped; the others stay as they are" in note for note in notes)


@pytest.mark.slow
@every_pair
def test_undone_bit_for_bit_and_saved_and_reloaded(cls: type[RemapMethod], model_type: str, tmp_path: Path) -> None:
    model = encoder(model_type).float()
    require_saved_and_undone(model, lambda: ctxext.patch(model, cls.example(spec_of(model))), tmp_path)


def test_a_description_says_that_keys_ahead_are_remapped_too() -> None:
    notes = ctxext.describe(extended(Streaming)).notes
    assert any("keys ahead of a query lie as far from it as they would behind" in note for note in notes)
    assert not any("cache" in note for note in notes)


def test_a_classifier_is_served_and_trains_with_checkpoints() -> None:
    model = tiny_model(tiny_config("eurobert"), loader=AutoModelForSequenceClassification).double().train()
    ctxext.patch(model, "self_extend", factor=4.0)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens(LENGTH, rows=2)).logits.square().sum().backward()
        grads.append([part.grad for part in model.parameters() if part.grad is not None])
    assert len(grads[0]) > 5
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_cache_of_a_decoder_turned_into_an_encoder_keeps_the_keys_that_it_was_given() -> None:
    """New tokens then see all that is in it; no key is turned or dropped, whatever the method does to a causal one."""
    for cls in (SelfExtend, Streaming):
        model, ids = extended(cls, "llama"), tokens(LENGTH)
        with torch.no_grad():
            first = model(ids[:, : LENGTH - 20], use_cache=True)
            keys = first.past_key_values.layers[0].keys.clone()
            second = model(ids[:, LENGTH - 20 :], past_key_values=first.past_key_values, use_cache=True)
        after = second.past_key_values.layers[0].keys
        assert after.shape[2] == LENGTH
        assert torch.equal(after[:, :, : keys.shape[2]], keys)
        assert second.logits.isfinite().all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_model_that_was_turned_round_after_the_patch_is_refused(is_causal: bool) -> None:
    model = tiny_model(tiny_config("llama"))
    model.config.is_causal = is_causal
    ctxext.patch(model, "self_extend", factor=4.0)
    model.config.is_causal = not is_causal
    for length in (20, LENGTH):
        with pytest.raises(IncompatibleError, match="but in this call it sees"):
            logits(model, tokens(length))
