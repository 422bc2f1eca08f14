"""Why a model has no positions that ctxext can extend, in words."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["why_absent"]


def why_absent(model: nn.Module) -> str:
    """The likeliest reason, read off the code of the model's class."""
    code = vars(sys.modules[type(model).__module__])
    buffers = [name for name, _ in model.named_buffers()] + [name for name, _ in model.named_parameters()]
    verbs = [*code, *(name for module in model.modules() for name in vars(type(module)))]
    if any("embed_positions" in name for name in buffers) and any(name.startswith("apply_rotary") for name in verbs):
        return (
            "it rotates by a sinusoid table that its own code computes once, and no field of its config (no "
            "rope_parameters) could make a reload compute another one"
        )
    owners = [name for name, value in code.items() if name.endswith("RotaryEmbedding") and "Vision" not in name]
    if any(hasattr(code[name], "compute_default_rope_parameters") for name in owners):
        return "its code knows rotary positions, but this checkpoint's config leaves them off"
    return "no rotary embedding of the form that transformers' own rope types use, and no ALiBi"
