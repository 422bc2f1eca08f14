"""The gate of ``ctxext serve``: what enters, how much of it is kept, and how what runs is ended."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from starlette.testclient import TestClient

import ctxext
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.serving.gate import Gate
from ctxext.serving.load import Served, load_served
from ctxext.serving.server import application
from tests._models import byte_model
from tests._tokenizer import make_letters
from tests.serving._running import KEY, running

MOST, KEYED = 1000, f"Bearer {KEY}"


class Knocking:
    """A request to a gate without a network: pieces of its body, and what the application got and answered."""

    def __init__(self, *pieces: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), ends: bool = True) -> None:
        self.scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": list(headers)}
        self.pieces = iter(pieces)
        self.ends, self.count = ends, len(pieces)
        self.taken = 0
        self.sent: list[Any] = []
        self.bodies: list[bytes] = []
        self.entered: list[Any] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive(self) -> Any:
        piece = next(self.pieces, None)
        if piece is None:
            if not self.entered:
                return {"type": "http.disconnect"}
            await asyncio.Event().wait()
        self.taken += 1
        return {"type": "http.request", "body": piece, "more_body": not self.ends or self.taken < self.count}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def at(self, **gate: Any) -> int | None:
        """The status that a gate of these settings gives."""
        asyncio.run(Gate(self.app, **gate)(self.scope, self.receive, self.send))
        return next((message["status"] for message in self.sent if "status" in message), None)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.sent[-1]["body"])["error"]
        return error


OWN = ("localhost", "LocalHost:8000", "localhost.:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]")
STRANGE = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example")
STRANGE += ("evil.example#@localhost", "192.168.0.1", "0.0.0.0:8000", "[::1", "[fe80::1]", "", "\xff")


@pytest.mark.parametrize(("name", "enters"), [*((name, True) for name in OWN), *((name, False) for name in STRANGE)])
def test_a_server_of_this_machine_is_reached_by_its_own_names_alone(name: str, enters: bool) -> None:
    """A page whose name was made to point to 127.0.0.1 (DNS rebinding) asks by that name."""
    header = ((b"host", name.encode("latin-1")),)
    local = Knocking(b"{}", headers=header)
    assert local.at(host="127.0.0.1") == (200 if enters else 421)
    assert enters or "localhost" in local.error["message"]
    two = Knocking(b"{}", headers=((b"host", b"localhost"), *header))
    assert two.at(host="localhost") == (200 if enters else 421)
    for host in ("0.0.0.0", "::", "10.0.0.1", "models.example"):  # whoever opens it to a network may have a proxy
        assert Knocking(b"{}", headers=header).at(host=host) == 200
    keyed = (*header, (b"authorization", f"Bearer {KEY}".encode()))
    assert Knocking(b"{}", headers=keyed).at(host="127.0.0.1", key=KEY) == 200  # a strange page has no key


@pytest.mark.parametrize(
    ("header", "path", "status"),
    [
        ((b"authorization", f"Bearer {KEY}".encode()), "/v1/models", 200),
        ((b"authorization", b"Bearer "), "/v1/models", 401),
        ((b"cookie", f"Bearer {KEY}".encode()), "/v1/models", 401),
        ((b"cookie", b""), "/health", 200),
    ],
)
def test_the_gate_opens_for_the_key_alone(header: tuple[bytes, bytes], path: str, status: int) -> None:
    asked = Knocking(b"{}", headers=(header,))
    asked.scope["path"] = path
    assert asked.at(key=KEY) == status
    assert bool(asked.entered) == (status == 200)


@pytest.mark.parametrize(
    ("pieces", "ends", "taken"),
    [
        ((b"a" * MOST,), True, 1),
        ((b"a" * (MOST + 1),), True, 1),
        ((b"a",) * (MOST + 1), True, MOST + 1),
        ((b"a" * 100,) * 10**6, False, 11),
        ((b"",) * 50 + (b"a" * 600,) * 2, True, 52),
    ],
    ids=["just fits", "one piece", "small pieces", "no end", "late"],
)
def test_a_body_beyond_the_limit_is_not_kept(pieces: tuple[bytes, ...], ends: bool, taken: int) -> None:
    """Chunked ones too, which state no length."""
    asked = Knocking(*pieces, ends=ends)
    fits = sum(map(len, pieces)) <= MOST
    assert asked.at(most=MOST) == (200 if fits else 413)
    assert asked.taken == taken
    assert asked.bodies == ([b"".join(pieces)] if fits else [])
    assert fits or ("1,000 bytes" in asked.error["message"] and asked.error["code"] == 413)


def test_a_client_that_leaves_within_its_body_reaches_nobody() -> None:
    asked = Knocking(b"{", ends=False)
    assert asked.at() is None
    assert asked.entered == []


START = {"type": "http.response.start", "status": 200}
EVENTS, LENGTH = {"headers": [(b"content-type", b"text/event-stream")]}, {"headers": [(b"content-length", b"4")]}
PIECE = {"type": "http.response.body", "body": b"data", "more_body": True}
CUT: dict[str, tuple[list[Any], bool | None]] = {  # what was sent before, and whether an error follows as an answer
    "nothing": ([], True),
    "a stream begun": ([START | EVENTS], False),
    "a stream": ([START | EVENTS, PIECE], False),
    "a whole stream": ([START | EVENTS, PIECE, PIECE | {"more_body": False}], None),
    "half an answer": ([START | LENGTH], None),
}


@pytest.mark.parametrize("name", CUT)
def test_a_dropped_answer_ends_as_far_as_it_was_sent(name: str) -> None:
    """Before its start by status 503, a stream by OpenAI's error event, and any other not at all."""
    before, is_answer = CUT[name]
    asked = Knocking(b"{}")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in before:
            await send(message)
        asked.entered.append(scope)
        await asyncio.Event().wait()

    async def dropped() -> None:
        gate = Gate(app)
        task = asyncio.ensure_future(gate(asked.scope, asked.receive, asked.send))
        while not asked.entered:
            await asyncio.sleep(0)
        (running,) = gate.running
        running.cancel()
        await task
        assert gate.running == set()

    asyncio.run(dropped())
    new = asked.sent[len(before) :]
    if is_answer is None:
        assert new == []
    elif is_answer:
        assert new[0]["status"] == 503
        assert asked.error["type"] == "server_error"
    else:
        (event,) = new
        named, data = event["body"].decode().removesuffix("\n\n").split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert (named, told["type"], told["error"]["code"]) == ("event: error", "error", 503)
        assert told["message"] == told["error"]["message"]
        assert not event.get("more_body")


@pytest.fixture
def served() -> Served:
    checkpoint = Checkpoint("tiny", byte_model(), make_letters(), sha256="-")
    return Served("org/tiny", checkpoint, 512, {"method": None, "dtype": "float32"})


def test_the_limit_of_a_body_follows_the_window(served: Served) -> None:
    """A token has a few bytes; a million of them, as text or as ids with commas, must fit."""
    assert isinstance(gate := application(served), Gate)
    assert gate.most == 8 << 20
    large = Served("tiny", served.checkpoint, 1 << 20, served.facts)
    assert isinstance(gate := application(large), Gate)
    assert gate.most == 64 << 20


def test_pages_of_an_origin_that_was_named_read_answers(served: Served) -> None:
    """Browsers ask first, by OPTIONS and without the key."""
    client = TestClient(application(served, key=KEY, host="127.0.0.1", origins=["http://localhost:3000"]))
    for origin, allowed in {"http://localhost:3000": "http://localhost:3000", "http://other": None}.items():
        headers = {"origin": origin, "access-control-request-method": "POST"}
        asked = client.options("/v1/completions", headers=headers | {"access-control-request-headers": "authorization"})
        assert asked.status_code == (200 if allowed else 400)
        answers = [client.get("/v1/models", headers={"origin": origin} | key) for key in ({}, {"authorization": KEYED})]
        assert [answer.status_code for answer in answers] == [401, 200]
        assert {answer.headers.get("access-control-allow-origin") for answer in (asked, *answers)} == {allowed}
    assert TestClient(application(served)).options("/v1/completions").status_code == 405


def test_the_log_and_health_say_which_prompts_are_read(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(application(served))
    with caplog.at_level("INFO", "uvicorn.error"):
        assert client.post("/v1/completions", json={"prompt": "一丁", "max_tokens": 1}).status_code == 200
    begun, read = caplog.messages
    assert begun == "Reading a prompt of 2 tokens; answers under way: 1."
    assert read.startswith("Read a prompt of 2 tokens in ")
    assert client.get("/health").json()["requests"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "stored"), [("auto", "float32"), ("fp32", "float32"), ("auto", "bfloat16")])
def test_the_dtype_that_is_served_is_told(dtype: str, stored: str, tmp_path: Path) -> None:
    extended = ctxext.patch(byte_model().to(getattr(torch, stored)), "yarn", factor=2)
    ctxext.save(extended, tmp_path / "a", tokenizer=make_letters())
    facts = load_served(str(tmp_path / "a"), dtype=dtype, device="cpu").facts
    served = "float32" if dtype == "fp32" else "bfloat16"
    assert (facts["dtype"], facts["stored_dtype"]) == (served, stored)


# A server whose model does not come to the end of its first step.
STUCK = """
import torch
from transformers import LlamaForCausalLM
def forward(self, *given, **more):
    print("a step begins", flush=True)
    rows = torch.ones(300, 300)
    while True:
        rows = rows @ rows
LlamaForCausalLM.forward = forward
from ctxext.cli.app import app
app()
"""
FLAGS = ("--port", "0", "--dtype", "fp32", "--name", "tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gate") / "model"
    ctxext.save(ctxext.patch(byte_model(), "yarn", factor=2), place, tokenizer=make_letters())
    return place


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--continuous-batching",)])
def test_a_second_ctrl_c_drops_what_runs(place: Path, more: tuple[str, ...]) -> None:
    ends: dict[bool, openai.APIError] = {}
    with running(place, *FLAGS, *more, program=("-c", STUCK), status=130) as server:

        def ask(stream: bool) -> None:
            try:
                list(server.client.completions.create(model="tiny", prompt="一丁", stream=stream))
            except openai.APIError as error:
                ends[stream] = error

        clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for client, said in zip(clients, ("a step begins", '/v1/completions HTTP/1.1" 200'), strict=True):
            client.start()
            server.until(said)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=60) as answer:
            assert json.loads(answer.read())["requests"] == [{"prompt_tokens": 2, "answer_tokens": 0}] * 2
        server.process.send_signal(signal.SIGINT)
        server.until("2 requests run; Ctrl-C again drops what runs.")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        for client in clients:
            client.join()
        assert server.process.wait(60) == 130
        assert "terminate called" not in server.said
    whole = ends[False]
    assert isinstance(whole, openai.InternalServerError)
    assert (whole.status_code, whole.type) == (503, "server_error")
    assert "drops this request" in ends[True].message


@pytest.mark.nightly
def test_ctrl_c_after_a_client_left_within_a_step_that_lasts(place: Path) -> None:
    with running(place, *FLAGS, program=("-c", STUCK)) as server:
        body = json.dumps({"prompt": "一丁"}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.until("a step begins")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert "terminate called" not in server.said
