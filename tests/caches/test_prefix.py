"""Caches of a text's beginning, of models whose layers do not all hold keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, cache_utils

import ctxext
from ctxext.caches.prefix import Mark, read_prefix, why_no_prefix, write_prefix
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError
from tests._models import logits, tiny, tokens


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(cache_utils, "DummyLayer"), reason="this transformers has no layers without keys")
@pytest.mark.parametrize("method", [None, "self_extend"])
def test_layers_that_read_the_keys_of_others_hold_no_state(method: str | None, tmp_path: Path) -> None:
    model, ids = tiny("gemma3n_text"), tokens(60)
    if method is not None:
        ctxext.patch(model, method, factor=4.0, trained_length=64)
    subject, cache = Subject.of(model), DynamicCache(config=model.config)
    assert any(isinstance(layer, cache_utils.DummyLayer) for layer in cache.layers)
    assert why_no_prefix(subject) is None
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        write_prefix(tmp_path / "text.safetensors", subject, cache, ids[0, :40].tolist())
        mark = Mark(cache, by_length=False)
        model(ids[:, 20:30], past_key_values=mark.cache)
        assert mark.back()
        read, kept = read_prefix(tmp_path / "text.safetensors", subject)
        assert kept == ids[0, :40].tolist()
        found = [model(ids[:, 40:], past_key_values=each).logits for each in (mark.cache, read)]
    right = logits(model, ids)[:, 40:]
    for each in found:
        torch.testing.assert_close(each, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("package", ["ctxext", "torch", "transformers"])
def test_a_file_belongs_to_the_versions_that_wrote_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that another version computed may differ in more than rounding: that is why the version was changed."""
    subject, ids = Subject.of(tiny()), tokens(20)
    cache = DynamicCache(config=subject.config)
    with torch.no_grad():
        subject.model(ids, past_key_values=cache)
    write_prefix(tmp_path / "text.safetensors", subject, cache, ids[0].tolist())
    read_prefix(tmp_path / "text.safetensors", subject)
    place = "ctxext.caches.prefix.__version__" if package == "ctxext" else f"{package}.__version__"
    monkeypatch.setattr(place, "0.0.1")
    with pytest.raises(CheckpointError, match=rf"text\.safetensors was written with {package} \d.*0\.0\.1"):
        read_prefix(tmp_path / "text.safetensors", subject)
