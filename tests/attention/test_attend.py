"""What stands in for a model's own attention and forward: proven before it is put there, and never silently gone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaAttention

import ctxext
from ctxext.attention import attend
from ctxext.errors import IncompatibleError, PatchStateError
from tests._models import FALCON, logits, qwen2_vl, tiny, tokens
from tests._programs import ROOT, ran
from tests.walk.tiny import TRAINED_LENGTH


class Capped(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, cap=5.0, **kwargs)


class CappedLlama(LlamaForCausalLM):
    """A model of somebody's own code, which gives its attention more than llama does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = Capped


@pytest.mark.parametrize("method", ["alibi", "t5_bias", "self_extend"])
def test_what_attention_is_given_and_ctxext_does_not_know_is_refused_by_its_name(method: str) -> None:
    model = CappedLlama(tiny().config)
    with pytest.raises(IncompatibleError, match=f"{method}.* llama: .* computes with cap,"):
        ctxext.patch(model, method, factor=4.0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation_after_alibi_is_refused_and_can_be_taken_back(implementation: str) -> None:
    model = ctxext.patch(tiny(), "alibi", factor=4.0)
    expected = logits(model, tokens())
    model.set_attn_implementation(implementation)
    for _ in range(2):
        with pytest.raises(PatchStateError, match=rf"is now '{implementation}'.*set_attn_implementation\('ctxext'\)"):
            logits(model, tokens())
    model.set_attn_implementation("ctxext")
    assert torch.equal(logits(model, tokens()), expected)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [("llama", "t5_bias"), ("llama", "retrieval_heads"), ("llama", "self_extend"), ("llama", "alibi"), ("bloom", "pi")],
)
def test_a_config_that_was_replaced_before_the_patch(model_type: str, method: str) -> None:
    """Its modules keep the object that they were built from."""
    model, other = tiny(model_type), tiny(model_type)
    model.config = copy.deepcopy(model.config)
    plain, found = logits(model, tokens()), []
    for one in (model, other):
        torch.manual_seed(0)
        found.append(logits(ctxext.patch(one, method, factor=4.0, trained_length=TRAINED_LENGTH), tokens()))
    assert torch.equal(*found)
    assert torch.equal(logits(ctxext.unpatch(model), tokens()), plain)


def test_unpatching_after_another_attention_implementation_brings_rotation_back() -> None:
    model = tiny()
    plain = logits(model, tokens())
    ctxext.patch(model, "alibi", factor=4.0).set_attn_implementation("eager")
    ctxext.unpatch(model)
    torch.testing.assert_close(logits(model, tokens()), plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "falcon"])
def test_families_with_alibi_of_their_own_refuse_it_as_well(model_type: str) -> None:
    model = tiny(model_type, **(FALCON if model_type == "falcon" else {}))
    ctxext.patch(model, "alibi", factor=4.0, trained_length=TRAINED_LENGTH)
    model.config._attn_implementation_internal = "eager"
    with pytest.raises(PatchStateError, match="_attn_implementation"):
        logits(model, tokens())


def replica_of(module: nn.Module) -> nn.Module:
    """What ``torch.nn.parallel.replicate`` makes of a module, on one device and with all weights zero."""
    replica: Any = module._replicate_for_data_parallel()
    replica._modules = {name: None if part is None else replica_of(part) for name, part in module._modules.items()}
    replica._parameters = {
        name: None if weight is None else nn.Parameter(torch.zeros_like(weight))
        for name, weight in module._parameters.items()
    }
    replica._buffers = {name: None if part is None else part.clone() for name, part in module._buffers.items()}
    return replica


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("llama", None),
        *(("llama", name) for name in ("yarn", "dynamic_ntk", "dynamic_yarn", "alibi")),
        *((name, "dynamic_pi") for name in ("bloom", "mpt", "falcon")),
    ],
)
def test_a_replica_runs_itself_and_not_the_original(model_type: str, method: str | None) -> None:
    model = tiny(model_type, **(FALCON if model_type == "falcon" else {}))
    if method:
        ctxext.patch(model, method, factor=4.0, trained_length=TRAINED_LENGTH)
    expected = logits(model, tokens())
    replica = replica_of(model)
    decoder = getattr(replica, replica.base_model_prefix)
    assert decoder(tokens(), use_cache=False).last_hidden_state.abs().max() == 0  # its weights are
    assert expected.abs().max() > 1
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, copied in replica.named_parameters(remove_duplicate=False):
        copied.data.copy_(weights[name])
    assert torch.equal(logits(replica, tokens()), expected)
    assert torch.equal(logits(model, tokens()), expected)
    if method:
        ctxext.unpatch(model)
        assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())


def test_a_replica_of_what_accelerate_wrapped_is_refused_by_name() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny()
    add_hook_to_module(model.model, ModelHook())
    ctxext.patch(model, "alibi", factor=4.0)
    with pytest.raises(IncompatibleError, match=r"LlamaModel: nn\.DataParallel cannot copy.*torchrun"):
        replica_of(model)


@pytest.mark.slow
def test_positions_along_several_axes_are_refused_where_they_differ() -> None:
    """An image between the words: height and width are counted beside time."""
    model = ctxext.patch(qwen2_vl(), "alibi", factor=4.0)
    plain, alike = tokens(40), torch.arange(40)[None, None].expand(3, 1, -1)
    assert torch.equal(logits(model, plain), logits(model, plain, position_ids=alike))
    image = torch.tensor([[7, *[5] * 16, 8]])
    inputs = torch.cat([tokens(20), image, tokens(20)], dim=1)
    arguments = {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    with pytest.raises(IncompatibleError, match=r"count along several axes that differ.*image"):
        logits(model, inputs, mm_token_type_ids=(inputs == 5).long(), **arguments)


@pytest.mark.nightly
def test_what_positions_and_masks_tell_of_images_ends_a_graph() -> None:
    """In a process of its own: the checker of shapes that tests run under cannot be compiled."""
    ran(["-m", "tests.contracts.compiled_remap_program", "images"], ROOT, code=0)


def in_calls(model: Any, cache: Any, ids: Tensor, keep: Tensor, positions: Tensor, *lengths: int) -> Tensor:
    """Logits of tokens read in calls of so many slots, each with the mask of all slots so far."""
    found, at = [], 0
    for length in lengths:
        here, at = slice(at, at + length), at + length
        more = {"attention_mask": keep[:, :at], "position_ids": positions[:, here]}
        with torch.no_grad():
            found.append(model(ids[:, here], past_key_values=cache, use_cache=True, **more).logits)
    return torch.cat(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", [{"method": "self_extend", "window": 16}, {"method": "alibi"}])
def test_slots_as_positions_count_padding_between_tokens_in_every_call(method: dict[str, Any], cache: str) -> None:
    """As transformers counts them by default. So a row of a batch that was padded on the right has a gap."""
    model = ctxext.patch(tiny(num_hidden_layers=3), factor=4.0, **method)
    ids, keep = tokens(150, rows=3), torch.ones(3, 150, dtype=torch.long)
    keep[0, 60:90] = keep[1, :20] = keep[2, :10] = keep[2, 50:90] = 0
    slots = torch.arange(150).expand(3, -1)
    whole = logits(model, ids, attention_mask=keep, position_ids=slots)
    made = StaticCache(config=model.config, max_cache_len=150) if cache == "static" else DynamicCache()
    found = in_calls(model, made, ids, keep, slots, 90, 40, *[1] * 20)
    torch.testing.assert_close(found[keep.bool()], whole[keep.bool()], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1:2, 20:], logits(model, ids[1:2, 20:]), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", ["alibi", "t5_bias"])
def test_padding_that_pushes_tokens_out_of_a_window_is_refused(method: str, cache: str) -> None:
    """A cache of a window counts slots. Where it still holds what is seen, or holds all, a row is read as alone."""
    model = ctxext.patch(tiny("mistral", sliding_window=16), method, factor=4.0, sliding_window="keep")

    def made() -> Any:
        is_static, config = cache == "static", model.config
        return StaticCache(config=config, max_cache_len=90) if is_static else DynamicCache(config=config)

    ids, keep = tokens(90, rows=2), torch.ones(2, 90, dtype=torch.long)
    keep[1, 5:40] = 0
    places = keep.cumsum(1) - 1
    with pytest.raises(IncompatibleError, match=r"window of 16 tokens counts padding between tokens.*DynamicCache\(\)"):
        in_calls(model, made(), ids, keep, places, 40, 1)
    alone = logits(model, torch.cat([ids[1:, :5], ids[1:, 40:]], 1))
    found = in_calls(model, DynamicCache(), ids, keep, places, 40, 1, 49)[1:, 40:]
    torch.testing.assert_close(found, alone[:, 5:], atol=1e-4, rtol=0)
    keep = torch.ones(2, 90, dtype=torch.long)
    keep[1, :7] = keep[1, 9:12] = 0  # in front of the text, and long before the window of the second call
    places = (keep.cumsum(1) - 1).clamp(min=0)
    found = in_calls(model, made(), ids, keep, places, 40, 1, 49)[1:, 12:]
    alone = logits(model, torch.cat([ids[1:, 7:9], ids[1:, 12:]], 1))
    torch.testing.assert_close(found, alone[:, 2:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["self_extend", "alibi", "t5_bias"])
def test_a_mask_of_pairs_is_refused_in_every_form(method: str) -> None:
    model, pairs = ctxext.patch(tiny(), method, factor=4.0), torch.ones(1, 1, 9, 9).tril()
    blocks = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 9, 9, device="cpu")
    for mask in (pairs, pairs.bool(), blocks, {"full_attention": pairs}, {"full_attention": None, "other": blocks}):
        with pytest.raises(IncompatibleError, match=r"attention_mask must be \[batch, keys\] with 1 for tokens"):
            logits(model, tokens(9), attention_mask=mask)
    found = logits(model, tokens(9), attention_mask={"full_attention": None})
    torch.testing.assert_close(found, logits(model, tokens(9)))


@pytest.mark.parametrize("method", ["self_extend", "alibi", "t5_bias", "dynamic_ntk"])
def test_borders_of_packed_documents_go_with_positions_that_restart(method: str) -> None:
    """As a collator of transformers makes them for flash attention, with positions and without."""
    model, lengths = ctxext.patch(tiny(), method, factor=4.0), (70, 1, 30)
    ids, ends = tokens(sum(lengths)), torch.tensor([0, 70, 71, 101], dtype=torch.int32)
    borders = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 70, "max_length_k": 70}
    for positions in ({}, {"position_ids": torch.arange(sum(lengths))[None]}):
        with pytest.raises(IncompatibleError, match=r"cu_seq_lens_q tells where.*position_ids that restart"):
            logits(model, ids, **borders, **positions)
    for starts in ([0, 70], [0, 35, 70]):  # in one row, and one in each of two rows
        alone, row = torch.tensor(starts), ids[:, :70].reshape(len(starts) - 1, -1)
        for positions in ({}, {"position_ids": torch.arange(row.shape[1])[None]}):
            found = logits(model, row, cu_seq_lens_q=alone, cu_seq_lens_k=alone, **positions)
            torch.testing.assert_close(found, logits(model, row))
    restarting = torch.cat([torch.arange(length) for length in lengths])[None]
    found = logits(model, ids, **borders, position_ids=restarting)
    each = torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(found, each, atol=1e-4, rtol=0)


@pytest.mark.parametrize("told", ["model", "config"])
@pytest.mark.parametrize(
    ("method", "given"),
    [("alibi", {}), ("retrieval_heads", {}), ("retrieval_heads", {"heads": [0]}), ("fire", {}), ("sinusoidal", {})],
)
def test_a_method_that_needs_all_heads_is_refused_where_processes_share_them(
    method: str, given: dict[str, Any], told: str
) -> None:
    """Under transformers' tensor parallelism a layer has some of its heads in each process.

    Transformers 5.16 keeps the number of processes in the config alone.
    """
    model = tiny()
    if told == "model":
        model._tp_size = 2
    else:
        model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(IncompatibleError, match=r"processes share the heads of this llama \(tensor parallelism\)"):
        ctxext.patch(model, method, factor=4.0, **given)
    with pytest.raises(IncompatibleError, match="heads are scored in a whole model"):
        ctxext.heads(model)
    model._tp_plan, plan = {}, model._tp_plan  # of experts alone
    ctxext.unpatch(ctxext.patch(model, method, factor=4.0, **given))
    model._tp_plan = plan
    for of_all_heads in ("yarn", "self_extend"):
        ctxext.unpatch(ctxext.patch(model, of_all_heads, factor=4.0))


@pytest.mark.parametrize("method", ["alibi", "self_extend", "fire"])
def test_attention_is_not_replaced_where_processes_share_layers(method: str) -> None:
    """Under transformers' pipeline parallelism a process has some of the layers, and nothing in place of others."""
    model = tiny()
    model.config.distributed_config = SimpleNamespace(pp_size=2)
    model.model.layers[1] = nn.Identity()
    with pytest.raises(IncompatibleError, match=r"processes share its layers \(pipeline parallelism\)\.$"):
        ctxext.patch(model, method, factor=4.0)


@pytest.mark.parametrize(
    ("model_type", "method"), [("llama", "self_extend"), ("llama", "alibi"), ("bloom", "alibi"), ("bloom", "pi")]
)
def test_a_device_without_float64_is_refused_when_a_model_is_extended_and_when_it_was_moved_there(
    model_type: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ctxext.patch(tiny(model_type), method, factor=4.0, trained_length=TRAINED_LENGTH)
    monkeypatch.setattr(attend, "WITHOUT_FLOAT64", {"cpu"})
    with pytest.raises(IncompatibleError, match=r"float64, which cpu lacks\. Move the model"):
        logits(model, tokens(100))
    with pytest.raises(IncompatibleError, match=r"float64, which cpu lacks\. Move the model"):
        ctxext.patch(tiny(model_type), method, factor=4.0, trained_length=TRAINED_LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"method": "self_extend"}, {"method": "retrieval_heads", "heads": [0, 3]}], ids=str)
def test_layers_that_are_compiled_one_by_one_are_remapped(how: dict[str, Any]) -> None:
    """A wrapper around each is in the paths of what it contains."""
    expected = logits(ctxext.patch(tiny(), factor=4.0, window=16, **how), tokens())
    model: Any = tiny()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    try:
        ctxext.patch(model, factor=4.0, window=16, **how)
        torch.testing.assert_close(logits(model, tokens()), expected, atol=1e-4, rtol=0)
    finally:
        torch._dynamo.reset()
