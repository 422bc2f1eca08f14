"""What a share of the heads loses, task by task: keys, questions, code and prose in texts of 2,048 tokens.

    python scripts/studies/share_by_task.py --code repeats.parquet --novels novels.parquet -o shares.json

Inside the trained window, at plain positions: the groups with the best scores of ``ctxext.heads`` see all of a text,
the others its first 4 and the last 256 tokens; for none, only the worst group sees all. Each task is a text and the
tokens of it that are scored: the answer behind the question, or in code and novels the second half, of which those that
repeat from more than 256 tokens before are counted apart too. What is kept is how much of the loss that all groups
save, against none, a share of them saves.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from typer import Option

sys.path.insert(0, str(Path(__file__).parents[2]))

import ctxext
from ctxext.attention.heads import heads
from ctxext.cli.options import run_script
from ctxext.evaluation import passkey
from ctxext.evaluation.retrieval import choices
from ctxext.files import write_json
from ctxext.measuring.checkpoint import load_checkpoint
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.texts.documents import read_documents
from ctxext.texts.haystack import of_text
from ctxext.texts.repeats import repeats_from_afar
from scripts.bench import claim, machine, markdown_table

LENGTH, WINDOW, SINKS = 2048, 256, 4
Scored = dict[str, list[int]]


def asked(tokenizer: Any, novel: Any, count: int) -> Iterator[tuple[Tensor, Scored]]:
    """Yield keys and questions hidden in a novel, and the places of their answers."""
    common: dict[str, Any] = {"haystack": of_text(tokenizer, novel.name, novel.text), "turning_point": 1}
    for key in passkey.make_prompts(tokenizer, [LENGTH], [0.1, 0.4], trials=-(-count // 2), seed=1, **common):
        prompt, answer = key.passkey.prompt, key.passkey.answer
        yield torch.cat([prompt, answer]), {"keys": list(range(len(prompt), len(prompt) + len(answer)))}
    for one in choices.make_prompts(tokenizer, [LENGTH], samples=count, seed=1, **common):
        prompt, answer = torch.cat([one.text, one.requests[0]]), one.answers[0]
        yield torch.cat([prompt, answer]), {one.task: list(range(len(prompt), len(prompt) + len(answer)))}


def read(tokenizer: Any, kind: str, path: Path, count: int) -> Iterator[tuple[Tensor, Scored]]:
    """Yield the middles of texts, and the tokens of their second halves: those that repeat from afar, and all."""
    for _, document in zip(range(count), read_documents([str(path)]), strict=False):
        ids = tokenizer(document.text).input_ids
        ids = ids[len(ids) // 3 :][:LENGTH]
        half = range(LENGTH // 2, LENGTH)
        repeats = repeats_from_afar(ids, WINDOW, len(half))
        copied = [place for place, repeated in zip(half, repeats, strict=True) if repeated]
        yield torch.tensor(ids), {f"{kind}, repeated": copied, f"{kind}, all tokens": list(half)}


@torch.no_grad()
def losses(model: Any, texts: list[tuple[Tensor, Scored]]) -> dict[str, list[float]]:
    """Return the mean loss of the scored tokens of each text, by task."""
    found: dict[str, list[float]] = {}
    for tokens, scored in texts:
        places = sorted({place for each in scored.values() for place in each})
        logits = model(tokens[None], logits_to_keep=torch.tensor(places) - 1).logits[0].float()
        each = dict(
            zip(places, functional.cross_entropy(logits, tokens[places], reduction="none").tolist(), strict=True)
        )
        for task, own in scored.items():
            if own:
                found.setdefault(task, []).append(statistics.mean(each[place] for place in own))
    return found


def main(
    code: Annotated[Path, Option(help="Source code, a text a row.")],
    novels: Annotated[Path, Option(help="Novels; the first is what keys and questions are hidden in.")],
    checkpoint: Annotated[str | None, Option(help="Default: SmolLM2-135M.")] = None,
    shares: Annotated[list[float] | None, Option("--share", help="Default: 0.05, 0.1, 0.2, 0.4.")] = None,
    count: Annotated[int, Option(help="Texts of each task.")] = 8,
    output: Annotated[Path | None, Option("--output", "-o", help="JSON of all numbers; what it holds is kept.")] = None,
) -> None:
    """Read every text with each share of the heads, and print what is kept."""
    loaded, console = load_checkpoint(checkpoint), Console()
    if output is not None:
        claim(output, "share_by_task.py", loaded, code=code, novels=novels, count=count)
    model, tokenizer = loaded.model, loaded.tokenizer
    ranked = heads(model).ranked()
    texts = [*asked(tokenizer, next(iter(read_documents([str(novels)]))), count)]
    for kind, path in (("code", code), ("novels", novels)):
        texts += read(tokenizer, kind, path, count)
    result = json.loads(output.read_text(encoding="utf-8")) if output and output.exists() else {}
    ways = {"all": None, **{f"{share:g}": share for share in shares or (0.05, 0.1, 0.2, 0.4)}, "none": 0.0}
    for name, share in ways.items():
        if name in result:
            continue
        console.print(f"reading {len(texts)} texts, {name}")
        if share is not None:
            far = ranked[: max(1, round(share * len(ranked)))] if share else ranked[-1:]  # one group at least reads far
            chosen = {"heads": far, "far": "plain", "window": WINDOW, "sinks": SINKS, "exact": False}
            ctxext.patch(model, RetrievalHeads(factor=1, **chosen))
        result[name] = losses(model, texts)
        if share is not None:
            ctxext.unpatch(model)
        if output is not None:
            write_json(output, result)
    rows = []
    for task, whole in result["all"].items():
        cells = [f"{statistics.mean(whole):.3f}", f"{statistics.mean(result['none'][task]):.3f}"]
        saved = statistics.mean(result["none"][task]) - statistics.mean(whole)
        for name in list(ways)[1:-1]:
            lost = [part - every for part, every in zip(result[name][task], whole, strict=True)]
            error, mean = statistics.stdev(lost) / len(lost) ** 0.5, statistics.mean(lost)
            cells.append(f"{100 * (1 - mean / saved):.0f} % ({mean:+.3f} ± {error:.3f})")
        rows.append([task, *cells])
    columns = ["loss of", "all groups", "none", *(f"kept by {name}" for name in list(ways)[1:-1])]
    console.print(markdown_table("", columns, rows, [machine("cpu")]), soft_wrap=True)


if __name__ == "__main__":
    run_script(main)
