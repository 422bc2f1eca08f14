"""A learned vector per position."""

from __future__ import annotations

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.laboratory.encodings.learned import Learned
from tests._encodings import SPEC, encoding_of


def test_is_its_definition_and_the_gradient_of_a_row_is_what_came_to_its_position() -> None:
    encoding, positions = encoding_of(Learned(factor=2)), torch.tensor([[0, 3, 3], [23, 1, 0]])
    up = torch.randn(2, 3, SPEC.hidden_size, dtype=torch.float64)
    found = encoding.added(positions)
    found.backward(up)
    expected = torch.zeros_like(encoding.weight)
    for row in range(2):
        for column in range(3):
            place = int(positions[row, column])
            assert torch.equal(found[row, column], encoding.weight[place])
            expected[place] += up[row, column]
    torch.testing.assert_close(encoding.weight.grad, expected.detach(), rtol=1e-12, atol=0)


def test_begins_as_embeddings_do() -> None:
    torch.manual_seed(0)
    weight = Learned(factor=50).build(SPEC).weight
    assert weight.shape == (50 * SPEC.trained_length, SPEC.hidden_size)
    assert weight.std().item() == pytest.approx(SPEC.embedding_std, rel=0.05)


def test_a_text_beyond_the_last_vector_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="position 12: this model has learned vectors for 12 positions"):
        Learned().build(SPEC).added(torch.tensor([[12]]))
