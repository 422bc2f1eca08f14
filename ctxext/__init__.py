"""Give an existing Hugging Face checkpoint a longer context, in place and in one line.

```python
import ctxext
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
ctxext.patch(model, method="yarn", factor=2, trained_length=131072)  # in place; ctxext.methods() lists the methods
print(ctxext.describe(model))
model.save_pretrained("llama-2x")
```
"""

import functools
import importlib
import typing

from ctxext import errors, registry, rope_types
from ctxext.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from ctxext import training
    from ctxext.attention.heads import heads
    from ctxext.checkpoints.export import export
    from ctxext.checkpoints.load import load
    from ctxext.checkpoints.save import save
    from ctxext.choosing.choose import choose
    from ctxext.core.patching import describe, patch, patched, unpatch
    from ctxext.methods import package as methods
    from ctxext.methods.base import method
    from ctxext.serving.ask import ask, read

__all__ = [
    "ask",
    "choose",
    "describe",
    "errors",
    "export",
    "heads",
    "load",
    "method",
    "methods",
    "patch",
    "patched",
    "read",
    "save",
    "training",
    "unpatch",
]

_PLACES = {
    "ask": "serving.ask",
    "choose": "choosing.choose",
    "describe": "core.patching",
    "export": "checkpoints.export",
    "heads": "attention.heads",
    "load": "checkpoints.load",
    "method": "methods.base",
    "patch": "core.patching",
    "patched": "core.patching",
    "read": "serving.ask",
    "save": "checkpoints.save",
    "unpatch": "core.patching",
}
# The core imports no room above it. These rooms fill its registries, and are imported before the first use of each.
registry.FILLED_BY |= {
    "steps": (
        "core.override",
        "caches.continuous",
        "caches.guards",
        "models.drafts",
        "models.own_config",
        "models.refusals",
        "models.sides",
        "models.temperature",
        "checkpoints.adapters",
        "checkpoints.limits",
    ),
    "steps of retrieval_heads": ("attention.heads",),
    "steps of dynamic methods": ("caches.generation",),
    "explanations": ("models.unknown",),
    "encodings": ("laboratory.encodings",),
}
_PACKAGES = ("methods", "training")


def __getattr__(name: str) -> typing.Any:
    """Import a verb or a package at its first use."""
    if name in _PLACES:
        found = _imported(_PLACES[name], name)
    elif name in _PACKAGES:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


def _imported(module: str, name: str) -> typing.Any:
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _rope_type(function: str, *arguments: typing.Any, **more: typing.Any) -> typing.Any:
    """Call a function that computes a rope type of ctxext; only a model of such a type needs its module."""
    return _imported("rotary.stored_form", function)(*arguments, **more)


# Before any checkpoint is read. Partial functions of a module can be pickled with a model that keeps one.
rope_types.RopeTypes(
    {
        rope_types.ROPE_TYPE: functools.partial(_rope_type, "initial_frequencies"),
        rope_types.UNROTATED_TYPE: functools.partial(_rope_type, "no_rotation"),
    }
).register()
