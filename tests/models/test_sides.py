"""Encoder-decoders: one method for both sides, and what earlier versions saved with a method for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.core.saved import identity
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError, UnknownNameError
from ctxext.planning.plan import plan_serving
from scripts.make_saved import values
from tests._checkpoints import try_only
from tests._models import RECENT, tokens
from tests.walk.check import State, Stock
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not RECENT, reason="built for the newest transformers")]

LENGTH = 2 * TRAINED_LENGTH + 10
SAVED = json.loads(Path(__file__).with_name("saved_sides.json").read_text())["models"]


def model_of(model_type: str = "t5gemma") -> PreTrainedModel:
    """A tiny encoder-decoder; t5gemma without the caps on its scores, which ALiBi's attention has not."""
    config = tiny_config(model_type)
    if model_type == "t5gemma":
        for part in (config.encoder, config.decoder):
            part.attn_logit_softcapping = None
    return tiny_model(config)


@torch.no_grad()
def logits(model: Any, ids: Tensor, written: Tensor, **arguments: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, decoder_input_ids=written, use_cache=False, **arguments).logits
    return found


def plain() -> PreTrainedModel:
    """The model that the golden file is of, whose weights follow from their names."""
    model = model_of().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.ones_like(weight) if "norm" in name else values(name, weight.shape))
    return model


def checkpoint(directory: Path, name: str = "two methods") -> Path:
    """A checkpoint that was saved when ``patch`` took a method for each side."""
    plain().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(SAVED[name]["config"]))
    return directory


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.nightly
def test_a_checkpoint_of_before_computes_what_it_computed(name: str, tmp_path: Path) -> None:
    stored, ids = SAVED[name], tokens(LENGTH)
    loaded = ctxext.load(checkpoint(tmp_path / "saved", name))
    expected = torch.tensor(stored["logits"])
    found, unextended = logits(loaded, ids, ids), logits(plain(), ids, ids)
    torch.testing.assert_close(found[0, 15::16, ::16], expected, atol=1e-4, rtol=0)
    assert (unextended[0, 15::16, ::16] - expected).abs().max() > 1, "this case could not tell it from a plain one"
    assert {side for side, _ in ctxext.describe(loaded).sides} == stored["config"]["ctxext"]["sides"].keys()
    loaded.save_pretrained(tmp_path / "again")
    again = ctxext.load(tmp_path / "again")
    assert torch.equal(logits(again, ids, ids), found)
    assert identity(again.config.ctxext) == identity(stored["config"]["ctxext"])
    assert torch.equal(logits(ctxext.unpatch(loaded), ids, ids), unextended)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """An encoder extended by YaRN with a decoder by ALiBi."""
    return ctxext.load(checkpoint(tmp_path_factory.mktemp("mixed")))


def test_stock_code_refuses_what_it_cannot_express(mixed: PreTrainedModel, stock: Stock, tmp_path: Path) -> None:
    mixed.save_pretrained(tmp_path)
    save_file({"input_ids": tokens(20)}, tmp_path / "inputs.safetensors")
    assert "ctxext_unrotated" in str(stock.logits(tmp_path, tmp_path / "inputs.safetensors"))


def test_the_decoder_stays_causal_and_the_encoder_sees_both_ways(mixed: PreTrainedModel) -> None:
    model, inputs = mixed, tokens(LENGTH)
    written = tokens(40)
    assert not torch.equal(logits(model, inputs, written)[:, :20], logits(model, inputs.flip(1), written)[:, :20])
    other = written.clone()
    other[0, 30] = 40 + (int(other[0, 30]) - 39) % 88
    found = logits(model, inputs, other) - logits(model, inputs, written)
    assert found[:, :30].abs().max() == 0
    assert found[:, 30:].abs().max() > 0


def test_generation_with_a_cache_equals_decoding_without_one(mixed: PreTrainedModel) -> None:
    ids = tokens(LENGTH, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    how = {"max_new_tokens": TRAINED_LENGTH + 16, "min_new_tokens": TRAINED_LENGTH + 16, "do_sample": False}
    written = mixed.generate(ids, attention_mask=mask, **how)
    scores = logits(mixed, ids, written[:, :-1], attention_mask=mask)
    scores[:, :, mixed.generation_config.eos_token_id or 1] = -torch.inf
    assert torch.equal(scores.argmax(-1), written[:, 1:])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, InvalidParameterError, "found None"),
        ({"method": "yarn", "decoder": "pi"}, UnknownNameError, "decoder"),
        ({"method": "yarn"}, InvalidParameterError, "needs to know how far to reach"),
        ({"method": "dynamic_ntk", "factor": 2.0}, IncompatibleError, "Give a method of fixed positions"),
        ({"method": "alibi", "factor": 2.0}, IncompatibleError, "a window to both sides"),
    ],
)
def test_bad_calls_are_refused_and_leave_no_trace(arguments: dict[str, Any], error: type, match: str) -> None:
    model = model_of()
    before = State.of(model, tokens(LENGTH))
    with pytest.raises(error, match=match):
        ctxext.patch(model, **arguments)
    assert before.difference(model) is None


@pytest.mark.parametrize("name", SAVED)
def test_an_extension_of_before_is_replaced_by_one_for_both_sides(name: str, tmp_path: Path) -> None:
    inputs, place = tokens(LENGTH), checkpoint(tmp_path, name)
    sides = SAVED[name]["config"]["ctxext"]["sides"]
    first = sides["encoder"]["trained_length"]
    with pytest.raises(PatchStateError, match=f"before that extension, trained_length={first}"):
        ctxext.load(place, "pi", factor=2.0)
    with pytest.raises(PatchStateError, match="trained_length=2 contradicts that"):
        ctxext.load(place, "pi", factor=2.0, trained_length=2)
    replaced = ctxext.load(place, "pi", factor=2.0, trained_length=first)
    lengths = {name: side.trained_length for name, side in ctxext.describe(replaced).sides}
    assert lengths == {"encoder": first, "decoder": TRAINED_LENGTH}
    expected = logits(ctxext.patch(plain(), "pi", factor=2.0), inputs, inputs)  # whose frequencies know no length
    assert torch.equal(logits(replaced, inputs, inputs), expected)
    if all(side["stock"] for side in sides.values()):
        live = type(replaced).from_pretrained(place).eval()
        ctxext.patch(live, "pi", factor=2.0, trained_length=first)
        assert torch.equal(logits(live, inputs, inputs), expected)


def test_a_checkpoint_on_disk(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "plain")
    written = patch_checkpoint(tmp_path / "plain", tmp_path / "extended", "yarn", factor=4.0)
    assert [name for name, _ in written.description.sides] == ["encoder", "decoder"]
    inputs, expected = tokens(LENGTH), ctxext.patch(model_of(), "yarn", factor=4.0)
    loaded = ctxext.load(tmp_path / "extended")
    assert torch.equal(logits(loaded, inputs, inputs), logits(expected, inputs, inputs))


def test_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_only(monkeypatch, "yarn", "pi", "ntk")
    model_of().save_pretrained(tmp_path / "plain")
    found = inspect_checkpoint(tmp_path / "plain")
    assert [place.side for place in found.positions] == ["encoder", "decoder"]
    assert found.no_positions is None
    assert {check.method for check in found.verdicts if check.refused is None} >= {"yarn", "pi", "ntk"}
    again = inspect_checkpoint(checkpoint(tmp_path / "extended"))
    assert again.description is not None
    assert again.extended == "encoder: ctxext yarn, trained_length=64; decoder: ctxext alibi, trained_length=64"


@pytest.mark.nightly
def test_adapters_carry_both_sides(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = ctxext.load(checkpoint(tmp_path / "saved"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    inputs = tokens(LENGTH)
    expected = logits(adapted.eval(), inputs, inputs)
    ctxext.save(adapted, tmp_path / "adapter")
    plain().save_pretrained(tmp_path / "base")
    for place in ("saved", "base"):
        loaded = ctxext.load(tmp_path / "adapter", base=tmp_path / place).eval()
        assert torch.equal(logits(loaded, inputs, inputs), expected)
    other = ctxext.load(tmp_path / "base", "yarn", factor=4.0)
    with pytest.raises(CheckpointError, match=r"decoder: .*alibi"):
        ctxext.load(tmp_path / "adapter", base=other)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["yarn", "alibi"])
def test_dia_which_writes_several_tokens_at_each_place(method: str, tmp_path: Path) -> None:
    """Its decoder's config calls itself an encoder-decoder's, and its encoder counts positions by itself."""
    crossing = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    config = tiny_config("dia", decoder_config={f"cross_{name}": value for name, value in crossing.items()})
    model = tiny_model(config)
    channels, ids = config.decoder_config.num_channels, tokens(90, rows=2)
    written = torch.randint(5, 100, (2, 80, channels), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    plain = logits(model, ids, written, attention_mask=mask)
    ctxext.patch(model, method, factor=4.0)
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


@pytest.mark.slow
def test_what_is_for_one_text_is_refused_by_name(tmp_path: Path) -> None:
    model = ctxext.patch(tiny_model(tiny_config("t5gemma")), "yarn", factor=2)
    with pytest.raises(IncompatibleError, match="does not support encoder-decoders"):
        plan_serving(model.config, trust_remote_code=True)
    said = r"sides have an extension each; no runtime .* Run it with transformers, by ctxext\.load\."
    with pytest.raises(IncompatibleError, match=said):
        ctxext.export(model, to="vllm")
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidParameterError, match="attention='flash': method 'yarn' leaves attention to the model"):
        ctxext.load(tmp_path, attention="flash")
