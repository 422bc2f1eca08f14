"""Models and arguments that ``patch`` refuses, each with its reason, and which are left as they were."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedModel

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError, UnknownNameError
from ctxext.laboratory.encodings import ENCODINGS
from ctxext.methods.yarn import YaRN
from tests._models import RECENT, gpt2, tiny, tokens
from tests.attention._encoders import encoder
from tests.models._sinusoids import build
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH

slow, nightly = pytest.mark.slow, pytest.mark.nightly
recent = pytest.mark.skipif(not RECENT, reason="built for the newest transformers")
# Their full-attention layers do not rotate at all; what rotates sees only a window.
LOCAL_ONLY = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "llama4", "llama4_text")
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
LEARNED, NONE = "learned positions, one vector each for 64 tokens", "no positions at all, so nothing needs extending"
UNASKED, TWO_ROWS = (
    "reading tokens never asks for a row of",
    r"\[1, 2, 3, 4, 5, 6\] and \[2, 3, 4, 5, 6, 7\], not for one row",
)
FREQUENCIES = (
    r"keeps frequencies alone among .* needs more than those\. Methods for it: abf, llama3, ntk, ntk_by_parts, pi"
)
DISTANCES = "buckets distances up to 128, but its config says .*=512"
TEMPERATURE = "temperature must be (a finite number, above 0 and )?at most 1, found"
OWN_ATTENTION = {"window": 16, "trained_length": TRAINED_LENGTH}


def changed(model_type: str, **fields: Any) -> PreTrainedModel:
    """A model whose config says something else than what it was built with."""
    model = tiny(model_type)
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def scaled() -> PreTrainedModel:
    """Of 512 tokens, as Llama 3.1 is scaled."""
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return tiny(max_position_embeddings=512, rope_parameters=llama3)


# Rows: a model or its type, methods, arguments of ``patch`` beside a factor of 4, and what is said.
INCOMPATIBLE: list[Any] = [
    (
        partial(changed, "llama", rope_parameters={"rope_type": "default"}),
        "yarn",
        {},
        "The config of this llama has no rope_theta in rope_parameters=.*default.*Add the base",
    ),
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
        "yarn self_extend dynamic_ntk alibi tile nope",
        {},
        FREQUENCIES,
    ),
    (partial(changed, "t5", relative_attention_max_distance=512), "stretch_buckets", {"trained_length": 64}, DISTANCES),
    ("t5", "stretch_buckets", {}, "does not state the trained length. Pass trained_length"),
    *(
        (model_type, "stretch_buckets", {}, rf"^(?!.*changes rotations).*{model_type}")
        for model_type in ("mpnet", "llama", "bloom", "deberta-v2")
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
    pytest.param("moonshine", "yarn dynamic_ntk alibi", {}, "decoder of this moonshine share one config", marks=recent),
    *(
        (partial(encoder, name), "retrieval_heads", {"heads": heads}, r"see later ones.* predicts? the next token")
        for name in ("eurobert", "llama")
        for heads in ((0,), None)
    ),
    *(
        pytest.param("gemma2", name, {}, f"'{name}' cannot replace the rotation of this gemma2: it caps", marks=nightly)
        for name in ENCODINGS
    ),
    # Tables of learned positions.
    *(
        (gpt2, name, {}, f"one vector each for 32 tokens .*, which method '{name}' cannot change. .*hierarchical, pi")
        for name in ("yarn", "ntk", "alibi", "self_extend")
    ),
    ("llama", "tile", {}, "This llama has rotations, which method 'tile' does not extend"),
    pytest.param(partial(tiny, "luke", entity_vocab_size=50), "pi", {}, rf"{UNASKED} luke\.entity_", marks=slow),
    pytest.param("prophetnet", "pi", {}, TWO_ROWS, marks=nightly),
    # Sinusoids.
    *(
        (partial(build, "MarianForCausalLM"), method, {"factor": 2}, f"{why}.*pi")
        for method, why in {
            "yarn": r"also multiplies cos and sin by 1\.069.*no such effect.*attention_factor=1\.0",
            "dynamic_ntk": "follows the length of each text",
            "self_extend": "gives a token several positions",
            "nope": "the same vector to every token",
            **dict.fromkeys(("alibi", "tile", "hierarchical"), "gives no frequencies"),
        }.items()
    ),
    ("pegasus_x", "pi", {}, "which its own code computes for each text"),
    (partial(tiny, "trocr", use_learned_position_embeddings=False), "pi", {}, "which its own code computes for"),
    *((model_type, "pi", {}, "rotates by a sinusoid table") for model_type in ("gptj", "roformer")),
    # Temperatures that would meet.
    ("deepseek_v3", "dynamic_yarn", {}, "temperature of 'dynamic_yarn' follows the length"),
    *(
        (model_type, method, {"scaling": "extend"} | more, "both together would sharpen twice")
        for model_type in ("ministral3", "mistral4")
        for method, more in (("self_extend", {"temperature": "logn"}), ("dynamic_yarn", {}))
    ),
]
UNKNOWN: list[Any] = [
    ("llama", "yran", {}, r"Unknown method 'yran'\. Did you mean 'yarn'\? Known: abf, alibi,"),
    ("llama", "zzz", {}, r"Unknown method 'zzz'\. Known: abf,"),
    ("llama", "linear", {}, r"Unknown method 'linear'\. Did you mean 'pi'\?"),  # rope types of transformers
    ("llama", "dynamic", {}, r"Unknown method 'dynamic'\. Did you mean 'dynamic_ntk'\?"),
    ("llama", "fier", {}, r"Unknown method 'fier'\. Did you mean 'fire'\?"),  # of the laboratory
    ("llama", "su", {}, r"Unknown method 'su'\. Did you mean 'longrope'\?"),
    ("llama", "NTK-aware", {}, r"Unknown method 'NTK-aware'\. Did you mean 'ntk'\?"),
    ("llama", "", {}, r"Unknown method ''\."),
    ("llama", "yarn", {"beta_fats": 3}, r"Unknown yarn parameter 'beta_fats'\. Did you mean 'beta_fast'\?"),
    ("llama", "pi", {"beta_fast": 3}, r"Unknown pi parameter 'beta_fast'\."),
    ("llama", "alibi", {"attention": "flahs"}, r"Did you mean 'flash'\?"),
    ("bloom", "alibi", {"attention": "sdpaa", "trained_length": TRAINED_LENGTH}, "Did you mean 'sdpa'"),
    ("t5", "stretch_buckets", {"sharpening": 0.1, "trained_length": TRAINED_LENGTH}, "sharpening"),
]
NO_FACTOR: dict[str, Any] = {"factor": None}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
HALVES = {"both_ways": "halves", "trained_length": TRAINED_LENGTH}
GIVEN_TWICE = r"A method object .* parameters; give {} to YaRN\(\.\.\.\)"
REACHES = "target_length={} and the parameters of dynamic_ntk contra"
CONTRADICTION = "factor=2 and target_length=256 contradict each other: the checkpoint was trained for 64 tokens, so "
CONTRADICTION += r"target_length means factor=4\. Give one of them\."
INVALID: list[Any] = [
    *(
        ("llama", given, NO_FACTOR, re.escape(f"method must be a name or a ctxext method object, found {given!r}."))
        for given in (None, 4, YaRN, {"method": "yarn"}, b"yarn")
    ),
    *(
        ("llama", YaRN(factor=4), NO_FACTOR | {name: value}, GIVEN_TWICE.format(name))
        for name, value in {"factor": 4, "target_length": 256, "beta_fast": 16.0}.items()
    ),
    ("llama", "pi", {"sliding_window": "drop"}, "sliding_window must be 'keep' or 'lift'"),
    ("llama", "pi", {"attention": "sdpa"}, "method 'pi' leaves attention to the model"),
    *(
        ("llama", "yarn alibi", {name: empty}, f"{name} must be one of its choices, or left out; found")
        for name in ("scaling", "attention")
        for empty in ("", [], 0, False)
    ),
    # How far to reach.
    *(
        ("llama", "dynamic_ntk", NO_FACTOR | {"target_length": far, "reach": reach}, REACHES.format(far))
        for far, reach in ((256, 2.0), (300, 2.0), (128, 4.0))
    ),
    ("llama", "yarn", NO_FACTOR, "needs to know how far to reach"),
    ("llama", "pi", {"factor": 2, "target_length": 256}, CONTRADICTION),
    *(
        ("llama", "pi", NO_FACTOR | extent, said)
        for extent, said in [
            ({"target_length": 32}, "target_length=32 is below the trained length of 64 tokens; there is nothing to"),
            ({"target_length": 96, "trained_length": 128}, "=96 is below the trained length of 128 tokens"),
            ({"factor": 0.5}, r"factor must be a finite number, at least 1, found 0\.5\."),
            ({"target_length": 0}, r"target_length must be a positive whole number of tokens, found 0\."),
        ]
    ),
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
    (partial(encoder, "eurobert", hidden_size=96, **THREE_HEADS), "alibi", HALVES, "'symmetric' for 3 heads"),
    # Tables of learned positions, and of sinusoids.
    (gpt2, "hierarchical", {"factor": 33}, "reaches 1,024 positions with two digits"),
    (gpt2, "tile", {"factor": None}, "needs to know how far to reach"),
    (gpt2, "pi", {"factor": None, "target_length": 16}, "target_length=16 is below the trained length of 32"),
    (gpt2, "pi", {"factor": 1.5, "trained_length": 16}, "below the 32 that transformer.wpe.weight has"),
    (gpt2, "stretch", {"factor": 2, "keep": 31}, "keep=31 leaves less than two"),
    (gpt2, "pi", {"sliding_window": "lift"}, "sliding_window=.*leaves attention to the model"),
    (gpt2, "pi", {"attention": "sdpa"}, "attention=.*leaves attention to the model"),
    (partial(build, "XGLMForCausalLM"), "pi", {"factor": None}, "needs to know how far to reach"),
    (partial(build, "XGLMForCausalLM"), "pi", {"attention": "sdpa"}, "leave attention to the model"),
    (partial(build, "XGLMForCausalLM"), "pi", {"sliding_window": "lift"}, "leave attention to the model"),
    *(
        (model, "pi", {"trained_length": 64}, "have rows for 32 tokens. Leave")
        for model in (gpt2, partial(build, "XGLMForCausalLM"))
    ),
    *(
        ("t5", "stretch_buckets", {"temperature": bad, "trained_length": TRAINED_LENGTH}, TEMPERATURE)
        for bad in (0, -1, 1.1, math.nan, "0.8", True)
    ),
    *(
        ("t5", "stretch_buckets", {name: how, "trained_length": TRAINED_LENGTH}, f"{name}='{how}': this t5 has only")
        for name, how in (("sliding_window", "lift"), ("attention", "sdpa"))
    ),
    ("bloom", "alibi", {"sliding_window": "lift", "trained_length": TRAINED_LENGTH}, "sliding_window"),
    # Scaled checkpoints, of which the window is never shrunk.
    (scaled, "yarn", {"factor": 16, "scaling": "keep"}, "scaling must be 'extend' or 'replace'"),
    (scaled, "yarn", {"factor": 16, "scaling": "replace", "trained_length": 128}, "contradicts the config"),
    (scaled, "yarn", {"scaling": "replace"}, "below the 512 that this checkpoint reads already"),
    (scaled, "yarn", {"factor": 2, "scaling": "extend", "trained_length": 128}, "below the 512 that this checkpoint"),
    *(
        (model, name, {"scaling": "extend", "trained_length": 32}, "the config of this .* scales no positions")
        for model, name in (("llama", "yarn"), ("bloom", "alibi"), (gpt2, "pi"), ("t5", "stretch_buckets"))
    ),
]
CHANGED = [(partial(changed, "llama", rope_parameters=None), "pi", {}, "rope_parameters=None.*Load the model again")]
EVERY = {IncompatibleError: INCOMPATIBLE, InvalidParameterError: INVALID, UnknownNameError: UNKNOWN}
EVERY |= {PatchStateError: CHANGED}


def rows() -> Any:
    for error, each in EVERY.items():
        for row in each:
            values, marks = (row.values, row.marks) if hasattr(row, "values") else (row, ())
            name = values[0] if isinstance(values[0], str) else getattr(values[0], "__name__", "built")
            yield pytest.param(error, *values, marks=marks, id=f"{name}, {values[1]}: {values[3][:40]}")


@pytest.mark.parametrize(("error", "model", "methods", "arguments", "said"), rows())
def test_it_is_refused_by_name_and_stays_as_it_was(
    error: type[Exception], model: Any, methods: Any, arguments: dict[str, Any], said: str
) -> None:
    model = tiny(model) if isinstance(model, str) else model()
    before, weights = State.of(model, tokens(30)), dict(model.named_parameters(remove_duplicate=False))
    for method in (methods.split() or [""]) if isinstance(methods, str) else [methods]:
        with pytest.raises(error, match=said):
            ctxext.patch(model, method, **{"factor": 4.0} | arguments)
    assert before.difference(model) is None
    assert all(weight is weights[name] for name, weight in model.named_parameters(remove_duplicate=False))
    assert ctxext.describe(model).method is None
