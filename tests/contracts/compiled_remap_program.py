"""Run by test_remap in its own process: a remapped model is compiled around its attention, and never as one graph."""

from __future__ import annotations

import torch

import ctxext
from tests._models import logits, tiny, tokens

if __name__ == "__main__":
    model = ctxext.patch(tiny().double(), "self_extend", factor=4, window=16)
    compiled = torch.compile(model, backend="eager")
    for length in (150, 101, 40):
        torch.testing.assert_close(logits(compiled, tokens(length)), logits(model, tokens(length)))
    torch._dynamo.reset()
    said = "one graph was made of attention in pieces"
    try:
        logits(torch.compile(model, backend="eager", fullgraph=True), tokens(150))
    except torch._dynamo.exc.Unsupported as error:
        said = str(error)
    assert "ctxext: attention in pieces reads the values of position_ids" in said, said
