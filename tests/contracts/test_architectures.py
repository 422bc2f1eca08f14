"""What every method promises on every kind of rotary model (docs: the promises of patch). New methods get all of it."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import GeneralInterface

import ctxext
import ctxext.models.rope
from ctxext.core.rotary import find_sites
from ctxext.core.subject import Subject
from ctxext.errors import PatchStateError
from ctxext.methods import METHODS, RopeMethod
from tests._models import MODELS, RECENT, logits, tiny, tokens
from tests._products import crossed, pairwise, some
from tests.walk.check import State, Stock, check_model
from tests.walk.tiny import TRAINED_LENGTH

ROPE_METHODS = [method for method in METHODS.values() if issubclass(method, RopeMethod)]

every_method = pytest.mark.parametrize("method", ROPE_METHODS, ids=[method.name for method in ROPE_METHODS])
every_model = pytest.mark.parametrize("model_type", MODELS)


def example(method: type[RopeMethod], model: PreTrainedModel) -> RopeMethod:
    return method.example(find_sites(Subject.of(model), TRAINED_LENGTH)[0].spec)


def patched(method: type[RopeMethod], model_type: str = "llama") -> PreTrainedModel:
    model = tiny(model_type)
    return ctxext.patch(model, example(method, model))


def test_the_work_list_is_not_empty() -> None:
    assert len(ROPE_METHODS) >= 10
    assert len(MODELS) >= 5


# One of each kind: static, of two sets, following the text, remapped.
A_FEW = [METHODS[name] for name in ("yarn", "longrope", "dynamic_yarn", "self_extend")]
few_by_day = pytest.mark.parametrize("method", some(ROPE_METHODS, *A_FEW, ids=lambda method: method.name))


@pytest.mark.slow
@pytest.mark.parametrize("methods", [pytest.param(ROPE_METHODS, marks=pytest.mark.nightly, id="all"), A_FEW])
@every_model
def test_saved_then_reloaded_by_stock_code_and_unpatched(
    model_type: str, methods: list[type[RopeMethod]], stock: Stock, tmp_path: Path
) -> None:
    findings = check_model(tiny(model_type), methods, stock, tmp_path)
    assert len(findings) == len(methods)
    problems = [finding for finding in findings if finding.outcome != "right"]
    if not RECENT and model_type == "gemma3_text":  # 5.16 and 5.17 cannot run longrope with frequencies per layer type
        assert {finding.method for finding in problems} == {"longrope", "table"} & {method.name for method in methods}
        refusal = "builds it from its config and calls it with positions"
        assert all(finding.outcome == "refused" and refusal in finding.detail for finding in problems)
        return
    if model_type == "deepseek_v3":  # its whole scores are scaled by a constant
        refused = problems.pop()
        assert (refused.method, refused.outcome) == ("dynamic_yarn", "refused")
        assert "follows the length of the text" in refused.detail
    assert problems == []
    loaded_by_stock = {finding.method for finding in findings if finding.stock}
    stored = {"pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "longrope", "llama3", "abf", "table"}
    assert loaded_by_stock >= stored & {method.name for method in methods}


@pytest.mark.slow
@few_by_day
def test_a_second_model_and_the_class_stay_as_they_were(method: type[RopeMethod]) -> None:
    other = tiny(seed=1)
    before = State.of(other, tokens())
    patched(method)
    assert before.difference(other) is None
    assert before.difference(tiny(seed=1)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copied", "method"), pairwise([copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ROPE_METHODS)
)
def test_a_copy_is_a_patched_model_of_its_own(method: type[RopeMethod], copied: Any) -> None:
    plain = State.of(tiny(), tokens())
    model = patched(method)
    extended = logits(model, tokens())
    twin = copied(model)
    assert torch.equal(logits(twin, tokens()), extended)
    other = copied(model)
    ctxext.unpatch(twin)
    assert plain.difference(twin) is None
    assert torch.equal(logits(model, tokens()), extended)
    ctxext.unpatch(model)
    assert torch.equal(logits(other, tokens()), extended)


@pytest.mark.parametrize(("dtype", "model_type"), pairwise([torch.bfloat16, torch.float16], list(MODELS)))
def test_a_cast_never_rounds_frequencies(model_type: str, dtype: torch.dtype) -> None:
    model = ctxext.patch(tiny(model_type), "yarn", factor=4.0)
    exact = {path: dict(rotary.named_buffers()) for path, rotary in Subject(model).rotaries}
    exact = {path: {name: buffer.clone() for name, buffer in buffers.items()} for path, buffers in exact.items()}
    model.to(dtype)
    assert model.get_input_embeddings().weight.dtype == dtype
    assert exact
    for path, buffers in exact.items():
        for name, buffer in buffers.items():
            now = model.get_submodule(path).get_buffer(name)
            assert now.dtype == torch.float32
            assert torch.equal(now, buffer)


@few_by_day
def test_patching_twice_raises_and_changes_nothing(method: type[RopeMethod]) -> None:
    model = patched(method)
    before = State.of(model, tokens())
    with pytest.raises(PatchStateError, match="already extended"):
        ctxext.patch(model, "pi", factor=2.0)
    assert before.difference(model) is None


@pytest.mark.slow
@pytest.mark.parametrize(("place", "method"), crossed(["fingerprint", "_prove", "_notes"], ROPE_METHODS))
def test_a_failure_in_the_middle_leaves_no_trace(
    method: type[RopeMethod], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    before = State.of(model, tokens())

    def fail(*_: Any) -> None:
        raise RuntimeError("the power went out")

    monkeypatch.setattr(ctxext.models.rope, place, fail)
    with pytest.raises(RuntimeError, match="the power went out"):
        ctxext.patch(model, example(method, model))
    assert before.difference(model) is None
    assert "ctxext" not in model.config.to_dict()
    monkeypatch.undo()
    assert ctxext.patch(model, example(method, model)) is model


def greedy_without_cache(model: PreTrainedModel, prompt: Tensor, count: int) -> Tensor:
    for _ in range(count):
        prompt = torch.cat([prompt, logits(model, prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "method"), crossed(["dynamic", "static"], ROPE_METHODS))
def test_generating_with_a_cache_equals_generating_without(method: type[RopeMethod], cache: str) -> None:
    """From inside the trained window to beyond it, so that dynamic methods change on the way."""
    model = patched(method)
    prompt = tokens(TRAINED_LENGTH - 8)
    expected = greedy_without_cache(model, prompt, 20)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        cache_implementation=cache,
        disable_compile=True,
    )
    assert torch.equal(found, expected)


@pytest.mark.slow
@every_model
def test_generating_with_a_cache_on_every_model(model_type: str) -> None:
    model = ctxext.patch(tiny(model_type), "yarn", factor=4.0)
    prompt = tokens(TRAINED_LENGTH - 8)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(found, greedy_without_cache(model, prompt, 20))


@few_by_day
def test_a_row_does_not_depend_on_padding_or_its_batch(method: type[RopeMethod]) -> None:
    model = patched(method)
    long = tokens()
    alone = logits(model, long[:, :80])
    padding = long.shape[1] - 80
    batch = torch.cat([long, torch.cat([torch.zeros(1, padding, dtype=torch.long), long[:, :80]], 1)])
    mask = torch.ones_like(batch)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, batch, attention_mask=mask, position_ids=positions)
    # Float32 sums in another order; what a wrong length or shift would do to these logits is above 0.1.
    torch.testing.assert_close(found[1:, padding:], alone, atol=2e-4, rtol=0)
    torch.testing.assert_close(found[:1], logits(model, long), atol=2e-4, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("method", some(ROPE_METHODS, METHODS["dynamic_yarn"], ids=lambda method: method.name))
@pytest.mark.usefixtures("_for_compiling")
def test_compiled_code_computes_the_same(method: type[RopeMethod]) -> None:
    model = patched(method)
    expected = logits(model, tokens())
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, tokens()), expected, atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.usefixtures("_for_compiling")
def test_compiled_before_it_was_patched() -> None:
    compiled = torch.compile(tiny(), backend="eager")
    plain = logits(compiled, tokens())
    ctxext.patch(compiled, "yarn", factor=4.0)
    extended = logits(ctxext.patch(tiny(), "yarn", factor=4.0), tokens())
    torch.testing.assert_close(logits(compiled, tokens()), extended, atol=1e-5, rtol=0)
    ctxext.unpatch(compiled)
    torch.testing.assert_close(logits(compiled, tokens()), plain, atol=1e-5, rtol=0)


@pytest.mark.slow
@every_method
def test_gradient_checkpointing_gives_the_same_gradients(method: type[RopeMethod]) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = patched(method).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(with_, without) for with_, without in zip(*gradients, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])


def adapted(model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


@pytest.mark.slow
@every_method
def test_peft_before_and_after_patching_and_merging(method: type[RopeMethod]) -> None:
    before = adapted(patched(method))
    after = adapted(tiny())
    assert ctxext.patch(after, example(method, after.get_base_model())) is after
    expected = logits(before, tokens())
    assert torch.equal(logits(after, tokens()), expected)
    merged = after.merge_and_unload()
    assert merged.config.ctxext["method"]["method"] == method.name
    torch.testing.assert_close(logits(merged, tokens()), expected, atol=1e-3, rtol=0)
    assert (expected - logits(adapted(tiny()), tokens())).abs().max() > 0.1
    ctxext.unpatch(merged)
    assert not hasattr(merged.config, "ctxext")


@every_model
def test_a_model_without_memory_gets_the_same_config(model_type: str) -> None:
    real = ctxext.patch(tiny(model_type), "yarn", factor=4.0)
    with torch.device("meta"):
        empty = type(real)(tiny(model_type).config)
    ctxext.patch(empty, "yarn", factor=4.0)
    real_config, empty_config = (model.config.to_dict() for model in (real, empty))
    assert empty_config == real_config
    assert all(parameter.is_meta for parameter in empty.parameters())


def _everything_global() -> dict[tuple[str, str], int]:
    """Identities of all that the modules and classes of transformers and of torch.nn hold."""
    found: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(("transformers", "torch.nn")):
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(f"{name}.{key}", inner): id(thing) for inner, thing in vars(value).items()}
                elif type(value) is dict or isinstance(value, GeneralInterface):
                    found |= {(f"{name}.{key}", str(inner)): id(thing) for inner, thing in value.items()}
    return found


@pytest.mark.slow
@every_method
def test_nothing_global_is_reassigned(method: type[RopeMethod]) -> None:
    model = tiny()
    logits(model, tokens())  # lazy imports happen before we look
    ctxext.unpatch(ctxext.patch(model, example(method, model)))
    before, during = _everything_global(), []
    ctxext.patch(model, example(method, model))
    model.model.layers[0].mlp.register_forward_hook(lambda *_: during.append(_everything_global()))
    logits(model, tokens())
    assert len(before) > 1000
    assert ("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS", "sdpa") in before
    assert len(during) == 1
    for seen in (*during, _everything_global()):
        assert [key for key, value in before.items() if seen.get(key) != value] == []
