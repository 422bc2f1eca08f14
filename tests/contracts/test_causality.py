"""Whether a token sees what comes after it never changes: a change of a future token reaches the past exactly when it
did before. For every method on causal decoders, on decoders turned into encoders, and on encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoModelForMaskedLM, PreTrainedModel

import ctxext
from ctxext.core.rotary import find_sites
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods import known_methods
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.spec import RopeSpec
from tests._models import FOR_LLAMA, RECENT, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

CAUSAL = ("llama", "gemma2", "deepseek_v3", "bloom")
TURNED = ("llama", "mistral")  # with is_causal=False in their config
MASKED = ("eurobert", "modernbert", *(("nomic_bert",) if RECENT else ()))


def masked(model_type: str) -> PreTrainedModel:
    return tiny_model(tiny_config(model_type), loader=AutoModelForMaskedLM)


def turned(model_type: str) -> PreTrainedModel:
    config = tiny_config(model_type, sliding_window=None) if model_type == "mistral" else tiny_config(model_type)
    config.is_causal = False
    return tiny_model(config)


BUILDS = {tiny: CAUSAL, turned: TURNED, masked: MASKED}
# One method of each kind on every model, the others on a Llama that sees the past.
OF_EACH_KIND = {"yarn", "dynamic_ntk", "alibi", "self_extend", "streaming"}
CASES = [
    pytest.param(
        *(build, name, method),
        marks=[pytest.mark.nightly] * ((build, name) != (tiny, "llama") and method not in OF_EACH_KIND),
        id=f"{build.__name__}-{name}-{method}",
    )
    for build, names in BUILDS.items()
    for name in names
    for method in FOR_LLAMA
]


def past_sees_future(model: PreTrainedModel, **arguments: Any) -> bool:
    """Whether a change of the token at 50 reaches what the model says of the tokens before it."""
    inputs = tokens(TRAINED_LENGTH - 8)
    changed = inputs.clone()
    changed[0, 50] = 40 + (int(inputs[0, 50]) - 39) % 88
    with torch.no_grad():
        found: list[Tensor] = [model(input_ids=ids, **arguments)[0] for ids in (inputs, changed)]
    assert not torch.equal(found[0][:, 50], found[1][:, 50])
    return not torch.equal(found[0][:, :50], found[1][:, :50])


def is_extended(model: PreTrainedModel, method: str) -> bool:
    """Patch the model; False where that is refused."""
    model.config.get_text_config(decoder=True)
    spec = RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)
    if Subject(model).rotaries:
        spec = find_sites(Subject.of(model), TRAINED_LENGTH)[0].spec
    example = known_methods()[method].example(spec)
    if isinstance(example, RetrievalHeads):
        example = replace(example, heads=None)  # its own: the example's may lie in a layer with a window
    try:
        ctxext.patch(model, example, trained_length=TRAINED_LENGTH)
    except IncompatibleError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("build", "model_type", "method"), CASES)
def test_a_token_sees_later_ones_exactly_when_it_did_before(build: Any, model_type: str, method: str) -> None:
    model, both_ways = build(model_type), build is not tiny
    assert past_sees_future(model) == both_ways
    if is_extended(model, method):
        assert past_sees_future(model) == both_ways


@pytest.mark.nightly
def test_the_work_list_is_not_one_of_refusals() -> None:
    """Most pairs are extended; where ALiBi is not, the reason is one of the model's."""
    for build, model_type in [*((tiny, name) for name in CAUSAL[:3]), *((masked, name) for name in MASKED)]:
        assert is_extended(build(model_type), "yarn"), model_type
    for model in (tiny(), masked("eurobert"), turned("llama"), turned("mistral")):
        assert is_extended(model, "alibi")
    with pytest.raises(IncompatibleError, match="differ by layer type"):
        ctxext.patch(masked("modernbert"), "alibi", factor=4.0)


@pytest.mark.slow
def test_a_prefix_that_sees_itself_is_refused_when_it_comes() -> None:
    """PaliGemma: causal for a plain text, both ways inside the prefix that token_type_ids mark."""
    config = tiny_config("paligemma")
    model = tiny_model(config, loader=AutoModelForImageTextToText)
    kinds = {"token_type_ids": torch.zeros(1, TRAINED_LENGTH - 8, dtype=torch.long)}
    assert past_sees_future(model, **kinds)
    ctxext.patch(model, "yarn", factor=4.0)
    assert past_sees_future(model, **kinds)
    ctxext.unpatch(model)
    for method in ("alibi", "self_extend"):
        ctxext.patch(model, method, factor=4.0)
        with pytest.raises(IncompatibleError, match="neither causal nor full here"):
            past_sees_future(model, **kinds)
        ctxext.unpatch(model)
