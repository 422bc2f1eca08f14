"""PEFT: an adapter on a model with an encoding brings the encoding's weights along; without them it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import ctxext
from ctxext.checkpoints.adapters import ENCODING_FILE, EXTENSION_FILE
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import known_methods
from ctxext.methods.encoding import Encoding, EncodingMethod
from ctxext.training import ExtensionCallback
from ctxext.training.lora import attach_lora
from tests._checkpoints import rewrite
from tests._models import logits, tokens
from tests._peft import base_of, lora
from tests._products import crossed

ENCODINGS = sorted(name for name, kind in known_methods().items() if issubclass(kind, EncodingMethod))
SOME = ["t5_bias", "fox", "learned", "path"]
small = partial(lora, r=2, task_type=None, target_modules=["q_proj"], init_lora_weights=False)


def patched_then_wrapped(base: Any, method: str, **more: Any) -> Any:
    return get_peft_model(ctxext.patch(base, method, factor=4), small(**more)).eval()


def wrapped_then_patched(base: Any, method: str, **more: Any) -> Any:
    return ctxext.patch(get_peft_model(base, small(**more)), method, factor=4).eval()


def patched_inside(base: Any, method: str) -> Any:
    wrapper = get_peft_model(base, small())
    ctxext.patch(wrapper.get_base_model(), method, factor=4)
    return wrapper.eval()


def shaken(model: Any) -> Any:
    """The model with encodings that no other has."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Encoding):
                for weight in module.parameters():
                    weight.add_(0.1 * torch.rand_like(weight))
    return model


def test_there_are_encodings() -> None:
    assert set(SOME) < set(ENCODINGS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("order", "method"), crossed([patched_then_wrapped, wrapped_then_patched, patched_inside], list(ENCODINGS))
)
def test_the_encoding_travels_with_the_adapter(
    order: Callable[..., Any], method: str, plain: Path, tmp_path: Path
) -> None:
    model = shaken(order(base_of(plain), method))
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path)
    for _ in range(2):
        assert torch.equal(logits(ctxext.load(tmp_path), tokens()), expected)
    fresh = ctxext.patch(base_of(plain), method, factor=4)
    assert torch.equal(logits(ctxext.load(tmp_path, base=fresh), tokens()), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("method", SOME)
def test_an_adapter_without_its_encoding_is_refused(method: str, plain: Path, tmp_path: Path) -> None:
    model = shaken(patched_then_wrapped(base_of(plain), method))
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model, tokens())
    model.unload().save_pretrained(tmp_path / "base")
    encoding = tmp_path / "adapter" / ENCODING_FILE
    encoding.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=rf"without its {ENCODING_FILE}"):
        ctxext.load(tmp_path / "adapter")
    # As an earlier version saved it: right only where the base has the encoding already.
    rewrite(tmp_path / "adapter" / EXTENSION_FILE, lambda saved: saved.pop("encoding"))
    with pytest.raises(CheckpointError, match=r"saved without the weights of its encoding .* base="):
        ctxext.load(tmp_path / "adapter")
    loaded = ctxext.load(tmp_path / "adapter", base=tmp_path / "base")
    assert torch.equal(logits(loaded, tokens()), expected)


@pytest.mark.slow
def test_what_is_in_modules_to_save_is_not_saved_twice(plain: Path, tmp_path: Path) -> None:
    model = attach_lora(ctxext.patch(base_of(plain), "t5_bias", factor=4), rank=2).eval()
    model.save_pretrained(tmp_path)
    assert not (tmp_path / ENCODING_FILE).exists()
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert any("ctxext_encoding" in name for name in file.keys())  # noqa: SIM118
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))


@pytest.mark.nightly
def test_several_adapters_of_which_one_holds_the_encoding_itself(plain: Path, tmp_path: Path) -> None:
    model = patched_then_wrapped(base_of(plain), "learned", modules_to_save=["ctxext_encoding"])
    model.add_adapter("second", small())
    shaken(model).eval().save_pretrained(tmp_path)
    assert not (tmp_path / ENCODING_FILE).exists()
    for name, place in (("default", tmp_path), ("second", tmp_path / "second")):
        model.set_adapter(name)
        assert torch.equal(logits(ctxext.load(place), tokens()), logits(model, tokens()))


@pytest.mark.slow
def test_a_state_given_is_saved_by_the_names_of_the_plain_model(plain: Path, tmp_path: Path) -> None:
    model = shaken(patched_then_wrapped(base_of(plain), "fox"))
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))
    base = {name for name in ctxext.patch(base_of(plain), "fox", factor=4).state_dict() if "ctxext_encoding" in name}
    assert set(load_file(tmp_path / ENCODING_FILE)) == base


@pytest.mark.slow
def test_saved_over_an_adapter_with_an_encoding(plain: Path, tmp_path: Path) -> None:
    """Nothing of the first is taken for the second's."""
    patched_then_wrapped(base_of(plain), "fox").save_pretrained(tmp_path)
    model = get_peft_model(ctxext.patch(base_of(plain), "yarn", factor=4), small()).eval()
    model.save_pretrained(tmp_path)
    assert not (tmp_path / ENCODING_FILE).exists()
    assert torch.equal(logits(ctxext.load(tmp_path), tokens()), logits(model, tokens()))


@pytest.mark.nightly
def test_an_encoding_of_another_shape(plain: Path, tmp_path: Path) -> None:
    patched_then_wrapped(base_of(plain), "t5_bias").save_pretrained(tmp_path / "one")
    other = get_peft_model(ctxext.patch(base_of(plain), "t5_bias", factor=4, buckets=16), small())
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / ENCODING_FILE).replace(tmp_path / "one" / ENCODING_FILE)
    with pytest.raises(CheckpointError, match=rf"{ENCODING_FILE} does not fit"):
        ctxext.load(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["t5_bias", "fire"])  # fire has weights without dimensions
def test_trained_and_resumed_by_the_trainer(method: str, plain: Path, tmp_path: Path) -> None:
    """A checkpoint of the Trainer carries the encoding, and is resumed into it, or not at all."""

    def trainer(model: Any, steps: int) -> Trainer:
        arguments = TrainingArguments(tmp_path / "run", max_steps=steps, save_steps=1, use_cpu=True, report_to=[])
        rows = [{"input_ids": row, "labels": row} for row in tokens(20, 2)]
        return Trainer(model, arguments, train_dataset=rows, callbacks=[ExtensionCallback()])

    model = wrapped_then_patched(base_of(plain), method)  # whose encoding is trained, too
    trainer(model, 1).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    loaded = ctxext.load(checkpoint, is_trainable=True)
    assert torch.equal(logits(loaded.eval(), tokens()), logits(model.eval(), tokens()))
    trainer(loaded, 2).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(PatchStateError, match=r"other weights in its encoding.*ctxext\.load\("):
        trainer(wrapped_then_patched(base_of(plain), method), 2).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.nightly
def test_a_second_adapter_with_another_encoding(plain: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        patched_then_wrapped(base_of(plain), "fox").save_pretrained(tmp_path / str(seed))
    model = ctxext.load(tmp_path / "1")
    before = logits(model, tokens())
    with pytest.raises(CheckpointError, match=r"has other weights than this model, whose own"):
        ctxext.load(tmp_path / "2", base=model, adapter_name="second")
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model, tokens()), before)
    ctxext.load(tmp_path / "1", base=model, adapter_name="second")
    with pytest.raises(InvalidParameterError, match="has an adapter 'second' already"):
        ctxext.load(tmp_path / "1", base=model, adapter_name="second")


def test_weights_that_are_not_in_memory(plain: Path, tmp_path: Path) -> None:
    model = patched_then_wrapped(base_of(plain), "fox")
    for module in model.modules():
        if isinstance(module, Encoding):
            module.to("meta")
    with pytest.raises(IncompatibleError, match=r"modules_to_save=\['ctxext_encoding'\]"):
        model.save_pretrained(tmp_path)
