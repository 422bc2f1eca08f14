"""Answers of ``ctxext serve`` over HTTP: how long a question about a long text takes, and the next one.

    python scripts/bench_serve.py                                                    # SmolLM2's shape on the CPU
    python scripts/bench_serve.py --model llama-8b --tokens 32768 --device cuda

Random weights of a published shape, with a word for each letter, so that their last layer is small; one client, greedy.
The first question reads the text; the second one goes on from what the server has kept.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any

import bench
import typer

import ctxext
from ctxext.errors import CtxextError
from ctxext.measuring.checkpoint import DTYPES, Checkpoint
from ctxext.serving.load import Served
from tests.serving._asking import letters
from tests.serving._running import answering

VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {},
    "yarn": {"method": "yarn"},
    "self_extend": {"method": "self_extend"},
    "dual_chunk": {"method": "dual_chunk"},
}
COLUMNS = ("variant", "steps", "first token, s", "ms a token", "next question, s", "of its tokens kept")


def asked(port: int, prompt: str, new: int) -> tuple[float, float, int]:
    """Ask once, and return the seconds to the first token, those of a further one, and the tokens that were kept."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
    request, start = urllib.request.Request(url, json.dumps(body).encode(), headers), time.perf_counter()
    times, usage = [], dict[str, Any]()
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            if event["choices"]:
                times.append(time.perf_counter())
    further = max(usage["completion_tokens"] - 1, 1)
    return times[0] - start, (times[-1] - times[0]) / further, usage["prompt_tokens_details"]["cached_tokens"]


def main(
    model: Annotated[str, typer.Option(help=f"of {', '.join(bench.SHAPES)}")] = "smollm2",
    tokens: bench.Tokens = 4096,
    new: Annotated[int, typer.Option(help="tokens of an answer", min=2)] = 64,
    only: Annotated[str, typer.Option(help=f"of {', '.join(VARIANTS)}, comma-separated; all if empty")] = "",
    dtype: bench.Dtype = "bf16",
    layers: bench.Layers = 0,
    device: bench.Device = bench.DEVICE,
    markdown: bench.Markdown = None,
) -> None:
    """Measure a server with and without ctxext, with eager steps and with graphs."""
    chosen, tokenizer = bench.listed(only, VARIANTS) or list(VARIANTS), letters()
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}")

    def rows(say: bench.Say) -> Iterator[bench.Row]:
        window = tokens + 2 * new + 64
        changes = {"vocab_size": len(tokenizer), "max_position_embeddings": max(window // 4, 64), "eos_token_id": None}
        made = bench.random_model(model, dtype, device, layers, **changes)
        text = "".join(chr(97 + (7 * at + at // 13) % 26) for at in range(tokens))
        for name in chosen:
            if name != "stock":
                ctxext.patch(made, factor=5, **VARIANTS[name])
            served = Served("tiny", Checkpoint("tiny", made, tokenizer), window, {})
            for steps in ("eager", "graphs"):
                say(f"{name}, {steps}")
                try:
                    with answering(served, compiles=steps == "graphs") as server:
                        asked(server.port, text[:64], new)  # warms up, and compiles
                        first, each, _ = asked(server.port, text, new)
                        again, _, kept = asked(server.port, text + " And then?", new)
                    yield name, steps, f"{first:.3f}", f"{1e3 * each:.1f}", f"{again:.3f}", f"{kept:,}"
                except (CtxextError, RuntimeError, OSError) as error:
                    yield name, steps, str(error).splitlines()[0][:150].replace("|", "/"), "", "", ""
            if name != "stock":
                ctxext.unpatch(made)

    depth = f", {layers} layers" if layers else ""
    title = f"A served {model}{depth}, {dtype}, text of {tokens:,} tokens, answers of {new}; {bench.machine(device)}"
    bench.report(title, COLUMNS, rows, markdown)


if __name__ == "__main__":
    typer.run(main)
