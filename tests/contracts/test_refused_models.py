"""Models and arguments that ``patch`` refuses, each with its reason, and which are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from tests._models import RECENT, tiny, tokens
from tests.attention.test_both_ways import encoder
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

Row = tuple[str | Callable[[], PreTrainedModel], str, dict[str, Any], str]
"""A model or its type, methods, arguments of ``patch``, and what is said."""

recent = pytest.mark.skipif(not RECENT, reason="built for the newest transformers")
# Their full-attention layers do not rotate at all; what rotates sees only a window.
LOCAL_ONLY = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "llama4", "llama4_text")
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
LEARNED, NONE = "learned positions, one vector each for 64 tokens", "no positions at all, so nothing needs extending"
OWN_ATTENTION = {"window": 16, "trained_length": TRAINED_LENGTH}


def without_rope() -> PreTrainedModel:
    model = tiny()
    model.config.rope_parameters = None
    return model


def changed_buckets() -> PreTrainedModel:
    model = tiny("t5")
    model.config.relative_attention_max_distance = 512
    return model


def scaled() -> PreTrainedModel:
    """Of 512 tokens, as Llama 3.1 is scaled."""
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return tiny(max_position_embeddings=512, rope_parameters=llama3)


INCOMPATIBLE: list[Row] = [
    # No positions, or those of another kind.
    ("gpt2", "yarn", {}, rf"has {LEARNED} \(transformer\.wpe\.weight\)"),
    ("opt", "yarn", {}, rf"has {LEARNED} \(model\.decoder\.embed_positions\.weight\)"),
    ("gpt_bigcode", "yarn", {}, LEARNED),
    *((model_type, "yarn", {}, NONE) for model_type in ("jamba", "nemotron_h", "mamba")),
    *((model_type, "yarn", {}, "rotates by a sinusoid table") for model_type in ("gptj", "roformer")),
    ("gptj", "yarn", {}, "no positions that ctxext can extend"),
    ("t5", "yarn", {}, "32 buckets of relative distances"),
    ("pegasus_x", "yarn", {}, "sinusoids to its input .*, which its own code"),
    ("blt", "yarn", {}, "follow configs of their own"),
    ("bloom", "yarn", {}, "has ALiBi, which method 'yarn' cannot change"),
    (partial(tiny, "granitemoehybrid", position_embedding_type=None), "yarn", {}, "config switches them off"),
    (
        partial(tiny, "esm", position_embedding_type="rotary"),
        "yarn",
        {},
        r"it rotates by code of its own \(.*rotary_embeddings: EsmRotaryEmbedding\)",
    ),
    (
        changed_buckets,
        "stretch_buckets",
        {"trained_length": 64},
        r"buckets distances up to 128, but its config says .*=512",
    ),
    # Layers that rotate otherwise than others, or not at all.
    *(
        pytest.param(model_type, "yarn dynamic_ntk alibi", {}, "belong to its sliding-window layers only", marks=recent)
        for model_type in LOCAL_ONLY
    ),
    pytest.param("cohere_compass_text", "yarn", {}, "belong to its sliding-window layers only", marks=recent),
    ("smollm3", "alibi", {}, "some of its layers have no positions"),
    pytest.param("glm5_next", "yarn", {}, "the part that reads text does not rotate", marks=recent),
    (partial(tiny, "granite_swa", layer_rope_theta=[1e4, 5e5]), "yarn self_extend", {}, "differ from rope_theta"),
    (partial(tiny, "granite_swa", layer_rope_theta=[0, 1e4]), "yarn self_extend", {}, "its sliding-window layers only"),
    (partial(tiny, "granite_swa", layer_rope_theta=[0, 0]), "yarn self_extend", {}, "none of its layers rotates"),
    # Attention that ctxext cannot take over.
    ("doge", "alibi", {}, r"alibi.*doge: Its code computes with the attention mask"),
    ("doge", "self_extend", OWN_ATTENTION, r"computes with the attention mask \(mask.dtype\)"),
    ("qwen4_exp_text", "self_extend", OWN_ATTENTION, r"computes with the attention mask \(mask.dtype\)"),
    ("deepseek_v32", "self_extend", OWN_ATTENTION, r"attention mask \(mask\[...\]\), so more than positions"),
    ("falcon", "self_extend", OWN_ATTENTION, "does not go through transformers' attention interface"),
    ("llama4_text", "self_extend", OWN_ATTENTION, "belong to its sliding-window layers only"),
    ("bloom", "self_extend", OWN_ATTENTION, "has ALiBi, which method 'self_extend' cannot change"),
    # Windows.
    (partial(tiny, "mistral", sliding_window=16), "yarn", {}, r"sees only the last 16 tokens.*'lift'.*'keep'"),
    (partial(tiny, "mistral", sliding_window=16), "self_extend", OWN_ATTENTION, "sliding_window='lift'"),
    (partial(tiny, "cwm", **WINDOWS, sliding_window=100), "self_extend", OWN_ATTENTION, "wider"),
    ("gemma3_text", "yarn", {"sliding_window": "lift"}, "already see the whole text"),
    ("moshi", "yarn", {"sliding_window": "lift"}, "'sliding_window' expected int"),
    # Texts that are read both ways.
    *((model_type, "nope", {}, f"this {model_type} reads both ways") for model_type in ("eurobert", "modernbert")),
    (partial(tiny, is_causal=False), "nope", {}, "this llama reads both ways"),
    (partial(encoder, "mistral", sliding_window=16), "alibi", {"sliding_window": "keep"}, "a window to both sides"),
    pytest.param(
        lambda: tiny_model(tiny_config("moonshine")),
        "yarn dynamic_ntk alibi",
        {},
        "decoder of this moonshine are built from one and the same config",
        marks=recent,
    ),
    # Temperatures that would meet.
    ("deepseek_v3", "dynamic_yarn", {}, "temperature of 'dynamic_yarn' follows the length"),
    *(
        (model_type, method, {"scaling": "extend"} | more, "both together would sharpen twice")
        for model_type in ("ministral3", "mistral4")
        for method, more in (("self_extend", {"temperature": "logn"}), ("dynamic_yarn", {}))
    ),
]
HALVES = {"both_ways": "halves", "trained_length": TRAINED_LENGTH}
INVALID: list[Row] = [
    ("llama", "yarn", {"factor": None}, "needs to know how far to reach"),
    *(
        ("llama", "yarn", extent, r"(factor|target_length) must be at most 1,000,000")
        for extent in ({"factor": 1e308}, {"factor": 1e9}, {"factor": None, "target_length": 10**30})
    ),
    ("llama", "longrope", {"short_factor": [1, 2], "long_factor": [1, 2]}, "the length of long_factor must be 16"),
    ("llama", "self_extend", {"factor": 2, "window": 100}, "window must be from 1 to 63 tokens"),
    ("llama", "string", {"factor": 2, "local": 5}, "reaches 123 tokens, found a target of 128"),
    (partial(tiny, "mistral", sliding_window=16), "yarn", {"sliding_window": "maybe"}, "'keep' or 'lift'"),
    # A factor of 1e6 is in range, and a table of so many rows would fill the memory.
    ("llama", "learned", {"factor": 1e6}, "at most 16,777,216 of them"),
    ("gpt2", "pi tile", {"factor": 1e6}, "at most 16,777,216 of them"),
    (partial(tiny, max_position_embeddings=10**30), "pi", {}, "The trained length that the config names must be at"),
    *((model_type, "alibi", HALVES, "is for encoders") for model_type in ("llama", "mpt")),
    (
        partial(encoder, "eurobert", hidden_size=96, num_attention_heads=3, num_key_value_heads=3),
        "alibi",
        HALVES,
        "'symmetric' for 3 heads",
    ),
    # Scaled checkpoints, of which the window is never shrunk.
    (scaled, "yarn", {"factor": 16, "scaling": "keep"}, "scaling must be 'extend' or 'replace'"),
    (scaled, "yarn", {"factor": 16, "scaling": "replace", "trained_length": 128}, "contradicts the config"),
    (scaled, "yarn", {"scaling": "replace"}, "below the 512 that this checkpoint reads already"),
    (scaled, "yarn", {"factor": 2, "scaling": "extend", "trained_length": 128}, "below the 512 that this checkpoint"),
    ("llama", "yarn", {"scaling": "extend"}, "are not scaled"),
]
PATCHED_OR_CHANGED: list[Row] = [
    (without_rope, "pi", {}, r"rope_parameters=None.*Load the model again"),
]
EVERY = {IncompatibleError: INCOMPATIBLE, InvalidParameterError: INVALID, PatchStateError: PATCHED_OR_CHANGED}


def rows() -> Any:
    for error, each in EVERY.items():
        for row in each:
            values, marks = (row.values, row.marks) if hasattr(row, "values") else (row, ())
            name = values[0] if isinstance(values[0], str) else getattr(values[0], "__name__", "built")
            yield pytest.param(error, *values, marks=marks, id=f"{name}, {values[1]}: {values[3][:40]}")


@pytest.mark.parametrize(("error", "model", "methods", "arguments", "said"), rows())
def test_it_is_refused_by_name_and_stays_as_it_was(
    error: type[Exception], model: Any, methods: str, arguments: dict[str, Any], said: str
) -> None:
    model = tiny(model) if isinstance(model, str) else model()
    before = State.of(model, tokens(40))
    for method in methods.split():
        with pytest.raises(error, match=said):
            ctxext.patch(model, method, **{"factor": 4.0} | arguments)
    assert before.difference(model) is None
    assert ctxext.describe(model).method is None
