"""Read long texts with a checkpoint whose layers mostly see a window, such as Gemma 3, beyond its trained length.

    python scripts/studies/second_model.py gemma-3-270m.gguf --text novels.parquet -n 2 --factor 1.5 -o study

Prints the loss by position beyond the trained window of each method, and at the last positions that of four truncations
and of a passkey. The windowed layers are computed in blocks of queries, with the same result: as transformers computes
them, they score all pairs of a long text, which takes five times as long as everything else. Each reading is kept in
the output folder, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as parquet
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

import ctxext
from ctxext.cli.options import run_script
from ctxext.evaluation.passkey import make_prompts
from ctxext.files import whole_file
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.measuring.loss import loss_by_position
from scripts.bench import claim, machine, markdown_table

BLOCK = 1024
"""Queries of a windowed layer whose scores are computed together."""

STEP = 4096
"""Positions of a column; the last of them inside the trained window is shown too."""

END = 2048
"""Last positions, on which truncations are compared."""


def windowed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    sliding_window: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of one unpadded text; with a window, in blocks of queries and the keys they see."""
    length, keys = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    sdpa = functional.scaled_dot_product_attention
    if length == 1:
        first = 0 if sliding_window is None else max(0, keys - sliding_window)
        return sdpa(query, key[:, :, first:], value[:, :, first:], scale=scaling).transpose(1, 2), None
    assert length == keys, "one pass over a whole text"
    if sliding_window is None or keys <= sliding_window:
        return sdpa(query, key, value, is_causal=True, scale=scaling).transpose(1, 2), None
    parts = []
    for start in range(0, length, BLOCK):
        stop, first = min(start + BLOCK, length), max(0, start - sliding_window + 1)
        distance = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
        seen = (distance >= 0) & (distance < sliding_window)
        there = slice(first, stop)
        parts.append(sdpa(query[:, :, start:stop], key[:, :, there], value[:, :, there], attn_mask=seen, scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2), None


def losses(model: Any, ids: Tensor, first: int) -> Tensor:
    """Return the losses of the tokens from position ``first`` on."""
    return loss_by_position(model, ids[None], start=first - 1)[0]


def read(model: Any, how: dict[str, Any], compute: Callable[[], Tensor]) -> Tensor:
    """Return what ``compute`` returns while the model is extended in this way; in no way if ``how`` is empty."""
    if not how:
        return compute()
    with ctxext.patched(model, **how):
        return compute()


def main(
    checkpoint: Annotated[str, Argument(help="a checkpoint or GGUF file")],
    text: Annotated[Path, Option(help="parquet file with columns name and text")],
    output: Annotated[Path, Option("--output", "-o", help="folder of the readings")],
    documents: Annotated[int, Option("-n", help="texts, the first of the file")] = 2,
    factor: Annotated[float, Option(help="of the methods")] = 1.5,
    tokens: Annotated[int | None, Option(help="read of each text; default: what the factor reaches")] = None,
    skip: Annotated[int, Option(help="tokens of each text that are left out at its start")] = 2000,
) -> None:
    """Measure what is missing, and print the tables."""
    AttentionInterface.register("windowed", windowed)
    AttentionMaskInterface.register("windowed", lambda **_: None)
    loaded = load_checkpoint(checkpoint, dtype="bf16")
    claim(output, "second_model.py", loaded, text=text, factor=factor, tokens=tokens, skip=skip)
    model, tokenizer = loaded.model, loaded.tokenizer
    trained = model.config.max_position_embeddings
    length = tokens or int(trained * factor)
    rows = parquet.read_table(text).to_pylist()[:documents]
    probe = torch.tensor(tokenizer(rows[0]["text"][:20_000])["input_ids"])[:2500]
    usual = losses(model, probe, 1)
    model.set_attn_implementation("windowed")
    print(f"mean loss by blocks minus by sdpa: {(losses(model, probe, 1) - usual).mean():+.5f}", flush=True)

    def kept(name: str, compute: Callable[[], Tensor]) -> Tensor:
        path = output / f"{name.replace('/', '_')}.pt"
        if not path.exists():
            start = time.monotonic()
            found = compute()
            with whole_file(path) as half:
                torch.save(found, half)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        return torch.load(path)

    methods: dict[str, dict[str, Any]] = {
        "self_extend": {"method": "self_extend", "factor": factor},
        "yarn": {"method": "yarn", "factor": factor},
        "unpatched": {},
    }
    first = trained - STEP  # the first token of which a method's loss is computed
    cuts = [trained // 4 * k for k in (4, 3, 2, 1)]
    spans = [f"{start // 1024}K-{(start + STEP) // 1024}K" for start in range(first, length, STEP)]
    table = []
    for row in rows:
        ids = torch.tensor(tokenizer(row["text"][: 8 * (skip + length)])["input_ids"])
        ids = torch.cat([ids[:1], ids[skip:]])[:length]  # the first token of a text stays
        if len(ids) < length:
            raise SystemExit(f"{row['name']} has {len(ids):,} tokens, not {length:,}.")
        found = {}
        for name, how in methods.items():
            found[name] = kept(f"{row['name']}-{name}", partial(read, model, how, partial(losses, model, ids, first)))
        for cut in cuts:
            end = torch.cat([ids[:1], ids[-cut + 1 :]])
            found[f"last {cut // 1024}K"] = kept(f"{row['name']}-last-{cut}", partial(losses, model, end, cut - END))
        for name, values in found.items():
            steps = [f"{part.mean():.4f}" for part in values.split(STEP)] if name in methods else [""] * len(spans)
            table.append([row["name"], name, *steps, f"{values[-END:].mean():.4f}"])
    columns = ["text", "read by", *spans, f"last {END // 1024}K"]
    print(markdown_table(f"Loss in nats per token; {machine('cpu')}", columns, table))

    [prompt] = make_prompts(tokenizer, [length], [0.1])
    key = prompt.passkey
    ids = torch.cat([key.prompt, key.answer])
    print(f"\npasskey of {len(ids):,} tokens, {len(ids) - key.key_position:,} back: loss of a token of the answer")
    for name, how in methods.items():
        if not how:
            continue  # beyond its window the unextended model does not even predict
        loss = kept(f"passkey-{name}", partial(read, model, how, partial(losses, model, ids, len(key.prompt))))
        print(f"{name}: {loss.mean():.3f}, at most {loss.max():.3f}")


if __name__ == "__main__":
    run_script(main)
