"""What every method that remaps positions promises, on live models of every structure, without a cache.

Expected logits are those of the model's own code with dense attention in the layers that reach far. A new method gets
all of this for nothing.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import ctxext
from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.methods.dual_chunk import DualChunk
from ctxext.methods.remap import RemapMethod
from ctxext.methods.self_extend import SelfExtend
from ctxext.methods.streaming import Streaming
from ctxext.spec import RopeSpec
from ctxext.training.sequences import require_separate
from tests._models import logits, tiny, tokens
from tests._products import some
from tests._remap import dense, relative_positions, spec_of
from tests.attention import _remapped
from tests.attention._remapped import KINDS, error, every_pair, example, model_of, patched, require_equal, target
from tests.referee.twin import on_a_gpu
from tests.walk.tiny import TRAINED_LENGTH

LENGTH = 2 * TRAINED_LENGTH + 10
CARRYING = {"qwen3_5_text", "qwen3_next", "granitemoehybrid", "lfm2_moe", "bamba"}
every_kind = pytest.mark.parametrize("model_type", some(KINDS, "llama", *_remapped.DISTINCT))


@pytest.mark.slow
@pytest.mark.parametrize("trained_length", [64, 100, 2048])
@_remapped.every_method
def test_relative_positions_stay_where_the_model_was_trained(cls: type[RemapMethod], trained_length: int) -> None:
    """Each visible pair is in exactly one piece, near pairs keep their distance, and none is farther than L - 1."""
    assert len(_remapped.REMAPS) >= 6
    rope = RopeSpec(rotary_dim=8, base=1e4, trained_length=trained_length)
    method = cls.example(rope)
    target, length = method.target_length(trained_length), min(method.target_length(trained_length), 2300)
    relative = relative_positions(method, rope, target, length)
    seen = ~relative[..., 0].isnan()
    is_whole = torch.equal(seen, torch.ones(length, length, dtype=torch.bool).tril())
    assert is_whole or cls is Streaming
    assert bool(seen.diagonal().all())
    assert not bool(relative.diagonal(dim1=0, dim2=1).any()), "a token is at distance 0 from itself"
    assert bool((relative[seen] >= 0).all())
    if cls is not ctxext.methods.DPE:  # its searched sizes are bound by no length
        assert relative[seen].max() <= trained_length - 1
    exact = min(method.exact_length(rope), length)
    places = torch.arange(exact, dtype=torch.float64)
    plain = (places[:, None] - places[None]).tril()
    assert torch.equal(relative[:exact, :exact].nan_to_num(0), plain[..., None].expand(-1, -1, 4))


def outcome(model: PreTrainedModel, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a text, and the gradients of all weights in one."""
    model.zero_grad()
    out = model(inputs, labels=inputs, use_cache=False)
    out.loss.backward()
    gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    assert len(gradients) > 10
    return out.logits.detach(), torch.cat(gradients)


@pytest.mark.slow
@every_pair
def test_a_patched_model_attends_by_the_relative_positions_of_its_method(
    cls: type[RemapMethod], model_type: str
) -> None:
    """Logits and gradients of the whole model, in which only some layers may reach far; undone, it is as before."""
    model, kind = model_of(model_type), KINDS[model_type]
    method = example(cls, model)
    inputs = tokens(min(LENGTH, target(method)))
    with dense(model, method, kind.form) as oracle:
        wanted = outcome(model, inputs)
    assert len(oracle.remapped) == kind.far
    plain = logits(model, inputs)
    found = outcome(patched(model, method), inputs)
    for one, other in zip(found, wanted, strict=True):
        require_equal(one, other)
    assert error(found[0], plain) > 1e-2
    assert torch.equal(logits(ctxext.unpatch(model), inputs), plain)


@torch.no_grad()
def readings(model: PreTrainedModel, rows: Tensor, keep: Tensor, *, static: bool) -> list[Tensor]:
    """Logits of rows, whole and with a cache in chunks and token by token, with a mask and without one."""
    steps, found = [rows.shape[1] - 9, 1, 4, 1, 3], []
    for mask in (None, keep):
        found.append(logits(model, rows, attention_mask=mask))
        caches: list[Any] = [DynamicCache(config=model.config)]
        caches += [StaticCache(config=model.config, max_cache_len=rows.shape[1] + 9)] * static
        for cache in caches:
            at = 0
            for part in rows.split(steps, 1):
                at += part.shape[1]
                seen = None if mask is None else mask[:, :at]
                found.append(model(part, attention_mask=seen, past_key_values=cache).logits)
    return found


@pytest.mark.slow
@every_pair
def test_inside_the_window_every_bit_stays(cls: type[RemapMethod], model_type: str) -> None:
    require_every_bit(cls, tiny(model_type, **KINDS[model_type].changes), static=model_type not in CARRYING)


@pytest.mark.parametrize(("implementation", "dtype"), [("eager", torch.bfloat16), ("sdpa", torch.float32)])
def test_every_bit_stays_in_other_dtypes_and_attentions(implementation: str, dtype: torch.dtype) -> None:
    model = tiny()
    model.set_attn_implementation(implementation)
    for weight in model.parameters():  # as transformers loads it: its frequencies stay in float32
        weight.data = weight.data.to(dtype)
    require_every_bit(SelfExtend, model, static=True)


def require_every_bit(cls: type[RemapMethod], model: PreTrainedModel, *, static: bool) -> None:
    method = example(cls, model)
    exact = min(method.exact_length(spec_of(model)), TRAINED_LENGTH)
    assert exact >= 16
    inputs = tokens(2 * exact, rows=2)
    short, keep = inputs[:, :exact], torch.ones(2, exact, dtype=torch.long)
    keep[0, :7] = 0
    before, long = readings(model, short, keep, static=static), logits(model, inputs)
    patched(model, method)
    now = readings(model, short, keep, static=static)
    assert all(map(torch.equal, now, before))
    assert error(logits(model, inputs), long) > 1e-3, "beyond, it does something"


def test_inside_the_window_the_models_own_function_gets_what_it_got_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among it dropout, and the name of the implementation, by which flash attention finds its kernel."""
    calls: list[tuple[Any, ...]] = []

    def mine(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        given.pop("position_ids", None)
        calls.append((module.config._attn_implementation, module.layer_idx, mask, given))
        return sdpa_attention_forward(module, q, k, v, mask, **given)

    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", mine)
    plain = tiny(attention_dropout=0.1)
    plain.set_attn_implementation("mine")
    model = ctxext.patch(copy.deepcopy(plain), "self_extend", factor=2)
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        results.append((each.train()(tokens(50)).logits, calls[:]))
        calls.clear()
    (found, found_calls), (wanted, wanted_calls) = results
    assert torch.equal(found, wanted)
    assert found_calls == wanted_calls
    assert found_calls[0][0] == "mine"
    assert found_calls[0][-1]["dropout"] == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some(KINDS, "lfm2_moe", "gemma3_text", "smollm3", "gpt_oss"))
def test_documents_of_one_row_are_read_each_alone_or_refused(model_type: str) -> None:
    """Where ctxext computes attention, also with a cache, with which no mask of transformers does."""
    model, ids = model_of(model_type), tokens(90)
    positions = torch.cat([torch.arange(50), torch.arange(40)])[None]
    for method in (_remapped.SELF_EXTEND, Streaming(factor=4, window=20), "yarn", "dynamic_ntk"):
        factor = 4.0 if isinstance(method, str) else None
        try:
            ctxext.patch(model, method, factor=factor, trained_length=TRAINED_LENGTH)
        except IncompatibleError:  # two methods do not fit layers of two kinds of positions
            continue
        by_masks_alone = isinstance(method, str) and model_type == "gpt_oss"
        for use_cache in (False,) if isinstance(method, str) else (False, True):
            with torch.no_grad():
                if model_type in CARRYING or by_masks_alone:
                    reason = (
                        "attention masks without positions" if by_masks_alone else "from one document into the next"
                    )
                    told = {"seq_idx": (positions == 0).cumsum(1).int()}
                    for more in ({}, told):
                        kernel = " without the package causal_conv1d" if more and not by_masks_alone else ""
                        said = rf"^position_ids restart.*{reason}{kernel}\. .*a row\.$"
                        with pytest.raises(IncompatibleError, match=said):
                            model(ids, position_ids=positions, use_cache=use_cache, **more)
                    model(ids[:, :50], position_ids=positions[:, :50], use_cache=use_cache)
                    hidden = {"attention_mask": (torch.arange(50) > 5).long()[None]}
                    model(ids[:, :50], position_ids=(positions[:, :50] - 6).clamp(min=0), **hidden)
                    continue
                found = model(ids, position_ids=positions, use_cache=use_cache).logits
                require_equal(found, torch.cat([model(ids[:, :50]).logits, model(ids[:, 50:]).logits], 1))
        ctxext.unpatch(model)


def test_packed_rows_of_a_model_that_carries_a_state_in_the_recipe() -> None:
    with pytest.raises(IncompatibleError, match=r"^position_ids restart.*'conv'"):
        require_separate(patched(model_of("lfm2_moe")))
    require_separate(patched(model_of("gpt_oss")))


def test_a_gap_in_positions_begins_no_document() -> None:
    """Skip-wise training leaves gaps, at which transformers' own mask parts documents unless a mask is given."""
    model, _ = _remapped.extended()
    ids, positions = tokens(20), torch.cat([torch.arange(10), torch.arange(30, 40)])[None]
    masked = logits(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert error(logits(model, ids, position_ids=positions), masked) < _remapped.EXACT
    assert error(logits(model, ids)[:, 10:], masked[:, 10:]) > 1e-3


@pytest.mark.slow
@every_kind
def test_a_saved_model_loads_with_ctxext_only_and_is_the_same(model_type: str, tmp_path: Path) -> None:
    kind, ids = KINDS[model_type], tokens(100)
    model = patched(tiny(model_type, **kind.changes))
    ctxext.save(model, tmp_path)
    # Phi-3's config is checked before its rope types are, and a field of it is guarded.
    refusal = StrictDataclassFieldValidationError if model_type == "phi3" else CheckpointError
    with pytest.raises(refusal, match=r"ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    said = f"{kind.far} of {kind.attending} attention layers are remapped; the others stay as they are"
    assert (said in str(ctxext.describe(loaded))) == (kind.far < kind.attending)


def test_a_model_that_was_saved_is_extended_afterwards(tmp_path: Path) -> None:
    """``save_pretrained`` leaves the name of the dtype in the config, of which Apertus makes a tensor."""
    model = tiny("apertus")
    model.save_pretrained(tmp_path)
    assert isinstance(model.config.dtype, str)
    assert logits(patched(model), tokens(LENGTH)).isfinite().all()


@pytest.mark.slow
def test_two_settings_have_two_fingerprints() -> None:
    found = {ctxext.describe(ctxext.patch(tiny(), SelfExtend(factor=2, window=w))).fingerprint for w in (16, 24, 32)}
    assert len(found) == 3


def test_describe_shows_the_pieces_in_words() -> None:
    said = str(ctxext.describe(ctxext.patch(tiny(), "self_extend", factor=2, window=32, thinning=0.5), verbose=True))
    assert "Texts of up to 64 tokens are read as without the extension." in said
    assert "keys less than 32 tokens back, and all keys of queries before 64, at their own positions" in said
    where = "where they lie 32 or more tokens back of queries from 64 on"
    assert f"the first 4 keys, {where}: queries at i // 4 + 24" in said
    far = "keys 32 or more tokens back of queries from 64 on, but for the first 4 of the text"
    assert f"{far}: queries at i // 4 + 24, keys at j // 4, each key counting as 0.5 of one" in said


def test_it_extends_what_a_scaled_checkpoint_was_trained_with() -> None:
    """Qwen2.5-1M ships Dual Chunk Attention together with YaRN: positions are remapped, frequencies stay."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    model = tiny(rope_parameters=scaled, max_position_embeddings=64)
    plain = copy.deepcopy(model)
    ctxext.patch(model, "dual_chunk", factor=2, trained_length=64)
    assert torch.equal(logits(model, tokens(55)), logits(plain, tokens(55)))
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("engine", [contextlib.nullcontext, on_a_gpu])
def test_training_with_dropout_is_refused(engine: Any) -> None:
    """Also of a few tokens on a GPU, whose kernel has no dropout either; layers take the number when they are built."""
    model = ctxext.patch(tiny(attention_dropout=0.1), DualChunk(factor=2)).eval()
    with engine(), torch.no_grad():
        cache = model(tokens(100)).past_key_values
        with pytest.raises(IncompatibleError, match=r"no dropout, found 0\.1"):
            model.train()(tokens(1), past_key_values=cache)
    with pytest.raises(IncompatibleError, match=r"no dropout, found 0\.1. Load the model with attention_dropout=0\.0"):
        model(tokens(70))
    model.config.attention_dropout = 0.0
    with pytest.raises(IncompatibleError, match="no dropout"):
        model(tokens(70))
    ctxext.patch(tiny(attention_dropout=0.0), DualChunk(factor=2)).train()(tokens(70))


@pytest.mark.slow
def test_a_named_backend_is_taken_and_never_falls_back() -> None:
    ids = tokens(100)
    one = ctxext.patch(tiny(), "self_extend", factor=2, attention="reference")
    other = ctxext.patch(tiny(), "self_extend", factor=2, attention="sdpa")
    assert error(logits(one, ids), logits(other, ids)) < 1e-4
    with pytest.raises(ctxext.errors.BackendUnavailableError, match="flex"):
        logits(ctxext.patch(tiny(), "self_extend", factor=2, attention="flex"), ids)


def test_positions_along_several_axes_are_refused_where_they_differ() -> None:
    model, inputs = patched(model_of("qwen3_5_text")), tokens(LENGTH)
    places = torch.arange(LENGTH)[None]
    require_equal(logits(model, inputs, position_ids=places.expand(4, 1, -1)), logits(model, inputs))
    with pytest.raises(IncompatibleError, match="differ, as in a text with an image or a video"):
        logits(model, inputs, position_ids=torch.stack([places, places, places // 2, places // 3]))


@pytest.mark.slow
@torch.no_grad()
def test_a_soft_cap_that_sdpa_drops_holds_in_short_and_long_texts() -> None:
    """transformers 5.16 takes sdpa for Gemma 2: short texts, and layers of a window, went without the cap."""
    models = [tiny("gemma2", attn_logit_softcapping=0.5, **KINDS["gemma2"].changes).double() for _ in range(2)]
    for model, own in zip(models, ("eager", "sdpa"), strict=True):
        model.config._attn_implementation_internal = own
        patched(model)
    for length in (40, LENGTH):
        expected, found = (logits(model, tokens(length)) for model in models)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert any(note.endswith("but under the soft cap that sdpa drops.") for note in ctxext.describe(models[1]).notes)
