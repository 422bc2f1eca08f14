"""Why a model has no positions that ctxext can extend, in words."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["learned_positions", "why_absent"]


def learned_positions(model: nn.Module) -> int | None:
    """How many positions a model has learned by heart, one vector each; None where it has no such table."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (last == "wpe" or "position" in last):
            said = getattr(model.config, "max_position_embeddings", None)
            # Some tables begin with rows that stand for no position (OPT's first two).
            return said if isinstance(said, int) and said <= module.num_embeddings else module.num_embeddings
    return None


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
    learned = learned_positions(model)
    if learned is not None:
        return (
            f"it has learned its {learned:,} positions by heart, a vector each, and no formula gives the next one: "
            f"take a model with rotary positions or ALiBi"
        )
    if any("Mamba" in type(module).__name__ for module in model.modules()):
        return (
            "it has none: its recurrent layers carry the order, so that nothing needs to be extended; what it makes of "
            "a longer text is a matter of training"
        )
    return "no rotary embedding of the form that transformers' own rope types use, and no ALiBi"
