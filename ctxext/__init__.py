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

import importlib
import pathlib
import sys
import typing

from ctxext import errors, registry
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

__all__ = [
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
    "save",
    "training",
    "unpatch",
]

_VERBS = {
    "describe": "core.patching",
    "method": "methods.base",
    "patch": "core.patching",
    "patched": "core.patching",
    "unpatch": "core.patching",
    "export": "checkpoints.export",
    "load": "checkpoints.load",
    "save": "checkpoints.save",
}
# The core imports no room above it. These rooms fill its registries, and are imported before the first use of each.
registry.filled_by(
    "steps",
    tuple(
        f"{__name__}.{room}"
        for room in (
            "core.own_config",
            "core.replicas",
            "caches.continuous",
            "caches.generation",
            "caches.records",
            "attention.attend",
            "attention.heads",
            "models",
            "checkpoints.adapters",
            "checkpoints.limits",
        )
    ),
)
registry.filled_by("encodings", (f"{__name__}.laboratory.encodings",))
# What a program that only extends a model need not wait for.
_MEASURING = {"choose": "choosing.choose", "heads": "attention.heads"}
_PACKAGES = ("methods", "training")


def __getattr__(name: str) -> typing.Any:
    """Import what is asked for."""
    if name in _VERBS | _MEASURING:
        found = getattr(importlib.import_module(f"{__name__}.{(_VERBS | _MEASURING)[name]}"), name)
    elif name in _PACKAGES:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


def _checks_first() -> bool:
    """Return whether this process is the ``ctxext`` command, ``python -m ctxext`` or a program that says so itself."""
    name = sys.argv[0] if sys.argv else ""
    is_command = pathlib.PurePath(name).stem == "ctxext" or (name == "-m" and "ctxext" in sys.orig_argv)
    return is_command or getattr(sys.modules.get("__main__"), "CHECKS_FIRST", False)


# Every program gets ctxext's rope types registered with transformers by this import, before any checkpoint is read. The
# command and the recipe read none before they have imported what they need, and mistakes must not wait for torch.
if not _checks_first():
    for _name in _VERBS:
        __getattr__(_name)
