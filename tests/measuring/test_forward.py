"""Where a model's positions end, and what is told of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring import forward
from ctxext.measuring.forward import check_positions, layers_of, logits_of_answers
from ctxext.measuring.loss import loss_by_position
from tests._models import TRAINED_LENGTH, logits, qwen2_vl, tiny, tokens
from tests.walk.tiny import tiny_config, tiny_model

ENDING = ("gpt2", "opt", "openai-gpt", "xlm", "ctrl", "codegen", "gptj", "mpt")


def reads(model: nn.Module, length: int) -> bool:
    """Whether a model takes so many tokens."""
    try:
        with torch.no_grad():
            model(input_ids=torch.full((1, length), 7))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("family", [*ENDING, "llama", "falcon", "bloom", "xglm", "mamba"])
def test_the_last_position_is_the_last_that_a_model_reads(family: str) -> None:
    model = tiny(family)
    subject, is_ending = Subject.of(model), family in ENDING
    assert forward.last_position(subject) == (TRAINED_LENGTH if is_ending else None)
    assert (reads(model, TRAINED_LENGTH), reads(model, TRAINED_LENGTH + 1)) == (True, not is_ending)
    if is_ending:
        says = r"positions for 64 tokens and cannot read 65\. .* at most 64\."
        with pytest.raises(InvalidParameterError, match=says):
            check_positions(subject, TRAINED_LENGTH + 1)
    else:
        check_positions(subject, TRAINED_LENGTH + 1)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv"])
def test_a_budget_in_bytes_is_refused_without_attention(family: str) -> None:
    with pytest.raises(InvalidParameterError, match=rf"passes of a {family} cannot be estimated.* Leave --memory out"):
        forward.cached_tokens_for(Subject.of(tiny(family)), 64, 10**9)


@pytest.mark.parametrize("cached", [None, 16])
@pytest.mark.parametrize("family", ["opt", "bart", "trocr", "gpt2"])
def test_pieces_come_from_the_decoder_inside_a_base_model_too(family: str, cached: int | None) -> None:
    model, ids = tiny_model(tiny_config(family), loader=AutoModelForCausalLM), tokens(40)
    pieces = torch.cat([piece for _, piece in forward.logits_in_chunks(model, ids, chunk=7, cached=cached)], dim=1)
    torch.testing.assert_close(pieces, logits(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("left", [[[-7]], [[0]] * 4], ids=["of an image", "of a batch"])
def test_images_of_an_earlier_text_move_no_cached_piece(left: list[list[int]]) -> None:
    """Qwen2-VL keeps how far they moved what follows them, a number for each row that was read."""
    model: Any = qwen2_vl()

    def losses() -> torch.Tensor:
        return loss_by_position(model, tokens(48), cached=16)

    expected = losses()
    model.model.rope_deltas = torch.tensor(left)
    assert torch.equal(losses(), expected)
    assert model.model.rope_deltas.tolist() == left, "whoever goes on from that text needs it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "goes_on"),
    [
        *((family, False) for family in ("jamba", "mamba", "zamba", "recurrent_gemma", "minimax")),
        *((family, True) for family in ("granitemoehybrid", "falcon_h1", "qwen3_next", "lfm2")),
    ],
)
def test_pieces_of_a_recurrent_model_go_on_from_its_state_or_are_refused(family: str, goes_on: bool) -> None:
    """Mamba's first form scans several tokens from an empty state, whatever was read before them."""
    model, ids = tiny(family), tokens(40)
    whole = loss_by_position(model, ids)
    if goes_on:
        torch.testing.assert_close(loss_by_position(model, ids, cached=16), whole, rtol=0, atol=1e-3)
        return
    with pytest.raises(IncompatibleError, match=r"does not go on from .* so a text cannot be read in cached pieces\."):
        loss_by_position(model, ids, cached=16)
    with pytest.raises(IncompatibleError, match="does not go on from the state of earlier tokens"):
        logits_of_answers(model, ids[0], [ids[0, :4]], [ids[0, 4:6]])
    assert torch.equal(loss_by_position(model, ids), whole)


@torch.no_grad()
def test_a_token_that_the_model_lacks_is_named_before_it_is_read() -> None:
    model, known = tiny("llama"), tiny("llama").config.vocab_size
    ids = tokens(20)
    for place in (0, 19):  # the last one is only predicted
        ids[0, place] = known
        says = rf"has token {known} of its tokenizer, and this llama knows {known}"
        with pytest.raises(InvalidParameterError, match=says):
            loss_by_position(model, ids)
        ids[0, place] = known - 1
    assert loss_by_position(model, ids).isfinite().all()


@torch.no_grad()
def test_a_token_that_a_model_reads_and_does_not_predict_is_named() -> None:
    """Mllama reads a token for images, of which its head knows nothing."""
    model, ids = tiny("mllama"), tokens(20)
    ids[0, 0] = model.config.vocab_size
    assert loss_by_position(model, ids).isfinite().all()
    ids[0, 9] = model.config.vocab_size
    assert logits(model, ids).isfinite().all()
    with pytest.raises(InvalidParameterError, match=r"has token 128 of its tokenizer, and this mllama.* knows 128"):
        loss_by_position(model, ids)
    assert logits_of_answers(model, ids[0], [ids[0, :4]], [ids[0, 4:6]])[0][0].isfinite().all()


def test_layers_that_read_pictures_are_no_layers_of_the_text() -> None:
    """InternVL3 1B has 24 of each, and those for pictures come first."""
    config = tiny_config("internvl", num_hidden_layers=2)
    config.vision_config.num_hidden_layers = 2
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert layers_of(model) == [*model.model.language_model.layers]
    plain: Any = tiny("llama")
    assert layers_of(plain) == [*plain.model.layers]
