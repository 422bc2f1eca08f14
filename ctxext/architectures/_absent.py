"""Why a model has no positions that ctxext can extend, in words."""

from __future__ import annotations

import inspect
import re
import sys

from torch import nn

__all__ = ["why_absent"]

TABLE = re.compile(r"pos|wpe")
BUCKETS = re.compile(r"relative_attention_bias|rel_pos_bias")
SOME_POSITION = re.compile(
    r"rotary|alibi|sinus|wpe|relative|rel_|position_?(bias|emb|enc)|embed_pos|pos_?(emb|enc)", re.I
)


def why_absent(model: nn.Module) -> str:
    """The likeliest reason, read off the model's modules and the code of their classes."""
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
    return (
        _table(model)
        or _none_at_all(model)
        or ("no rotary embedding of the form that transformers' own rope types use, and no ALiBi")
    )


def _table(model: nn.Module) -> str | None:
    """What is said of a table with a row for each position, or for each kind of distance."""
    embeddings = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Embedding)]
    for path, module in reversed(embeddings):  # of an encoder-decoder, the decoder's
        name, rows = path.rpartition(".")[2], module.num_embeddings - int(getattr(module, "offset", 0))
        if BUCKETS.search(name):
            return (
                f"it has {rows} buckets of relative distances ({path}); all distances beyond the last bucket's share "
                f"that one, whatever the length"
            )
        if TABLE.search(name) and "Sinusoid" in type(module).__name__:
            return f"it adds sinusoids to its input, from a table of {rows} tokens ({path})"
        if TABLE.search(name):
            return (
                f"it has learned positions, one vector each for {rows} tokens ({path}), and no method here makes "
                f"more of those"
            )
    return None


def _none_at_all(model: nn.Module) -> str | None:
    """What is said of a model whose order of tokens comes from recurrence and the causal mask alone."""
    classes = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    lines = [line for kind in classes for line in inspect.getsource(kind).splitlines()]
    if any(SOME_POSITION.search(line) for line in lines if not line.lstrip().startswith("@")):  # decorators only offer
        return None
    return "it has no positions at all, so nothing needs extending: it reads as far as memory and its training carry"
