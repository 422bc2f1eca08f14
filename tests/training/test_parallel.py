"""What engines cannot carry is refused by name; what a shard is told is enough for the whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.training.lora import attach_lora
from ctxext.training.parallel import launched_parallelism, release_attention, require_carried, whole_sequence
from tests._models import FALCON, tiny, tokens

LENGTH = 96


def accelerator(**sizes: int) -> Any:
    """As much of one as is looked at."""
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa") if "sp_size" in sizes else None
    state = SimpleNamespace(fsdp_plugin=None)
    return SimpleNamespace(parallelism_config=ParallelismConfig(**sizes, sp_handler=handler), state=state)


def patched(method: str, model_type: str = "llama", *, changes: dict[str, Any] | None = None, **parameters: Any) -> Any:
    return ctxext.patch(tiny(model_type, **(changes or {})), method, factor=4, **parameters)


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


WINDOWED = {"changes": {"sliding_window": 32}, "sliding_window": "keep"}
REFUSED: list[tuple[Any, dict[str, int], str]] = [
    (lambda: eager(patched("yarn")), {"cp_size": 2}, "attention of this model is 'eager'. Load it with attn_impl"),
    (lambda: patched("yarn", "mistral", **WINDOWED), {"cp_size": 2}, r"\['sliding_attention'\].*lift the windows"),
    (lambda: patched("yarn", "gemma3_text"), {"cp_size": 2}, "layers of type .'sliding_attention'. need one"),
    (lambda: patched("alibi", attention="flex"), {"cp_size": 2}, "backend 'flex' has no form"),
    (lambda: patched("alibi", "bloom", bias="stock"), {"cp_size": 2}, "bias='stock'.*Take bias='exact'"),
    (lambda: patched("yarn"), {"cp_size": 5}, "96 tokens cannot be cut into 5 .* data.length to a multiple of 10"),
    (lambda: patched("alibi"), {"sp_size": 2}, "not ctxext's for 'alibi'. Take recipes/accelerate/fsdp2-context"),
    (lambda: patched("self_extend", "qwen2_vl"), {"sp_size": 2}, "not ctxext's for 'self_extend'"),
    (
        lambda: patched("self_extend", "llava", attention="flex"),
        {"cp_size": 2},
        "backend 'flex' has no form for a part",
    ),
    (lambda: patched("dynamic_yarn"), {"sp_size": 2}, "'dynamic_yarn' follows the length .* such as yarn, or recipes"),
    (lambda: eager(patched("yarn")), {"sp_size": 2}, "'eager' and sp_attn_implementation is 'sdpa'"),
    (lambda: patched("yarn", "mistral", **WINDOWED), {"sp_size": 2}, "Take flash_attention_2"),
    (lambda: patched("yarn"), {"sp_size": 3}, "heads cannot be shared by 3 processes. Lower sp_size"),
]


@pytest.mark.parametrize(("build", "sizes", "said"), REFUSED)
def test_refused_with_the_reason(build: Any, sizes: dict[str, int], said: str) -> None:
    engine = "Context parallelism" if "cp_size" in sizes else "DeepSpeed Ulysses"
    with pytest.raises(IncompatibleError, match=f"^{engine} cannot carry this run: .*{said}"):
        require_carried(Subject.of(attach_lora(build(), rank=2)), accelerator(**sizes), lengths={LENGTH})


def test_packed_documents_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"packed documents need one.*data\.positions to consecutive or pose"):
        require_carried(Subject.of(patched("yarn")), accelerator(sp_size=2), packed=True)
    require_carried(Subject.of(patched("yarn")), accelerator(dp_shard_size=2), packed=True)


@pytest.mark.parametrize(
    ("version", "said"),
    [(1, "Set fsdp_version: 2"), (2, r"SHARDED_STATE_DICT leaves the adapter in pieces.*to FULL_STATE_DICT")],
)
def test_flattened_weights_and_adapters_in_pieces_are_refused(version: int, said: str) -> None:
    """The latter is what accelerate takes for FSDP 2 by itself, of which the Trainer writes no adapter."""
    engine = accelerator()
    engine.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    with pytest.raises(IncompatibleError, match=said):
        require_carried(Subject.of(patched("yarn")), engine)
    engine.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    require_carried(Subject.of(tiny()), engine)


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (lambda: patched("yarn"), {"cp_size": 2}),
        (lambda: patched("dynamic_ntk"), {"cp_size": 4}),
        (lambda: patched("alibi"), {"cp_size": 2}),
        (lambda: patched("alibi", "bloom", attention="sdpa"), {"cp_size": 2}),
        (lambda: patched("yarn", "mistral", changes={"sliding_window": 32}, sliding_window="lift"), {"cp_size": 2}),
        (lambda: patched("pi"), {"sp_size": 2}),
        (lambda: eager(patched("dynamic_yarn")), {"dp_shard_size": 2}),
        (lambda: eager(tiny()), {}),
    ],
)
def test_carried(build: Any, sizes: dict[str, int]) -> None:
    require_carried(Subject.of(build()), accelerator(**sizes), lengths={LENGTH})


def test_what_the_launcher_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_parallelism().non_data_parallel_size == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    assert launched_parallelism().cp_size == 1, "a size without the switch is a leftover"
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert launched_parallelism().non_data_parallel_size == 4


def batch(*lengths: int) -> dict[str, Tensor]:
    """Rows of the same number of tokens; positions skip so that each ends at its length."""
    rows = [torch.cat([torch.arange(8), torch.arange(length - 8, length)]) for length in lengths]
    return {"input_ids": tokens(16, rows=len(rows)), "position_ids": torch.stack(rows)}


@pytest.mark.slow
def test_what_a_shard_is_told() -> None:
    def told(model: Any, *lengths: int) -> dict[str, Any]:
        return whole_sequence(Subject.of(model), batch(*lengths))

    assert told(attach_lora(patched("yarn"), rank=2), 96, 100) == {}
    assert told(patched("dynamic_ntk"), 96, 96) == {"ctxext_length": 96}
    assert told(patched("dynamic_ntk"), 30, 60) == {"ctxext_length": 60}  # inside the trained window
    assert told(patched("dynamic_ntk", growth="doubling"), 90, 100) == {"ctxext_length": 100}
    sharded = {"ctxext_length": 100, "ctxext_sharded": True}
    assert told(attach_lora(patched("alibi"), rank=2), 96, 100) == sharded
    assert told(patched("self_extend", "llava"), 96, 100) == sharded  # whose images have SDPA


def test_batches_that_no_shard_can_hold() -> None:
    subject, given, counted = Subject.of(patched("yarn")), batch(96, 96), torch.arange(16).expand(2, -1)
    for part, said in (
        ({"input_ids": given["input_ids"]}, "no position_ids: every process would count"),
        (given | {"position_ids": counted % 8}, "packed documents"),
        (given | {"attention_mask": (counted > 2).long()}, r"attention_mask \[2, 16\] hides tokens"),
        (given | {"attention_mask": torch.ones(2, 1, 16, 16)}, r"attention_mask \[2, 1, 16, 16\] hides tokens"),
    ):
        with pytest.raises(IncompatibleError, match=said):
            whole_sequence(subject, part)
    with pytest.raises(IncompatibleError, match=r"\[96, 100\] tokens long.*Set the batch to 1"):
        whole_sequence(Subject.of(patched("dynamic_yarn")), batch(96, 100))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "llava", "bloom", "mpt", "falcon"])
def test_a_shard_that_is_the_whole_sequence(model_type: str) -> None:
    """Plain causal attention is then what its engine would do; accelerate's hooks take the mask away."""
    changes = FALCON if model_type == "falcon" else {}
    model = patched("alibi", model_type, changes=changes, trained_length=64)
    given = batch(200, 250) | {"attention_mask": torch.ones(2, 16, dtype=torch.long)}
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        _attach_context_parallel_hooks(model)
        found = model(**given, **whole_sequence(Subject.of(model), given), use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    dropped = any(name.endswith("self_attn") for name, _ in model.named_modules())
    assert dropped == (model_type not in ("bloom", "mpt", "falcon"))


def test_after_training_masks_are_seen_again() -> None:
    model = attach_lora(patched("yarn"), rank=2).eval()
    padded = {"input_ids": tokens(16), "attention_mask": (torch.arange(16) > 4).long()[None], "use_cache": False}
    with torch.no_grad():
        before = model(**padded).logits[:, 5:]
        _attach_context_parallel_hooks(model)
        assert not torch.allclose(model(**padded).logits[:, 5:], before, atol=0.1)
        release_attention(Subject.of(model))
        assert torch.equal(model(**padded).logits[:, 5:], before)


def test_after_training_deepspeed_has_left_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a part of a sequence was expected")

    shared.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    model = patched("yarn")
    before = model(tokens(16)).logits
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", shared)
    with pytest.raises(AssertionError, match="a part of a sequence"):
        model(tokens(16))
    for _ in range(2):
        release_attention(Subject.of(model))
        assert torch.equal(model(tokens(16)).logits, before)


def test_a_shard_must_say_where_it_stands() -> None:
    model, given = patched("alibi"), batch(96)
    for part in ({"ctxext_length": 96}, {"position_ids": given["position_ids"]}):
        with pytest.raises(InvalidParameterError, match=r"needs ctxext_length.* counted from the start"):
            model(given["input_ids"], ctxext_sharded=True, **part)
    mask = torch.tensor([[0] + [1] * 15])
    with pytest.raises(IncompatibleError, match="cannot be padded"):
        model(**given, attention_mask=mask, ctxext_sharded=True, ctxext_length=96)
