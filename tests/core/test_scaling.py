"""Checkpoints that are scaled already: extended from the frequencies that their weights know, or anew, never on top."""

from __future__ import annotations

import copy
import gc
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

import ctxext
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import PatchStateError
from tests._checkpoints import rewrite
from tests._formulas import spectrum
from tests._models import logits, tiny, tokens
from tests._products import crossed
from tests.walk.tiny import TRAINED_LENGTH

LENGTH = 512  # what the scaled checkpoints of these tests read
ORIGINAL = 64
PAIRS = 16  # of a tiny Llama: 32 dimensions a head
EIGHTFOLD = {"factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | EIGHTFOLD
YARN = {"rope_type": "yarn", "rope_theta": 1.5e5} | EIGHTFOLD
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4} | EIGHTFOLD
LONGROPE |= {"short_factor": [1.0 + 0.01 * i for i in range(PAIRS)], "long_factor": [1.0 + i for i in range(PAIRS)]}
SCALED = {"llama3": LLAMA3, "yarn": YARN, "linear": LINEAR, "longrope": LONGROPE}


def scaled(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny Llama whose config scales its positions, as published checkpoints do that were trained so."""
    return tiny(max_position_embeddings=LENGTH, rope_parameters=dict(SCALED[kind]), **changes)


def trained_by(kind: str) -> tuple[list[float], float]:
    """Return the frequencies and the scale that the weights of a scaled checkpoint know, by the published formula."""
    found = spectrum(SCALED[kind] | {"max_position_embeddings": LENGTH}, 2 * PAIRS, LENGTH)
    return found.inv_freq.tolist(), found.scale


def extended_by_yarn(trained: list[float]) -> list[float]:
    """YaRN by 2 on any falling frequencies: the ends of its ramp are where they turn 32 times and once."""

    def dimension(turns: float) -> float:
        wanted = math.log(turns * 2 * math.pi / LENGTH)
        logs = [math.log(frequency) for frequency in trained]
        for i in range(PAIRS - 1):
            if logs[i + 1] <= wanted <= logs[i]:
                return i + (logs[i] - wanted) / (logs[i] - logs[i + 1])
        end = 0 if wanted > logs[0] else PAIRS - 2
        return end + (logs[end] - wanted) / (logs[end] - logs[end + 1])

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), 2 * PAIRS - 1)
    kept = [1 - min(max((i - low) / (high - low), 0), 1) for i in range(PAIRS)]
    return [frequency * (share + (1 - share) / 2) for frequency, share in zip(trained, kept, strict=True)]


def rotation(model: PreTrainedModel) -> tuple[Tensor, float]:
    rotary = model.get_submodule("model.rotary_emb")
    return rotary.inv_freq.double(), float(rotary.attention_scaling)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALED)
def test_the_obvious_call_extends_the_frequencies_that_the_weights_know(kind: str, tmp_path: Path) -> None:
    """``patch("yarn", factor=2, trained_length=131072)`` on Llama 3.1, and its like."""
    model = scaled(kind)
    before = logits(model, tokens())
    ctxext.patch(model, "yarn", factor=2, trained_length=LENGTH)
    trained, scale = trained_by(kind)
    inv_freq, found = rotation(model)
    torch.testing.assert_close(inv_freq, torch.tensor(extended_by_yarn(trained)).double(), rtol=1e-6, atol=0)
    assert found == pytest.approx(scale * (0.1 * math.log(2) + 1), rel=1e-6)
    assert model.config.max_position_embeddings == 2 * LENGTH
    assert ctxext.describe(model).trained_length == LENGTH
    assert "Extends the frequencies that its scaling" in ctxext.describe(model).notes[0]
    model.save_pretrained(tmp_path)
    extended = logits(model, tokens())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), tokens()), extended)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), extended)
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens()), before)


def test_undone_before_its_first_long_text() -> None:
    """transformers keeps the set of longrope for long texts from the first config that meets such a text."""
    model, long = scaled("longrope"), tokens(ORIGINAL + 1)
    ctxext.unpatch(ctxext.patch(model, "yarn", factor=2, trained_length=LENGTH))
    assert torch.equal(logits(model, long), logits(scaled("longrope"), long))


@pytest.mark.parametrize(("kind", "method"), crossed(list(SCALED), ["dynamic_ntk", "ntk", "pi"]))
def test_every_method_starts_from_them(kind: str, method: str) -> None:
    model, slowest = scaled(kind), 1 / 3 if method == "dynamic_ntk" else 0.5
    trained, scale = trained_by(kind)
    within = logits(model, tokens(LENGTH))
    ctxext.patch(model, method, factor=2, trained_length=LENGTH)
    if method == "dynamic_ntk" and kind != "longrope":  # which has other frequencies for the texts of 64 tokens
        torch.testing.assert_close(logits(model, tokens(LENGTH)), within, rtol=0, atol=1e-5)
    cos, _ = model.get_submodule("model.rotary_emb")(torch.zeros(1), torch.arange(2 * LENGTH)[None])
    last = math.cos((2 * LENGTH - 1) * trained[-1] * slowest) * scale
    assert float(cos[0, -1, -1]) == pytest.approx(last, abs=2e-5)


def test_a_uniform_scaling_stays_linear() -> None:
    model = ctxext.patch(scaled("linear"), "pi", factor=2, trained_length=LENGTH)
    assert model.config.rope_parameters == {"rope_type": "linear", "rope_theta": 1e4, "factor": 16.0}


@pytest.mark.slow
def test_what_is_saved_only_for_ctxext_comes_back(tmp_path: Path) -> None:
    model = ctxext.patch(scaled("yarn"), "dynamic_yarn", factor=2, trained_length=LENGTH)
    long = tokens(LENGTH + 100)
    expected = logits(model, long)
    model.save_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path)
    assert torch.equal(logits(loaded, long), expected)
    assert ctxext.describe(loaded).fingerprint == ctxext.describe(model).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(("start", "scaling"), [(64, "extend"), (256, "replace")])
def test_what_only_the_first_file_leaves_open_is_settled(start: int, scaling: str, tmp_path: Path) -> None:
    """Without its original length, YaRN may start from either; the extended config states the one filled in."""
    tiny().save_pretrained(tmp_path / "plain")
    rewrite(tmp_path / "plain/config.json", lambda config: config.update(rope_scaling={"type": "yarn", "factor": 4.0}))
    patch_checkpoint(tmp_path / "plain", tmp_path / "out", "ntk", factor=2, trained_length=start, scaling=scaling)
    assert ctxext.export(tmp_path / "out", to="vllm").by_flag["--max-model-len"] == str(2 * start)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_replacing_is_asked_for_by_name(kind: str, tmp_path: Path) -> None:
    model = scaled(kind)
    ctxext.patch(model, "pi", factor=16, scaling="replace")
    base = SCALED[kind]["rope_theta"]
    assert model.config.rope_parameters == {"rope_type": "linear", "rope_theta": base, "factor": 16.0}
    assert ctxext.describe(model).trained_length == ORIGINAL
    assert "replaces" in ctxext.describe(model).notes[0]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))


@pytest.mark.parametrize(
    ("kind", "method"), [*zip(SCALED, ("self_extend", "rerope", "streaming", "dual_chunk"), strict=True)]
)
def test_a_remapping_starts_from_plain_positions_where_the_scaling_is_replaced(kind: str, method: str) -> None:
    """It kept the frequencies of the scaling that it should replace, without their temperature."""
    model = scaled(kind)
    rope = {"rope_type": "default", "rope_theta": SCALED[kind]["rope_theta"]}
    plain = tiny(max_position_embeddings=LENGTH, rope_parameters=rope)
    given: dict[str, Any] = {"factor": 16.0, "trained_length": ORIGINAL}
    ctxext.patch(model, method, scaling="replace", **given)
    ctxext.patch(plain, method, **given)
    assert rotation(model)[1] == 1.0
    assert torch.equal(rotation(model)[0], rotation(plain)[0])
    assert torch.equal(logits(model, tokens()), logits(plain, tokens()))


@pytest.mark.slow
def test_the_temperature_that_latent_attention_was_trained_with_is_kept(tmp_path: Path) -> None:
    """DeepSeek multiplies its whole scores; stock code reads by how much off the scaling of its config."""
    rope = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    model = tiny("deepseek_v3", max_position_embeddings=LENGTH, rope_parameters=rope)
    attention = model.model.layers[0].self_attn
    trained = attention.scaling
    for method, own in (("yarn", 0.1 * math.log(2) + 1), ("pi", 1.0), ("dynamic_ntk", 1.0)):
        ctxext.patch(model, method, factor=2, trained_length=LENGTH)
        assert attention.scaling == pytest.approx(trained * own**2, rel=1e-6)
        assert model.model.rotary_emb.attention_scaling == 1.0
        ctxext.unpatch(model)
        assert attention.scaling == trained
    ctxext.patch(model, "yarn", factor=2, trained_length=LENGTH).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(stock, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("parameters", [{"ramp": "turns"}, {"attention_factor": 1.2}], ids=str)
def test_every_yarn_sharpens_whole_scores_of_latent_attention(parameters: dict[str, Any]) -> None:
    """Section 3.4 of the paper divides the whole score by the temperature."""
    model = tiny("deepseek_v3")
    attention = model.model.layers[0].self_attn
    plain_scaling = attention.scaling
    ctxext.patch(model, "yarn", factor=4, **parameters)
    scale = parameters.get("attention_factor", 0.1 * math.log(4) + 1)
    assert attention.scaling == pytest.approx(plain_scaling * scale**2, rel=1e-6)
    assert model.model.rotary_emb.attention_scaling == 1.0


@pytest.mark.parametrize(("model_type", "whole"), [("gpt_neox", False), ("llama", True)])
def test_it_is_said_which_dimensions_the_temperature_reaches(model_type: str, whole: bool) -> None:
    notes = " ".join(ctxext.describe(ctxext.patch(tiny(model_type), "yarn", factor=4)).notes)
    assert ("rotated dimensions of each head" in notes) is not whole
    notes = " ".join(ctxext.describe(ctxext.patch(tiny(model_type), "pi", factor=4)).notes)
    assert "temperature" not in notes


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ntk", "abf", "yarn", "pi", "llama3"])
def test_what_ctxext_extended_is_taken_off_first(first: str, tmp_path: Path) -> None:
    """``ntk`` and ``abf`` are stored as a raised base, from which nothing may be extended."""
    ctxext.patch(tiny(), first, factor=4).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    before = logits(model, tokens())
    ctxext.patch(model, "yarn", factor=4, trained_length=TRAINED_LENGTH)
    again = ctxext.load(tmp_path, "yarn", factor=4, trained_length=TRAINED_LENGTH)
    anew = ctxext.patch(tiny(), "yarn", factor=4)
    assert torch.equal(logits(model, tokens()), logits(anew, tokens()))
    assert torch.equal(logits(again, tokens()), logits(anew, tokens()))
    assert model.config.rope_parameters == anew.config.rope_parameters
    ctxext.unpatch(model)
    assert torch.equal(logits(model, tokens()), before)
    assert model.config.ctxext["method"]["method"] == first


def test_a_trained_length_that_contradicts_the_saved_one(tmp_path: Path) -> None:
    ctxext.patch(tiny(), "yarn", factor=4).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    message = f"trained_length=512 contradicts that. .*trained_length={TRAINED_LENGTH} .* trained_length=256: the"
    with pytest.raises(PatchStateError, match=message):
        ctxext.patch(model, "yarn", factor=2, trained_length=512)
    with pytest.raises(PatchStateError, match=message):
        ctxext.load(tmp_path, "yarn", factor=2, trained_length=512)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method"), [("llama", "yarn"), ("gpt2", "stretch"), ("bloom", "alibi"), ("t5gemma", "pi")]
)
def test_a_config_that_another_model_had_is_not_extended(model_type: str, method: str) -> None:
    """The first of two models keeps the copy that it got, so that the second is alone with the shared config."""
    one = tiny(model_type)
    other = type(one)(one.config).eval()
    shared, plain = one.config, one.config.to_json_string()
    ctxext.patch(one, method, factor=4, trained_length=TRAINED_LENGTH)
    assert (other.config, ctxext.describe(other).method) == (shared, None)
    assert shared.to_json_string() == plain
    ctxext.patch(other, method, factor=2, trained_length=TRAINED_LENGTH)
    ctxext.unpatch(one)
    assert one.config is not shared
    assert one.config.to_json_string() == plain
    assert ctxext.describe(other).target_length == 2 * TRAINED_LENGTH
    ctxext.unpatch(ctxext.patch(one, method, factor=8, trained_length=TRAINED_LENGTH))
    ctxext.unpatch(other)
    assert other.config.to_json_string() == plain
    assert shared.to_json_string() == plain


@pytest.mark.slow
@pytest.mark.parametrize("more", [-2, -1, 0, 1])
def test_who_shares_a_config_however_python_counts_references(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: counted(thing) + more)
    one = tiny()
    other = type(one)(one.config)
    shared = one.config
    assert ctxext.patch(one, "yarn", factor=4).config is not shared
    assert other.config is shared
    alone = tiny()
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("nobody else holds the config"))
    kept = id(alone.config)
    assert id(ctxext.patch(alone, "yarn", factor=4).config) == kept


class Twice(transformers.LlamaForCausalLM):
    """Keeps its config under a second name as well, as the decoder of DiffusionGemma does, which makes masks by it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.text_config = config


@pytest.mark.slow
def test_a_config_that_a_module_has_under_a_second_name_is_the_copy_too() -> None:
    one = Twice(tiny().config)
    other, shared = Twice(one.config), one.config
    ctxext.patch(one, "yarn", factor=4)
    assert one.text_config is one.config is not shared
    assert other.text_config is other.config is shared


def parted(kind: str) -> tuple[Any, Any]:
    """Return a whole model and the part of it that is extended; both read one config, or one text part."""
    whole: Any = vision_language(tiny().config) if kind == "llava" else tiny(kind)
    return whole, whole.model.language_model if kind == "llava" else whole.base_model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "bloom", "llava"])
def test_a_part_of_a_model_is_extended_in_the_config_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else reads the config; to find that out, patch does not walk all objects of the process."""
    monkeypatch.setattr(gc, "get_objects", lambda *_: pytest.fail("patch walks all objects"))
    whole, part = parted(kind)
    shared = part.config
    ctxext.patch(part, "pi", factor=2)
    assert part.config is shared is whole.config.get_text_config()
    assert shared.ctxext["method"]["method"] == "pi"
    other = type(part)(shared)
    ctxext.unpatch(part)
    ctxext.patch(part, "pi", factor=4)
    assert other.config is shared is not part.config


def vision_language(text: LlamaConfig) -> LlavaForConditionalGeneration:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)).eval()


@pytest.mark.nightly
@pytest.mark.parametrize("extended", ["whole", "text"])
def test_models_that_share_the_text_part_of_a_config(extended: str) -> None:
    text = tiny()
    one, other = vision_language(text.config), vision_language(text.config)
    models = {"whole": one, "text": text, "other": other}
    shared = text.config
    assert one.config.text_config is other.config.text_config is shared
    ctxext.patch(models[extended], "yarn", factor=4)
    assert not hasattr(shared, "ctxext")
    assert shared.max_position_embeddings == TRAINED_LENGTH
    assert shared.rope_parameters["rope_type"] == "default"
    for name, model in models.items():
        assert model.config.get_text_config() is (shared if name != extended else model.get_decoder().config)
        assert (ctxext.describe(model).method is None) is (name != extended)
    ctxext.unpatch(models[extended])
    assert models[extended].config.get_text_config().to_dict() == shared.to_dict()
    for model in models.values():
        ctxext.patch(model, "yarn", factor=4)
    for model in models.values():  # in the order in which they were extended
        ctxext.unpatch(model)
        assert ctxext.describe(model).method is None
    assert shared.rope_parameters["rope_type"] == "default"
    alone = vision_language(copy.deepcopy(shared))
    own = alone.config.text_config
    assert ctxext.patch(alone, "yarn", factor=4).config.text_config is own
