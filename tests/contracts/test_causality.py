"""Whether a token sees what comes after it never changes: a change of a future token reaches the past exactly when it
did before. Here on decoders turned into encoders, and with a prefix; the walk looks at every model type by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods import known_methods
from ctxext.rotary.sites import find_sites
from tests._models import FOR_LLAMA, logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model


def turned(model_type: str) -> PreTrainedModel:
    config = tiny_config(model_type, sliding_window=None) if model_type == "mistral" else tiny_config(model_type)
    config.is_causal = False
    return tiny_model(config)


def past_sees_future(model: PreTrainedModel, **arguments: Any) -> bool:
    """Whether a change of the token at 50 reaches what the model says of the tokens before it."""
    inputs = tokens(TRAINED_LENGTH - 8)
    changed = inputs.clone()
    changed[0, 50] = 40 + (int(inputs[0, 50]) - 39) % 88
    with torch.no_grad():
        found: list[Tensor] = [model(input_ids=ids, **arguments)[0] for ids in (inputs, changed)]
    assert not torch.equal(found[0][:, 50], found[1][:, 50])
    return not torch.equal(found[0][:, :50], found[1][:, :50])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("method", FOR_LLAMA)
def test_a_turned_decoder_sees_later_tokens_with_any_method(method: str, model_type: str) -> None:
    model = turned(model_type)
    example = known_methods()[method].example(find_sites(Subject.of(model), TRAINED_LENGTH)[0].spec)
    assert past_sees_future(model)
    if method in ("nope", "retrieval_heads"):
        with pytest.raises(IncompatibleError, match=r"reads both ways|see later"):
            ctxext.patch(model, example, trained_length=TRAINED_LENGTH)
    else:
        assert past_sees_future(ctxext.patch(model, example, trained_length=TRAINED_LENGTH))


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


@pytest.mark.slow
def test_a_text_of_which_a_processor_says_that_it_holds_no_image_is_read() -> None:
    """Gemma 3's processor says so of each token of any text, by zeros; the tokens of an image see one another."""
    model: Any = ctxext.patch(tiny("gemma3"), "self_extend", factor=4.0)
    ids = tokens(90, rows=2)
    keep = (torch.arange(90) >= torch.tensor([[20], [0]])).long()
    given, none = {"attention_mask": keep}, {"token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(logits(model, ids, **given, **none), logits(model, ids, **given))
    written = [model.generate(ids, **given, **more, max_new_tokens=4, do_sample=False) for more in ({}, none)]
    assert torch.equal(*written)
    image = {"token_type_ids": (torch.arange(90) // 4 == 10).long().expand(2, -1)}
    with pytest.raises(IncompatibleError, match="neither causal nor full here"):
        logits(model, ids, **given, **image)
