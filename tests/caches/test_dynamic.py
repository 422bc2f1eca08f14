"""Methods that follow the length: what is said of them, what they cannot do, and images, which take few positions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.methods import Method
from tests._models import LONGROPE, logits, qwen2_vl, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

DYNAMIC = ["dynamic_ntk", "dynamic_pi", "dynamic_yarn"]
NOTE = f"Plain transformers loads it, but mixes positions: .* Beyond {TRAINED_LENGTH} tokens"


def notes(model: PreTrainedModel) -> str:
    return " ".join(ctxext.describe(model).notes)


def method_name(method: str | Method) -> str:
    return method if isinstance(method, str) else method.name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic_ntk", LONGROPE], ids=method_name)
def test_what_stock_code_makes_of_it_is_said_and_so(method: str | Method, tmp_path: Path) -> None:
    factor = 4.0 if isinstance(method, str) else None
    model = ctxext.patch(tiny(), method, factor=factor)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation).eval()
    long, short = tokens(), tokens(40)
    assert torch.equal(logits(stock, long), logits(model, long))
    padded = torch.cat([long, torch.cat([torch.zeros(1, 152, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(padded)
    mask[1, :152] = 0
    options: dict[str, Any] = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    ours, theirs = (logits(either, padded, **options)[1, 152:] for either in (model, stock))
    torch.testing.assert_close(ours, logits(model, short)[0], atol=3e-4, rtol=0)
    assert (theirs - ours).abs().max() > 0.1
    greedy = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "output_logits": True}
    greedy |= {"return_dict_in_generate": True}
    prompt = tokens(TRAINED_LENGTH - 2)
    ours, theirs = (either.generate(prompt, **greedy) for either in (model, stock))
    differ = (torch.stack(ours.logits) - torch.stack(theirs.logits)).abs().amax(dim=(1, 2)) > 0.1
    assert not differ[:3].any()
    assert differ[3:].any()
    restored = ctxext.load(tmp_path)
    for either in (model, restored):
        assert re.search(NOTE, notes(either))


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "dynamic_pi", "pi"])
def test_nothing_of_the_kind_is_said_elsewhere(method: str) -> None:
    assert "Plain transformers loads it" not in notes(ctxext.patch(tiny(), method, factor=4.0))


@pytest.mark.usefixtures("_for_compiling")
@pytest.mark.parametrize("growth", ["exact", "doubling"])
@pytest.mark.nightly
def test_one_graph_is_refused_in_a_sentence(growth: str) -> None:
    model = ctxext.patch(tiny(), "dynamic_ntk", factor=4.0, growth=growth)
    sentence = r"a dynamic method reads the length of each sequence.*Compile with fullgraph=False"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=sentence):
        torch.compile(model, backend="eager", fullgraph=True)(tokens(), use_cache=False, ctxext_length=400)
    with pytest.raises(IncompatibleError, match=sentence):
        torch.export.export(model, (tokens(),), {"use_cache": False}, strict=False)


def compiled_steps(model: PreTrainedModel) -> int:
    """How often generate(), with a cache that it may compile with, asks for a compiled forward pass."""
    asked: list[Any] = []

    def compiled_call(settings: Any) -> Any:
        asked.append(settings)
        return model.__call__

    model.get_compiled_call = compiled_call
    everywhere = CompileConfig(backend="eager")
    everywhere._compile_all_devices = True
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "compile_config": everywhere}
    model.generate(tokens(40), cache_implementation="static", **greedy)
    del model.get_compiled_call
    return len(asked)


@pytest.mark.parametrize(("model_type", "method"), [("llama", "dynamic_ntk"), ("bloom", "dynamic_pi")])
def test_a_trace_that_would_hold_one_length_is_refused(model_type: str, method: str) -> None:
    model = ctxext.patch(tiny(model_type), method, factor=4.0, trained_length=TRAINED_LENGTH)
    model.requires_grad_(requires_grad=False)
    with pytest.raises(IncompatibleError, match="a dynamic method reads the length"):
        torch.jit.trace(model, (tokens(),), check_trace=False, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method", "how", "compiles"),
    [
        ("llama", "dynamic_ntk", {}, False),
        ("llama", "dynamic_ntk", {"growth": "doubling"}, False),
        ("llama", "dynamic_ntk", {"growth": "request"}, True),
        ("bloom", "dynamic_pi", {"growth": "request"}, False),
        ("llama", "self_extend", {}, True),
    ],
)
def test_generate_compiles_by_itself_where_positions_stay(
    model_type: str, method: str, how: dict[str, Any], compiles: bool
) -> None:
    model = tiny(model_type)
    assert compiled_steps(model) > 0
    ctxext.patch(model, method, factor=4.0, trained_length=TRAINED_LENGTH, **how)
    assert (compiled_steps(model) > 0) == compiles
    ctxext.unpatch(model)
    assert compiled_steps(model) > 0
    ctxext.patch(model, "pi", factor=4.0, trained_length=TRAINED_LENGTH)
    assert compiled_steps(model) > 0


@pytest.mark.parametrize(("model_type", "method"), [("llama", "dynamic_ntk"), ("bloom", "dynamic_pi")])
@pytest.mark.parametrize("chosen", [None, False, True])
def test_what_generate_may_compile_is_saved_as_the_user_chose_it(
    model_type: str, method: str, chosen: bool | None, tmp_path: Path
) -> None:
    """Stock code, or ctxext with another method, may load what is saved and compile it."""
    model = tiny(model_type)
    model.generation_config.disable_compile = chosen
    saved = []
    for place in ("plain", "extended"):
        model.save_pretrained(tmp_path / place)
        saved.append((tmp_path / place / "generation_config.json").read_text(encoding="utf-8"))
        if place == "plain":
            ctxext.patch(model, method, factor=4.0, trained_length=TRAINED_LENGTH)
    assert saved[0] == saved[1]


IMAGE = torch.tensor([[7, *[5] * 16, 8]])  # 16 patches in 4 rows: they take 4 positions


def with_image(text: int) -> Tensor:
    return torch.cat([tokens(20), IMAGE, tokens(20 + text)[:, 20:]], dim=1)


def seen(ids: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    image, grid = torch.randn(64 * len(ids), 96, generator=generator), torch.tensor([[1, 8, 8]] * len(ids))
    return {"pixel_values": image, "image_grid_thw": grid, "mm_token_type_ids": (ids == 5).long()}


def fitted(last: int) -> PreTrainedModel:
    """PI by the last position."""
    model = qwen2_vl()
    return ctxext.patch(model, "pi", factor=last / TRAINED_LENGTH) if last > TRAINED_LENGTH else model


@pytest.mark.nightly
@pytest.mark.parametrize("text", [30, 45, 70])
def test_the_positions_of_an_image_count_and_not_its_tokens(text: int) -> None:
    """Of 38 + text tokens, the image's 16 take 4 positions, also in a request of 12 tokens more."""
    ids, last = with_image(text), 20 + 6 + text
    found = logits(ctxext.patch(qwen2_vl(), "dynamic_pi", factor=4.0), ids, **seen(ids))
    torch.testing.assert_close(found, logits(fitted(last), ids, **seen(ids)), atol=3e-4, rtol=0)
    assert last <= TRAINED_LENGTH or (found - logits(qwen2_vl(), ids, **seen(ids))).abs().max() > 0.1
    model = ctxext.patch(qwen2_vl(), "dynamic_pi", factor=4.0, growth="request")
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    written = [one.generate(ids, **seen(ids), **options) for one in (model, fitted(last + 12))]
    assert torch.equal(*written)


@pytest.mark.parametrize("growth", ["exact", "request"])
def test_rows_of_other_lengths_where_cos_keeps_its_planes(growth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the Qwen2-VL of transformers 5.16, whose attention chooses among the planes."""

    def rotate(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        return angles.cos(), angles.sin()

    model = ctxext.patch(qwen2_vl(), "dynamic_pi", factor=4.0, growth=growth)
    rotary = model.model.language_model.rotary_emb
    monkeypatch.setattr(type(rotary), "forward", rotate)
    short = torch.arange(40).expand(3, 1, 40)
    rows = torch.cat([2 * short, short], dim=1)
    documents = torch.cat([2 * short, short], dim=2)
    alone = [rotary(torch.zeros(1, 40, 1), one) for one in (2 * short, short)]
    for both, axis in ((rows, 1), (documents, 2)):
        found = rotary(torch.zeros(both.shape[1], both.shape[2], 1), both)
        for each, (long_one, short_one) in zip(found, zip(*alone, strict=True), strict=True):
            assert torch.equal(each, torch.cat([long_one, short_one], dim=axis))


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["exact", "doubling"])
@pytest.mark.parametrize("method", DYNAMIC)
def test_generating_from_an_image_equals_decoding_without_a_cache(method: str, growth: str) -> None:
    model = ctxext.patch(qwen2_vl(), method, factor=4.0, growth=growth)
    for text in (34, 45):  # across the window, and beyond it from the start
        ids = with_image(text)
        greedy = ids
        for _ in range(6):
            greedy = torch.cat([greedy, logits(model, greedy, **seen(greedy))[:, -1:].argmax(-1)], dim=1)
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        for way in ({}, {"cache_implementation": "static"}):
            assert torch.equal(model.generate(ids, **seen(ids), **options, **way), greedy), way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method"), [("llama", "dynamic_ntk"), ("llama", "dynamic_pi"), ("bloom", "dynamic_pi")]
)
def test_a_declared_length_meets_no_keys_of_another(model_type: str, method: str) -> None:
    """As a number too, which is one length for all rows."""
    model = ctxext.patch(tiny(model_type), method, factor=4.0, trained_length=TRAINED_LENGTH)
    cache = model(tokens(50), use_cache=True).past_key_values
    with pytest.raises(IncompatibleError, match="gives a sequence of 60 tokens other positions than its 50 cached"):
        model(tokens(10), past_key_values=cache, ctxext_length=200)
    cache = model(tokens(60)[:, :50], use_cache=True, ctxext_length=200).past_key_values
    steps = model(tokens(60)[:, 50:], past_key_values=cache, ctxext_length=200).logits
    whole = logits(model, tokens(60), ctxext_length=200)[:, 50:]
    torch.testing.assert_close(steps, whole, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", DYNAMIC)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted_where_attention_rotates_by_itself(side: str, method: str) -> None:
    model = ctxext.patch(tiny("moshi", sliding_window=300), method, factor=4.0, trained_length=TRAINED_LENGTH)
    real, text = slice(40, 90) if side == "left" else slice(0, 50), tokens(90)
    mask = torch.zeros(2, 90, dtype=torch.long)
    mask[0, real], mask[1] = 1, 1
    found = logits(model, text.expand(2, -1), attention_mask=mask)[0, real]
    torch.testing.assert_close(found, logits(model, text[:, real])[0], atol=5e-5, rtol=0)


@pytest.mark.parametrize("method", DYNAMIC)
def test_positions_that_begin_later_without_a_cache_are_named(method: str) -> None:
    """As PaliGemma's, which begin at 1, or a shard's."""
    model = ctxext.patch(tiny(), method, factor=4.0)
    with pytest.raises(IncompatibleError, match=r"positions here begin at 1 without a cache\. Give positions from 0"):
        model(tokens(80), position_ids=torch.arange(1, 81)[None])


@pytest.mark.parametrize("method", DYNAMIC)
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_padding_in_a_mask_of_pairs_is_not_counted(form: str, method: str) -> None:
    """With positions and without: a short row is the plain model's, whatever it is batched with."""
    model = ctxext.patch(tiny(), method, factor=4.0)
    ids, keep = tokens(90, rows=2), torch.arange(90)[None] >= torch.tensor([[40], [0]])
    mask = keep[:, None, None] & torch.ones(90, 90, dtype=torch.bool).tril()
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    counted = (keep.long().cumsum(1) - 1).clamp(min=0)
    for positions in ({}, {"position_ids": counted}):
        found = logits(model, ids, attention_mask=mask, **positions)
        torch.testing.assert_close(found[:1, 40:], logits(tiny(), ids[:1, 40:]), atol=5e-5, rtol=0)
        torch.testing.assert_close(found[1:], logits(model, ids[1:]), atol=5e-5, rtol=0)
