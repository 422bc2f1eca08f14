"""What every method promises on every kind of rotary model (docs: the promises of patch). New methods get all of it."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils.generic import GeneralInterface

import ctxext
import ctxext.models.rope
from ctxext.core.subject import Subject
from ctxext.methods import METHODS, RopeMethod
from ctxext.rotary.sites import find_sites
from tests._models import MODELS, RECENT, logits, tiny, tokens
from tests._products import pairwise
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


@every_model
def test_a_model_without_memory_gets_the_same_config(model_type: str) -> None:
    real = ctxext.patch(tiny(model_type), "yarn", factor=4.0)
    with torch.device("meta"):
        empty = type(real)(tiny(model_type).config)
    ctxext.patch(empty, "yarn", factor=4.0)
    real_config, empty_config = (model.config.to_dict() for model in (real, empty))
    assert empty_config == real_config
    assert all(parameter.is_meta for parameter in empty.parameters())


# Names that torch.compile puts into modules for earlier tests, and takes out when their code is freed, at any time.
COMPILERS = re.compile(r"__(builtins_dict|compiled_fn|resume_at|import)|.*_\d+_c\d+").match


def _everything_global() -> dict[tuple[str, str], int]:
    """Identities of all that the modules and classes of transformers and of torch.nn hold."""
    found: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(("transformers", "torch.nn")):
            kept = {key: value for key, value in list(vars(module).items()) if not COMPILERS(key)}
            for key, value in kept.items():
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
