"""GGUF files that scale their positions: every loader gives the model that llama.cpp runs, or refuses by name."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ctxext
from ctxext.checkpoints.export import export
from ctxext.checkpoints.gguf_file import GGUFFile
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, PatchStateError
from ctxext.measuring.checkpoint import load_checkpoint
from tests._checkpoints import SHAPE, TRAINED
from tests._gguf import HALF, PLAIN, scaled_by, write_gguf

YARN = scaled_by("yarn", 4.0, original_max_position_embeddings=32)
DIVISORS = np.linspace(1, 8, HALF).astype(np.float32)


def scaling(**keys: Any) -> dict[str, Any]:
    return {f"rope__scaling__{name}": value for name, value in keys.items()}


# What a file says, and the frequencies and the scale of cos and sin that llama.cpp computes from it, in float64.
FILES: dict[str, tuple[dict[str, Any], np.ndarray, float]] = {
    "divisors": ({"rope_freqs": DIVISORS}, PLAIN / DIVISORS, 1.0),
    "divisors of one": ({"rope_freqs": np.ones(HALF, dtype=np.float32)}, PLAIN, 1.0),
    "divisors and a scale": ({"rope_freqs": DIVISORS, **scaling(attn_factor=1.25)}, PLAIN / DIVISORS, 1.25),
    "divisors and a factor": ({"rope_freqs": DIVISORS, **scaling(type="linear", factor=2.0)}, PLAIN / DIVISORS / 2, 1),
    "linear": (scaling(type="linear", factor=4.0), PLAIN / 4, 1.0),
    "linear, as older files say it": ({"rope__scale_linear": 4.0}, PLAIN / 4, 1.0),
    "a factor without a type": (scaling(factor=4.0), PLAIN / 4, 1.0),
    "a factor that is switched off": (scaling(type="none", factor=4.0), PLAIN, 1.0),
    "yarn": (scaling(type="yarn", factor=4.0, original_context_length=32), YARN, 0.1 * math.log(4) + 1),
    "yarn with a scale": (
        scaling(type="yarn", factor=4.0, original_context_length=32, attn_factor=0.5),
        YARN, 0.5 * (0.1 * math.log(4) + 1),
    ),
    "another base": ({"rope__freq_base": 500000.0}, 500000.0 ** (-np.arange(HALF) / HALF), 1.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def rotation(model: nn.Module) -> tuple[np.ndarray, float]:
    """What the rotary module of a Llama does: its frequencies, and its scale by running it at position 0."""
    inner = Subject.of(model).model.model.rotary_emb
    cos, _ = inner(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.long))
    return inner.inv_freq.double().numpy(), cos.flatten()[0].item()


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_loader_gives_the_positions_in_the_file(name: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    keys, inv_freq, scale = FILES[name]
    file = write_gguf(model, tmp_path / "tiny.gguf", **keys)
    found = rotation(load_checkpoint(str(file), device="cpu", dtype="fp32").model)
    np.testing.assert_allclose(found[0], inv_freq, rtol=1e-6)
    assert found[1] == pytest.approx(scale, rel=1e-6)
    is_plain = np.array_equal(inv_freq, PLAIN) or "base" in name
    with pytest.raises(CheckpointError, match="carries no extension to restore") as refusal:
        ctxext.load(file)
    # Stock transformers reads nothing of a file's scaling, so nobody is sent there with one.
    assert ("AutoModelForCausalLM" in str(refusal.value)) == is_plain
    assert ("scaling='extend'" in str(refusal.value)) != is_plain
    if not is_plain:
        with pytest.raises(PatchStateError, match="already extended"):
            ctxext.load(file, "pi", factor=2)
    given: dict[str, Any] = {} if is_plain else {"trained_length": TRAINED, "scaling": "extend"}
    extended = rotation(ctxext.load(file, "pi", factor=2, **given))
    np.testing.assert_allclose(extended[0], inv_freq / 2, rtol=1e-6)
    assert extended[1] == pytest.approx(scale, rel=1e-6)


def test_two_sets_of_divisors(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """As Phi-3's: one for texts up to the original length, another for longer ones."""
    keys = {"rope_factors_short.weight": np.ones(HALF, dtype=np.float32) * 2, "rope_factors_long.weight": DIVISORS}
    file = write_gguf(
        model, tmp_path / "tiny.gguf", tensors=keys, **scaling(original_context_length=32, attn_factor=1.2)
    )
    rotary = load_checkpoint(str(file), device="cpu", dtype="fp32").model.model.rotary_emb
    for length, divisors in ((32, 2.0), (40, DIVISORS)):
        cos, _ = rotary(torch.zeros(1, length, 4), torch.arange(length)[None])
        expected = 1.2 * np.cos(np.outer(np.arange(length), PLAIN / divisors))
        np.testing.assert_allclose(cos[0, :, :HALF].numpy(), expected, atol=1e-5)


@pytest.mark.slow
def test_a_copy_that_export_wrote_is_the_extended_model(model: LlamaForCausalLM, tmp_path: Path) -> None:
    plain = write_gguf(model, tmp_path / "plain.gguf")
    export(plain, to="llama.cpp", method="yarn", factor=4.0, gguf=(plain, tmp_path / "long.gguf"))
    tokens = torch.arange(100)[None]
    with torch.no_grad():
        found = load_checkpoint(str(tmp_path / "long.gguf"), device="cpu", dtype="fp32").model(tokens).logits
        expected = ctxext.load(plain, "yarn", factor=4.0)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_freqs": np.ones(HALF - 1, dtype=np.float32)}, r"rope_freqs\.weight, which should be 8 numbers"),
        ({"rope_freqs": np.zeros(HALF, dtype=np.float32)}, r"rope_freqs\.weight, which should be 8 numbers above 0"),
        ({"rope_freqs": DIVISORS} | scaling(type="yarn", factor=4.0), "divides beside it"),
        (scaling(type="su", factor=4.0), r"llama\.rope\.scaling\.type='su'"),
        (scaling(alpha=1000.0), r"llama\.rope\.scaling\.alpha=1000"),
        (scaling(type="yarn", factor=4.0, yarn_log_multiplier=0.1), r"yarn_log_multiplier=0\.1"),
        (scaling(type="linear", factor=-2.0), r"factor=-2\.0; it should be above 0"),
        ({"rope__dimension_count": 8, "attention__key_length": 16}, "rotates 8 of the 16 dimensions of a head"),
    ],
)
def test_positions_that_no_config_holds_are_refused_everywhere(
    keys: dict[str, Any], message: str, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    file = write_gguf(model, tmp_path / "tiny.gguf", **keys)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(file), device="cpu")
    with pytest.raises(CheckpointError, match=message):
        ctxext.load(file, "pi", factor=2)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(file.parent, gguf_file=file.name)


def test_threads_that_load_at_a_time_leave_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    """Else a file that lies there later would be taken for the one that was read before."""
    path, entered = write_gguf(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "model.gguf"), threading.Event()
    before = gguf.GGUFReader, gguf.get_tensor_name_map

    def load() -> None:
        with GGUFFile(path).read_by_transformers():
            entered.set()
            left.wait(5)

    left, other = threading.Event(), threading.Thread(target=load)
    with GGUFFile(path).read_by_transformers():
        other.start()
        entered.wait(0.5)
    left.set()
    other.join()
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
