"""Run by test_caches in its own process: over a static cache, one graph serves every new token.

transformers compiles so by itself on CUDA, where a graph for each length would be recorded anew for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CompileConfig

import ctxext
from tests._models import tiny, tokens

if __name__ == "__main__":
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
