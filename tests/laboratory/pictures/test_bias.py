"""Numbers of the picture of a bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxext.core.architecture import find_architecture
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.laboratory.encodings.kerple import KERPLE
from ctxext.laboratory.pictures.bias import bias_of_encoding, bias_of_slopes
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.methods import METHODS, Method
from ctxext.methods.alibi import ALiBi
from ctxext.methods.dynamic_pi import DynamicPI
from ctxext.models.alibi import AlibiArchitecture
from tests._checkpoints import rewrite
from tests._models import tiny


def test_slopes_of_alibi() -> None:
    """The paper's: for 8 heads 1/2, 1/4 ... 1/256; the bias is their product with the distance."""
    found = bias_of_slopes(ALiBi(factor=2.0), PictureRequest(trained_length=64)).values
    assert found["slopes"].tolist() == [2.0**-head for head in range(1, 9)]
    at = found["distances"].tolist().index(127)
    assert found["bias"][:, at].tolist() == [-127 * 2.0**-head for head in range(1, 9)]


def test_bias_of_an_encoding() -> None:
    torch.manual_seed(0)
    p, a = (weight.detach().double().clamp(min=0.01) for weight in KERPLE(factor=2.0).build(SMALL).parameters())
    found = bias_of_encoding(KERPLE(factor=2.0), PictureRequest()).values
    for index, distance in enumerate(found["distances"].tolist()):
        torch.testing.assert_close(found["bias"][:, index], -p * (1 + a * distance).log(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["slopes"], p * (1 + a * 512).log() / 512, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "method"), [("t5", "pi"), ("t5", "alibi"), ("mamba2", "pi"), ("bloom", "pi")])
def test_slopes_are_drawn_of_a_checkpoint_that_has_slopes(model_type: str, method: str, tmp_path: Path) -> None:
    tiny(model_type).save_pretrained(tmp_path)
    request = PictureRequest(checkpoint=str(tmp_path), trained_length=64)
    if model_type == "bloom":
        assert picture_of(METHODS[method](factor=4.0), request).numbers["kind"] == "bias"
        return
    with pytest.raises(IncompatibleError, match=rf"^Method '{method}' changes nothing in .*heads have no slopes"):
        picture_of(METHODS[method](factor=4.0), request)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "changes"), [("bloom", {}), ("falcon", {"alibi": True}), ("mpt", {})])
def test_slopes_of_a_checkpoint_are_those_that_its_attention_adds(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Falcon divides them, like its scores, by the square root of the size of a head."""
    model = tiny(model_type, **changes)
    model.save_pretrained(tmp_path)
    found = bias_of_slopes(DynamicPI(factor=1.0), PictureRequest(checkpoint=str(tmp_path), trained_length=64)).values
    family = find_architecture(Subject.of(model))
    assert isinstance(family, AlibiArchitecture)
    torch.testing.assert_close(found["slopes"], family.stock_slopes(Subject.of(model)), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method", "said"),
    [
        ("mpt", DynamicPI(factor=2.0), "alibi_bias_max of this mpt is 16"),
        ("gemma3_text", ALiBi(factor=2.0), "cannot replace the rotation of this gemma3_text"),
    ],
)
def test_slopes_of_a_model_that_does_not_take_the_method_are_refused(
    model_type: str, method: Method, said: str, tmp_path: Path
) -> None:
    tiny(model_type).save_pretrained(tmp_path)
    if model_type == "mpt":
        rewrite(tmp_path / "config.json", lambda config: config["attn_config"].update(alibi_bias_max=16))
    with pytest.raises(IncompatibleError, match=said):
        picture_of(method, PictureRequest(checkpoint=str(tmp_path), trained_length=64))
