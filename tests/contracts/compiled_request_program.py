"""Run by test_generation in a process: growth="request" is one graph for a step, whatever lengths are declared."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

import ctxext
from ctxext.errors import InvalidParameterError, PatchStateError
from tests._models import logits, tokens
from tests.caches._requests import EVERY, METHODS, TOTAL, build, padded, stepped
from tests.walk.tiny import TRAINED_LENGTH


def one_graph(model: PreTrainedModel, expected: int) -> None:
    """Compare batches of other declared lengths, across the trained length, with eager decoding on a growing cache."""
    everywhere = CompileConfig(fullgraph=True, backend="eager", mode=None)
    everywhere._compile_all_devices = True
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    options |= {"pad_token_id": 0, "eos_token_id": None}
    for width, short in ((TOTAL - 4, TOTAL - 6), (TOTAL - 3, TOTAL - 20), (TOTAL - 5, 40)):
        ids, mask = padded(width, short)
        how = options | {"attention_mask": mask, "max_new_tokens": TOTAL - width}
        eager = model.generate(ids, **how)
        found = model.generate(ids, cache_implementation="static", compile_config=everywhere, **how)
        assert torch.equal(found.sequences, eager.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(eager.logits), atol=1e-5, rtol=0)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == expected, f"{graphs} graphs"


def by_hand() -> None:
    """Decode in a loop, over a cache that a graph filled and that other calls refuse or read again."""
    model, ids = build("dynamic_ntk"), tokens(TOTAL + 1)
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    expected = logits(model, ids[:, :-1], ctxext_length=TOTAL)[0]
    cache = StaticCache(config=model.config, max_cache_len=2 * TOTAL)
    stepped(model, ids[:, : TOTAL - 8], cache, ctxext_length=TOTAL)
    for stop in range(TOTAL - 7, TOTAL + 1):
        found = stepped(model, ids[:, :stop], cache, compiled, ctxext_length=TOTAL)
        torch.testing.assert_close(found[0], expected[stop - 1], atol=3e-4, rtol=0)
    with pytest.raises(InvalidParameterError, match="A text of 73 tokens is longer than the 72 declared for it"):
        stepped(model, ids, cache, compiled, ctxext_length=TOTAL)
    unchecked = {"past_key_values": cache, "ctxext_length": TOTAL}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a dynamic method reads the length of each sequence"):
        compiled(ids[:, :1], **unchecked)
    torch._dynamo.reset()
    expected = logits(model, ids, ctxext_length=TOTAL + 9)[:, -1]
    found = stepped(model, ids, cache, compiled, ctxext_length=TOTAL + 9)  # reads the whole text again, in a graph
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)
    assert int(cache.get_seq_length()) == TOTAL + 1
    ctxext.unpatch(model)
    with pytest.raises(PatchStateError, match="Start with a new cache"):
        logits(model, ids[:, :1], past_key_values=cache)
    ctxext.patch(model, "dynamic_pi", factor=4.0, growth="request", trained_length=TRAINED_LENGTH)
    with pytest.raises(PatchStateError, match="filled while the model was extended by 'dynamic_ntk'"):
        logits(model, ids[:, :1], **unchecked)
    ids, compiled = torch.cat([ids, ids[:, :1]], 1), torch.compile(model, fullgraph=True, backend="eager")
    found = stepped(model, ids, cache, compiled, ctxext_length=TOTAL + 9)
    torch.testing.assert_close(found, logits(model, ids, ctxext_length=TOTAL + 9)[:, -1], atol=3e-4, rtol=0)


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model_type, method = ("llama", kind) if kind in METHODS else next(pair for pair in EVERY if pair[0] == kind)
        # Rows that are fitted alike are rotated at once. Stock gemma takes two graphs, too.
        one_graph(build(method, model_type), 1 + (method == "longrope" or model_type.startswith("gemma")))
    by_hand()
