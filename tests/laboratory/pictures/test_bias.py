"""Numbers of the picture of a bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxext.errors import IncompatibleError
from ctxext.laboratory.encodings.kerple import KERPLE
from ctxext.laboratory.pictures.bias import bias_of_encoding, bias_of_slopes
from ctxext.laboratory.pictures.of_method import picture_of
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.methods import METHODS
from ctxext.methods.alibi import ALiBi
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
