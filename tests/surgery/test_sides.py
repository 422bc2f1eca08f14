"""Encoder-decoders: each side extended by itself, by one method or by two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import ALiBi, YaRN
from ctxext.saved import identity
from tests._models import RECENT, tokens
from tests.walk.check import State, Stock
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(not RECENT, reason="built for the newest transformers")

LENGTH = 2 * TRAINED_LENGTH + 10
TYPES = ("t5gemma", "t5gemma2")
every_type = pytest.mark.parametrize("model_type", TYPES)


def model_of(model_type: str = "t5gemma") -> PreTrainedModel:
    """A tiny encoder-decoder; t5gemma without the caps on its scores, which ALiBi's attention has not."""
    config = tiny_config(model_type)
    if model_type == "t5gemma":
        for part in (config.encoder, config.decoder):
            part.attn_logit_softcapping = None
    return tiny_model(config)


def saved_once(model: PreTrainedModel, directory: Path) -> State:
    """Its state after saving, which writes into its config."""
    model.save_pretrained(directory)
    return State.of(model, tokens(LENGTH))


@torch.no_grad()
def logits(model: Any, ids: Tensor, written: Tensor, **arguments: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, decoder_input_ids=written, use_cache=False, **arguments).logits
    return found


@pytest.mark.slow
@every_type
def test_one_method_extends_both_sides_and_stock_code_loads_it(model_type: str, tmp_path: Path) -> None:
    model, inputs = model_of(model_type), tokens(LENGTH)
    before = saved_once(model, tmp_path / "plain")
    ctxext.patch(model, "yarn", factor=4.0)
    description = ctxext.describe(model)
    assert [name for name, _ in description.sides] == ["encoder", "decoder"]
    assert all(side.target_length == 4 * TRAINED_LENGTH for _, side in description.sides)
    assert description.stock
    extended = logits(model, inputs, inputs)
    assert not torch.equal(extended, before.logits)
    model.save_pretrained(tmp_path / "extended")
    save_file({"input_ids": inputs}, tmp_path / "inputs.safetensors")
    with Stock() as stock:
        found = stock.logits(tmp_path / "extended", tmp_path / "inputs.safetensors")
    assert isinstance(found, Tensor), found
    assert torch.equal(found, extended)
    loaded = ctxext.load(tmp_path / "extended")
    assert torch.equal(logits(loaded, inputs, inputs), extended)
    assert str(ctxext.describe(loaded)).partition("edited")[0] == str(description).partition("edited")[0]
    for one in (model, loaded):
        ctxext.unpatch(one)
        assert torch.equal(logits(one, inputs, inputs), before.logits)
    assert before.difference(model) is None


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@every_type
def test_a_side_that_is_given_no_method_stays_as_it_is(model_type: str, side: str) -> None:
    model = model_of(model_type)
    plain = copy.deepcopy(model.config.to_dict())
    ctxext.patch(model, **{side: "yarn"}, factor=4.0)
    other = {"encoder": "decoder", "decoder": "encoder"}[side]
    now = model.config.to_dict()
    assert now[other] == plain[other]
    assert now[side] != plain[side]
    assert [name for name, _ in ctxext.describe(model).sides] == [side]


def by_hand(kept: Tensor, read: Tensor) -> Any:
    """The decoder's attention, a query and a head at a time: ALiBi on what it wrote, none on what the encoder read."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        crosses, out = "Cross" in type(module).__name__, torch.zeros_like(q)
        rows, heads = q.shape[:2]
        for row in range(rows):
            for head in range(heads):
                keys, values = (part[row, head * k.shape[1] // heads] for part in (k, v))
                for i in torch.nonzero(kept[row]).flatten().tolist():
                    js = torch.nonzero(read[row] if crosses else kept[row] & (torch.arange(len(kept[row])) <= i))
                    scores = scaling * (keys[js[:, 0]] @ q[row, head, i])
                    if not crosses:
                        scores = scores - 2.0 ** (-8 * (head + 1) / heads) * (i - js[:, 0])
                    out[row, head, i] = torch.softmax(scores, 0) @ values[js[:, 0]]
        return out.transpose(1, 2), None

    return attention


@pytest.mark.slow
def test_a_decoder_with_alibi_equals_what_is_written_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on either side of either text; the rotary encoder is YaRN's, and cross-attention has no distance."""
    ids, written = tokens(LENGTH, rows=3), tokens(40, rows=3)
    at, to = torch.arange(LENGTH), torch.arange(40)
    read = torch.stack([at >= 0, at >= 10, at < LENGTH - 12])  # less than a window: torch's float64 gives NaN there
    kept = torch.stack([to >= 0, to >= 5, to < 30])
    masks = {"attention_mask": read.long(), "decoder_attention_mask": kept.long()}
    oracle = ctxext.patch(model_of().double(), encoder=YaRN(factor=4.0))
    oracle.model.decoder.rotary_emb.inv_freq.zero_()
    oracle.model.decoder.config.layer_types = ["full_attention"] * 2
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "by_hand", by_hand(kept, read))
    oracle.model.decoder.config._attn_implementation_internal = "by_hand"
    for attention in ("sdpa", "reference"):
        model = model_of().double()
        model.config.decoder.layer_types = ["full_attention"] * 2
        for layer in (*model.model.decoder.layers, *oracle.model.decoder.layers):
            layer.attention_type, layer.self_attn.sliding_window = "full_attention", None
        ctxext.patch(model, encoder="yarn", decoder="alibi", factor=4.0, attention=attention)
        found, expected = logits(model, ids, written, **masks), logits(oracle, ids, written, **masks)
        torch.testing.assert_close(found[kept], expected[kept], rtol=1e-8, atol=1e-8)


def mixed(model_type: str = "t5gemma") -> PreTrainedModel:
    return ctxext.patch(model_of(model_type), encoder="yarn", decoder="alibi", factor=4.0)


@pytest.mark.slow
def test_encoder_and_decoder_by_two_methods_saved_and_reloaded(tmp_path: Path) -> None:
    model, inputs = model_of(), tokens(LENGTH)
    before = saved_once(model, tmp_path / "plain")
    ctxext.patch(model, encoder=YaRN(factor=8.0, beta_fast=16.0), decoder=ALiBi(factor=2.0))
    said = {name: (side.method, side.target_length) for name, side in ctxext.describe(model).sides}
    assert said["encoder"] == (YaRN(factor=8.0, beta_fast=16.0).to_dict(), 512)
    assert said["decoder"] == (ALiBi(factor=2.0).to_dict(), 128)
    extended = logits(model, inputs, inputs)
    model.save_pretrained(tmp_path / "extended")
    loaded = ctxext.load(tmp_path / "extended")
    assert torch.equal(logits(loaded, inputs, inputs), extended)
    assert identity(loaded.config.ctxext) == identity(model.config.ctxext)
    with pytest.raises(CheckpointError, match=r"ctxext\.load"):
        type(model).from_pretrained(tmp_path / "extended")
    ctxext.unpatch(model)
    assert before.difference(model) is None
    assert torch.equal(logits(ctxext.unpatch(loaded), inputs, inputs), before.logits)


@pytest.mark.slow
def test_stock_code_refuses_what_it_cannot_express(tmp_path: Path) -> None:
    mixed().save_pretrained(tmp_path)
    save_file({"input_ids": tokens(20)}, tmp_path / "inputs.safetensors")
    with Stock() as stock:
        assert "ctxext_unrotated" in str(stock.logits(tmp_path, tmp_path / "inputs.safetensors"))


@pytest.mark.slow
def test_the_decoder_stays_causal_and_the_encoder_sees_both_ways() -> None:
    model, inputs = mixed(), tokens(LENGTH)
    written = tokens(40)
    assert not torch.equal(logits(model, inputs, written)[:, :20], logits(model, inputs.flip(1), written)[:, :20])
    other = written.clone()
    other[0, 30] = 40 + (int(other[0, 30]) - 39) % 88
    found = logits(model, inputs, other) - logits(model, inputs, written)
    assert found[:, :30].abs().max() == 0
    assert found[:, 30:].abs().max() > 0


@pytest.mark.slow
def test_generation_with_a_cache_equals_decoding_without_one() -> None:
    for model in (mixed(), ctxext.patch(model_of("t5gemma2"), "yarn", factor=4.0)):
        ids = tokens(LENGTH, rows=2)
        mask = torch.ones_like(ids)
        mask[1, :30] = 0
        how = {"max_new_tokens": 2 * TRAINED_LENGTH - 60, "min_new_tokens": 2 * TRAINED_LENGTH - 60, "do_sample": False}
        written = model.generate(ids, attention_mask=mask, **how)
        scores = logits(model, ids, written[:, :-1], attention_mask=mask)
        suppressed = scores.clone()
        suppressed[:, :, model.generation_config.eos_token_id or 1] = -torch.inf
        assert torch.equal(suppressed.argmax(-1), written[:, 1:])


@pytest.mark.slow
def test_a_row_alone_is_the_row_in_a_batch() -> None:
    model = mixed().double()
    ids, written = tokens(LENGTH, rows=2), tokens(50, rows=2)
    mask, kept = torch.ones_like(ids), torch.ones_like(written)
    mask[1, :10], kept[1, 30:] = 0, 0
    together = logits(model, ids, written, attention_mask=mask, decoder_attention_mask=kept)
    alone = logits(model, ids[1:, 10:], written[1:, :30])
    torch.testing.assert_close(together[1:, :30], alone, rtol=1e-4, atol=1e-4)  # its rotary encoder counts slots


@pytest.mark.parametrize(("model_type", "rotates"), [("t5gemma", False), ("t5gemma2", True)])
def test_whether_what_is_read_of_the_encoder_is_rotated(model_type: str, rotates: bool) -> None:
    """T5Gemma rotates nothing there. T5Gemma 2, whose attention is merged, rotates the query and not the key."""
    model, seen = model_of(model_type).double(), []

    def note(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *_: Any, **__: Any) -> Any:
        if "Merged" in type(module).__name__ or "Cross" in type(module).__name__:
            seen.append((q, k))
        return torch.zeros_like(q).transpose(1, 2), None

    ids, written = tokens(30), tokens(20)
    for turn in (1.0, 0.5):
        rotary = model.model.decoder.rotary_emb
        for name, buffer in rotary.named_buffers():
            if name.endswith("inv_freq"):
                buffer.mul_(turn)
        with pytest.MonkeyPatch.context() as patching:
            patching.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", note)
            model.model.decoder.config._attn_implementation_internal = "sdpa"
            logits(model, ids, written)
    (q, k), (turned_q, turned_k) = seen[0], seen[len(seen) // 2]
    encoder_keys = slice(-30, None)
    assert torch.equal(k[:, :, encoder_keys], turned_k[:, :, encoder_keys])
    assert torch.equal(q, turned_q) is not rotates


@pytest.mark.slow
def test_numbers_for_each_side() -> None:
    model = ctxext.patch(model_of(), encoder="yarn", decoder="pi", factor={"encoder": 8.0, "decoder": 2.0})
    assert {name: side.target_length for name, side in ctxext.describe(model).sides} == {"encoder": 512, "decoder": 128}
    model = ctxext.patch(model_of(), "yarn", target_length={"encoder": 256, "decoder": 128})
    assert {name: side.target_length for name, side in ctxext.describe(model).sides} == {"encoder": 256, "decoder": 128}
    model = ctxext.patch(model_of(), "yarn", factor=2.0, trained_length={"encoder": 32, "decoder": 64})
    assert {name: side.target_length for name, side in ctxext.describe(model).sides} == {"encoder": 64, "decoder": 128}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, InvalidParameterError, r"found None.*encoder=.*decoder="),
        ({"method": "yarn", "encoder": "pi"}, InvalidParameterError, "method='yarn' is for both sides"),
        ({"encoder": "yarn", "factor": {"decoder": 2.0}}, InvalidParameterError, "speaks of 'decoder'"),
        ({"encoder": "yarn"}, InvalidParameterError, "needs to know how far to reach"),
        ({"decoder": "dynamic_ntk", "factor": 2.0}, IncompatibleError, "decoder a method of fixed positions"),
        ({"encoder": "alibi", "factor": 2.0}, IncompatibleError, "a window to both sides"),
        ({"decoder": "rerope", "factor": 2.0}, IncompatibleError, "attend to an encoder's text|sliding window"),
    ],
)
def test_bad_calls_are_refused_and_leave_no_trace(arguments: dict[str, Any], error: type, match: str) -> None:
    model = model_of()
    before = State.of(model, tokens(LENGTH))
    with pytest.raises(error, match=match):
        ctxext.patch(model, **arguments)
    assert before.difference(model) is None


@pytest.mark.parametrize("arguments", [{"encoder": "yarn"}, {"method": "yarn", "trained_length": {"encoder": 2}}])
def test_sides_of_a_model_that_has_none_are_refused(arguments: dict[str, Any]) -> None:
    model = tiny_model(tiny_config("llama"))
    with pytest.raises(InvalidParameterError, match="encoder-decoder"):
        ctxext.patch(model, factor=2.0, **arguments)


@pytest.mark.slow
def test_a_second_side_cannot_be_added_and_an_extension_can_be_replaced(tmp_path: Path) -> None:
    model, inputs = model_of(), tokens(LENGTH)
    ctxext.patch(model, encoder="yarn", factor=4.0)
    with pytest.raises(PatchStateError, match="already extended"):
        ctxext.patch(model, decoder="yarn", factor=4.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(PatchStateError, match="trained_length=64"):
        ctxext.load(tmp_path, "pi", factor=2.0)
    replaced = ctxext.load(tmp_path, "pi", factor=2.0, trained_length=TRAINED_LENGTH)
    expected = ctxext.patch(model_of(), "pi", factor=2.0)
    assert torch.equal(logits(replaced, inputs, inputs), logits(expected, inputs, inputs))
    stock = type(model).from_pretrained(tmp_path).eval()
    ctxext.patch(stock, "pi", factor=2.0, trained_length=TRAINED_LENGTH)
    assert torch.equal(logits(stock, inputs, inputs), logits(expected, inputs, inputs))


@pytest.mark.slow
def test_loaded_with_a_method_for_each_side(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path, encoder="yarn", decoder="alibi", factor=4.0, attention="sdpa")
    inputs = tokens(LENGTH)
    assert torch.equal(logits(loaded, inputs, inputs), logits(mixed(), inputs, inputs))


@pytest.mark.slow
def test_a_checkpoint_on_disk(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "plain")
    written = patch_checkpoint(tmp_path / "plain", tmp_path / "extended", encoder="yarn", decoder="alibi", factor=4.0)
    assert [name for name, _ in written.description.sides] == ["encoder", "decoder"]
    inputs = tokens(LENGTH)
    loaded = ctxext.load(tmp_path / "extended")
    assert torch.equal(logits(loaded, inputs, inputs), logits(mixed(), inputs, inputs))


@pytest.mark.slow
def test_inspected(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "plain")
    found = inspect_checkpoint(tmp_path / "plain")
    assert [place.side for place in found.positions] == ["encoder", "decoder"]
    assert found.no_positions is None
    assert {check.method for check in found.verdicts if check.refused is None} >= {"yarn", "pi", "ntk"}
    mixed().save_pretrained(tmp_path / "extended")
    again = inspect_checkpoint(tmp_path / "extended")
    assert again.description is not None
    assert again.extended == "encoder: ctxext yarn, trained_length=64; decoder: ctxext alibi, trained_length=64"


@pytest.mark.slow
def test_adapters_carry_both_sides(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model_of().save_pretrained(tmp_path / "base")
    base = ctxext.load(tmp_path / "base", encoder="yarn", decoder="alibi", factor=4.0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    inputs = tokens(LENGTH)
    expected = logits(adapted.eval(), inputs, inputs)
    ctxext.save(adapted, tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter").eval(), inputs, inputs), expected)
    other = ctxext.load(tmp_path / "base", "yarn", factor=4.0)
    with pytest.raises(CheckpointError, match=r"decoder: .*alibi"):
        ctxext.load(tmp_path / "adapter", base=other)


@pytest.mark.slow
def test_copied_and_undone() -> None:
    model, inputs = model_of(), tokens(LENGTH)
    plain = logits(model, inputs, inputs)
    ctxext.patch(model, encoder="yarn", decoder="alibi", factor=4.0)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, inputs, inputs), logits(model, inputs, inputs))
    ctxext.unpatch(model)
    assert not torch.equal(logits(copied, inputs, inputs), plain)
    assert torch.equal(logits(ctxext.unpatch(copied), inputs, inputs), plain)


def test_one_config_for_both_sides_is_refused_by_name() -> None:
    model = tiny_model(tiny_config("moonshine"))
    with pytest.raises(IncompatibleError, match="one and the same config"):
        ctxext.patch(model, "yarn", factor=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("methods", [{"encoder": "yarn", "decoder": "alibi"}, {"encoder": "alibi", "decoder": "yarn"}])
def test_dia_which_writes_several_tokens_at_each_place(methods: dict[str, str], tmp_path: Path) -> None:
    """Its decoder's config calls itself an encoder-decoder's, and its encoder counts positions by itself."""
    crossing = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    config = tiny_config("dia", decoder_config={f"cross_{name}": value for name, value in crossing.items()})
    model = tiny_model(config)
    channels, ids = config.decoder_config.num_channels, tokens(90, rows=2)
    written = torch.randint(5, 100, (2, 80, channels), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    plain = logits(model, ids, written, attention_mask=mask)
    ctxext.patch(model, **methods, factor=4.0)
    extended = logits(model, ids, written, attention_mask=mask)
    assert not torch.equal(extended, plain)
    alone = logits(model, ids[1:, :60], written[1:])
    torch.testing.assert_close(extended[channels:], alone, rtol=1e-3, atol=2e-3 * float(extended.abs().max()))
    other = written.clone()
    other[:, 60] = (other[:, 60] + 1) % 100
    later = logits(model, ids, other, attention_mask=mask)
    assert torch.equal(later[:, :60], extended[:, :60])
    model.save_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path)
    assert torch.equal(logits(loaded, ids, written, attention_mask=mask), extended)
    assert torch.equal(logits(ctxext.unpatch(model), ids, written, attention_mask=mask), plain)
