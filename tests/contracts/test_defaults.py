"""What a program sets for tensors of its own, a default device or dtype, changes nothing in what ctxext computes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ctxext
from ctxext.kernels import Layout
from ctxext.kernels.flash import token_indices
from ctxext.methods import METHODS, RopeMethod, known_methods
from ctxext.spec import RopeSpec
from tests._models import FOR_LLAMA, logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

SPEC = RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    """``torch.set_default_device``: "meta" stands in for a GPU, since what is made there cannot be read either."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """``torch.set_default_dtype``, as many training programs have it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "default device meta": lambda: default_device("meta"),
    "inside torch.device": lambda: torch.device("meta"),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
}
KINDS = [
    *(("llama", name) for name in FOR_LLAMA),
    ("gemma3_text", "yarn"),
    *((name, method) for name in ("bloom", "mpt", "falcon") for method in ("pi", "alibi")),
]


def patched(kind: str, method: str, around: Callable[[], Any], *, runs: bool) -> tuple[Any, Tensor, Tensor]:
    """Its description inside the surroundings, its logits beyond the window, and those within it after unpatch.

    It also ``runs`` inside them, where they are such that a stock model does.
    """
    model = tiny(kind, **({"alibi": True, "new_decoder_architecture": False} if kind == "falcon" else {}))
    chosen = known_methods()[method].example(SPEC)
    with around():
        ctxext.patch(model, chosen, trained_length=TRAINED_LENGTH)
        said = ctxext.describe(model)
    with torch.no_grad(), around() if runs else contextlib.nullcontext():
        long = model(tokens(100), use_cache=False).logits
    with around():
        ctxext.unpatch(model)
    return said, long, logits(model, tokens(50))


@pytest.mark.slow
@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize(("kind", "method"), KINDS, ids=["-".join(pair) for pair in KINDS])
def test_patch_describe_and_unpatch(kind: str, method: str, name: str) -> None:
    said, long, plain = patched(kind, method, SURROUNDINGS[name], runs="dtype" in name)
    usual, expected, unextended = patched(kind, method, contextlib.nullcontext, runs=True)
    assert said == usual
    assert torch.equal(long, expected)
    assert torch.equal(plain, unextended)


@pytest.mark.slow
@pytest.mark.parametrize("around", [SURROUNDINGS[name] for name in SURROUNDINGS if "dtype" in name])
def test_load(around: Callable[[], Any], tmp_path: Path) -> None:
    """A default device of "meta" is nothing to load under: transformers itself makes its buffers there."""
    plain = tiny()
    plain.save_pretrained(tmp_path / "plain")
    ctxext.patch(plain, "yarn", factor=4.0).save_pretrained(tmp_path / "long")
    loaded = []
    for place, arguments in (("plain", {"method": "yarn", "factor": 4.0}), ("long", {})):
        with around():
            loaded.append(ctxext.load(tmp_path / place, device_map="cpu", dtype=torch.float32, **arguments))
    for model in loaded:
        assert torch.equal(logits(model.eval(), tokens(100)), logits(plain, tokens(100)))


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("method", [m for m in METHODS.values() if issubclass(m, RopeMethod)], ids=lambda m: m.name)
def test_frequencies_are_float64_numbers_on_the_cpu(method: type[RopeMethod], around: Callable[[], Any]) -> None:
    usual = method.example(SPEC).frequencies(SPEC, 256)
    with around():
        found = method.example(SPEC).frequencies(SPEC, 256)
    assert found.inv_freq.dtype == torch.float64
    assert torch.equal(found.inv_freq, usual.inv_freq)
    assert found.attention_scale == usual.attention_scale


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_layouts_of_packed_documents(around: Callable[[], Any]) -> None:
    usual = Layout.packed([3, 1, 4])
    with around():
        found = Layout.packed([3, 1, 4], device="cpu")
        indices = token_indices(found)
    assert torch.equal(found.query_positions, usual.query_positions)
    assert [x.tolist() if isinstance(x, Tensor) else x for x in indices] == [
        x.tolist() if isinstance(x, Tensor) else x for x in token_indices(usual)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        *itertools.product(["llama", "deepseek_v3", "gpt_neox"], ["yarn", "dynamic_ntk"]),
        *itertools.product(["llama", "gpt_neox"], ["alibi"]),
    ],
)
def test_a_model_patched_without_memory_rotates_once_it_has_some(model_type: str, method: str) -> None:
    """Frequencies are in no checkpoint: after ``to_empty`` nothing else would fill them, and nothing would say so."""
    extension = {"method": method, "factor": 4.0, "trained_length": TRAINED_LENGTH}
    filled = ctxext.patch(tiny(model_type), **extension)
    with torch.device("meta"):
        empty = type(filled)(tiny(model_type).config)
    ctxext.patch(empty, **extension).to_empty(device="cpu").load_state_dict(filled.state_dict())
    long = tokens(2 * TRAINED_LENGTH)
    assert torch.equal(logits(filled, long), logits(empty.eval(), long))
    assert torch.equal(logits(ctxext.unpatch(filled), tokens()), logits(ctxext.unpatch(empty), tokens()))
    assert torch.equal(logits(ctxext.patch(filled, **extension), long), logits(ctxext.patch(empty, **extension), long))
