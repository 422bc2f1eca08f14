"""What published configs mean: one length for every command, whatever form they are written in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, LlamaForCausalLM

import ctxext
from ctxext.checkpoints.export import read_extended
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.core.architecture import trained_length_of
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.planning.plan import reach_of
from ctxext.runtimes.base import ExtensionInConfig
from tests._checkpoints import SHAPE, try_only
from tests._models import tiny
from tests._products import some

# ruff: noqa: E501
SMALL = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "rope_theta": 500000.0}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TABLES = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
DUAL = {"chunk_size": 262144, "local_size": 8192, ORIGINAL: 262144}

# What is published: model type, max_position_embeddings, rope_scaling, other fields; and the length that weights know.
CERTAIN: dict[str, tuple[str, int, dict[str, Any] | None, dict[str, Any], int]] = {
    "plain": ("llama", 8192, None, {}, 8192),
    "Qwen3, YaRN as its card says": ("qwen3", 40960, {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}, {}, 131072),
    "the same, twice": ("qwen3", 40960, {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 32768}, {}, 65536),
    "lowered for a server": ("qwen2", 16384, {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}, {}, 131072),
    "YaRN, factor rounded": ("llama", 100000, {"type": "yarn", "factor": 24.41, ORIGINAL: 4096}, {}, 100000),
    "YaRN, factor from lengths": ("llama", 65536, {"type": "yarn", "factor": None, ORIGINAL: 4096}, {}, 65536),
    "linear, original stated": ("llama", 4096, {"type": "linear", "factor": 4.0, ORIGINAL: 4096}, {}, 16384),
    "linear, between": ("llama", 8192, {"type": "linear", "factor": 4.0, ORIGINAL: 4096}, {}, 16384),
    "Llama 3.1's block, length as it was": ("llama", 8192, LLAMA3 | {"factor": 8.0, ORIGINAL: 8192}, {}, 65536),
    "Phi-3": ("phi3", 131072, {"type": "longrope", **TABLES}, {ORIGINAL: 4096, "pad_token_id": 0}, 131072),
    "longrope with a factor": ("llama", 40960, {"type": "longrope", "factor": 4.0, ORIGINAL: 32768, **TABLES}, {}, 131072),
    "dynamic": ("llama", 32768, {"type": "dynamic", "factor": 2.0}, {}, 32768),
    "Command R": ("cohere", 8192, None, {"model_max_length": 131072}, 131072),
    "Qwen2.5-1M": ("qwen2", 1010000, None, {"dual_chunk_attention_config": DUAL}, 262144),
    "Qwen2.5-1M, chunks alone": ("qwen2", 1010000, None, {"dual_chunk_attention_config": {"chunk_size": 262144}}, 262144),
}  # fmt: skip
# Forms that published checkpoints use for one length and for another.
OPEN: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "linear": ("llama", 4096, {"type": "linear", "factor": 4.0}, {}, (4096, 16384)),
    "YaRN without an original length": ("llama", 32768, {"type": "yarn", "factor": 4.0}, {}, (32768, 131072)),
    "the same in the words of transformers 5": ("llama", 32768, {"rope_type": "yarn", "factor": 4.0}, {}, (32768, 131072)),
    "Llama 3's without one": ("llama", 32768, LLAMA3 | {"factor": 4.0}, {}, (32768, 131072)),
    "longer than original x factor": ("llama", 131072, {"type": "yarn", "factor": 8.0, ORIGINAL: 8192}, {}, (65536, 131072)),
    "linear, longer than that": ("llama", 65536, {"type": "linear", "factor": 4.0, ORIGINAL: 4096}, {}, (16384, 65536)),
    "dynamic with an original length": ("llama", 32768, {"type": "dynamic", "factor": 4.0, ORIGINAL: 8192}, {}, (8192, 32768)),
    "llama3, shorter than before it": ("llama", 4096, LLAMA3 | {"factor": 8.0, ORIGINAL: 8192}, {}, (4096, 65536)),
}  # fmt: skip
Written = Callable[[str, int, "dict[str, Any] | None", dict[str, Any]], Path]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Write a config.json to the letter, without weights, and let inspect try one method."""
    try_only(monkeypatch, "yarn")

    def write(model_type: str, longest: int, scaling: dict[str, Any] | None, others: dict[str, Any]) -> Path:
        fields = {"model_type": model_type, "max_position_embeddings": longest, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(SMALL | fields | others))
        return tmp_path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CERTAIN, *list(CERTAIN)[::3], "Phi-3", "dynamic"))
def test_every_part_reads_the_length_that_a_form_means(name: str, written: Written) -> None:
    model_type, longest, scaling, others, window = CERTAIN[name]
    place = written(model_type, longest, scaling, others)
    config = AutoConfig.from_pretrained(place)
    model = AutoModelForCausalLM.from_config(config)
    assert inspect_checkpoint(place).trained_length == window
    assert reach_of(config) == window
    assert trained_length_of(Subject.of(model)) == window
    assert ctxext.describe(model).trained_length == window
    if scaling is not None:
        extended = read_extended(config)
        times = 2 if name == "dynamic" else 1  # which a runtime stretches further than its weights were trained
        assert (extended.target_length, extended.length_notes) == (times * window, [])
        with pytest.raises(PatchStateError, match=rf"trained_length={window}\b"):
            ctxext.patch(model, "yarn", factor=2)
    if name != "Phi-3":  # whose class takes no other form than longrope; that is another test's
        told = {} if scaling is None else {"trained_length": window}
        if name == "Command R":
            assert ctxext.patch(model, "alibi", factor=2).config.model_max_length == 2 * window
            ctxext.unpatch(model)
        ctxext.patch(model, "yarn", factor=2, **told)
        description = ctxext.describe(model)
        assert (description.trained_length, description.target_length) == (window, 2 * window)
        assert getattr(model.config, "model_max_length", 2 * window) == 2 * window  # vLLM serves no more than this


def test_a_bloom_that_names_no_length_has_that_of_all_blooms() -> None:
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    assert reach_of(config) == trained_length_of(Subject.of(AutoModelForCausalLM.from_config(config))) == 2048
    assert reach_of(BloomConfig(seq_length=4096)) == 4096


@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN)
def test_a_form_that_means_two_lengths_is_asked_about(name: str, written: Written) -> None:
    model_type, longest, scaling, others, windows = OPEN[name]
    place = written(model_type, longest, scaling, others)
    config = AutoConfig.from_pretrained(place)
    model = AutoModelForCausalLM.from_config(config)
    assert inspect_checkpoint(place).trained_length is None
    assert reach_of(config) is None
    assert trained_length_of(Subject.of(model)) is None
    extended: ExtensionInConfig = read_extended(config)
    (note,) = extended.length_notes
    assert all(str(window) in note for window in windows)
    with pytest.raises(PatchStateError, match=rf"trained_length={windows[0]} or trained_length={windows[1]}\b"):
        ctxext.patch(model, "yarn", factor=2)
    with pytest.raises(InvalidParameterError, match="does not state the trained length"):
        ctxext.patch(model, "yarn", factor=2, scaling="extend")
    for window in windows:
        ctxext.patch(model, "pi", factor=2, trained_length=window)
        assert ctxext.describe(model).target_length == 2 * window
        ctxext.unpatch(model)


def test_an_extension_below_what_the_published_form_reaches_is_refused(written: Written) -> None:
    """Qwen3 with YaRN reads 131,072: 61,440 tokens are fewer, though more than max_position_embeddings."""
    place = written(*CERTAIN["Qwen3, YaRN as its card says"][:4])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    for told in ({"trained_length": 131072}, {"scaling": "replace"}):
        with pytest.raises(InvalidParameterError, match=r"61440.*below"):
            ctxext.patch(model, "yarn", target_length=61440, **told)
    ctxext.patch(model, "yarn", factor=1.5, scaling="extend")
    assert ctxext.describe(model).target_length == 196608


@pytest.mark.parametrize(
    ("model_type", "method", "padding"),
    [("llama", "yarn", 128), ("llama", "self_extend", 500), ("opt", "tile", 500), ("m2m_100", "pi", 100)],
)
def test_a_padding_token_without_a_row(model_type: str, method: str, padding: int) -> None:
    """Many give the config a new token for padding before they make the embedding longer."""
    model = tiny(model_type)
    model.config.pad_token_id = padding
    with pytest.raises(IncompatibleError, match=rf"cannot build this {model_type} .*pad_token_id={padding}: "):
        ctxext.patch(model, method, factor=2)
    if model_type == "llama":  # the way out that it names
        model.resize_token_embeddings(padding + 1)
    else:
        model.config.pad_token_id = 0
    ctxext.patch(model, method, factor=2)
    assert model.config.ctxext["target_length"] == 128


def test_a_class_that_no_config_builds_is_refused_for_that_and_not_for_its_padding() -> None:
    class Own(LlamaForCausalLM):
        def __init__(self, config: Any, extra: int) -> None:
            super().__init__(config)

    model = Own(tiny().config, 3)
    model.config.pad_token_id = 500
    with pytest.raises(IncompatibleError, match="cannot build Own from its extended config: TypeError"):
        ctxext.patch(model, "yarn", factor=2)
