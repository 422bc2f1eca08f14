"""Adapters put on a model: one that fits computes as it was saved, and any other leaves the model as it was."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import pipeline

import ctxext
from ctxext.checkpoints.adapters import ADAPTER_WEIGHTS
from ctxext.checkpoints.load import load_saved
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, InvalidParameterError
from tests._checkpoints import rewrite
from tests._models import logits, tiny, tokens
from tests._peft import ALL, EXTENSION, base_of, extended, trained
from tests._tokenizer import make_tokenizer
from tests.walk.check import State


def test_onto_a_model_in_memory(adapter: tuple[Path, Tensor], plain: Path) -> None:
    directory, expected = adapter
    base = extended(base_of(plain))
    loaded = ctxext.load(directory, base=base, adapter_name="again")
    assert loaded.get_base_model() is base
    assert list(loaded.peft_config) == ["again"]
    assert torch.equal(logits(loaded, tokens()), expected)
    with pytest.raises(CheckpointError, match=r"has: method 'yarn' there, not extended here\. Extend it the same way"):
        ctxext.load(directory, base=base_of(plain))
    with pytest.raises(InvalidParameterError, match=r"dtype: base is a model in memory, which is loaded already"):
        ctxext.load(directory, base=base, dtype=torch.bfloat16)
    for wrong in (nn.Linear(2, 2), nn.Sequential(nn.Embedding(2, 2)), nn.ModuleList([base])):  # which holds one
        with pytest.raises(IncompatibleError, match=rf"extends transformers models; found {type(wrong).__name__}"):
            ctxext.load(directory, base=wrong)
    with pytest.raises(InvalidParameterError, match=r"base=LlamaForCausalLM is for adapters"):
        ctxext.load(plain, base=base)


@pytest.mark.slow
def test_a_base_inside_a_wrapper_is_asked_for_alone(adapter: tuple[Path, Tensor], plain: Path, tmp_path: Path) -> None:
    """PEFT finds layers by their names, to which a wrapper adds its own, and of a pipeline it knows nothing."""
    base = extended(base_of(plain))
    held = pipeline("text-generation", model=base, tokenizer=make_tokenizer(bos=True), device="cpu")
    before = State.of(base, tokens())
    for wrapper in (held, torch.compile(base), nn.DataParallel(base)):
        said = rf"^base={type(wrapper).__name__}: the adapter in .* belongs on the LlamaForCausalLM inside it"
        with pytest.raises(IncompatibleError, match=said):
            ctxext.load(adapter[0], base=wrapper)
    assert before.difference(base) is None
    assert torch.equal(logits(ctxext.load(adapter[0], base=held.model), tokens()), adapter[1])
    get_peft_model(base_of(plain), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)  # plain, unmarked
    for wrong in (nn.Linear(2, 2), 5):
        with pytest.raises(IncompatibleError, match=f"extends transformers models; found {type(wrong).__name__}"):
            ctxext.load(tmp_path, "yarn", factor=2, base=wrong)


@pytest.mark.slow
def test_hooks_that_peft_takes_off_an_offloaded_base_keep_the_extension(plain: Path, tmp_path: Path) -> None:
    """A method that follows the length stands in place of a forward, around which accelerate has put a hook."""
    method = {"method": "dynamic_ntk", "factor": 4}
    model = trained(ctxext.patch(base_of(plain), **method))
    ctxext.save(model, tmp_path)
    names = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")  # as "auto" has them
    base = dispatch_model(base_of(plain), dict.fromkeys(names, "cpu"), force_hooks=True)
    ctxext.patch(base, **method)
    assert torch.equal(logits(ctxext.load(tmp_path, base=base), tokens()), logits(model, tokens()))


def test_weights_on_a_disk_are_refused(adapter: tuple[Path, Tensor], plain: Path, tmp_path: Path) -> None:
    """PEFT would move the weights that are not there to whatever device there is."""
    offloaded: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": tmp_path}
    with pytest.raises(IncompatibleError, match="weights on a disk, which PEFT cannot put"):
        ctxext.load(adapter[0], **offloaded)
    base = ctxext.load(plain, **EXTENSION, **offloaded)
    expected = logits(base, tokens())
    with pytest.raises(IncompatibleError, match="weights on a disk"):
        ctxext.load(adapter[0], base=base)
    assert torch.equal(logits(base, tokens()), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["whole", "inner"])
def test_a_second_adapter_on_a_model_in_memory(part: str, plain: Path, tmp_path: Path) -> None:
    expected = {}
    for name, targets in (("first", ALL), ("second", ["q_proj", "down_proj"])):
        model = trained(extended(base_of(plain)), LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
        model.save_pretrained(tmp_path / name)
        expected[name] = logits(model, tokens())
    model = ctxext.load(tmp_path / "first", adapter_name="first")
    given = model if part == "whole" else model.get_base_model()
    both = ctxext.load(tmp_path / "second", base=given, adapter_name="second")
    if part == "whole":
        assert model.active_adapter == "first"  # as PEFT's load_adapter leaves it
        assert torch.equal(logits(both, tokens()), expected["first"])
        for name in expected:
            model.set_adapter(name)
            assert torch.equal(logits(both, tokens()), expected[name])
        model.save_pretrained(tmp_path / "both")
        for name in expected:
            assert torch.equal(logits(ctxext.load(tmp_path / "both" / name), tokens()), expected[name])
    both.set_adapter("second")
    assert torch.equal(logits(both, tokens()), expected["second"])
    for name in ("first", "second"):
        with pytest.raises(InvalidParameterError, match=f"has an adapter '{name}' already"):
            ctxext.load(tmp_path / "second", base=given, adapter_name=name)


@pytest.mark.slow
def test_a_second_adapter_to_be_trained(adapter: tuple[Path, Tensor]) -> None:
    model = ctxext.load(adapter[0])
    assert ctxext.load(adapter[0], base=model, adapter_name="second", is_trainable=True) is model
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trainable
    assert all(".second." in name for name in trainable)


@pytest.mark.slow
@pytest.mark.parametrize("cast", [True, False])
def test_a_second_adapter_has_the_dtype_of_the_first(cast: bool, adapter: tuple[Path, Tensor]) -> None:
    """PEFT's add_adapter and load_adapter both cast, the first by default."""
    model = ctxext.load(adapter[0], dtype=torch.bfloat16, autocast_adapter_dtype=cast)
    ctxext.load(adapter[0], base=model, adapter_name="second", autocast_adapter_dtype=cast)
    weights = [(name, weight.dtype) for name, weight in model.named_parameters() if ".lora_" in name]
    for adapted in (".default.", ".second."):
        dtypes = {dtype for name, dtype in weights if adapted in name}
        assert dtypes == {torch.float32 if cast else torch.bfloat16}, adapted


@pytest.mark.slow
def test_a_second_adapter_that_cannot_be_read_leaves_nothing(adapter: tuple[Path, Tensor], tmp_path: Path) -> None:
    model = ctxext.load(adapter[0])
    shutil.copytree(adapter[0], tmp_path / "torn")
    weights = tmp_path / "torn" / ADAPTER_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        ctxext.load(tmp_path / "torn", base=model, adapter_name="second")
    assert list(model.peft_config) == ["default"]


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
    loaded = ctxext.load(tmp_path, "yarn", factor=2, base=base, adapter_name="second")
    assert ctxext.describe(loaded).target_length == 128


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
    model: Any = tiny(**given)
    if is_adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj", "c_proj"]))
    names = [key for key, _ in model.named_modules()]
    for _ in range(2):
        with pytest.raises(CtxextError, match=says):
            load_saved(place, plain_class=True, base=model, adapter_name="second")
        assert [key for key, _ in model.named_modules()] == names


def test_what_peft_refuses_of_an_adapter_is_a_sentence(tmp_path: Path) -> None:
    other = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    prompt = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    for name, config in (("ia3", other), ("prompt", prompt)):
        get_peft_model(tiny(), config).save_pretrained(tmp_path / name)
    model = get_peft_model(tiny(), LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(IncompatibleError, match=r"PEFT does not put the adapter in .*: Cannot combine adapters"):
        load_saved(tmp_path / "ia3", plain_class=True, base=model, adapter_name="second")
    assert list(model.peft_config) == ["default"]
    with pytest.raises(IncompatibleError, match=r"PEFT does not put the adapter in .*: Cannot set a prompt learning"):
        load_saved(tmp_path / "prompt", plain_class=True, base=tiny(), is_trainable=True)
