"""Layers that have an owner, next to those of transformers."""

from __future__ import annotations

import pytest
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, StaticLayer

from ctxext.caches.records import owned, plain_class

MAPPINGS = ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING")


@pytest.mark.skipif(not hasattr(cache_utils, MAPPINGS[0]), reason="this transformers registers no layer types")
@pytest.mark.parametrize("kind", [DynamicLayer, StaticLayer])
def test_new_caches_of_any_model_are_made_of_plain_layers(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers registers each class of layers that names its type, and makes new caches of the last one."""
    before = {name: dict(getattr(cache_utils, name)) for name in MAPPINGS}
    for name in MAPPINGS:
        monkeypatch.setattr(cache_utils, name, dict(before[name]))
    named = type("Named", (kind,), {"_layer_type": "named"})
    registered = {name: dict(getattr(cache_utils, name)) for name in MAPPINGS}
    assert registered != before
    made = owned(named)
    assert {name: getattr(cache_utils, name) for name in MAPPINGS} == registered
    assert made._layer_type == "named"  # type: ignore[attr-defined]
    assert plain_class(object.__new__(made)) is named
