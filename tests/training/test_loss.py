"""The loss in chunks against the model's own, and that no tensor of tokens x vocabulary ever exists."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.training import chunk_loss, loss
from tests._models import on_recent, tiny, tokens
from tests._peft import lora
from tests.kernels.cases import Largest
from tests.training._recipe import QUIET

LENGTH = 50
CHUNKS = (14, 1024)
ROUTED = {"output_router_logits": True}


def batch(rows: int = 2) -> dict[str, Tensor]:
    """Rows in which a different number of labels counts, none of them in a whole chunk of 7."""
    ids = tokens(LENGTH, rows=rows)
    labels = ids.clone()
    labels[0, :9] = -100
    labels[-1, 20:38] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad()
    value = model(**inputs).loss
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(model: Any, chunk: int = 14, tolerance: float = 2e-6, **inputs: Any) -> None:
    value, expected = gradients(model, **inputs)
    with chunk_loss(model, chunk=chunk):
        found = gradients(model, **inputs)
    assert torch.allclose(found[0], value, rtol=1e-6)
    assert found[1].keys() == expected.keys()
    assert len(expected) >= 2
    scale = max(float(g.norm()) for g in expected.values())
    off = {n: float((found[1][n] - g).norm()) / scale for n, g in expected.items()}
    assert all(value < tolerance for value in off.values()), off


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *(("llama", {"tie_word_embeddings": tied}) for tied in (False, True)),
        ("gemma2", {"final_logit_softcapping": 5.0}),  # a soft cap after the head
        ("cohere", {"logit_scale": 0.3}),  # a scale after it
        ("mixtral", ROUTED | {"router_aux_loss_coef": 0.5}),  # a second loss
        ("jetmoe", ROUTED | {"aux_loss_coef": 0.5}),  # whose weight has another name
        ("qwen3_vl_moe", ROUTED | {"router_aux_loss_coef": 0.5}),  # or another place
        *(("bloom", {}), ("falcon", {"alibi": False})),
    ],
)
def test_equals_the_models_own_loss_and_gradients(model_type: str, changes: dict[str, Any], chunk: int) -> None:
    agree(tiny(model_type, **changes), chunk, **batch())


def test_as_the_trainer_calls_it() -> None:
    inputs = batch()
    agree(tiny(), **inputs, num_items_in_batch=torch.tensor(123))
    agree(tiny(), **inputs, num_items_in_batch=7)
    agree(tiny(), **inputs, shift_labels=inputs["labels"].roll(3, 1))  # where a shard's labels were shifted before
    agree(tiny(), inputs_embeds=tiny().get_input_embeddings()(inputs["input_ids"]).detach(), labels=inputs["labels"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", "mixtral", on_recent("bloom", reason="BLOOM drops the argument before its loss")]
)
@pytest.mark.parametrize("ignored", [5, 0, -1])
def test_the_index_that_is_ignored_is_the_callers(kind: str, ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch()
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, ignored)
    inputs["labels"][:, 30:] = ignored
    for more in ({}, {"num_items_in_batch": 7}, {"shift_labels": inputs["labels"].roll(3, 1)}):
        agree(tiny(kind), **inputs, **more, ignore_index=ignored)
    with chunk_loss(model := tiny(kind), chunk=14):
        counted = model(**inputs, ignore_index=ignored).loss
    if ignored >= 0:  # a token as good as others, where nobody says that it is ignored
        assert abs((counted - model(**inputs).loss).item()) > 1e-3
    monkeypatch.setattr(loss, "is_sharded", lambda _: True)
    agree(tiny(kind), **inputs, ignore_index=ignored)
    inputs["labels"][0, 3] = -100
    with chunk_loss(model), pytest.raises(InvalidParameterError, match=f"ignore_index is {ignored}"):
        model(**inputs, ignore_index=ignored)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bits_are_as_near_to_the_truth(tied: bool, autocast: bool) -> None:
    """Against float64: at most twice the error of the model's own loss in the same precision, for every weight."""
    inputs = batch(rows=4)
    model = tiny(tie_word_embeddings=tied)
    truth = gradients(copy.deepcopy(model if autocast else model.bfloat16()).double(), **inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # a cast of the head is shared by all chunks
        plain = gradients(model, **inputs)
        with chunk_loss(model, chunk=12):
            ours = gradients(model, **inputs)
    assert abs(ours[0] - truth[0]) <= 2 * abs(plain[0] - truth[0]) + 1e-6
    for name, exact in truth[1].items():
        error = (ours[1][name].double() - exact).norm()
        allowed = (plain[1][name].double() - exact).norm()
        assert error <= 2 * allowed, name


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (False, {"target_modules": ["q_proj", "lm_head"]}),
        (False, {"modules_to_save": ["lm_head"]}),
        (True, {"modules_to_save": ["embed_tokens", "norm"], "ensure_weight_tying": True}),
        (True, {}),  # the head is frozen
    ],
)
def test_adapters(tied: bool, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = lora(init_lora_weights=False, **{"target_modules": ["q_proj"]} | settings)
    agree(get_peft_model(tiny(tie_word_embeddings=tied), config), **batch())


@pytest.mark.parametrize("build", [lambda: tiny(), lambda: tiny("gemma2", tie_word_embeddings=True)])
def test_recomputed_pieces_are_the_same(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs under engines that hold the weights in parts."""
    monkeypatch.setattr(loss, "is_sharded", lambda model: True)
    agree(build(), **batch())


@pytest.mark.slow
def test_patched_models_keep_their_positions() -> None:
    positions = torch.arange(LENGTH) % 23
    for model, method in ((tiny("bloom"), "alibi"), (tiny(), "yarn"), (tiny(), "dynamic_yarn")):
        ctxext.patch(model, method, factor=4)
        agree(model, **batch(), position_ids=positions.expand(2, -1))


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_tensor_of_tokens_by_vocabulary(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "is_sharded", lambda model: recomputed)
    vocabulary, length, chunk = 4096, 400, 40
    model = tiny(vocab_size=vocabulary, hidden_size=32, head_dim=8, intermediate_size=48)
    ids = tokens(length)
    with Largest() as plain:
        gradients(model, input_ids=ids, labels=ids)
    with chunk_loss(model, chunk=chunk), Largest() as ours:
        gradients(model, input_ids=ids, labels=ids)
    assert plain.numbers >= length * vocabulary
    assert ours.numbers == chunk * vocabulary  # the head's weights are 32 x vocabulary


def test_no_gradient_no_labels_no_logits() -> None:
    model, inputs = tiny(), batch()
    with torch.inference_mode():
        expected = model(**inputs)
        with chunk_loss(model, chunk=14):
            found = model(**inputs)
            plain = model(inputs["input_ids"])
            as_tuple = model(**inputs, return_dict=False)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-6)
    assert found.logits is None
    assert "logits" not in found
    assert torch.equal(as_tuple[0], found.loss)
    assert torch.equal(plain.logits, expected.logits)


def test_a_batch_without_any_label() -> None:
    inputs = batch() | {"labels": torch.full((2, LENGTH), -100)}
    model = tiny()
    with chunk_loss(model, chunk=14):
        assert model(**inputs).loss.isnan()  # as torch's own mean over nothing
        value, found = gradients(model, **inputs, num_items_in_batch=5)
    assert value == 0
    assert "lm_head.weight" in found, "a rank without labels must still take part in the reduction"
    assert all((g == 0).all() for g in found.values())


def run(model: Any, directory: Path, **arguments: Any) -> tuple[list[float], list[float], float]:
    settings = QUIET | {"max_steps": 3, "learning_rate": 1e-4}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    data = batch(rows=8)
    rows = [{"input_ids": i, "labels": t} for i, t in zip(data["input_ids"], data["labels"], strict=True)]
    trainer = Trainer(
        model, TrainingArguments(str(directory), **settings, **arguments), train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in steps], [entry["grad_norm"] for entry in steps], trainer.evaluate()["eval_loss"]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_the_trainer_needs_no_change(precision: dict[str, bool], tmp_path: Path) -> None:
    """Accumulated, normalised by the tokens of the whole batch, and evaluated."""
    expected = run(tiny(), tmp_path, **precision)
    model = tiny()
    chunk_loss(model, chunk=14)
    losses, norms, evaluation = run(model, tmp_path, **precision)
    assert len(losses) == 3
    assert losses[0] != losses[1], "nothing was trained"
    assert losses == pytest.approx(expected[0], rel=2e-3 if precision else 1e-5)
    assert norms == pytest.approx(expected[1], rel=2e-2 if precision else 1e-5)
    assert evaluation == pytest.approx(expected[2], rel=2e-3 if precision else 1e-5)


@pytest.mark.nightly
def test_compiled() -> None:
    model, inputs = tiny(), batch()
    value, expected = gradients(model, **inputs)
    chunk_loss(model, chunk=14)
    found = gradients(torch.compile(model, backend="eager"), **inputs)
    assert torch.allclose(found[0], value, rtol=1e-6)
    assert torch.allclose(found[1]["_orig_mod.lm_head.weight"], expected["lm_head.weight"], atol=1e-6)


def test_undone_in_order() -> None:
    model = tiny()
    handle = chunk_loss(model)
    with pytest.raises(PatchStateError, match="computes its loss in chunks already"):
        chunk_loss(model)
    handle.remove()
    handle.remove()
    assert "forward" not in vars(model)
    bloom = tiny("bloom")
    first = chunk_loss(bloom)
    ctxext.patch(bloom, "alibi", factor=2)
    with pytest.raises(PatchStateError, match=r"was patched after chunk_loss\(model\).*unpatch"):
        first.remove()
    ctxext.unpatch(bloom)
    first.remove()
    assert "forward" not in vars(bloom)
    ctxext.patch(bloom, "alibi", factor=2)
    above = vars(bloom)["forward"]
    with chunk_loss(bloom):
        assert vars(bloom)["forward"] is above, "positions are still read first"
        twin = pickle.loads(pickle.dumps(copy.deepcopy(bloom)))
        assert twin(**batch()).logits is None
    assert bloom(**batch()).logits is not None
    assert twin(**batch()).logits is None
    ctxext.unpatch(bloom)


class PastTheBase(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose head does not read what its base computes."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_refused() -> None:
    for model, said in (
        (tiny("xlm"), "XLMWithLMHeadModel has a loss of its own"),
        (tiny("bamba", z_loss_coefficient=1e-3), "BambaForCausalLM has a loss of its own"),
        (tiny().model, "LlamaModel is not a base model with a language modelling head"),
    ):
        with pytest.raises(IncompatibleError, match=said):
            chunk_loss(model)
    chunk_loss(tiny("bamba"))
    model = tiny()
    model.__class__ = PastTheBase
    with chunk_loss(model), pytest.raises(IncompatibleError, match="cannot compute its logits in pieces"):
        model(**batch())
    model = tiny()
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(PatchStateError, match=r"forward of this LlamaForCausalLM has been replaced .* by Liger"):
        chunk_loss(model)
    model = tiny()
    chunk_loss(model)
    value = model(**batch()).loss
    value.backward(retain_graph=True)
    with pytest.raises(PatchStateError, match="one backward pass"):
        value.backward()


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize("given", ["1024", 14.0, True, None, 0])
def test_a_chunk_of_no_whole_number_is_refused(given: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"^chunk must be a positive whole number of tokens, found "):
        chunk_loss(tiny(), chunk=given)


def test_device_hooks_stay_around() -> None:
    """accelerate moves inputs between devices in a forward of its own."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    model, hook = tiny(), Counting()
    value, _ = gradients(model, **batch())
    add_hook_to_module(model, hook)
    with chunk_loss(model, chunk=14):
        assert torch.allclose(gradients(model, **batch())[0], value, rtol=1e-6)
    assert hook.calls == 1
    assert model(**batch()).logits is not None
