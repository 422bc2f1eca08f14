"""Read the positions of a GGUF file into the config that transformers makes of the rest of the file.

transformers reads the base of a GGUF file, for most architectures, and neither its scaling keys nor its tensors of
divisors: a Llama 3.1 would be loaded with plain positions. llama.cpp reads them as follows (ggml-org/llama.cpp,
src/llama-model.cpp and src/llama-graph.cpp): the type is ``linear`` where none is said, ``attn_factor`` multiplies cos
and sin, ``yarn`` multiplies them by 0.1 ln(factor) + 1 on top of that, and a tensor divides each frequency whatever
the type is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from ctxext.checkpoints.gguf_file import GGUFFile
from ctxext.core.scaling import heads_of, is_windowed, rope_dicts
from ctxext.errors import CheckpointError
from ctxext.files import JsonObject

DIVISORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# ``finetuned`` says that the weights were trained with the scaling, which changes no number.
READ = frozenset({"type", "factor", "attn_factor", "original_context_length", "finetuned"})
OF_YARN = frozenset({"yarn_beta_fast", "yarn_beta_slow"})


def read_positions(text: Any, file: GGUFFile) -> None:
    """Write the rotation that a GGUF file says into the text config that transformers made of the same file.

    Layers with a sliding window keep their frequencies where these are separate, as in llama.cpp.

    Raises:
        CheckpointError: the file says positions that no config of stock transformers can hold, or its numbers
            contradict each other.
    """
    reaching = [rope for layer_type, rope in rope_dicts(text) if not (layer_type and is_windowed(layer_type))]
    architecture = file.get("general.architecture")
    prefix = f"{architecture}.rope."
    if not reaching or any(rope.get("rope_type", "default") not in ("default", "linear") for rope in reaching):
        return  # no rotation, or one that transformers itself knows from the architecture
    head = heads_of(text)[2]
    share = reaching[0].get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
    width = int(head * share)
    dimensions = (_head(file, architecture, head), file.number(prefix + "dimension_count", width))
    if dimensions != (head, width):
        raise _unreadable(
            file,
            f"rotates {dimensions[1]} of the {dimensions[0]} dimensions of a head, which are read as {width} of {head}",
        )
    form = _scaling(file, prefix, width)
    for rope in reaching:
        rope["rope_theta"] = float(file.number(prefix + "freq_base", rope["rope_theta"]))
        if form:
            rope.update(form)
    if form.get("rope_type") == "longrope" and hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = form["original_max_position_embeddings"]


def _head(file: GGUFFile, architecture: str, head: int) -> int:
    """Return the dimensions of a head by the file, or ``head`` where the file leaves them open."""
    size, count = (file.get(f"{architecture}.{name}") for name in ("embedding_length", "attention.head_count"))
    if isinstance(size, int) and isinstance(count, int) and count > 0:
        head = size // count
    return int(file.number(f"{architecture}.attention.key_length", head))


def _scaling(file: GGUFFile, prefix: str, width: int) -> JsonObject:
    """Translate the scaling into the fields of transformers; empty if positions are plain."""
    scaling = prefix + "scaling."
    kind = file.get(scaling + "type", "linear")
    unread = [key for key in file.keys if key.startswith(scaling) and key.removeprefix(scaling) not in READ | OF_YARN]
    if unread:
        raise _unreadable(file, f"says {unread[0]}={file.get(unread[0])}")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise _unreadable(file, f"says {scaling}type={kind!r}")
    length = int(file.number(prefix.removesuffix("rope.") + "context_length", 0))
    original = int(file.number(scaling + "original_context_length", length))
    # As in llama.cpp: ``scale_linear`` is the older name of the factor, and a factor of 0 scales nothing.
    factor = float(file.number(scaling + "factor", file.number(prefix + "scale_linear", 1.0))) or 1.0
    scale = float(file.number(scaling + "attn_factor", 1.0))
    factor = 1.0 if kind == "none" else factor
    for name, value in (("factor", factor), ("attn_factor", scale)):
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{file.path} says {scaling}{name}={value}; it should be above 0.")
    named = {name: _divisors(file, name, width) for name in (DIVISORS, SHORT, LONG)}
    tables = {name: table for name, table in named.items() if table is not None and (table != 1).any()}
    if kind == "yarn":
        if tables:
            raise _unreadable(file, f"says {scaling}type=yarn and holds {next(iter(tables))}, which divides beside it")
        form: JsonObject = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": float(file.number(scaling + "yarn_beta_fast", 32.0)),
            "beta_slow": float(file.number(scaling + "yarn_beta_slow", 1.0)),
        }
        return form if scale == 1 else form | {"attention_factor": scale * (0.1 * math.log(factor) + 1)}
    if not tables and scale == 1:
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    if DIVISORS in tables and len(tables) > 1:
        raise _unreadable(file, f"holds {' and '.join(tables)}, which divide the same frequencies")
    # longrope is the one rope type of transformers that holds any divisors, and any factor on cos and sin.
    plain = tables.get(DIVISORS, np.ones(width // 2))
    short, long = (np.multiply(tables.get(name, plain), factor) for name in (SHORT, LONG))
    return {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": original,
        "attention_factor": scale,
    }


def _divisors(file: GGUFFile, name: str, width: int) -> Float[np.ndarray, " half"] | None:
    divisors = file.tensor(name)
    if divisors is None:
        return None
    if len(divisors) != width // 2 or not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise _unreadable(file, f"holds {name}, which should be {width // 2} numbers above 0 (found {len(divisors)})")
    return divisors.astype(np.float64)


def _unreadable(file: GGUFFile, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} {what}: transformers cannot be given these positions. Give the checkpoint that the file was "
        f"converted from."
    )
