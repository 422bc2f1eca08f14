"""Models with buckets of relative distances: T5 and its kin, stretched in stock form, and read at a temperature.

The temperature is in the weights, so that stock code has it too.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, T5Config, T5EncoderModel

import ctxext
from ctxext.checkpoints.carried import differences
from ctxext.checkpoints.export import export
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from tests._famous import FAMOUS
from tests._models import both_sides, on_recent, tiny, tokens
from tests._products import crossed
from tests.walk.check import Stock
from tests.walk.stock import logits_of
from tests.walk.tiny import TRAINED_LENGTH


@pytest.mark.slow
def test_a_short_text_is_read_as_before_and_a_long_one_otherwise() -> None:
    plain, long = tiny("t5"), extend(tiny("t5"), temperature=1.0)
    assert torch.equal(both_sides(long, 8), both_sides(plain, 8)), "8 tokens know 7 tokens of distance each way"
    assert torch.equal(both_sides(long, 9), both_sides(plain, 9)), "and the first wide bucket begins where it did"
    assert (both_sides(long) - both_sides(plain)).abs().max() > 1e-3


@pytest.mark.slow
def test_every_part_says_the_same_and_unpatching_brings_all_back(tmp_path: Path) -> None:
    model = tiny("t5")
    before, said = both_sides(model), copy.deepcopy(model.config.to_dict())
    parts = [module for module in model.modules() if hasattr(module, "relative_attention_max_distance")]
    assert len(parts) == 6
    ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    assert {part.relative_attention_max_distance for part in parts} == {512}
    assert {one.config.relative_attention_max_distance for one in (model, model.encoder, model.decoder)} == {512}
    model.encoder.save_pretrained(tmp_path)
    alone = T5EncoderModel.from_pretrained(tmp_path)
    assert alone.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance == 512
    with pytest.raises(PatchStateError, match="already extended by 'stretch_buckets'"):
        ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    ctxext.unpatch(model)
    assert torch.equal(both_sides(model), before)
    assert model.config.to_dict() == said
    assert {part.relative_attention_max_distance for part in parts} == {128}
    assert {one.config.relative_attention_max_distance for one in (model.encoder, model.decoder)} == {128}


@pytest.mark.nightly
def test_the_published_config_says_its_length(tmp_path: Path) -> None:
    """t5-small's config.json has n_positions, which no code reads; other T5 are told trained_length."""
    config = T5Config.from_dict(FAMOUS["google-t5/t5-small"])
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    ctxext.patch(model, "stretch_buckets", factor=4)
    assert (model.config.n_positions, model.config.relative_attention_max_distance) == (2048, 512)
    assert "512 -> 2048 tokens" in str(ctxext.describe(model))
    assert "from 128 to 512 tokens, which shared one bucket, are distinguished" in str(ctxext.describe(model))
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["relative_attention_max_distance"] == 512
    found = inspect_checkpoint(tmp_path)
    assert found.no_positions == "none: this t5 has buckets of relative distances"
    assert {one.method for one in found.verdicts if one.refused is None} <= {"stretch_buckets"}
    said = r"not one of rotary positions; .* Run it with transformers, by ctxext\.load\."
    with pytest.raises(IncompatibleError, match=said):
        export(tmp_path, to="llama.cpp")


SIZES = {"d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (transformers.LongT5ForConditionalGeneration, "sees only the tokens around each token"),
        (transformers.UdopForConditionalGeneration, "whose largest distance is in its code and not in its config"),
    ],
)
def test_buckets_that_cannot_be_stretched_rightly_are_refused(kind: Any, said: str) -> None:
    with torch.device("meta"):
        model = kind(kind.config_class(d_model=16, **SIZES))
    before = model.config.to_dict()
    with pytest.raises(IncompatibleError, match=said):
        ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    assert model.config.to_dict() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Pop2PianoForConditionalGeneration", "Pix2StructTextModel", "T5EncoderModel"])
def test_kin_that_reads_or_writes_something_else(kind: str) -> None:
    """Music and pictures beside text, an encoder alone: what each class calls itself does not matter."""
    cls = getattr(transformers, kind)
    width = {"hidden_size": 16} if kind.startswith("Pix") else {"d_model": 16}
    with torch.device("meta"):
        model = cls(cls.config_class(**SIZES, **width))
    before = model.config.to_dict()
    ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)
    assert model.config.relative_attention_max_distance == 512
    ctxext.unpatch(model)
    assert model.config.to_dict() == before


def test_code_that_buckets_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof fails where the model's code does not do what the paper says."""
    model = tiny("t5")
    attention = type(model.encoder.block[0].layer[0].SelfAttention)
    original = attention._relative_position_bucket

    def otherwise(relative_position: Tensor, **given: Any) -> Tensor:
        return original(relative_position // 2, **given)

    monkeypatch.setattr(attention, "_relative_position_bucket", staticmethod(otherwise))
    with pytest.raises(IncompatibleError, match=r"does not bucket a distance of -?\d+ tokens as T5 does"):
        ctxext.patch(model, "stretch_buckets", factor=4, trained_length=TRAINED_LENGTH)


# --- at a temperature -----------------------------------------------------------------------------------------------

LONG = 6 * TRAINED_LENGTH  # more than the last bucket of a stretched T5 begins at
UMT5 = on_recent("umt5", reason="UMT5 reads its cache wrongly, extended or not")


def extend(model: Any, **given: Any) -> Any:
    arguments = {"factor": 4.0, "temperature": 0.8, "trained_length": TRAINED_LENGTH} | given
    return ctxext.patch(model, "stretch_buckets", **arguments)


def attentions(model: nn.Module) -> dict[str, Any]:
    """The self-attention of each layer and, under other names, the attention to the encoder's text."""
    return {name: module for name, module in model.named_modules() if name.endswith("Attention")}


def bucket(distance: int, *, both_ways: bool, reach: int, buckets: int = 32) -> int:
    """The bucket of a key ``distance`` tokens after its query, from the words of T5's paper."""
    half = buckets // 2 if both_ways else buckets
    start = half if both_ways and distance > 0 else 0
    back = abs(distance) if both_ways else max(0, -distance)
    if back < half // 2:
        return start + back
    wide = half // 2 * math.log(back / (half // 2)) / math.log(reach / (half // 2))
    return start + min(half - 1, half // 2 + math.floor(wide + 1e-9))


@torch.no_grad()
def by_the_paper(plain: Any, table: Tensor, hidden: Tensor, *, causal: bool, temperature: float) -> Tensor:
    """What one self-attention layer says with the weights that were learned, in float64 and word by word."""
    length, heads = hidden.shape[1], table.shape[1]
    q, k, v = (made(hidden)[0].view(length, heads, -1).transpose(0, 1) for made in (plain.q, plain.k, plain.v))
    rows = [[bucket(j - i, both_ways=not causal, reach=512) for j in range(length)] for i in range(length)]
    scores = (q @ k.transpose(1, 2) + table[torch.tensor(rows)].permute(2, 0, 1)) / temperature
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    mixed = torch.softmax(scores, dim=-1) @ v
    said: Tensor = plain.o(mixed.transpose(0, 1).reshape(1, length, -1))
    return said


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.8, 0.5])
@pytest.mark.parametrize("model_type", ["t5", "mt5", UMT5, "switch_transformers"])
def test_every_self_attention_is_the_papers_and_no_other_is_touched(model_type: str, temperature: float) -> None:
    plain = tiny(model_type, **({"num_decoder_layers": 2} if model_type != "switch_transformers" else {})).double()
    model = extend(copy.deepcopy(plain), temperature=temperature)
    heard: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Any:
        return lambda _, args, said: heard.__setitem__(name, (args[0], said[0]))

    hooks = [module.register_forward_hook(note(name)) for name, module in attentions(model).items()]
    both_sides(model, 200)
    for hook in hooks:
        hook.remove()
    before, tables = attentions(plain), {}
    for name, (hidden, said) in heard.items():
        side, learned = name.partition(".")[0], before[name]
        if name.endswith("EncDecAttention"):
            assert torch.equal(learned.q.weight, attentions(model)[name].q.weight)
            continue
        if learned.has_relative_attention_bias:
            tables[side] = learned.relative_attention_bias.weight.detach()
        exact = by_the_paper(learned, tables[side], hidden, causal=side == "decoder", temperature=temperature)
        # float32 decides which bucket a distance that begins one falls into, and nothing else
        torch.testing.assert_close(said, exact, rtol=1e-9, atol=1e-9)
        untouched = by_the_paper(learned, tables[side], hidden, causal=side == "decoder", temperature=1.0)
        assert (said - untouched).abs().max() > 1e-3
    assert len([name for name in heard if name.endswith("SelfAttention")]) >= 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "model_type"),
    crossed([torch.bfloat16, torch.float32, torch.float16], ["t5", "mt5", "umt5", "switch_transformers"]),
)
def test_stock_code_reads_it_bit_for_bit_and_unpatching_brings_the_very_weights_back(
    model_type: str, dtype: torch.dtype, stock: Stock, tmp_path: Path
) -> None:
    plain = tiny(model_type)
    plain.save_pretrained(tmp_path)
    model = type(plain).from_pretrained(tmp_path, dtype=dtype).eval()  # which keeps some of T5's weights in float32
    values = {name: value.clone() for name, value in model.state_dict().items()}
    objects, config = dict(model.named_parameters()), model.config.to_dict()
    extend(model)
    changed = [name for name, weight in model.named_parameters() if weight is not objects[name]]
    assert {name.split(".")[-2] for name in changed} == {"q", "relative_attention_bias"}
    assert not any("EncDec" in name for name in changed)
    for name in changed:
        divided = (objects[name].double() / 0.8).to(objects[name].dtype)
        assert torch.equal(model.get_parameter(name), divided), "rounded once"
    model.save_pretrained(tmp_path / "extended")
    save_file({"input_ids": tokens(LONG)}, tmp_path / "text.safetensors")
    expected = logits_of(model, tokens(LONG))
    found = stock.logits(tmp_path / "extended", tmp_path / "text.safetensors")
    assert isinstance(found, Tensor), found
    assert torch.equal(found, expected)
    again = ctxext.load(tmp_path / "extended").eval()
    assert torch.equal(logits_of(again, tokens(LONG)), expected), "and is not divided twice"
    ctxext.unpatch(model)
    assert all(weight is objects[name] for name, weight in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config


def test_without_one_the_weights_stay_where_they_are() -> None:
    model = tiny("t5")
    objects = dict(model.named_parameters())
    extend(model, temperature=1)
    assert all(weight is objects[name] for name, weight in model.named_parameters())
    notes = " ".join(ctxext.describe(model).notes)
    assert "are read as before" in notes
    assert "divided" not in notes
    assert "weights" not in ctxext.describe(model).stored_as


@pytest.mark.slow
def test_what_is_said_of_it() -> None:
    """A short text is not read as before, and the fingerprint tells it from one without."""
    plain, stretched, sharper = tiny("t5"), extend(tiny("t5"), temperature=1), extend(tiny("t5"))
    assert (both_sides(sharper, 8) - both_sides(plain, 8)).abs().max() > 1e-3
    said = ctxext.describe(sharper)
    assert said.method == {"method": "stretch_buckets", "factor": 4.0, "temperature": 0.8}
    assert said.stock
    assert said.stored_as == "stock relative_attention_max_distance 128 -> 512, and weights of self-attention"
    assert "divided by 0.8 in texts of every length" in " ".join(said.notes)
    assert "are read as before" not in " ".join(said.notes)
    assert said.fingerprint != ctxext.describe(stretched).fingerprint
    assert "temperature" in differences(sharper.config.ctxext, stretched.config.ctxext)


@pytest.mark.slow
def test_a_saved_one_is_complete_and_cannot_be_extended_anew(tmp_path: Path) -> None:
    model, saved = extend(tiny("t5")), tmp_path / "saved"
    model.save_pretrained(saved)
    again = ctxext.load(saved).eval()
    assert ctxext.describe(again).fingerprint == ctxext.describe(model).fingerprint
    with pytest.raises(PatchStateError, match="Load the original checkpoint"):
        ctxext.unpatch(again)
    anew = {"factor": 8.0, "trained_length": TRAINED_LENGTH}
    message = r"divided by a temperature of 0\.8 and rounded.*Load the original checkpoint"
    before = both_sides(again)
    verbs = (
        lambda **how: extend(again, **how),
        lambda **how: ctxext.load(saved, "stretch_buckets", **how),
        lambda **how: patch_checkpoint(saved, tmp_path / "new", "stretch_buckets", **how),
    )
    for verb, temperature in itertools.product(verbs, (0.8, 1.0)):
        with pytest.raises(IncompatibleError, match=message):
            verb(**anew, temperature=temperature)
    assert not (tmp_path / "new").exists()
    assert torch.equal(both_sides(again), before)


@pytest.mark.nightly
def test_load_extends_a_plain_checkpoint_or_one_whose_buckets_are_stretched(tmp_path: Path) -> None:
    tiny("t5").save_pretrained(tmp_path / "plain")
    extend(tiny("t5"), factor=2.0, temperature=1.0).save_pretrained(tmp_path / "stretched")
    expected = both_sides(extend(tiny("t5")))
    given = {"factor": 4.0, "temperature": 0.8, "trained_length": TRAINED_LENGTH}
    before = {"plain": tiny("t5"), "stretched": extend(tiny("t5"), factor=2.0, temperature=1.0)}
    for name, plain in before.items():
        model = ctxext.load(tmp_path / name, "stretch_buckets", **given).eval()
        assert torch.equal(both_sides(model), expected)
        assert torch.equal(both_sides(ctxext.unpatch(model)), both_sides(plain))


@pytest.mark.nightly
def test_a_checkpoint_on_the_disk_is_written_with_other_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    tiny("t5").save_pretrained(source)
    given = {"factor": 4.0, "trained_length": TRAINED_LENGTH}
    with pytest.raises(InvalidParameterError, match=r"link: .* changes some of its weights.*Leave link out"):
        patch_checkpoint(source, target, "stretch_buckets", link=True, temperature=0.8, **given)
    written = patch_checkpoint(source, target, "stretch_buckets", temperature=0.8, **given)
    assert written.rewritten
    stock = transformers.AutoModelForSeq2SeqLM.from_pretrained(target).eval()
    assert torch.equal(both_sides(stock), both_sides(extend(tiny("t5"))))
    linked = patch_checkpoint(source, tmp_path / "linked", "stretch_buckets", link=True, **given)
    assert linked.linked
    assert not linked.rewritten


def test_a_weight_that_layers_share_is_divided_once() -> None:
    model = tiny("t5")
    first, second = (model.encoder.block[at].layer[0].SelfAttention for at in (0, 1))
    second.q.weight = first.q.weight
    learned = first.q.weight.detach().clone()
    extend(model)
    assert first.q.weight is second.q.weight
    assert torch.equal(first.q.weight, (learned.double() / 0.8).float())
    ctxext.unpatch(model)
    assert first.q.weight is second.q.weight
    assert torch.equal(first.q.weight, learned)


def refused(model: Any, message: str, **given: Any) -> None:
    before, weights = model.config.to_dict(), {name: id(weight) for name, weight in model.named_parameters()}
    with pytest.raises((IncompatibleError, InvalidParameterError), match=message):
        extend(model, **given)
    assert model.config.to_dict() == before
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance == 128


@pytest.mark.slow
def test_weights_that_cannot_be_divided() -> None:
    model = tiny("t5")
    attention, cross = model.decoder.block[1].layer[0].SelfAttention, model.decoder.block[1].layer[1].EncDecAttention
    quantised, whole = copy.deepcopy(model), torch.zeros(attention.q.weight.shape, dtype=torch.int8)
    quantised.decoder.block[1].layer[0].SelfAttention.q.weight = nn.Parameter(whole, requires_grad=False)
    refused(quantised, r"decoder\.block\.1\..*q\.weight .* cannot be divided by a temperature: it is quantised")
    cross.q.weight = attention.q.weight
    refused(model, r"cannot be divided by a temperature: decoder\.block\.1\.layer\.1\..*q\.weight is the same weight")
    large = tiny("t5").half()
    with torch.no_grad():
        large.encoder.block[0].layer[0].SelfAttention.q.weight[0, 0] = 60000.0
    refused(large, r"too large for torch\.float16")


def test_training_reaches_the_weights_that_stand_there() -> None:
    model = extend(tiny("t5"))
    model(input_ids=tokens(16), decoder_input_ids=tokens(16)).logits.square().sum().backward()
    attention = model.encoder.block[0].layer[0].SelfAttention
    for weight in (attention.q.weight, attention.relative_attention_bias.weight):
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0
