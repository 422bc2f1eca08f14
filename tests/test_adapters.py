"""PEFT: an adapter never loses the extension that it was trained with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import State, logits, tiny, tokens
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ctxext
from ctxext import _adapters
from ctxext._adapters import EXTENSION_FILE, SENTENCE
from ctxext.errors import CheckpointError, InvalidParameterError, PatchStateError, VerificationError

EXTENSION = {"method": "yarn", "factor": 4}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_of(directory: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(directory).eval()


def trained(model: Any, config: Any = None) -> Any:
    """The model with an adapter that changes its logits, as training would leave it."""
    torch.manual_seed(2)
    adapted = get_peft_model(model, config or LoraConfig(task_type="CAUSAL_LM", target_modules=ALL))
    shake(adapted)
    return adapted.eval()


def shake(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> tuple[Path, Tensor]:
    """An adapter saved with its extension, and the logits of its model."""
    model = trained(ctxext.patch(base_of(plain), **EXTENSION))
    ctxext.save(model, tmp_path / "adapter")
    return tmp_path / "adapter", logits(model, tokens())


def test_before_and_after_get_peft_model(plain: Path) -> None:
    before, after = trained(ctxext.patch(base_of(plain), **EXTENSION)), trained(base_of(plain))
    unextended = State.of(after, tokens())
    assert ctxext.patch(after, **EXTENSION) is after
    assert torch.equal(logits(before, tokens()), logits(after, tokens()))
    assert after.config.ctxext == before.config.ctxext
    ctxext.unpatch(after)
    assert unextended.difference(after) is None
    assert "save_pretrained" not in vars(after)


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
        lambda: AutoPeftModelForCausalLM.from_pretrained(directory),
        lambda: AutoModelForCausalLM.from_pretrained(directory),
        lambda: base_of(plain).load_adapter(directory),
        second,
    ]


def test_the_plain_way_fails_with_a_sentence(adapter: tuple[Path, Tensor], plain: Path) -> None:
    for load in plainly(adapter[0], plain):
        with pytest.raises(ValueError, match=SENTENCE):
            load()


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_kinds_of_adapters(config: Any, plain: Path, tmp_path: Path) -> None:
    model = trained(ctxext.patch(base_of(plain), **EXTENSION), config)
    ctxext.save(model, tmp_path)
    for load in plainly(tmp_path, plain)[:3]:
        with pytest.raises((KeyError, ValueError), match=SENTENCE):
            load()
    loaded = ctxext.load(tmp_path)
    assert loaded.peft_config["default"].peft_type == config.peft_type
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_an_adapter_saved_without_its_extension(plain: Path, tmp_path: Path) -> None:
    trained(ctxext.patch(base_of(plain), **EXTENSION)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is an adapter without {EXTENSION_FILE}: it was saved \(or copied\)"):
        ctxext.load(tmp_path)


def test_a_model_patched_as_an_adapted_one_saves_its_extension_by_itself(plain: Path, tmp_path: Path) -> None:
    model = ctxext.patch(trained(base_of(plain)), **EXTENSION)
    model.save_pretrained(tmp_path / "extended")
    assert torch.equal(logits(ctxext.load(tmp_path / "extended"), tokens()), logits(model, tokens()))
    ctxext.unpatch(model).save_pretrained(tmp_path / "extended")  # over it: nothing of the extension stays behind
    assert torch.equal(
        logits(PeftModel.from_pretrained(base_of(plain), tmp_path / "extended"), tokens()), logits(model, tokens())
    )
    with pytest.raises(CheckpointError):
        ctxext.load(tmp_path / "extended")


def test_another_adapter_saved_over_it(adapter: tuple[Path, Tensor], plain: Path) -> None:
    directory, _ = adapter
    trained(ctxext.patch(base_of(plain), "pi", factor=2)).save_pretrained(directory)
    with pytest.raises(CheckpointError, match=f"is not the one that {EXTENSION_FILE} was written for"):
        ctxext.load(directory)


def test_the_base_has_moved(adapter: tuple[Path, Tensor], plain: Path, tmp_path: Path) -> None:
    directory, expected = adapter
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


def test_a_directory_that_was_renamed(adapter: tuple[Path, Tensor], tmp_path: Path) -> None:
    directory, expected = adapter
    directory.rename(tmp_path / "renamed")
    assert torch.equal(logits(ctxext.load(tmp_path / "renamed"), tokens()), expected)


def test_bases_that_are_extended_themselves(adapter: tuple[Path, Tensor], plain: Path, tmp_path: Path) -> None:
    directory, expected = adapter
    ctxext.patch(base_of(plain), **EXTENSION).save_pretrained(tmp_path / "same")
    assert torch.equal(logits(ctxext.load(directory, base=tmp_path / "same"), tokens()), expected)
    ctxext.patch(base_of(plain), "pi", factor=4).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"was trained on 'yarn' .* is saved extended by 'pi' .* the right base"):
        ctxext.load(directory, base=tmp_path / "other")


def test_another_base_model(adapter: tuple[Path, Tensor], tmp_path: Path) -> None:
    tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path / "other")
    with pytest.raises(VerificationError, match=r"it is not the same base model\. Give the right one with base="):
        ctxext.load(adapter[0], base=tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"method": "yarn", "factor": 4}, CheckpointError),
        ({"factor": 4}, InvalidParameterError),
        ({"attention": "sdpa"}, InvalidParameterError),
    ],
    ids=str,
)
def test_an_adapter_chooses_its_extension_itself(
    arguments: dict[str, Any], error: type[Exception], adapter: tuple[Path, Tensor]
) -> None:
    with pytest.raises(error):
        ctxext.load(adapter[0], **arguments)


def test_merged_saved_and_loaded_by_stock_code(plain: Path, tmp_path: Path) -> None:
    model = trained(ctxext.patch(base_of(plain), **EXTENSION))
    merged = model.merge_and_unload()
    assert ctxext.describe(merged).method is not None
    expected = logits(merged, tokens())
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path).eval(), tokens()), expected)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), expected)


def test_trained_embeddings_and_norms(plain: Path, tmp_path: Path) -> None:
    whole = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=ALL, modules_to_save=whole)
    model = trained(ctxext.patch(base_of(plain), **EXTENSION), config)
    expected = logits(model, tokens())
    ctxext.save(model, tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), tokens()), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens()), expected, rtol=1e-4, atol=1e-4)


def test_two_adapters(plain: Path, tmp_path: Path) -> None:
    model = trained(ctxext.patch(base_of(plain), **EXTENSION))
    model.add_adapter(
        "second", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights="gaussian")
    )
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


def test_saving_twice_keeps_the_true_initialisation(plain: Path, tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=ALL, init_lora_weights="gaussian")
    model = trained(ctxext.patch(base_of(plain), **EXTENSION), config)
    for _ in range(2):
        ctxext.save(model, tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] == SENTENCE
        assert ctxext.load(tmp_path).peft_config["default"].init_lora_weights == "gaussian"
    ctxext.save(ctxext.load(tmp_path), tmp_path / "again")
    assert ctxext.load(tmp_path / "again").peft_config["default"].init_lora_weights == "gaussian"


@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_crash_while_marking(crash_at: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was on the disk before, a half-written adapter is refused, and saving again repairs it."""
    ctxext.save(trained(ctxext.patch(base_of(plain), "pi", factor=2)), tmp_path)
    model = trained(ctxext.patch(base_of(plain), **EXTENSION))
    writes, write = [], _adapters.write_whole

    def crashing(path: Path, text: str) -> None:
        writes.append(path.name)
        if len(writes) > crash_at:
            raise OSError("disk full")
        write(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(_adapters, "write_whole", crashing)
        with pytest.raises(OSError, match="disk full"):
            ctxext.save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"(without its extension|saving was interrupted).*ctxext\.save"):
        ctxext.load(tmp_path)
    ctxext.save(model, tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))
    assert PeftConfig.from_pretrained(tmp_path).base_model_name_or_path == str(plain)


def test_adapters_of_transformers_itself(plain: Path, tmp_path: Path) -> None:
    model = base_of(plain)
    model.add_adapter(LoraConfig(target_modules=ALL))
    shake(model)
    ctxext.save(ctxext.patch(model, **EXTENSION), tmp_path)
    with pytest.raises(ValueError, match=SENTENCE):
        base_of(plain).load_adapter(tmp_path)
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model.eval(), tokens()))


def test_pickled_adapters_are_refused(adapter: tuple[Path, Tensor]) -> None:
    directory, _ = adapter
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors; ctxext reads adapters"):
        ctxext.load(directory)


def test_an_unextended_adapter_is_not_ours_to_save(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchStateError, match=r"This LlamaForCausalLM is not extended; save it with save_pretrained\."):
        ctxext.save(trained(base_of(plain)), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
