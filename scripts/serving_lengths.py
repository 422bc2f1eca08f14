"""Lengths that a card holds in use, as ``ctxext plan`` computes them, for docs/guides/planning.md.

    python scripts/serving_lengths.py            # rewrite docs/evidence/serving-lengths.csv

Nothing is measured here. A card has as many GiB as its name says GB, and a GiB of them is left to the CUDA context;
one of 141 GB has 140 GiB.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from ctxext.planning.plan import longest, plan_serving

PLACE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "serving-lengths.csv"
CHUNK = 2048
CARDS = {"12 GB": 11, "16 GB": 15, "24 GB": 23, "32 GB": 31, "80 GB": 79, "141 GB": 139}
"""GiB that weights, cache and work may take on a card."""
_QWEN3: dict[str, Any] = {"vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128}
_QWEN3 |= {"num_key_value_heads": 8, "max_position_embeddings": 40960}
_LLAMA: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES: dict[str, PreTrainedConfig] = {
    "Qwen3 4B": Qwen3Config(**_QWEN3, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "Mistral 7B v0.3": MistralConfig(**_LLAMA, vocab_size=32768, max_position_embeddings=32768, sliding_window=None),
    "Llama 3.1 8B": LlamaConfig(**_LLAMA, vocab_size=128256, max_position_embeddings=131072),
    "Qwen3 8B": Qwen3Config(**_QWEN3, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
}


def rows() -> Iterator[list[str]]:
    """Yield the rows of the table, its head first."""
    yield ["model", "weights", "bits of the cache", *CARDS]
    for name, config in SHAPES.items():
        for quantisation in (None, "nf4"):
            for bits in (None, 8, 4):
                cells = cells_of(config, quantisation, bits)
                yield [name, quantisation or "bf16", str(bits or 16), *cells]


def cells_of(config: PreTrainedConfig, quantisation: str | None, bits: int | None) -> Iterator[str]:
    """Yield the longest context on each card, a dash where no chunk fits beside the weights."""
    plan = plan_serving(config, quantisation=quantisation, cache_bits=bits, prompt_chunk=CHUNK)
    for size in CARDS.values():
        fits = plan.at(CHUNK).total <= size * 2**30
        yield f"{longest(plan, size * 2**30).length:,}" if fits else "-"


if __name__ == "__main__":
    with PLACE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows())
