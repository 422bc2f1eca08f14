"""Checkpoints that are more than a causal language model come back as what was saved, or are refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.load import load_saved
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, IncompatibleError, PatchStateError, UnknownNameError
from ctxext.measuring.checkpoint import load_checkpoint
from tests._checkpoints import rewrite, save_with_tokenizer
from tests._models import logits, qwen2_vl, tiny, tokens
from tests._products import crossed
from tests._tokenizer import make_tokenizer
from tests.walk.special import SPECIAL
from tests.walk.tiny import TRAINED_LENGTH, _shrunk


def vision_language(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = _shrunk(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {}))
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).eval()
    return model


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was saved extended; read it only."""
    directory = tmp_path_factory.mktemp("yarn")
    ctxext.patch(tiny(), "yarn", factor=4).save_pretrained(directory)
    return directory


HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model", "ForCausalLM"]


@pytest.mark.nightly
@pytest.mark.parametrize(("head", "name"), crossed(HEADS, ["yarn", "dynamic_ntk", "alibi"]))
def test_a_head_comes_back(head: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, f"Llama{head}")
    model = kind(tiny().config).eval()
    model.save_pretrained(tmp_path / "plain")
    inputs = tokens(TRAINED_LENGTH)
    with torch.no_grad():
        expected = ctxext.patch(model, name, factor=4)(inputs)[0]
    model.save_pretrained(tmp_path / "long")
    patch_checkpoint(tmp_path / "plain", tmp_path / "disk", name, factor=4.0)
    for place, given in (("long", {}), ("plain", {"method": name, "factor": 4}), ("disk", {})):
        loaded = ctxext.load(tmp_path / place, **given)
        assert type(loaded) is kind
        with torch.no_grad():
            assert torch.equal(loaded(inputs)[0], expected)


@pytest.mark.nightly
def test_the_class_can_be_chosen(plain: Path) -> None:
    for chosen in ("AutoModelForSequenceClassification", transformers.AutoModelForSequenceClassification):
        loaded = ctxext.load(plain, "yarn", factor=4, auto_class=chosen)
        assert type(loaded).__name__ == "LlamaForSequenceClassification"
    with pytest.raises(UnknownNameError, match="Did you mean 'AutoModelForCausalLM'"):
        ctxext.load(plain, "yarn", factor=4, auto_class="AutoModelForCausaLM")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["llava", "qwen3_5", "mllama", "gemma3"])
def test_a_vision_language_checkpoint_stays_whole(model_type: str, tmp_path: Path) -> None:
    model = vision_language(model_type)
    model.save_pretrained(tmp_path / "plain")
    before = json.loads((tmp_path / "plain/config.json").read_text())
    patch_checkpoint(tmp_path / "plain", tmp_path / "disk", "yarn", factor=4.0)
    after = json.loads((tmp_path / "disk/config.json").read_text())
    assert (after["model_type"], after["architectures"]) == (model_type, before["architectures"])
    assert after["vision_config"] == before["vision_config"]
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"text_config", "ctxext"}
    stock, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "disk", output_loading_info=True)
    assert type(stock) is type(model)
    assert not report["missing_keys"] | report["unexpected_keys"]

    ctxext.patch(model, "yarn", factor=4)
    model.save_pretrained(tmp_path / "memory")
    expected = logits(model, tokens())
    for place, given in (("memory", {}), ("disk", {}), ("plain", {"method": "yarn", "factor": 4})):
        loaded = ctxext.load(tmp_path / place, **given)
        assert type(loaded) is type(model)
        assert torch.equal(logits(loaded, tokens()), expected)
    again = ctxext.load(tmp_path / "memory", "pi", factor=2, trained_length=TRAINED_LENGTH)
    assert ctxext.describe(again).target_length == 2 * TRAINED_LENGTH


@pytest.mark.nightly
def test_the_attention_of_a_text_part_serves_short_texts(tmp_path: Path) -> None:
    """Its config is built in memory first, where it names the attention of the extended model."""
    model, short = qwen2_vl(), tokens(TRAINED_LENGTH)
    model.save_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path, "self_extend", factor=2)
    assert torch.equal(logits(loaded, short), logits(model, short))


@pytest.mark.nightly
def test_a_llama_4_is_refused_by_name(tmp_path: Path) -> None:
    """It rotates in windowed layers only; extending it in memory, on disk and while loading say so alike."""
    model = vision_language("llama4")
    model.save_pretrained(tmp_path / "plain")
    for verb in (
        lambda: ctxext.patch(model, "yarn", factor=4),
        lambda: patch_checkpoint(tmp_path / "plain", tmp_path / "disk", "yarn", factor=4.0),
        lambda: ctxext.load(tmp_path / "plain", "yarn", factor=4),
    ):
        with pytest.raises(IncompatibleError, match="llama4_text"):
            verb()
    assert not (tmp_path / "disk").exists()


@pytest.mark.nightly
def test_the_language_part_can_be_chosen_and_saved(tmp_path: Path) -> None:
    model = vision_language("qwen3_5")
    ctxext.patch(model, "yarn", factor=4)
    model.save_pretrained(tmp_path / "whole")
    part = ctxext.load(tmp_path / "whole", auto_class="AutoModelForCausalLM")
    assert type(part).__name__ == "Qwen3_5ForCausalLM"
    assert torch.equal(logits(part, tokens()), logits(model, tokens()))
    ctxext.save(part, tmp_path / "part")
    assert torch.equal(logits(ctxext.load(tmp_path / "part"), tokens()), logits(part, tokens()))


def test_a_part_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """Without ``architectures`` nothing says which of its classes a checkpoint is."""
    vision_language("qwen3_5").save_pretrained(tmp_path / "plain")
    rewrite(tmp_path / "plain/config.json", lambda config: config.pop("architectures"))
    with pytest.raises(IncompatibleError, match="does not say which class it was saved from"):
        patch_checkpoint(tmp_path / "plain", tmp_path / "long", "yarn", factor=4.0)
    with pytest.raises(IncompatibleError, match="auto_class='AutoModelForCausalLM'"):
        ctxext.load(tmp_path / "plain", "yarn", factor=4)


@pytest.mark.slow
def test_a_class_of_ones_own_is_not_taken_for_a_language_model(tmp_path: Path) -> None:
    """A reward model with tied embeddings has all the weights of one, and would be read as one without a word."""
    path = save_with_tokenizer(tiny(tie_word_embeddings=True), tmp_path / "own") / "config.json"
    rewrite(path, lambda config: config.update(architectures=["MyRewardModel"]))
    for verb in (
        lambda: patch_checkpoint(tmp_path / "own", tmp_path / "long", "yarn", factor=4.0),
        lambda: ctxext.load(tmp_path / "own", "yarn", factor=4),
        lambda: load_checkpoint(str(tmp_path / "own")),
    ):
        with pytest.raises(IncompatibleError, match=r"MyRewardModel.* auto_class="):
            verb()
    assert not (tmp_path / "long").exists()
    own = ctxext.load(tmp_path / "own", "yarn", factor=4, auto_class="LlamaForCausalLM")
    assert type(own) is LlamaForCausalLM, "it is what was asked for"
    rewrite(path, lambda config: config.update(architectures=["LLaMAForCausalLM"]))  # as the first conversions spelt it
    assert type(ctxext.load(tmp_path / "own", "yarn", factor=4)) is LlamaForCausalLM
    load_checkpoint(str(tmp_path / "own"))


def test_what_predicts_no_tokens_is_not_evaluated(tmp_path: Path) -> None:
    save_with_tokenizer(transformers.LlamaForSequenceClassification(tiny().config), tmp_path)
    with pytest.raises(IncompatibleError, match="LlamaForSequenceClassification, which predicts no tokens"):
        load_checkpoint(str(tmp_path))


@pytest.mark.nightly
def test_python_code_beside_a_type_that_transformers_knows_is_not_needed(plain: Path, tmp_path: Path) -> None:
    source = shutil.copytree(plain, tmp_path / "source")
    own = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    rewrite(source / "config.json", lambda config: config.update(auto_map=own))
    expected = logits(ctxext.patch(tiny(), "yarn", factor=4), tokens())
    assert torch.equal(logits(ctxext.load(source, "yarn", factor=4), tokens()), expected)
    patch_checkpoint(source, tmp_path / "long", "yarn", factor=4.0)
    assert torch.equal(logits(ctxext.load(tmp_path / "long"), tokens()), expected)


@pytest.mark.parametrize("length", [512, 4096])
def test_a_bloom_says_what_it_was_trained_for(length: int, tmp_path: Path) -> None:
    model = tiny("bloom", seq_length=length)
    ctxext.patch(model, "pi", factor=2)
    assert ctxext.describe(model).trained_length == length
    assert model.config.seq_length == 2 * length
    model.save_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path)
    assert (ctxext.describe(loaded).trained_length, ctxext.describe(loaded).target_length) == (length, 2 * length)
    with pytest.raises(ctxext.errors.CtxextError, match=f"trained_length={length}"):
        ctxext.load(tmp_path, "pi", factor=2)
    assert ctxext.unpatch(loaded).config.seq_length == length
    assert ctxext.describe(ctxext.patch(tiny("bloom"), "pi", factor=2)).trained_length == 2048


@pytest.mark.slow
def test_generate_reaches_the_new_window(tmp_path: Path) -> None:
    """Llama 2's generation_config.json holds its window as max_length."""
    model = tiny()
    model.generation_config = transformers.GenerationConfig(max_length=TRAINED_LENGTH, do_sample=True)
    model.save_pretrained(tmp_path / "plain")
    ctxext.patch(model, "yarn", factor=4)
    assert model.generation_config.max_length == 4 * TRAINED_LENGTH
    assert ctxext.unpatch(model).generation_config.max_length == TRAINED_LENGTH
    written = patch_checkpoint(tmp_path / "plain", tmp_path / "long", "yarn", factor=4.0)
    settings = json.loads((tmp_path / "long/generation_config.json").read_text())
    assert (settings["max_length"], settings["do_sample"]) == (4 * TRAINED_LENGTH, True)
    assert f"generation_config.json: max_length {TRAINED_LENGTH} -> {4 * TRAINED_LENGTH}" in written.changed
    model.generation_config.max_length = 20  # a choice, and no window
    assert ctxext.patch(model, "yarn", factor=4).generation_config.max_length == 20


def test_the_pieces_of_sentence_transformers_come_along(plain: Path, tmp_path: Path) -> None:
    source = shutil.copytree(plain, tmp_path / "source")
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}, {"path": "2_Dense"}]
    (source / "modules.json").write_text(json.dumps(modules))
    for part, names in {"1_Pooling": ["config.json"], "2_Dense": ["config.json", "model.safetensors"]}.items():
        (source / part).mkdir()
        for name in names:
            (source / part / name).write_bytes(b"{}")
    written = patch_checkpoint(source, tmp_path / "long", "yarn", factor=4.0)
    assert written.left_out == ()
    for file in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (tmp_path / "long" / file).read_bytes() == b"{}"
    (source / "modules.json").write_text("{}")
    with pytest.raises(CheckpointError, match="should hold a list of modules"):
        patch_checkpoint(source, tmp_path / "third", "yarn", factor=4.0)


def test_save_raises_the_tokenizer_and_hands_arguments_on(tmp_path: Path) -> None:
    model, tokenizer = tiny(), make_tokenizer(bos=True)
    tokenizer.model_max_length = TRAINED_LENGTH
    ctxext.patch(model, "yarn", factor=4)
    assert any("model_max_length = 256" in note for note in ctxext.describe(model).notes)
    ctxext.save(model, tmp_path / "new", tokenizer=tokenizer, max_shard_size="100KB")
    assert tokenizer.model_max_length == TRAINED_LENGTH
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "new").model_max_length == 4 * TRAINED_LENGTH
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        ctxext.save(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_the_base_of_a_method_is_no_base_of_an_adapter(plain: Path) -> None:
    abf = ctxext.load(plain, "abf", factor=4, base=5e5)
    assert abf.config.rope_parameters["rope_theta"] == 5e5
    with pytest.raises(UnknownNameError, match=r"'beta_fst'\. Did you mean 'beta_fast'"):
        ctxext.load(plain, "yarn", factor=4, beta_fst=3)
    with pytest.raises(ctxext.errors.InvalidParameterError, match="found None"):
        ctxext.load(None, "yarn", factor=4)  # type: ignore[arg-type]


def test_a_misspelt_directory_is_named(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(plain, tmp_path / "ck/llama")
    said = r"no directory ck/lama, though there is one ck\. Did you mean ck/llama\?"
    with pytest.raises(CheckpointError, match=said):
        ctxext.load("ck/lama", "yarn", factor=4)
    monkeypatch.chdir(tmp_path / "ck")
    with pytest.raises(CheckpointError, match=r"There is no directory lama\. Did you mean llama\?"):
        ctxext.load("lama", "yarn", factor=4, local_files_only=True)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, 1.5])
@pytest.mark.parametrize("name", ["max_position_embeddings", "rope_parameters"])
def test_a_field_of_another_type_in_what_was_before_is_a_sentence(
    name: str, value: Any, yarn: Path, tmp_path: Path
) -> None:
    """What transformers' own classes refuse, and what they end in."""
    shutil.copytree(yarn, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path / "config.json", lambda config: config["ctxext"]["original"].update({name: value}))
    with pytest.raises(ctxext.errors.CtxextError, match=re.escape(str(tmp_path))):
        ctxext.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "incomplete, without sides"),
        ("yes", "has format 'yes'"),
        ({"format": 1}, "incomplete, without"),
        ({"method": "yarn"}, "method='yarn' is no dict"),
        ({"method": {}}, "method is without method"),
        ({"trained_length": None}, "trained_length=None is no int"),
        *(({"method": {"method": name}}, r"is unknown to ctxext .*Install") for name in ([1], None, "warn")),
    ],
)
def test_a_damaged_extension_is_named_by_every_verb(change: Any, said: str, yarn: Path, tmp_path: Path) -> None:
    source = shutil.copytree(yarn, tmp_path / "source")
    whole = isinstance(change, str) or change == {"format": 1}
    rewrite(source / "config.json", lambda config: config.update(ctxext=change if whole else config["ctxext"] | change))
    for verb in (
        lambda: ctxext.load(source),
        lambda: ctxext.load(source, "pi", factor=2, trained_length=TRAINED_LENGTH),
        lambda: patch_checkpoint(source, tmp_path / "long", "yarn", factor=4.0),
        lambda: inspect_checkpoint(str(source)),
        lambda: ctxext.export(str(source), to="vllm"),
    ):
        with pytest.raises(CheckpointError, match=said):
            verb()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["self_extend", "ntk"])
def test_a_part_that_was_extended_alone_is_found_in_the_whole(method: str, tmp_path: Path) -> None:
    model, text = vision_language("llava"), tokens(2 * TRAINED_LENGTH)
    ctxext.patch(model.model.language_model, method, factor=2)
    model.save_pretrained(tmp_path)
    expected = logits(model, text)
    for loaded in (model, load_saved(tmp_path, plain_class=True), ctxext.load(tmp_path)):
        assert torch.equal(logits(loaded, text), expected)
        assert ctxext.describe(loaded).method == ctxext.method(method, factor=2).to_dict()
    with pytest.raises(PatchStateError, match=f"already extended .ctxext {method}"):
        ctxext.load(tmp_path, "yarn", factor=2)
    if method == "ntk":  # which plain transformers loads
        with pytest.raises(PatchStateError, match=r"text part of this Llava.* was extended alone, and saved in it"):
            ctxext.patch(AutoModelForImageTextToText.from_pretrained(tmp_path), "yarn", factor=2)


def test_another_part_that_was_extended_alone_is_refused(tmp_path: Path) -> None:
    """Only ctxext computes it, and nothing would: the whole was read without a word."""
    extension = ctxext.patch(tiny(), "self_extend", factor=2).config.ctxext
    vision_language("llava").save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", lambda config: config["vision_config"].update(ctxext=extension))
    with pytest.raises(CheckpointError, match="belongs to its vision_config, which was extended alone"):
        load_saved(tmp_path, plain_class=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_an_adapter_around_a_part_that_was_extended_alone_is_not_saved(is_wrapped_first: bool, tmp_path: Path) -> None:
    """It would be saved without the extension, which its own model does not have."""
    whole: Any = vision_language("llava")
    part = whole.model.language_model
    whole.save_pretrained(tmp_path / "plain")
    whole.name_or_path = str(tmp_path / "plain")
    if not is_wrapped_first:
        ctxext.patch(part, "yarn", factor=4)
    model = get_peft_model(whole, LoraConfig(target_modules=r".*language_model.*q_proj", init_lora_weights=False))
    if is_wrapped_first:
        ctxext.patch(part, "yarn", factor=4)
    expected = logits(model.eval(), tokens())
    message = "This LlamaModel was extended alone, .* ctxext.patch on the whole model"
    with pytest.raises(IncompatibleError, match=message):
        model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(IncompatibleError, match=message):
        logits(model.train(), tokens())
    ctxext.unpatch(part)
    ctxext.patch(model.eval(), "yarn", factor=4).save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), tokens()), expected)
