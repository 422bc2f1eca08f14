"""``ctxext serve`` in a process of its own, asked by OpenAI's client: what it answers is what ``generate`` gives."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest
import torch
from starlette.exceptions import HTTPException

import ctxext
from ctxext.caches.records import PAGED_IN_LAYERS
from ctxext.serving.endpoints import fit
from ctxext.serving.gate import Gate
from tests._models import byte_model
from tests._products import some
from tests._programs import command
from tests._tokenizer import make_letters
from tests.serving._running import KEY, Running, running

TRAINED, FACTOR = 512, 4
FLAGS = ("--port", "0", "--dtype", "fp32")
LETTERS = make_letters()
PROMPT = LETTERS.decode(torch.randint(0, 256, (900,), generator=torch.Generator().manual_seed(3)))


def saved(place: Path, method: str | None, **parameters: Any) -> Path:
    """Save a small model that reads letters, extended where a method is named."""
    model = byte_model()
    if method is None:
        model.save_pretrained(place)
        LETTERS.save_pretrained(place)
    else:
        ctxext.save(ctxext.patch(model, method, factor=FACTOR, **parameters), place, tokenizer=LETTERS)
    return place


def generated(model: Any, prompt: str, count: int) -> str:
    """What ``generate`` gives, as text."""
    inputs = LETTERS(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(LETTERS.decode(tokens[0, inputs["input_ids"].shape[1] :]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model saved with Self-Extend."""
    place = saved(tmp_path_factory.mktemp("served") / "self_extend", "self_extend")
    with running(place, *FLAGS, "--api-key", KEY) as started:
        yield started


@pytest.fixture(scope="module")
def model(server: Running) -> Any:
    """The model that is served, in this process."""
    return ctxext.load(server.name).eval()


def asked(server: Running, prompt: str, count: int, **more: Any) -> str:
    """The answer to a prompt."""
    request = {"model": server.name, "prompt": prompt, "max_tokens": count, "temperature": 0} | more
    return str(server.client.completions.create(**request).choices[0].text)


def posted(server: Running, path: str, body: bytes) -> tuple[int, str]:
    """The status of an answer to raw bytes, and its sentence."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


@pytest.mark.parametrize(("prompt", "asked_for", "given"), [(60, 4, 4), (63, None, 1), (40, None, 24), (4, 60, 60)])
def test_an_answer_that_fits_gets_its_length(prompt: int, asked_for: int | None, given: int) -> None:
    assert fit(prompt, asked_for, 64) == given
    assert fit(prompt, asked_for, None) == (asked_for or 1024)


@pytest.mark.parametrize(("prompt", "asked_for"), [(60, 5), (64, None), (64, 1), (65, None), (65, 0), (1, 64), (0, 1)])
def test_one_token_too_many_is_refused(prompt: int, asked_for: int | None) -> None:
    with pytest.raises(HTTPException, match=f"has {prompt or 'no'} tokens"):
        fit(prompt, asked_for, 64)


@pytest.mark.parametrize(
    ("header", "path", "enters"), [(f"Bearer {KEY}", "/v1/models", True), ("Bearer ", "/v1", False)]
)
@pytest.mark.parametrize("name", [b"authorization", b"cookie"])
def test_the_gate_opens_for_the_key_alone(header: str, path: str, enters: bool, name: bytes) -> None:
    entered, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.append(scope["path"])

    async def receive() -> Any:
        return {"type": "http.request" if not entered else "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(name, header.encode())]}
    asyncio.run(Gate(app, KEY)(scope, receive, send))
    enters = enters and name == b"authorization"
    assert bool(entered) == enters
    assert [message["status"] for message in sent if "status" in message] == ([] if enters else [401])


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:40]], ids=["beyond the window", "inside it"])
def test_answers_are_those_of_generate(server: Running, model: Any, prompt: str) -> None:
    expected, name, client = generated(model, prompt, 24), server.name, server.client
    messages: Any = [{"role": "user", "content": prompt}]
    sampled: Any = {"model": name, "temperature": 0}
    assert len(set(expected)) > 3
    assert asked(server, prompt, 24) == expected
    streamed = client.completions.create(prompt=prompt, max_tokens=24, stream=True, **sampled)
    assert "".join(part.choices[0].text for part in streamed) == expected
    chat = client.chat.completions.create(messages=messages, max_tokens=24, **sampled)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (expected, "length")
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(prompt), 24)
    parts = client.chat.completions.create(messages=messages, max_tokens=24, stream=True, **sampled)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert client.responses.create(input=prompt, max_output_tokens=24, **sampled).output_text == expected
    stopped = client.completions.create(prompt=prompt, max_tokens=24, stop=expected[5], **sampled)
    assert stopped.choices[0].text == expected[: expected.index(expected[5])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_two_clients_at_once_get_their_own_answers(server: Running, model: Any) -> None:
    prompts = [PROMPT[start : start + 700] for start in range(0, 160, 20)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: asked(server, prompt, 16), prompts))
    assert answers == [generated(model, prompt, 16) for prompt in prompts]
    assert len(set(answers)) > 4


@pytest.mark.slow
def test_health_and_models_say_how_the_model_is_extended(server: Running) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_beyond_the_window_is_refused_with_the_numbers(server: Running, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r"900 tokens.*1149: 2049 together.*window.*2048 tokens"):
        asked(server, PROMPT, 1149, stream=stream)
    assert len(asked(server, PROMPT, 1148)) == 1148
    with pytest.raises(openai.BadRequestError, match=r"2700 tokens.*2048 tokens"):
        server.client.chat.completions.create(
            model=server.name, messages=[{"role": "user", "content": PROMPT * 3}], stream=stream
        )


@pytest.mark.slow
def test_an_answer_of_no_stated_length_ends_with_the_window(server: Running) -> None:
    answer = server.client.completions.create(model=server.name, prompt=(PROMPT * 3)[:2040], temperature=0)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (8, "length")


@pytest.mark.slow
def test_strangers_are_refused_and_other_doors_are_shut(server: Running) -> None:
    stranger = openai.OpenAI(base_url=server.client.base_url, api_key="guessed", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="needs its API key"):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model=server.name, prompt="一", max_tokens=1)
    for path in ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone"):
        assert posted(server, path, b"{}")[0] == 404
    with pytest.raises(openai.NotFoundError, match="has no model 'another'"):
        server.client.completions.create(model="another", prompt="一", max_tokens=1)


VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "一丁", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "一丁"}], "max_tokens": 2},
    "/v1/responses": {"input": "一丁", "max_output_tokens": 2},
}
NO_NUMBER: list[Any] = ["x", [], {}, -5, float("nan"), float("inf"), True, "1"]
NO_MESSAGE: list[Any] = [
    None,
    3,
    "x",
    {},
    [],
    [3],
    [{}],
    [{"role": 3, "content": "x"}],
    [{"role": "user", "content": 3}],
]
NO_MESSAGE += [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]]
NO_MESSAGE += [[{"role": "user", "content": [{"type": "text"}]}], [{"role": "nobody", "content": "x"}]]
NO_MESSAGE += [[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]]
NO_MESSAGE += [[{"role": "assistant", "tool_calls": [{}]}], [{"role": "user", "content": "\ud800"}]]
WRONG: dict[str, list[Any]] = {
    "temperature": NO_NUMBER,
    "top_p": [*NO_NUMBER, 2],
    "seed": ["x", 2**70, 1.5, {}],
    "frequency_penalty": ["x", -3, 9, []],
    "stop": ["", [""], 3, {}, [3]],
    "stream": ["yes", 3, []],
    "model": [3, [], {}, "another"],
    "generation_config": ['{"max_new_tokens": "x"}', "{", 3],
    "nobody": [1],
}
OF_ONE: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": [None, 3, [], {}, "", [""], [[]], [["x"]], [[1, 2], 3], [10**9], "\ud800"],
        "max_tokens": [*NO_NUMBER, 10**30, 1.5, 5000],
        "suffix": [3, [], "x"],
        "n": [0, 129, "x"],
        "echo": [1],
        "logprobs": [True, 21],
    },
    "/v1/chat/completions": {
        "messages": NO_MESSAGE,
        "max_tokens": [*NO_NUMBER, 0, 5000],
        "max_completion_tokens": [*NO_NUMBER, 0],
        "tools": ["x", 3, {}, [3], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 3}}]],
        "logit_bias": ["x", [], {"x": 1}, {"5": "x"}, {"99999": 1}],
        "chat_template_kwargs": ["x", [], {"tokenize": False}, {"chat_template": "{{ 1 / 0 }}"}, {"tools": []}],
        "response_format": [{"type": "json_schema"}, {"type": "x"}, 3],
    },
    "/v1/responses": {
        "input": [
            None,
            3,
            {},
            [],
            [3],
            "",
            [{"role": "user"}, 3],
            [{"type": "function_call"}],
            [{"type": "input_image"}],
        ],
        "max_output_tokens": [*NO_NUMBER, 0],
        "instructions": [3, []],
        "previous_response_id": ["resp_1"],
        "tools": ["x", [3], [{"type": "web_search"}]],
    },
}


def malformed(count: int) -> Iterator[tuple[str, bytes]]:
    """Requests that no server can answer: wrong fields one or several at a time, and bytes that are no JSON object."""
    draw = random.Random(0)
    for index in range(count):
        path = draw.choice(sorted(VALID))
        body = dict(VALID[path])
        wrong = {name: value for name, value in (WRONG | OF_ONE[path]).items() if not (name == "stream" and index % 2)}
        for name in draw.sample(sorted(wrong), draw.choice([1, 1, 1, 2, 3])):
            body[name] = draw.choice(wrong[name])
        text = json.dumps(body).encode()
        if index % 5 == 0:
            text = draw.choice(
                [text[: draw.randrange(1, len(text) - 1)], draw.randbytes(40), b"[]", b"3", b"", b"[" * 9999]
            )
        yield path, text


@pytest.mark.slow
def test_malformed_requests_get_a_sentence(server: Running) -> None:
    for path, body in malformed(200):
        status, sentence = posted(server, path, body)
        assert 400 <= status < 500, (status, path, body)
        assert len(sentence) > 10, (path, body)
        assert "Traceback" not in sentence
    for path, valid in VALID.items():
        assert posted(server, path, json.dumps(valid).encode())[0] == 200
    assert "Traceback" not in server.said


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_work_for_a_client_that_went_away_ends(server: Running, model: Any, stream: bool) -> None:
    began = time.monotonic()
    asked(server, PROMPT[:100], 1500)
    whole = time.monotonic() - began
    client = server.client.with_options(timeout=whole / 8)
    request: Any = {"model": server.name, "prompt": PROMPT[:100], "max_tokens": 1500, "temperature": 0}
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


@pytest.mark.slow
@pytest.mark.parametrize("method", some(["dynamic_yarn", None], "dynamic_yarn"))
def test_every_method_is_served_and_ctrl_c_finishes_what_runs(tmp_path: Path, method: str | None) -> None:
    """A plain checkpoint is extended at start; a dynamic method that was saved keeps the positions of a request."""
    place = saved(tmp_path / "model", method)
    extended = ("-m", "rerope", "-f", str(FACTOR)) if method is None else ()
    expected = (
        ctxext.load(place, "rerope", factor=FACTOR)
        if method is None
        else ctxext.load(place, "dynamic_yarn", factor=FACTOR, trained_length=TRAINED, growth="request")
    )
    with running(place, *FLAGS, *extended, "--name", "mine") as server:
        server.name = "mine"
        assert ("growth='request' in place of 'exact'" in server.said) == (method is not None)
        answers: list[str] = []
        client = threading.Thread(target=lambda: answers.append(asked(server, PROMPT, 300)))
        client.start()
        while "POST" not in server.said and client.is_alive():  # it is answered, or under way
            time.sleep(0.2)
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGINT)
                break
        client.join()
        assert server.process.wait(60) == 0
        assert answers == [generated(expected.eval(), PROMPT, 300)]


@pytest.mark.nightly
def test_memory_stays_flat_over_200_requests(server: Running) -> None:
    sizes = []
    for count in range(200):
        asked(server, PROMPT[: 300 + count], 2 + count % 7, stream=False)
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
    with running(place, *FLAGS, "--continuous-batching", "--cached-tokens", "4096") as server:
        prompts = [PROMPT[start : start + 700] for start in range(0, 80, 20)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: asked(server, prompt, 8), prompts))
        assert answers == [generated(model.eval(), prompt, 8) for prompt in prompts]
        assert asked(server, PROMPT, 8, temperature=1, seed=1) != asked(server, PROMPT, 8, temperature=1, seed=2)
        with pytest.raises(openai.BadRequestError, match="2048 tokens"):
            asked(server, PROMPT, 1149)


@pytest.mark.slow
def test_what_cannot_be_served_is_a_sentence_at_start(tmp_path: Path) -> None:
    place = saved(tmp_path / "plain", None)
    refused = command("serve", place, "--port", 0, "-m", "kerple", "--continuous-batching")
    assert refused.exit_code == 1
    assert "'kerple' does not work with continuous batching" in refused.stderr
    refused = command("serve", place, "--port", 0, "-f", 2)
    assert "factor: only with a method" in refused.stderr
    refused = command("serve", place, "--host", "no.such.host.invalid")
    assert "cannot be listened on" in refused.stderr
