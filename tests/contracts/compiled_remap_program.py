"""Run by tests in a process of its own: steps as one graph, and whole texts around theirs.

A graph replays what it captured, so that numbers are compared at every token across the borders of a method, after the
cache lost tokens, got its rows in another order, and began another text; shapes would stay right where these go wrong.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, CompileConfig, DynamicCache, StaticCache

import ctxext
from tests._models import logits, qwen2_vl, tiny, tokens
from tests.walk.tiny import tiny_config, tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "self_extend": {"window": 16, "temperature": "logn"},
    "dual_chunk": {"chunk": 24, "local": 4},
    "retrieval_heads": {"heads": [0, 3], "window": 20, "temperature": "logn"},
    "rerope": {"window": 16, "leak": 0.125},
    "dpe": {"window": 16, "groups": [2, 4]},
    "string": {"local": 8},
    "streaming": {"window": 24},
}
MOST = 100  # slots of the cache; the model was trained for 64 tokens


@torch.no_grad()
def steps(method: str) -> None:
    """Read texts token by token through one graph, and compare every token with one pass."""
    factor, last = (1.5, 95) if method == "string" else (4, MOST - 1)
    model = ctxext.patch(tiny().double(), method, factor=factor, **METHODS[method])
    keep = torch.ones(2, MOST, dtype=torch.long)
    keep[1, :5] = 0
    places = (keep.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(config=model.config, max_cache_len=MOST)
    graph = torch.compile(model.forward, fullgraph=True, backend="eager")

    first, second = tokens(2 * MOST, rows=2)[:, : 2 * last].split(last, 1)
    whole = [model(ids, attention_mask=keep[:, :last], position_ids=places[:, :last], use_cache=False).logits
             for ids in (first, second)]  # fmt: skip

    def read(forward: Any, text: int, start: int, stop: int) -> None:
        # As generate() does: in the first pass the mask has the length of the tokens, later that of the cache.
        given = {"attention_mask": keep[:, :stop] if forward is model else keep, "past_key_values": cache}
        given["position_ids"] = places[:, start:stop].clone()
        found = forward(input_ids=(first, second)[text][:, start:stop], **given).logits
        torch.testing.assert_close(found, whole[text][:, start:stop])

    read(model, 0, 0, 12)
    for at in range(12, 20):
        read(graph, 0, at, at + 1)
    cache.crop(-4)
    for at in range(16, 30):
        read(graph, 0, at, at + 1)
    cache.reset()
    read(model, 1, 0, 55)
    for at in range(55, 75):
        read(graph, 1, at, at + 1)
    cache.reorder_cache(torch.tensor([1, 0]))
    for part in (keep, places, second, whole[1]):
        part.copy_(part.flip(0))
    for at in range(75, last):
        read(graph, 1, at, at + 1)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1, f"{method}: {graphs} graphs"


@torch.no_grad()
def growing() -> None:
    """Compile the steps of a growing cache, in which eager steps have turned keys, or dropped some of some heads."""
    ids = tokens(170)
    for method in ("retrieval_heads", "rerope", "self_extend", "dual_chunk"):
        for eager in (0, 40):
            torch._dynamo.reset()
            model = ctxext.patch(tiny().double(), method, factor=4, **METHODS[method])
            cache, graph = DynamicCache(), torch.compile(model.forward, backend="eager")
            parts = [model(ids[:, :120], past_key_values=cache).logits]
            for at in range(120, 120 + eager + 4):
                forward = graph if at >= 120 + eager else model
                parts.append(forward(ids[:, at : at + 1], past_key_values=cache).logits)
            found = torch.cat(parts, 1)
            torch.testing.assert_close(found, model(ids[:, : found.shape[1]], use_cache=False).logits)


def generated() -> None:
    """Generate over a static cache, where one graph serves every new token.

    transformers compiles so by itself on CUDA, where a graph for each length would be recorded anew for each token.
    """
    for method in ("alibi", "hierarchical_summary", "self_extend", "dual_chunk", "streaming"):
        model, prompt = ctxext.patch(tiny(), method, factor=4.0), tokens(60, rows=2)
        mask = torch.ones_like(prompt)
        mask[1, :7] = 0
        asked: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        asked |= {"eos_token_id": None, "pad_token_id": 0}
        everywhere = CompileConfig(fullgraph=True, backend="eager")
        everywhere._compile_all_devices = True
        expected = model.generate(prompt, **asked)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = model.generate(prompt, cache_implementation="static", compile_config=everywhere, **asked)
        assert torch.equal(found, expected)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == 1, f"{method}: {graphs} graphs"


def texts() -> None:
    """Read whole texts compiled around attention, and hear why they are not one graph."""
    model = ctxext.patch(tiny().double(), "self_extend", factor=4, window=16)
    compiled = torch.compile(model, backend="eager")
    for length in (150, 101, 40):
        torch.testing.assert_close(logits(compiled, tokens(length)), logits(model, tokens(length)))
    refused(model, tokens(150))
    # Few tokens, too, where a step would leave out the dropout.
    refused(ctxext.patch(tiny(attention_dropout=0.1), "self_extend", factor=4, window=16).train(), tokens(3))


def images() -> None:
    """Read text alone in a graph, and hear of what tells an image, which a graph cannot branch on."""
    model, places = ctxext.patch(qwen2_vl(), "alibi", factor=4.0), torch.arange(40).expand(3, 1, -1).clone()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, tokens(40), position_ids=places), logits(model, tokens(40)))
    places[1:, :, 20:] -= 4
    ended(compiled, "count along several axes that differ", position_ids=places)
    model = tiny_model(tiny_config("paligemma"), loader=AutoModelForImageTextToText)
    compiled = torch.compile(ctxext.patch(model, "alibi", factor=4.0), backend="eager")
    kinds = {"token_type_ids": torch.ones_like(tokens(40))}
    torch.testing.assert_close(logits(compiled, tokens(40), **kinds), logits(model, tokens(40), **kinds))
    ended(compiled, "neither causal nor full here", token_type_ids=torch.zeros_like(tokens(40)))


def ended(compiled: Any, why: str, **arguments: torch.Tensor) -> None:
    """Hear the assertion of a graph."""
    said = "the graph ran to its end"
    try:
        logits(compiled, tokens(40), **arguments)
    except RuntimeError as error:
        said = str(error)
    assert why in said, said


def refused(model: Any, ids: torch.Tensor) -> None:
    """Hear why a call is not one graph."""
    torch._dynamo.reset()
    said = "one graph was made of attention in pieces"
    try:
        logits(torch.compile(model, backend="eager", fullgraph=True), ids)
    except torch._dynamo.exc.Unsupported as error:
        said = str(error)
    assert "ctxext: attention in pieces reads the values of position_ids" in said, said


MODES = {"texts": texts, "growing": growing, "generated": generated, "images": images}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        MODES.get(name, partial(steps, name))()
