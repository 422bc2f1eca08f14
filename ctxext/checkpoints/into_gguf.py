"""Write an extension into a copy of a GGUF file, for llama.cpp: any frequencies that do not change with the text."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext.checkpoints.gguf_file import SCALING_TENSORS, GGUFFile
from ctxext.core.subject import text_of
from ctxext.errors import CheckpointError
from ctxext.files import JsonObject, Progress
from ctxext.methods.formulas import NEVER
from ctxext.runtimes.base import ExtensionInConfig
from ctxext.runtimes.llama_cpp import DIVISORS, holds_divisors, is_scaling, keys_of

# What llama.cpp takes where a file does not say it.
USUAL_BASE = 10000.0
# Of the base, written in float32; and of divisors that two programs computed, in float32 at the worst.
SAME_BASE, SAME_DIVISORS = 1e-6, 1e-4


def write_into_gguf(
    extended: ExtensionInConfig,
    plain: Any,
    source: Path,
    out: Path,
    *,
    architecture: str,
    progress: Progress | None = None,
) -> None:
    """Write a copy of a GGUF file that holds an extension.

    The file may have been converted from the original checkpoint or from the extended one; whatever scaling it holds
    is replaced. Weights, tokenizer and all else are copied as they are.

    Args:
        plain: the config before it, or the same one where nothing says what was before.

    Raises:
        CheckpointError: the file is not GGUF, or of another model, or ``out`` is in the way or cannot be written.
    """
    file = GGUFFile(source)
    before = text_of(plain)
    base = float(file.number(f"{architecture}.rope.freq_base", USUAL_BASE))
    divisors = _divisors(extended.text, base, extended.target_length)
    _refuse_other_model(file, architecture, extended, before, rotary_dim=2 * len(divisors))
    _refuse_other_scaling(file, [divisors, _divisors(before, base, extended.trained_length)])
    tensor = (DIVISORS, divisors) if holds_divisors(extended) else None
    scaling = [name for name in file.tensors if name.startswith(SCALING_TENSORS)]
    if tensor is None and scaling:  # they would act on top of the keys
        raise CheckpointError(
            f"{file.path} holds {scaling[0]}, which scales positions beside the keys of {extended.method}. Give the "
            f"GGUF file of a checkpoint whose positions are plain."
        )
    file.copy(out, keys=keys_of(extended, architecture), drop=is_scaling, tensor=tensor, progress=progress)


def _divisors(text: Any, base: float, length: int) -> Float[np.ndarray, " half"]:
    """Compute what divides each power of ``base`` to give the frequencies of plain transformers for a config.

    Both sides are rounded as transformers rounds, so that what an extension leaves alone is divided by 1 exactly.
    """
    rope = dict(text.rope_parameters)
    unscaled = {"rope_type": "linear", "factor": 1.0}
    plain = _frequencies(text, rope | unscaled | {"rope_theta": base}, length)
    scaled = _frequencies(text, rope | unscaled if rope["rope_type"] == "default" else rope, length)
    with np.errstate(divide="ignore"):  # what does not turn may have become 0
        divisors: np.ndarray = np.minimum(plain / scaled, NEVER).astype(np.float32)
    return divisors


def _frequencies(text: Any, rope: JsonObject, length: int) -> Float[np.ndarray, " half"]:
    """Compute the frequencies of plain transformers for a text of ``length`` tokens, in float64."""
    config = copy.deepcopy(text)
    config.rope_parameters = rope
    inv_freq: np.ndarray = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None, seq_len=length)[0].double().numpy()
    return inv_freq


def _refuse_other_model(
    file: GGUFFile, architecture: str, extended: ExtensionInConfig, before: Any, rotary_dim: int
) -> None:
    """Refuse a file that is not a whole model, or whose numbers differ from the checkpoint's."""
    text = extended.text
    numbers = {
        "block_count": [text.num_hidden_layers],
        "embedding_length": [text.hidden_size],
        "attention.head_count": [text.num_attention_heads],
        "rope.dimension_count": [rotary_dim],
        "rope.freq_base": [float(option.rope_parameters["rope_theta"]) for option in (before, text)],
        "context_length": [option.max_position_embeddings for option in (before, text)]
        + [extended.trained_length, extended.target_length],
    }
    expected = {"general.architecture": [architecture]} | {
        f"{architecture}.{name}": option for name, option in numbers.items()
    }
    for key, options in expected.items():
        value = file.get(key)
        if value is None and key.endswith((".rope.dimension_count", ".rope.freq_base")):  # which may be left out
            continue
        if not any(value == option or _is_close(value, option) for option in options):
            right = " or ".join(
                dict.fromkeys(f"{option:g}" if isinstance(option, float) else str(option) for option in options)
            )
            raise CheckpointError(
                f"{file.path} is of another model than this {text.model_type}: it says {key}={value}, and by the "
                f"checkpoint's config it is {right}. Give the GGUF file that was converted from this checkpoint."
            )


def _is_close(value: Any, wanted: Any) -> bool:
    return isinstance(wanted, float) and isinstance(value, float) and math.isclose(value, wanted, rel_tol=SAME_BASE)


def _refuse_other_scaling(file: GGUFFile, known: list[Float[np.ndarray, " half"]]) -> None:
    """Refuse a file whose divisors are neither the checkpoint's before the extension nor after it."""
    divisors = file.tensor(DIVISORS)
    if divisors is None:
        return
    if not any(
        len(divisors) == len(expected) and np.allclose(divisors, expected, rtol=SAME_DIVISORS) for expected in known
    ):
        raise CheckpointError(
            f"{file.path} holds {DIVISORS} with {len(divisors)} divisors, {_few(divisors)}, and by the "
            f"checkpoint's config they are {_few(known[-1])}: its weights were trained with other positions. Give the "
            f"checkpoint that the file was converted from."
        )


def _few(numbers: Float[np.ndarray, " n"]) -> str:
    return f"from {numbers[0]:.6g} to {numbers[-1]:.6g}"
