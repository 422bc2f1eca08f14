"""Who reads what: methods, factors and lengths follow from one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.checkpoint import Checkpoint, load_checkpoint
from ctxext.measuring.readers import find_readers
from tests._models import tiny
from tests._tokenizer import BYTES_AFTER_BOS


def test_a_checkpoint_that_was_saved_extended_is_read_as_saved(checkpoint: str, tmp_path: Path) -> None:
    """The original reads for the references; without it, the extended model itself reads the last tokens."""
    ctxext.patch(LlamaForCausalLM.from_pretrained(checkpoint), "yarn", factor=2).save_pretrained(tmp_path)
    BYTES_AFTER_BOS.save_pretrained(tmp_path)
    loaded, plain = (load_checkpoint(str(place), dtype="fp32") for place in (tmp_path, checkpoint))
    readers = find_readers(loaded, reference=plain)
    assert [one.reading.name for one in readers] == ["unpatched", "truncated", "as saved"]
    assert readers[2].lengths == (512, 1024)
    with pytest.raises(InvalidParameterError, match=r"The reference .* is extended itself; give the original"):
        find_readers(loaded, reference=loaded)
    readers = find_readers(loaded, methods=["pi"], factors=[4.0])
    assert [one.reading.name for one in readers] == ["truncated", "as saved", "pi x4"]
    assert [one.lengths for one in readers] == [(512, 1024, 2048), (512, 1024), (512, 1024, 2048)]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"lengths": [600]}, InvalidParameterError, r"600 tokens are more than the 512 that this model is trained for"),
        (
            {"lengths": [2048], "methods": ["pi"], "factors": [2.0]},
            InvalidParameterError,
            r"2,048 tokens are more than the 1,024 that what is extended here reaches.*--beyond",
        ),
        ({"lengths": [400], "methods": ["pi"]}, InvalidParameterError, r"inside the trained 512.*Give a --factor"),
        ({"factors": [2.0]}, InvalidParameterError, r"factor of 2 is for a method"),
        (
            {"lengths": [2048], "methods": ["pi"], "factors": [2.0, 4.0]},
            InvalidParameterError,
            r"PI .2 reaches 1,024 tokens, fewer than every length",
        ),
        ({"lengths": [400], "methods": ["pi factor=4", "yarn"]}, InvalidParameterError, r"inside the trained 512"),
        ({"methods": ["pi"], "factors": [2.0, 2.0000001]}, InvalidParameterError, r"each method once; found 'pi x2'"),
        ({"methods": ["alibi", "table inv_freq=[1.0]"]}, IncompatibleError, r"given frequencies"),
    ],
)
def test_what_cannot_be_read_is_refused(
    model: LlamaForCausalLM, given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    loaded = Checkpoint("tiny", model, BYTES_AFTER_BOS)
    with pytest.raises(kind, match=message):
        find_readers(loaded, **given)
    with pytest.raises(InvalidParameterError, match="is its own reference"):
        find_readers(loaded, methods=["pi"], reference=loaded)
    assert ctxext.describe(model).method is None


@pytest.mark.slow
def test_lengths_follow_from_methods_and_factors_from_lengths(model: LlamaForCausalLM) -> None:
    loaded = Checkpoint("tiny", model, BYTES_AFTER_BOS)

    def readers(**given: Any) -> dict[str, tuple[int, ...]]:
        return {one.reading.name: one.lengths for one in find_readers(loaded, **given)}

    assert readers() == {"unpatched": (512,)}
    assert readers(lengths=[600], beyond=True) == {"unpatched": (600,), "truncated": (600,)}
    both = {"unpatched": (512, 1024), "truncated": (512, 1024), "yarn x2": (512, 1024)}
    assert readers(methods=["yarn"]) == both
    assert readers(methods=["yarn"], unpatched=False) == both | {"unpatched": (512,)}
    assert readers(methods=["yarn"], lengths=[400, 768])["yarn x1.5"] == (400, 768)
    assert readers(methods=["pi factor=4"], lengths=[400]) == {"unpatched": (400,), "pi x4": (400,)}
    several = readers(methods=["pi", "dynamic_ntk"], factors=[2.0, 4.0])
    assert several["pi x2"] == (512, 1024)
    assert several["pi x4"] == several["dynamic_ntk x2"] == several["truncated"] == (512, 1024, 2048)


@pytest.mark.parametrize("family", ["gpt2", "opt", "mpt"])
def test_a_model_whose_positions_end_is_asked_no_further(family: str) -> None:
    loaded, method = Checkpoint("tiny", tiny(family), BYTES_AFTER_BOS), "alibi" if family == "mpt" else "pi"
    readers = [one.lengths for one in find_readers(loaded, methods=[method], lengths=[64, 128])]
    assert readers == [(64,), (64, 128), (64, 128)], "the control stays in its window"
    for given in ({}, {"methods": [method], "factors": [1.5]}, {"trained_length": 128}):
        with pytest.raises(InvalidParameterError, match=r"are more than|cannot read 128"):
            find_readers(loaded, lengths=[128], beyond=True, **given)
