"""What is trained, in which precision, and that the merged checkpoint computes what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.errors import IncompatibleError
from ctxext.training.lora import attach_lora, linear_layers, merged, norm_layers
from tests._models import logits, tiny, tokens


def trained(model: Any, steps: int = 2) -> Any:
    """After a few steps large enough to see."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=3e-2)
    model.train()
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=model.get_base_model().dtype == torch.bfloat16):
            model(tokens(rows=2), labels=tokens(rows=2)).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", True), ("llama", False), ("qwen3", True), ("bloom", True), ("gpt_neox", True)]
)
def test_saved_and_merged_it_computes_what_was_trained(model_type: str, tied: bool, tmp_path: Path) -> None:
    base = tiny(model_type, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    ctxext.patch(base, "pi" if model_type == "bloom" else "yarn", factor=2)
    model = trained(attach_lora(base, rank=4))
    ours = logits(model, tokens())
    ctxext.save(model, tmp_path / "adapter")
    again = ctxext.load(tmp_path / "adapter", base=tmp_path / "base")
    assert torch.allclose(logits(again, tokens()), ours, atol=1e-5)

    merged(model).save_pretrained(tmp_path / "merged")
    loaded = ctxext.load(tmp_path / "merged").eval()
    assert torch.allclose(logits(loaded, tokens()), ours, atol=1e-4)
    if model_type != "bloom":
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.equal(logits(stock, tokens()), logits(loaded, tokens()))
    embedding, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (embedding is head) == tied
    after = loaded.state_dict()
    assert set(after) == set(before)
    same = {name for name in before if torch.equal(before[name], after[name])}
    biases = {f"{name}.bias" for name, module in loaded.named_modules() if isinstance(module, torch.nn.Linear)}
    assert same - biases == (set() if tied else {"lm_head.weight"})


@pytest.mark.parametrize("model_type", ["modernbert", "bert", "roberta", "phi"])
def test_the_bias_of_a_head_that_shares_the_embedding_stays(model_type: str, tmp_path: Path) -> None:
    base = tiny(model_type, tie_word_embeddings=True)
    base.get_output_embeddings().bias.data.normal_()
    base.save_pretrained(tmp_path / "base")
    ids, kind = tokens(), type(base)
    model = attach_lora(ctxext.patch(base, "pi", factor=4), rank=4)
    with model.disable_adapter():
        plain = model(ids).logits
    assert torch.equal(model(ids).logits, plain), "nothing is trained yet"
    ours = trained(model)(ids).logits
    ctxext.save(model, tmp_path / "adapter")
    again = ctxext.load(tmp_path / "adapter", base=tmp_path / "base").eval()
    assert torch.allclose(again(ids).logits, ours, atol=1e-4)
    merged(model).save_pretrained(tmp_path / "merged")
    for loader in (ctxext.load, kind.from_pretrained):
        assert torch.allclose(loader(tmp_path / "merged").eval()(ids).logits, ours, atol=1e-4)


def test_what_is_trained_is_float32_and_the_rest_computes_as_the_finished_model() -> None:
    model = attach_lora(ctxext.patch(tiny(tie_word_embeddings=True).bfloat16(), "yarn", factor=2), rank=4).eval()
    kinds = {weight.requires_grad: weight.dtype for weight in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    streams = []
    for layer in model.get_base_model().model.layers:
        layer.register_forward_hook(lambda _, __, output: streams.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, tokens())
    assert set(streams) == {torch.bfloat16}, "activations between layers, which checkpointing keeps, are twice as large"
    finished = merged(model)
    assert {weight.dtype for weight in finished.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(finished, tokens()), found), "the updates are still zero"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "ernie4_5_moe"])
def test_what_transformers_keeps_in_float32_is_not_rounded(model_type: str, tmp_path: Path) -> None:
    """The routers of experts, of a model that is loaded in bfloat16."""
    base = tiny(model_type)
    for name, numbers in base.state_dict().items():
        if "e_score_correction_bias" in name:
            numbers.normal_()
    base.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    kept = {name for name, weight in before.items() if weight.dtype == torch.float32}
    assert any(not torch.equal(before[name], before[name].bfloat16().float()) for name in kept)
    after = merged(attach_lora(ctxext.patch(loaded, "yarn", factor=2), rank=2)).state_dict()
    assert {name: weight.dtype for name, weight in after.items()} == {n: weight.dtype for n, weight in before.items()}
    assert all(torch.equal(after[name], before[name]) for name in kept)


def test_small_updates_are_not_rounded_away() -> None:
    model = attach_lora(tiny().bfloat16(), rank=4)
    norm = next(weight for name, weight in model.named_parameters() if "norm" in name and weight.requires_grad)
    with torch.no_grad():
        norm += 1e-4
    assert (norm - 1).abs().min() > 5e-5


@pytest.mark.parametrize(
    ("model_type", "targets", "expected"),
    [
        ("llama", ["attention"], ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("llama", ["mlp"], ["down_proj", "gate_proj", "up_proj"]),
        ("bloom", ["attention"], ["dense", "query_key_value"]),
        ("bloom", ["mlp"], ["dense_4h_to_h", "dense_h_to_4h"]),
        ("mpt", ["attention", "mlp"], ["Wqkv", "down_proj", "out_proj", "up_proj"]),
        ("gpt2", ["attention"], ["attn.c_attn", "attn.c_proj"]),
        ("falcon", ["attention", "mlp"], ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]),
    ],
)
def test_layers_are_found_by_structure(model_type: str, targets: Any, expected: list[str]) -> None:
    assert linear_layers(tiny(model_type), targets) == expected


def test_norms_are_found_and_what_is_not_there_is_named() -> None:
    model = tiny("qwen3")
    layers = model.config.num_hidden_layers
    assert len(norm_layers(model)) == 4 * layers + 1, "two a layer, two of queries and keys, one at the end"
    with pytest.raises(IncompatibleError, match="no linear layers of the kind 'attention'"):
        linear_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)), ["attention"])


# Of each hybrid what is adapted; its mixer hands the weight of out_proj to a fused kernel in transformers' code.
HYBRIDS = {
    "falcon_h1": {"in_proj", "q_proj", "o_proj", "up_proj"},
    "bamba": {"in_proj", "q_proj", "o_proj", "up_proj"},
    "granitemoehybrid": {"in_proj", "q_proj", "o_proj", "input_linear"},
    "zamba2": {"in_proj", "q_proj", "o_proj", "gate_up_proj"},
    "nemotron_h": {"in_proj", "q_proj", "o_proj", "up_proj"},
    "jamba": {"in_proj", "x_proj", "q_proj", "o_proj"},
}


def adapted(model: Any) -> set[str]:
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if "lora_A" in name}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_leave_out_what_a_fused_kernel_passes_by(model_type: str) -> None:
    changes: dict[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1} if model_type == "jamba" else {}
    model = attach_lora(tiny(model_type, **changes), embeddings=False)
    found = adapted(model)
    assert found >= HYBRIDS[model_type]
    assert not found & {"out_proj", "conv1d"} or model_type == "jamba"  # whose code calls all of its layers but dt_proj
    assert "dt_proj" not in found


def test_an_attention_layer_of_the_same_name_is_adapted() -> None:
    assert "out_proj" in adapted(attach_lora(tiny("lfm2"), embeddings=False))


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "phimoe", "llama4_text", "deepseek_v3", "glm4_moe", "qwen2_moe"],
)
def test_experts_that_are_one_tensor_are_adapted_and_routers_are_not(model_type: str) -> None:
    model = attach_lora(tiny(model_type), rank=2, embeddings=False)
    names = [name for name, _ in model.named_parameters() if "lora_B" in name]
    assert any("experts" in name for name in names)
    assert not any(part in name for name in names for part in ("router", ".gate."))
    linear = [n for n, part in model.named_modules() if isinstance(part, torch.nn.Linear) and ".layers." in n]
    adapted_ones = {name.rpartition(".lora_B")[0] for name in names}
    left = {n.rpartition(".base_layer")[0] for n in linear if "router" not in n and "lora_" not in n}
    assert left <= adapted_ones
    model(tokens(rows=2), labels=tokens(rows=2)).loss.backward()
    assert not [name for name, weight in model.named_parameters() if name in names and not weight.grad.any()]


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_adapted_experts_are_saved_loaded_and_merged(model_type: str, tmp_path: Path) -> None:
    base = tiny(model_type)
    base.save_pretrained(tmp_path / "base")
    model = trained(attach_lora(ctxext.patch(base, "yarn", factor=2), rank=2))
    ours = logits(model, tokens())
    assert not torch.allclose(ours, logits(ctxext.load(tmp_path / "base", "yarn", factor=2), tokens()), atol=1e-2)
    ctxext.save(model, tmp_path / "adapter")
    again = ctxext.load(tmp_path / "adapter", base=tmp_path / "base")
    assert torch.allclose(logits(again, tokens()), ours, atol=1e-4)
    merged(model).save_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(ctxext.load(tmp_path / "merged").eval(), tokens()), ours, atol=1e-3)
    with pytest.raises(IncompatibleError, match=r"dropout=0\.1: PEFT adapts experts that are one tensor"):
        attach_lora(tiny("mixtral"), dropout=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options"), [("mixtral", {}), ("gpt_oss", {"trained_length": 64}), ("deepseek_v3", {})]
)
def test_experts_are_trained_whole_where_all_is(model_type: str, options: dict[str, int], tmp_path: Path) -> None:
    base = tiny(model_type)
    base.save_pretrained(tmp_path / "base")
    experts = {name for name, weight in base.named_parameters() if weight.ndim == 3}
    model = attach_lora(ctxext.patch(base, "yarn", factor=2, **options), whole=True)
    names = {n.replace(".modules_to_save.default", "") for n, w in model.named_parameters() if w.requires_grad}
    assert {name.removeprefix("base_model.model.") for name in names} >= experts
    model(tokens(rows=2), labels=tokens(rows=2)).loss.backward()
    ours = logits(trained(model), tokens())
    ctxext.save(model, tmp_path / "adapter")
    again = ctxext.load(tmp_path / "adapter", base=tmp_path / "base")
    assert torch.allclose(logits(again, tokens()), ours, atol=1e-4)
    merged(model).save_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(ctxext.load(tmp_path / "merged").eval(), tokens()), ours, atol=1e-3)


@pytest.mark.nightly
def test_training_of_them_is_planned_and_a_plan_makes_no_adapter() -> None:
    """Of the highest rank its weights would take 100 GiB."""
    from ctxext.planning.plan import plan_training

    for model_type in ("falcon_h1", "mixtral"):
        assert plan_training(tiny(model_type).config).at(64).adapters
    few, many = (plan_training(tiny().config, lora_rank=rank).at(64).adapters for rank in (1, 10**8))
    assert many > 10**7 * few


@pytest.mark.slow
def test_norms_that_put_out_more_than_one_tensor_are_trained() -> None:
    """Zaya's normalises queries and keys together."""
    model = attach_lora(tiny("zaya"), rank=2)
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    gradients = [weight.grad for name, weight in model.named_parameters() if "qk_norm.modules_to_save" in name]
    assert gradients
    assert all(gradient is not None for gradient in gradients)
