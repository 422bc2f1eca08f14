"""Directories that hold an adapter and something of its base: the base's config, or whole weights too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.checkpoints.adapters import is_adapter
from ctxext.checkpoints.export import export
from ctxext.checkpoints.inspect import inspect_adapter, inspect_checkpoint
from ctxext.checkpoints.load import load_saved
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, InvalidParameterError
from ctxext.measuring.checkpoint import load_checkpoint
from tests._checkpoints import rewrite
from tests._models import logits, tiny, tokens
from tests._peft import lora
from tests._tokenizer import make_tokenizer


def adapted(plain: Path, method: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(plain)
    if method is not None:
        ctxext.patch(model, method, factor=4)
    return get_peft_model(model, lora(task_type=None, target_modules=["q_proj"], r=2, init_lora_weights=False)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_with_the_config_of_its_base_it_is_an_adapter(method: str, plain: Path, tmp_path: Path) -> None:
    """As axolotl writes one."""
    model = adapted(plain, method)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"a training run's own")
    assert is_adapter(tmp_path)
    loaded = ctxext.load(tmp_path)
    assert isinstance(loaded, PeftModel)
    assert torch.equal(logits(loaded, tokens()), expected)
    assert inspect_adapter(tmp_path).method is not None
    with pytest.raises(CheckpointError, match="holds an adapter and not a whole model"):
        patch_checkpoint(tmp_path, tmp_path.parent / "out", "yarn", factor=4)


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("method", ["yarn", None])
def test_whole_weights_and_an_adapter_in_one_directory_are_refused(
    weights: str, method: str | None, plain: Path, tmp_path: Path
) -> None:
    """Stock transformers adds the adapter to the weights; merged ones would have it twice."""
    model = adapted(plain, method)
    model.save_pretrained(tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path)
    if weights != "model.safetensors":
        (tmp_path / "model.safetensors").rename(tmp_path / weights)
    attempts: list[Callable[[], Any]] = [
        lambda: ctxext.load(tmp_path),
        lambda: ctxext.load(tmp_path, "yarn", factor=4),
        lambda: load_checkpoint(str(tmp_path), device="cpu"),
        lambda: patch_checkpoint(tmp_path, tmp_path.parent / "out", "yarn", factor=4),
        lambda: export(tmp_path, to="vllm", method="yarn", factor=4),
        lambda: inspect_checkpoint(tmp_path),
    ]
    for attempt in attempts:
        with pytest.raises(CheckpointError, match=rf"whole model \({weights}\) and an adapter .* Is it merged already"):
            attempt()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", "{"),
        ("adapter_config.json", "[]"),
        ("ctxext_config.json", '{"extension": '),
        ("ctxext_config.json", "{}"),
        ("ctxext_config.json", '{"extension": null, "guarded": {}}'),
        ("ctxext_config.json", '{"extension": {}, "guarded": {}}'),
        ("ctxext_config.json", '{"extension": {"format": 1}, "guarded": {"peft_type": "LORA"}}'),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, plain: Path, tmp_path: Path) -> None:
    adapted(plain, "yarn").save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    for read in (ctxext.load, inspect_adapter):
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path)


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_type_that_this_peft_does_not_know_is_named(is_extended: bool, plain: Path, tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=2) if is_extended else tiny()
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    if is_extended:
        rewrite(tmp_path / "ctxext_config.json", lambda saved: saved["guarded"].update(peft_type="OF_TOMORROW"))
    else:
        rewrite(tmp_path / "adapter_config.json", lambda config: config.update(peft_type="OF_TOMORROW"))
    with pytest.raises(CheckpointError, match=r"^PEFT .* cannot read .*adapter_config\.json: 'OF_TOMORROW'"):
        load_saved(tmp_path, plain_class=True, base=plain)


def lora_on(place: Path, base: Any, **fields: Any) -> Path:
    """Save an adapter of a random model."""
    get_peft_model(base, LoraConfig(r=2, **fields)).save_pretrained(place)
    return place


# What an adapter was saved with, what is changed in its config afterwards, and what it then misses, on two layers.
UNREACHED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer modules": ({}, {"target_modules": ["q_proj"]}, r"no place for .*v_proj.lora_A.weight \(4 of 8 weights\)"),
    "more modules": ({}, {"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks .*o_proj.lora_A.weight \(4 of 8"),
    "fewer layers": ({}, {"layers_to_transform": [0]}, r"no place for .*layers.1.*\(4 of 8"),
    "a module that is left out": ({}, {"exclude_modules": ["v_proj"]}, r"no place for .*v_proj.*\(4 of 8"),
    "weights of nothing": ({}, {"target_parameters": ["mlp.down.weight"]}, r"named mlp.down.weight \(target_param"),
    "experts": ({}, {"target_parameters": ["mlp.experts.down_proj"]}, r"named mlp.experts.down_proj \(target_param"),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_an_adapter_that_does_not_reach_what_it_asks_for_is_refused(name: str, tmp_path: Path) -> None:
    saved, changed, says = UNREACHED[name]
    place = lora_on(tmp_path / "adapter", tiny(num_hidden_layers=2), **{"target_modules": ["q_proj", "v_proj"]} | saved)
    rewrite(place / "adapter_config.json", lambda config: config.update(changed))
    model = ctxext.patch(tiny(num_hidden_layers=2), "yarn", factor=2)
    names = [key for key, _ in model.named_modules()]
    with pytest.raises(CheckpointError, match=f"does not fit this LlamaForCausalLM: .*{says}"):
        load_saved(place, plain_class=True, base=model)
    assert [key for key, _ in model.named_modules()] == names


@pytest.mark.slow
def test_an_adapter_of_a_classifier_asks_for_its_class(plain: Path, tmp_path: Path) -> None:
    """The base's own class is that of a language model, which has no place for the head."""
    chosen = {"auto_class": "AutoModelForSequenceClassification", "num_labels": 3}
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(ctxext.load(plain, "yarn", factor=2, **chosen), config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no place for .*score\.weight .*the class \(auto_class\)"):
        ctxext.load(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path, **chosen), tokens()), logits(model, tokens()))


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_whole_weights_of_another_size_leave_a_model_as_it_is(saved: str, tmp_path: Path) -> None:
    trained, model = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    trained.resize_token_embeddings(size := model.config.vocab_size + 8)
    place = lora_on(tmp_path / "adapter", trained, target_modules=["q_proj"], modules_to_save=[saved])
    names = [key for key, _ in model.named_modules()]
    with pytest.raises(CheckpointError, match=rf"{saved}\.weight of size .*resize_token_embeddings\({size}\) first"):
        load_saved(place, plain_class=True, base=model)
    assert [key for key, _ in model.named_modules()] == names
    model.resize_token_embeddings(size)
    assert isinstance(load_saved(place, plain_class=True, base=model), PeftModel)


@pytest.mark.parametrize("config", [LoraConfig(target_modules=["q_proj"]), PromptTuningConfig(num_virtual_tokens=4)])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_method_that_is_refused_leaves_the_base_in_memory_as_it_was(
    config: Any, is_adapted: bool, tmp_path: Path
) -> None:
    config.task_type = "CAUSAL_LM"
    get_peft_model(tiny(), config).save_pretrained(tmp_path)
    base: Any = get_peft_model(tiny(), copy.deepcopy(config)) if is_adapted else tiny()
    names = [key for key, _ in base.named_modules()]
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match="how far to reach"):
            ctxext.load(tmp_path, "yarn", base=base, adapter_name="second")
        assert [key for key, _ in base.named_modules()] == names


@pytest.mark.parametrize(("trained", "given"), [(2, 3), (3, 2)])
def test_an_adapter_of_a_base_with_other_layers_is_refused(trained: int, given: int, tmp_path: Path) -> None:
    place = lora_on(tmp_path / "adapter", tiny(num_hidden_layers=trained), target_modules=["q_proj"])
    model = get_peft_model(tiny(num_hidden_layers=given), LoraConfig(target_modules=["v_proj"]))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_proj\.lora_A"):
        load_saved(place, plain_class=True, base=model, adapter_name="second")
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear", "rank_pattern": {"v_proj": 4, "layers.0.*down_proj": 1}},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "bias": "lora_only"},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "trainable_token_indices": [1, 2]},
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": False},
        # Names for all kinds of models, as scripts give them: those that this one does not have say nothing.
        {"target_modules": ["q_proj", "c_attn"], "rank_pattern": {"k_proj": 4}, "alpha_pattern": {"encoder.*": 4}},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "ln_f"], "layers_to_transform": [1, 7]},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"], "use_dora": False},
    ],
)
def test_an_adapter_that_reaches_all_is_loaded(fields: dict[str, Any], tmp_path: Path) -> None:
    place = lora_on(tmp_path / "adapter", tiny(num_hidden_layers=2), **fields)
    model = ctxext.patch(tiny(num_hidden_layers=2), "yarn", factor=2)
    assert isinstance(load_saved(place, plain_class=True, base=model), PeftModel)


def on(model: Any, is_adapted: bool) -> Any:
    """A model, or the same in PEFT's with an adapter of its own."""
    return get_peft_model(model, LoraConfig(target_modules=["o_proj", "c_proj"])) if is_adapted else model


# The model that an adapter is of, the model that it is loaded onto, and what is said.
OF_OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "wider": ({"hidden_size": 256}, {}, r"lora_A.weight of size \[2, 256\], and this .* has in_features=128 there"),
    "more heads": ({"num_attention_heads": 8}, {}, r"lora_B.weight of size \[256, 2\], .* has out_features=128 there"),
    "a wider GPT-2": (
        {"model_type": "gpt2", "n_embd": 256},
        {"model_type": "gpt2"},
        r"lora_A.weight of size \[2, 256\], and this GPT2LMHeadModel has in_features=128 there",
    ),
    "a GPT-2": ({"model_type": "gpt2"}, {}, r"^PEFT does not put the adapter in .* on this LlamaForCausalLM: .*c_attn"),
}


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_adapter_of_another_model_leaves_the_base_as_it_was(name: str, is_adapted: bool, tmp_path: Path) -> None:
    of, given, says = OF_OTHERS[name]
    targets = ["c_attn" if of.get("model_type") == "gpt2" else "q_proj"]
    place = lora_on(tmp_path / "adapter", tiny(**of), target_modules=targets)
    model = on(tiny(**given), is_adapted)
    names = [key for key, _ in model.named_modules()]
    for _ in range(2):
        with pytest.raises(CtxextError, match=says):
            load_saved(place, plain_class=True, base=model, adapter_name="second")
        assert [key for key, _ in model.named_modules()] == names


def test_what_peft_refuses_of_an_adapter_is_a_sentence(tmp_path: Path) -> None:
    other = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    get_peft_model(tiny(), other).save_pretrained(tmp_path / "ia3")
    prompt = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    get_peft_model(tiny(), prompt).save_pretrained(tmp_path / "prompt")
    model = on(tiny(), True)
    refused = pytest.raises(IncompatibleError, match=r"PEFT does not put the adapter in .*: Cannot combine adapters")
    with refused:
        load_saved(tmp_path / "ia3", plain_class=True, base=model, adapter_name="second")
    assert list(model.peft_config) == ["default"]
    with pytest.raises(IncompatibleError, match=r"PEFT does not put the adapter in .*: Cannot set a prompt learning"):
        load_saved(tmp_path / "prompt", plain_class=True, base=tiny(), is_trainable=True)


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "second"])
def test_an_adapter_on_the_hub(inside: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model card says to load it so. One in a subfolder has a name."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--lora"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    model = get_peft_model(
        ctxext.load(plain, "yarn", factor=4), lora(init_lora_weights=False), inside or "default"
    ).eval()
    ctxext.save(model, repository / "snapshots" / "abc", tokenizer=make_tokenizer(bos=True))
    where = {"local_files_only": True} | ({"subfolder": inside} if inside else {})
    loaded = ctxext.load("me/lora", **where)
    assert isinstance(loaded, PeftModel)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    with pytest.raises(CheckpointError, match="carries its own extension"):
        ctxext.load("me/lora", "pi", factor=2, **where)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if not inside:
        measured = load_checkpoint("me/lora", device="cpu", dtype="fp32")
        assert (measured.name, ctxext.describe(measured.model).target_length) == ("me/lora", 256)
    for name in ("me/other", "me/lora"):
        with pytest.raises(CheckpointError, match=f"There is no directory {name}. The hub did not give it either"):
            ctxext.load(name, revision="of nobody", local_files_only=True)
