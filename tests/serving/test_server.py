"""``ctxext serve``, asked by OpenAI's client: what it answers is what ``generate`` gives."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from starlette.exceptions import HTTPException

import ctxext
from ctxext.caches.records import PAGED_IN_LAYERS
from ctxext.errors import InvalidParameterError
from ctxext.serving.endpoints import Completions, fit
from ctxext.serving.load import load_served
from ctxext.serving.server import bound, open_to_clients
from tests._checkpoints import save_with_tokenizer
from tests._models import byte_model, trained_for
from tests._programs import command
from tests._tokenizer import make_letters
from tests.serving._running import KEY, Reached, answering, running

TRAINED, FACTOR = 64, 4
FLAGS = ("--port", "0", "--dtype", "fp32")
LETTERS = make_letters()
PROMPT = LETTERS.decode(torch.randint(0, 256, (112,), generator=torch.Generator().manual_seed(3)))


def saved(place: Path, method: str | None, **parameters: Any) -> Path:
    """Save a small model that reads letters, extended where a method is named."""
    model = trained_for(byte_model(), TRAINED)
    if method is None:
        return save_with_tokenizer(model, place, LETTERS)
    ctxext.save(ctxext.patch(model, method, factor=FACTOR, **parameters), place, tokenizer=LETTERS)
    return place


def generated(model: Any, prompt: str, count: int) -> str:
    """What ``generate`` gives, as text."""
    inputs = LETTERS(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(LETTERS.decode(tokens[0, inputs["input_ids"].shape[1] :]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("served") / "self_extend", "self_extend")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Reached]:
    with answering(load_served(str(place), dtype="fp32"), key=KEY) as started:
        yield started


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    return ctxext.load(place).eval()


def asked(server: Reached, prompt: str, count: int, **more: Any) -> str:
    request = {"model": server.name, "prompt": prompt, "max_tokens": count, "temperature": 0} | more
    return str(server.client.completions.create(**request).choices[0].text)


@pytest.mark.parametrize(("prompt", "asked_for", "given"), [(60, 4, 4), (63, None, 1), (40, None, 24), (4, 60, 60)])
def test_an_answer_that_fits_gets_its_length(prompt: int, asked_for: int | None, given: int) -> None:
    assert fit(prompt, asked_for, 64) == given
    assert fit(prompt, asked_for, None) == (asked_for or 1024)


@pytest.mark.parametrize(("prompt", "asked_for"), [(60, 5), (64, None), (64, 1), (65, None), (65, 0), (1, 64), (0, 1)])
def test_one_token_too_many_is_refused(prompt: int, asked_for: int | None) -> None:
    with pytest.raises(HTTPException, match=f"has {prompt or 'no'} tokens"):
        fit(prompt, asked_for, 64)
    both = r"112 tokens, and the answer may take 145: 257 together\. The window of this model is 256 tokens\. Shorten"
    with pytest.raises(HTTPException, match=both):
        fit(112, 145, 256)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:40]], ids=["beyond the window", "inside it"])
def test_answers_are_those_of_generate(server: Reached, model: Any, prompt: str) -> None:
    expected, name, client = generated(model, prompt, 24), server.name, server.client
    messages: Any = [{"role": "user", "content": prompt}]
    sampled: Any = {"model": name, "temperature": 0}
    assert len(set(expected)) > 3
    assert asked(server, prompt, 24) == expected
    streamed = client.completions.create(prompt=prompt, max_tokens=24, stream=True, **sampled)
    assert "".join(part.choices[0].text for part in streamed) == expected
    chat = client.chat.completions.create(messages=messages, max_tokens=24, **sampled)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (expected, "length")
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(prompt), 24)
    parts = client.chat.completions.create(messages=messages, max_tokens=24, stream=True, **sampled)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert client.responses.create(input=prompt, max_output_tokens=24, **sampled).output_text == expected
    stopped = client.completions.create(prompt=prompt, max_tokens=24, stop=expected[5], **sampled)
    assert stopped.choices[0].text == expected[: expected.index(expected[5])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_work_before_the_first_token_stops_no_other(server: Reached, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is told, and what a client waited for in vain is not begun."""
    prompts, free, usual = [], threading.Event(), Completions.draws

    def slow(endpoint: Any, request: Any) -> Any:
        prompts.append(request.prompt)
        assert free.wait(60)
        return usual(endpoint, request)

    monkeypatch.setattr(Completions, "draws", slow)
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(asked, server, PROMPT[:3], 1) for _ in range(2)]
        while len(prompts) < 2:
            time.sleep(0.01)
        impatient = server.client.with_options(timeout=0.5)
        with pytest.raises(openai.APITimeoutError):
            impatient.completions.create(model=server.name, prompt="left", max_tokens=1)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=60) as answer:
            assert json.loads(answer.read())["requests"] == []
        free.set()
        assert len({answer.result() for answer in first}) == 1
    assert asked(server, PROMPT, 1)
    assert "left" not in prompts


@pytest.mark.slow
def test_health_and_models_say_how_the_model_is_extended(server: Reached) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=60) as answer:
        health = json.loads(answer.read())
    assert health["status"] == "ok"
    (listed,) = server.client.models.list().data
    told: Any = listed.model_extra
    assert (listed.id, told["max_model_len"]) == (server.name, TRAINED * FACTOR)
    for facts in (health, told["ctxext"]):
        assert (facts["method"], facts["factor"]) == ("self_extend", FACTOR)
        assert (facts["trained_length"], facts["window"]) == (TRAINED, TRAINED * FACTOR)
        assert facts["parameters"]["sinks"] == 4
    assert server.client.models.retrieve(server.name) == listed


@pytest.mark.slow
def test_an_unknown_model_has_the_code_of_openais_specification(server: Reached) -> None:
    client = server.client
    for ask in (
        lambda: client.models.retrieve("another"),
        lambda: client.completions.create(model="another", prompt="a", max_tokens=1),
        lambda: client.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}]),
        lambda: client.responses.create(model="", input="a"),
    ):
        with pytest.raises(openai.NotFoundError, match=r"has no model '.*': it serves") as refused:
            ask()
        assert (refused.value.code, refused.value.type) == ("model_not_found", "invalid_request_error")


@pytest.mark.slow
def test_strangers_are_refused_and_other_doors_are_shut(server: Reached) -> None:
    stranger = openai.OpenAI(base_url=server.client.base_url, api_key="guessed", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="needs its API key"):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model=server.name, prompt="一", max_tokens=1)
    for path in ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone"):
        with pytest.raises(openai.NotFoundError):
            server.client.post(f"{server.client.base_url}".removesuffix("/v1/") + path, body={}, cast_to=object)


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
def test_the_work_for_a_client_that_went_away_ends(server: Reached, model: Any, stream: bool) -> None:
    began = time.monotonic()
    asked(server, PROMPT[:20], 150)
    whole = time.monotonic() - began
    client = server.client.with_options(timeout=whole / 8)
    request: Any = {"model": server.name, "prompt": PROMPT[:20], "max_tokens": 150, "temperature": 0}
    if stream:
        answer = client.completions.create(stream=True, **request)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**request)
    began = time.monotonic()
    assert asked(server, PROMPT, 4) == generated(model, PROMPT, 4)
    assert time.monotonic() - began < whole / 2


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["dynamic_yarn", None])
def test_every_method_is_served_and_ctrl_c_finishes_what_runs(tmp_path: Path, method: str | None) -> None:
    """A plain checkpoint is extended at start; a dynamic method that was saved keeps the positions of a request."""
    place = saved(tmp_path / "model", method)
    extended = ("-m", "rerope", "-f", str(FACTOR)) if method is None else ()
    asked_for = {} if method is None else {"trained_length": TRAINED, "growth": "request"}
    expected = ctxext.load(place, method or "rerope", factor=FACTOR, **asked_for)
    with running(place, *FLAGS, *extended, "--name", "mine", "--api-key", KEY) as server:
        server.name = "mine"
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="guessed").models.list()
        assert ("growth='request' in place of 'exact'" in server.said) == (method is not None)
        answers: list[str] = []
        client = threading.Thread(target=lambda: answers.append(asked(server, PROMPT, 140)))
        client.start()
        while "POST" not in server.said and client.is_alive():  # it is answered, or under way
            time.sleep(0.2)
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGINT)
                break
        client.join()
        assert server.process.wait(60) == 0
        assert answers == [generated(expected.eval(), PROMPT, 140)]


@pytest.mark.nightly
def test_memory_stays_flat_over_200_requests(place: Path) -> None:
    sizes = []
    with running(place, *FLAGS, "--api-key", KEY) as server:
        for count in range(200):
            asked(server, PROMPT[: 10 + count // 2], 2 + count % 7, stream=False)
            if count % 20 == 19:
                sizes.append(server.memory)
    assert max(sizes[5:]) - max(sizes[2:5]) < 4 << 20, sizes


@pytest.mark.slow
@pytest.mark.skipif(not PAGED_IN_LAYERS, reason="remapped models are paged since transformers 5.24")
@pytest.mark.parametrize(
    "method", ["self_extend", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("yarn", "dynamic_yarn"))]
)
def test_continuous_batches_give_each_client_its_own_answer(method: str, tmp_path: Path) -> None:
    place = saved(tmp_path / method, method)
    model = ctxext.load(place)
    if method == "dynamic_yarn":
        model = ctxext.load(place, method, factor=FACTOR, trained_length=TRAINED, growth="request")
    served = load_served(str(place), dtype="fp32")
    with answering(served, continuous_batching=True, cached_tokens=1024) as server:
        prompts = [PROMPT[start : start + 80] for start in range(1, 29, 7)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: asked(server, prompt, 8), prompts))
        assert answers == [generated(model.eval(), prompt, 8) for prompt in prompts]
        assert asked(server, PROMPT, 8, temperature=1, seed=1) != asked(server, PROMPT, 8, temperature=1, seed=2)
        with pytest.raises(openai.BadRequestError, match="256 tokens"):
            asked(server, PROMPT, 145)


@pytest.mark.slow
def test_what_cannot_be_served_is_a_sentence_at_start(tmp_path: Path) -> None:
    place = saved(tmp_path / "plain", None)
    refused = command("serve", place, "--port", 0, "-f", 2)
    assert "factor: only with a method" in refused.stderr
    refused = command("serve", place, "--host", "no.such.host.invalid")
    assert "cannot be listened on" in refused.stderr
    for host in ("a..b", "a" * 64, f"{'b' * 70}.example"):
        with pytest.raises(InvalidParameterError, match=f"{host}:0 cannot be listened on: .* Give another"):
            bound(host, 0)


def test_a_port_is_taken_before_clients_may_connect_and_again_after_a_restart() -> None:
    """Two servers load for minutes: the second one is told at once."""
    first = bound("127.0.0.1", 0)
    address = first.getsockname()
    said = rf"127\.0\.0\.1:{address[1]} cannot be listened on: .* Give another"
    with pytest.raises(InvalidParameterError, match=said):
        bound(*address)
    open_to_clients(first)
    with socket.create_connection(address) as client:
        answered, _ = first.accept()
        with pytest.raises(InvalidParameterError, match="cannot be listened on"):
            bound(*address)
        answered.close()  # the side that ends a connection keeps its address for a minute
        assert client.recv(1) == b""
    first.close()
    again, other = bound(*address), socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(address)  # both share it until one listens
    open_to_clients(again)
    with pytest.raises(InvalidParameterError, match="cannot be listened on"):
        open_to_clients(other)
    again.close()
    other.close()
