"""PEFT: an adapter never loses the extension that it was trained with."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.checkpoints import adapters
from ctxext.checkpoints.adapters import ADAPTER_WEIGHTS, EXTENSION_FILE, SENTENCE
from ctxext.checkpoints.load import load_saved
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError, VerificationError
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.training.lora import attach_lora, reattach_lora
from tests._checkpoints import contents
from tests._models import logits, tiny, tokens
from tests._peft import ALL, EXTENSION, base_of, extended, lora, refusal, shake, through_transformers, trained
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH

CAUSAL = {"task_type": "CAUSAL_LM"}


@pytest.mark.slow
def test_before_and_after_get_peft_model(plain: Path) -> None:
    before, after = trained(extended(base_of(plain))), trained(base_of(plain))
    unextended = State.of(after, tokens())
    assert extended(after) is after
    assert torch.equal(logits(before, tokens()), logits(after, tokens()))
    assert after.config.ctxext == before.config.ctxext
    ctxext.unpatch(after)
    assert unextended.difference(after) is None
    assert "save_pretrained" not in vars(after)


@pytest.mark.nightly
def test_saved_and_loaded(adapter: tuple[Path, Tensor]) -> None:
    directory, expected = adapter
    for path in (directory, str(directory)):
        loaded = ctxext.load(path)
        assert isinstance(loaded, PeftModel)
        assert torch.equal(logits(loaded, tokens()), expected)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert loaded.peft_config["default"].init_lora_weights is True
        assert ctxext.describe(loaded).method == ctxext.method("yarn", factor=4).to_dict()
    low = ctxext.load(directory, dtype=torch.bfloat16)
    assert low.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    assert low.get_base_model().model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.slow
def test_training_goes_on(adapter: tuple[Path, Tensor], tmp_path: Path) -> None:
    directory, _ = adapter
    loaded = ctxext.load(directory, is_trainable=True, adapter_name="more")
    assert any(parameter.requires_grad for parameter in loaded.parameters())
    shake(loaded)
    loaded.save_pretrained(tmp_path / "again")  # a loaded adapter keeps its extension, however it is saved
    again = ctxext.load(tmp_path / "again" / "more")
    assert torch.equal(logits(again, tokens()), logits(loaded, tokens()))


def plainly(directory: Path, plain: Path) -> list[Callable[[], Any]]:
    """Every way to load an adapter without ctxext."""

    def second() -> None:
        trained(base_of(plain)).load_adapter(directory, "second")

    return [
        lambda: PeftModel.from_pretrained(base_of(plain), directory),
        lambda: PeftModel.from_pretrained(base_of(plain), directory, low_cpu_mem_usage=True),
        lambda: peft.AutoPeftModelForCausalLM.from_pretrained(directory),
        lambda: AutoModelForCausalLM.from_pretrained(directory),
        lambda: base_of(plain).load_adapter(directory),
        second,
    ]


def test_the_plain_way_fails_with_a_sentence(adapter: tuple[Path, Tensor], plain: Path) -> None:
    for load in plainly(adapter[0], plain):
        with pytest.raises((KeyError, ValueError), match=refusal(SENTENCE)):
            load()


def test_a_damaged_adapter_is_refused_by_name(adapter: tuple[Path, Tensor], plain: Path) -> None:
    directory = adapter[0]

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            ctxext.load(directory)

    trained(base_of(plain)).save_pretrained(directory)
    refused(f"is not the one that {EXTENSION_FILE} was written for")
    (directory / EXTENSION_FILE).unlink()
    refused(rf"is an adapter without {EXTENSION_FILE}: .* PeftModel\.")


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (EXTENSION_FILE, f"without its {EXTENSION_FILE}: saving was interrupted, or that"),
        (ADAPTER_WEIGHTS, r"has no adapter_model\.safetensors; ctxext reads adapters"),
    ],
)
def test_an_adapter_without_one_of_its_files(gone: str, words: str, adapter: tuple[Path, Tensor]) -> None:
    (adapter[0] / gone).rename(adapter[0] / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=words):
        ctxext.load(adapter[0])


@pytest.mark.slow
def test_the_base_has_moved(adapter: tuple[Path, Tensor], plain: Path, tmp_path: Path) -> None:
    directory, expected = adapter[0].rename(tmp_path / "renamed"), adapter[1]
    shutil.copytree(plain, tmp_path / "moved")
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/gone/base"
    (directory / "adapter_config.json").write_text(json.dumps(config))
    said = rf"The adapter in {directory} needs its base checkpoint: There is no checkpoint at /gone/base: .* pass base="
    with pytest.raises(CheckpointError, match=said):
        ctxext.load(directory)
    assert torch.equal(logits(ctxext.load(directory, base=tmp_path / "moved"), tokens()), expected)
    for nothing in (None, ""):
        (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": nothing}))
        with pytest.raises(CheckpointError, match=r"does not say what its base checkpoint is; pass base="):
            ctxext.load(directory)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["./models/base", "models/base"])  # the second may be a name on the hub
@pytest.mark.parametrize("method", ["yarn", None])
def test_a_base_with_a_relative_path_is_looked_for_where_the_program_runs(
    method: str | None, named: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing said that the adapter was another folder's, nor that its base lies around it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    project = tmp_path / "project"
    shutil.copytree(plain, project / named)
    monkeypatch.chdir(project)
    model = AutoModelForCausalLM.from_pretrained(named).eval()
    trained(model if method is None else ctxext.patch(model, method, factor=4)).save_pretrained("out/adapter")
    monkeypatch.chdir(tmp_path)
    adapter, beside = "project/out/adapter", re.escape(str(project / "models/base"))
    said = rf"(?s)^The adapter in {adapter} needs its base checkpoint: There is no .* One lies at {beside}\."
    for load in (functools.partial(load_saved, plain_class=True), functools.partial(load_checkpoint, device="cpu")):
        with pytest.raises(CheckpointError, match=said):
            load(adapter)
    assert load_saved(adapter, plain_class=True, base=project / "models/base") is not None
    if method is None:
        with pytest.raises(CheckpointError, match=rf"Where its base {named} carries one, pass the folder of that"):
            ctxext.load(adapter)


@pytest.mark.nightly
def test_trained_on_an_extended_base_by_code_without_ctxext(plain: Path, tmp_path: Path) -> None:
    """The adapter carries no mark; the config of the base that it names says how that was extended."""
    ctxext.save(extended(base_of(plain)), tmp_path / "base")
    model = trained(base_of(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / EXTENSION_FILE).exists()
    expected = logits(model, tokens())
    for given in (None, tmp_path / "base", plain, ctxext.load(tmp_path / "base"), extended(base_of(plain))):
        loaded = ctxext.load(tmp_path / "adapter", base=given).eval()
        assert torch.equal(logits(loaded, tokens()), expected)
        assert ctxext.describe(loaded).method["method"] == "yarn"
    with pytest.raises(CheckpointError, match="trained on another extension than this LlamaForCausalLM has: factor"):
        ctxext.load(tmp_path / "adapter", base=ctxext.patch(base_of(plain), "yarn", factor=2))


@pytest.mark.nightly
def test_a_base_whose_windows_were_treated_otherwise(tmp_path: Path) -> None:
    """All its layers have a window, which can be lifted or kept under the same frequencies."""
    tiny("mistral", sliding_window=16).save_pretrained(tmp_path / "plain")
    model, *others = (extended(base_of(tmp_path / "plain"), sliding_window=how) for how in ("lift", "lift", "keep"))
    ctxext.save(trained(model), tmp_path / "adapter")
    for other, choice in zip(others, ("lift", "keep"), strict=True):
        other.save_pretrained(tmp_path / choice)
    for base in ("plain", "lift"):
        loaded = ctxext.load(tmp_path / "adapter", base=tmp_path / base)
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    for load in (
        lambda: ctxext.load(tmp_path / "adapter", base=tmp_path / "keep"),
        lambda: ctxext.load(tmp_path / "adapter", base=others[1]),
        lambda: reattach_lora(others[1], tmp_path / "adapter"),
    ):
        with pytest.raises(CheckpointError, match="sliding_window 'lift' there, 'keep' here"):
            load()


def test_a_base_in_memory_has_no_report_of_another_model(adapter: tuple[Path, Tensor], plain: Path) -> None:
    base, report = ctxext.load(plain, "yarn", factor=4, output_loading_info=True)
    assert "missing_keys" in report
    _, report = ctxext.load(adapter[0], base=base, output_loading_info=True)
    assert report == {}


@pytest.mark.slow
def test_another_base_model(adapter: tuple[Path, Tensor], tmp_path: Path) -> None:
    tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path / "other")
    with pytest.raises(VerificationError, match=r"it is not the same base model\. Give the right one with base="):
        ctxext.load(adapter[0], base=tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"method": "yarn", "factor": 4}, CheckpointError, ""),
        ({"factor": 4}, InvalidParameterError, ""),
        ({"attention": "sdpa"}, InvalidParameterError, ""),
        *(
            ({"adapter_name": name}, InvalidParameterError, f"adapter_name must be .* found {re.escape(repr(name))}")
            for name in ("", "a.b", ".", 5, None, b"x")
        ),
    ],
    ids=str,
)
def test_an_adapter_chooses_its_extension_itself_and_takes_a_plain_name(
    arguments: dict[str, Any], error: type[Exception], words: str, adapter: tuple[Path, Tensor]
) -> None:
    with pytest.raises(error, match=words):
        ctxext.load(adapter[0], **arguments)


@pytest.mark.slow
def test_trained_embeddings_and_norms(plain: Path, tmp_path: Path) -> None:
    whole = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]
    config = LoraConfig(**CAUSAL, target_modules=ALL, modules_to_save=whole)
    model = trained(extended(base_of(plain)), config)
    expected = logits(model, tokens())
    ctxext.save(model, tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), tokens()), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_adapters(plain: Path, tmp_path: Path) -> None:
    model = trained(extended(base_of(plain)))
    model.add_adapter("second", lora(target_modules=["q_proj"], init_lora_weights="gaussian"))
    model.set_adapter("second")
    shake(model)
    stranger = tmp_path / "checkpoint-1"  # lies in the same folder, and is of another model
    trained(base_of(plain)).save_pretrained(stranger)
    before = {path.name: path.read_bytes() for path in stranger.iterdir()}
    ctxext.save(model, tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path / "second"), tokens()), logits(model, tokens()))
    model.set_adapter("default")
    first = ctxext.load(tmp_path)
    assert torch.equal(logits(first, tokens()), logits(model, tokens()))
    assert {path.name: path.read_bytes() for path in stranger.iterdir()} == before


@pytest.mark.slow
def test_one_of_two_adapters_saved_again_leaves_the_other_its_extension(plain: Path, tmp_path: Path) -> None:
    model = extended(trained(base_of(plain)))
    model.add_adapter("second", lora())
    model.save_pretrained(tmp_path)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path, selected_adapters=["second"])
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), expected)
    shutil.rmtree(tmp_path / "second")
    model.save_pretrained(tmp_path, True, ["second"])
    for place in (tmp_path, tmp_path / "second"):
        assert (place / EXTENSION_FILE).is_file()


@pytest.mark.slow
def test_an_adapter_with_a_name_is_loaded_from_the_folder_above(plain: Path, tmp_path: Path) -> None:
    """As PEFT takes it: not the one in that folder, nor a subfolder of the base."""
    model = trained(extended(base_of(plain)))
    model.add_adapter("second", lora())
    model.set_adapter("second")
    shake(model)
    model.save_pretrained(tmp_path)
    expected = logits(model, tokens())
    for base in ({}, {"base": plain}, {"base": extended(base_of(plain))}):
        assert torch.equal(logits(ctxext.load(tmp_path, subfolder="second", **base), tokens()), expected)


def test_hotswapping_is_refused(adapter: tuple[Path, Tensor], plain: Path) -> None:
    """PEFT then makes no layer, and so reads nothing of how LoRA is initialised."""
    model = trained(base_of(plain))
    before = logits(model, tokens())
    with pytest.raises(KeyError, match=re.escape(SENTENCE)):
        hotswap_adapter(model, str(adapter[0]), "default")
    assert torch.equal(logits(model, tokens()), before)


@pytest.mark.nightly
def test_saving_twice_keeps_the_true_initialisation(plain: Path, tmp_path: Path) -> None:
    config = LoraConfig(**CAUSAL, target_modules=ALL, init_lora_weights="gaussian")
    model = trained(extended(base_of(plain)), config)
    for _ in range(2):
        ctxext.save(model, tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] == SENTENCE
        assert ctxext.load(tmp_path).peft_config["default"].init_lora_weights == "gaussian"
    ctxext.save(ctxext.load(tmp_path), tmp_path / "again")
    assert ctxext.load(tmp_path / "again").peft_config["default"].init_lora_weights == "gaussian"


@pytest.mark.slow
@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_crash_while_marking(crash_at: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's own save writes in place: a half-written adapter is refused, whatever was there before.

    ctxext.save leaves what was there.
    """
    ctxext.save(trained(ctxext.patch(base_of(plain), "pi", factor=2)), tmp_path)
    before = contents(tmp_path)
    model = trained(extended(base_of(plain)))
    writes, write = [], adapters.write_whole

    def crashing(path: Path, text: str) -> None:
        writes.append(path.name)
        if len(writes) > crash_at:
            raise OSError("disk full")
        write(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(adapters, "write_whole", crashing)
        with pytest.raises(CheckpointError, match="disk full"):
            ctxext.save(model, tmp_path)
        assert contents(tmp_path) == before
        writes.clear()
        with pytest.raises(OSError, match="disk full"):
            model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"(without its extension|saving was interrupted).*ctxext\.save"):
        ctxext.load(tmp_path)
    ctxext.save(model, tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(plain)


@through_transformers
def test_adapters_of_transformers_itself(plain: Path, tmp_path: Path) -> None:
    model = base_of(plain)
    model.add_adapter(LoraConfig(target_modules=ALL))
    shake(model)
    ctxext.save(extended(model), tmp_path)
    with pytest.raises(KeyError, match=re.escape(SENTENCE)):
        base_of(plain).load_adapter(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model.eval(), tokens()))


def test_an_unextended_adapter_is_not_ours_to_save(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchStateError, match=r"This LlamaForCausalLM is not extended; save it with save_pretrained\."):
        ctxext.save(trained(base_of(plain)), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def patched_then_wrapped(base: Any) -> Any:
    return get_peft_model(extended(base), lora())


def patched_inside(base: Any) -> Any:
    wrapper = get_peft_model(base, lora())
    extended(wrapper.get_base_model())
    return wrapper


def patched_then_added(base: Any) -> Any:
    extended(base).add_adapter(lora())
    return base


def added_then_patched(base: Any) -> Any:
    base.add_adapter(lora())
    return extended(base)


ORDERS = {
    "patched, then wrapped": patched_then_wrapped,
    "wrapped, then patched": lambda base: extended(get_peft_model(base, lora())),
    "patched inside": patched_inside,
    "patched, then added": patched_then_added,
    "added, then patched": added_then_patched,
    "by the recipe": lambda base: attach_lora(extended(base), rank=4),
}


def check_kept(directory: Path, model: Any, plain: Path) -> None:
    """The adapter there brings its extension along, and no plain way of loading it succeeds."""
    for load in plainly(directory, plain):
        with pytest.raises((KeyError, ValueError), match=refusal(SENTENCE)):
            load()
    assert torch.equal(logits(ctxext.load(directory), tokens()), logits(model.eval(), tokens()))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=[through_transformers] * ("added" in order)) for order in ORDERS]
)
def test_however_it_was_put_together_and_saved(order: str, plain: Path, tmp_path: Path) -> None:
    model = ORDERS[order](base_of(plain))
    shake(model)
    model.eval().save_pretrained(tmp_path / "at once")
    check_kept(tmp_path / "at once", model, plain)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    copy.deepcopy(model).save_pretrained(tmp_path / "copied")
    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path / "pickled")
    for name in ("again", "given", "copied", "pickled"):
        with pytest.raises((KeyError, ValueError), match=refusal(SENTENCE)):
            PeftModel.from_pretrained(base_of(plain), tmp_path / name)
        assert torch.equal(logits(ctxext.load(tmp_path / name), tokens()), expected)


@pytest.mark.slow
def test_weights_gathered_by_an_engine(plain: Path, tmp_path: Path) -> None:
    """ZeRO-3 gathers weights itself: no state_dict is asked for between the last step and saving."""
    model = patched_then_wrapped(base_of(plain))
    weights = {f"base_model.model.{name}": weight for name, weight in model.get_base_model().named_parameters()}
    logits(model, tokens())
    model.save_pretrained(tmp_path, state_dict=weights)
    check_kept(tmp_path, model, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(**CAUSAL, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        PromptTuningConfig(**CAUSAL, num_virtual_tokens=4),
        peft.LoHaConfig(**CAUSAL, target_modules=ALL),
        peft.OFTConfig(**CAUSAL, target_modules=ALL, oft_block_size=4),
        peft.LoKrConfig(**CAUSAL, target_modules=ALL),
        peft.VeraConfig(**CAUSAL, target_modules=["q_proj"], r=2),
        peft.RandLoraConfig(**CAUSAL, target_modules=["q_proj"], r=2),
        peft.LNTuningConfig(**CAUSAL, target_modules=["input_layernorm"]),
        peft.AdaLoraConfig(**CAUSAL, init_r=4, target_r=2, total_step=50, tfinal=10, target_modules=["q_proj"]),
        LoraConfig(**CAUSAL, target_modules=["embed_tokens"]),
        LoraConfig(**CAUSAL, target_modules=["q_proj"], use_dora=True),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_kinds_saved_by_peft(config: Any, plain: Path, tmp_path: Path) -> None:
    model = trained(extended(base_of(plain)), config)
    # What only puts virtual tokens before the text does not save its extension by itself.
    save = ctxext.save if isinstance(config, PromptTuningConfig) else type(model).save_pretrained
    save(model, tmp_path)
    for load in plainly(tmp_path, plain)[:3]:
        with pytest.raises(KeyError, match=re.escape(SENTENCE)):
            load()
    loaded = ctxext.load(tmp_path)
    assert loaded.peft_config["default"].peft_type == config.peft_type
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


@pytest.mark.slow
def test_adapters_of_a_base_whose_config_its_class_refuses(tmp_path: Path) -> None:
    """PEFT reads that when it saves, to see whether the vocabulary has grown."""
    base = str(tmp_path / "base")
    ctxext.save(ctxext.patch(tiny("phi3"), "self_extend", factor=4, trained_length=TRAINED_LENGTH), base)
    model = trained(ctxext.load(base), LoraConfig(target_modules=["qkv_proj"]))
    for place in (tmp_path / "before any pass", tmp_path / "after one"):
        model.save_pretrained(place)
        assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] == base
        assert torch.equal(logits(ctxext.load(place), tokens()), logits(model, tokens()))


@pytest.mark.slow
def test_virtual_tokens_added_after_patch_to_a_wrapper_that_ctxext_knows(plain: Path, tmp_path: Path) -> None:
    model = extended(get_peft_model(base_of(plain), PromptTuningConfig(**CAUSAL, num_virtual_tokens=4)))
    model.add_adapter("second", PromptTuningConfig(**CAUSAL, num_virtual_tokens=4))
    model.set_adapter("second")
    model.eval().save_pretrained(tmp_path)
    for directory in (tmp_path, tmp_path / "second"):
        with pytest.raises(KeyError, match=re.escape(SENTENCE)):
            PeftModel.from_pretrained(base_of(plain), directory)
    assert torch.equal(logits(ctxext.load(tmp_path / "second"), tokens()), logits(model, tokens()))


@pytest.mark.nightly
def test_one_lora_config_for_several_models(plain: Path, tmp_path: Path) -> None:
    """Each model's adapter is saved as that model is: two extended differently, and a plain one."""
    config = lora()
    models = {"yarn": extended(base_of(plain)), "pi": ctxext.patch(base_of(plain), "pi", factor=2)}
    adapted = {name: trained(model, config) for name, model in (models | {"plain": base_of(plain)}).items()}
    for _ in range(2):
        for name, model in adapted.items():
            model.save_pretrained(tmp_path / name)
        for name in models:
            assert torch.equal(logits(ctxext.load(tmp_path / name), tokens()), logits(adapted[name], tokens()))
        loaded = PeftModel.from_pretrained(base_of(plain), tmp_path / "plain").eval()
        assert torch.equal(logits(loaded, tokens()), logits(adapted["plain"], tokens()))


def test_a_config_taken_from_an_extended_model(plain: Path, tmp_path: Path) -> None:
    """It belongs to the plain model that it is used for."""
    model = patched_then_wrapped(base_of(plain))
    logits(model, tokens())
    other = trained(base_of(plain), copy.deepcopy(model.peft_config["default"]))
    other.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_of(plain), tmp_path).eval()
    assert torch.equal(logits(loaded, tokens()), logits(other, tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_an_adapter_that_is_converted_while_it_is_saved(is_wrapped_first: bool, plain: Path, tmp_path: Path) -> None:
    """PEFT then saves a copy of its config: PiSSA, which changes the base's weights, becomes a LoRA of the base's."""
    base, config = base_of(plain), lora(init_lora_weights="pissa", r=2)
    model = extended(get_peft_model(base, config)) if is_wrapped_first else get_peft_model(extended(base), config)
    first, converted = str(tmp_path / "first"), tmp_path / "converted"
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(first)
    model.peft_config["default"].init_lora_weights = "pissa"
    shake(model)
    expected = logits(model.eval(), tokens())
    model.save_pretrained(converted, path_initial_model_for_weight_conversion=first)
    for load in plainly(converted, plain)[:3]:
        with pytest.raises(KeyError, match=re.escape(SENTENCE)):
            load()
    torch.testing.assert_close(logits(ctxext.load(converted), tokens()), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("config", [peft.LoHaConfig(r=2, target_modules=["q_proj"]), lora(r=4)], ids=["LoHa", "LoRA"])
@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_an_adapter_is_converted_without_the_extension(
    config: Any, is_wrapped_first: bool, plain: Path, tmp_path: Path
) -> None:
    """PEFT saves the converted one by a config of its own, which would load onto the plain base without a word."""
    base = base_of(plain)
    model = extended(trained(base, config)) if is_wrapped_first else trained(extended(base), config)
    expected = logits(model, tokens())
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(IncompatibleError, match=r"without the extension.*unpatch.*ctxext\.load\(path, method"):
            peft.save_as_lora(tmp_path / "converted", each, rank=8)
    assert not contents(tmp_path)
    peft.save_as_lora(tmp_path / "converted", ctxext.unpatch(model), rank=8)
    loaded = ctxext.load(tmp_path / "converted", **EXTENSION)
    torch.testing.assert_close(logits(loaded, tokens()), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_unpatched_it_is_saved_plain(plain: Path, tmp_path: Path) -> None:
    config = lora()
    model = trained(extended(base_of(plain)), config)
    base = model.get_base_model()
    logits(model, tokens())
    model.save_pretrained(tmp_path / "extended")
    assert model.peft_config["default"] is not config
    ctxext.unpatch(model)
    assert model.peft_config["default"] is config
    assert not base._state_dict_pre_hooks
    assert not base._forward_pre_hooks
    model.save_pretrained(tmp_path / "extended")  # over it: nothing of the extension stays behind
    loaded = PeftModel.from_pretrained(base_of(plain), tmp_path / "extended").eval()
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    with pytest.raises(CheckpointError, match="another adapter was saved over it"):
        ctxext.load(tmp_path / "extended")
    ctxext.patch(model, "pi", factor=2)
    model.save_pretrained(tmp_path / "other")
    assert ctxext.describe(ctxext.load(tmp_path / "other")).method == ctxext.method("pi", factor=2).to_dict()


def test_hooks_of_others_outlive_unpatch(plain: Path) -> None:
    base, seen = base_of(plain), []
    before = base.register_forward_pre_hook(lambda *_: seen.append("before"))
    extended(base)
    base.register_forward_pre_hook(lambda *_: seen.append("after"))
    before.remove()
    ctxext.unpatch(base)
    logits(base, tokens())
    assert seen == ["after"]


def test_an_adapter_that_was_deleted_does_not_come_back(plain: Path) -> None:
    model = trained(extended(base_of(plain)))
    model.add_adapter("second", lora())
    logits(model, tokens())
    model.delete_adapter("second")
    ctxext.unpatch(model)
    assert list(model.peft_config) == ["default"]


@pytest.mark.nightly
def test_compiled_whole(plain: Path) -> None:
    model = trained(extended(base_of(plain)))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(logits(compiled, tokens()), logits(model, tokens()), atol=1e-5)


@pytest.mark.slow
def test_patched_through_a_compiled_peft_model(plain: Path, tmp_path: Path) -> None:
    model = trained(base_of(plain))
    compiled = torch.compile(model, backend="eager")
    extended(compiled)
    compiled.save_pretrained(tmp_path / "adapter")
    check_kept(tmp_path / "adapter", model, plain)
    ctxext.unpatch(compiled)
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize("readme", [b"---\n: [\n---\n", "Über uns".encode("latin-1"), b"# A project\n"])
def test_a_readme_beside_the_folder_of_an_adapter_is_left_alone(
    readme: bytes, name: str, plain: Path, tmp_path: Path
) -> None:
    """The card of an adapter with a name lies above its folder; so may the page of a project."""
    (tmp_path / "README.md").write_bytes(readme)
    get_peft_model(extended(base_of(plain)), lora(), adapter_name=name).save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "README.md").read_bytes() == readme
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.base_model == str(plain)
