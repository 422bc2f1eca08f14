"""The entrance to the server: it refuses strangers and bodies without end, and ends the work that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

BODY = 8 << 20  # bytes of a body; a longer window allows longer ones
PATIENCE = 2.0  # seconds in which a client can take the end of a dropped answer
ENDING = "This server is ending, and drops this request."

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Coroutine[Any, Any, None]]


def error_response(status: int, sentence: str, code: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's API writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": sentence, "type": kind, "param": None, "code": code or status}
    return JSONResponse({"error": error}, status_code=status)


def unknown_model(asked: str, served: str) -> JSONResponse:
    """Return the answer to a request for a model that is not served."""
    return error_response(404, f"This server has no model {asked!r}: it serves {served!r}.", "model_not_found")


def is_local(host: str) -> bool:
    """Return whether a host is this machine's own name or address, which no other machine can be reached by."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """Entrance to the application: it refuses strangers, and ends the work for clients that went away.

    A page in a browser may point its own name to 127.0.0.1 and ask (DNS rebinding), but it asks by that name. Hence a
    server without a key that listens to this machine alone answers by this machine's names alone.

    Args:
        app: the application behind the gate.
        key: the key that clients must show; None answers everybody.
        host: the name or address that the server listens to.
        most: bytes of the longest body that is read.
    """

    def __init__(self, app: App, key: str | None = None, host: str = "", most: int = BODY) -> None:
        self.app, self.most = app, most
        self.digest = None if key is None else _digest(f"Bearer {key}".encode())
        self.is_local = key is None and is_local(host)
        self.reading: set[asyncio.Future[Any]] = set()
        self.running: set[asyncio.Future[Any]] = set()
        self.is_ending = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refused := self._refused(scope):
            return await refused(scope, receive, send)
        answer = Answer(scope, receive, send)
        read = _begun(self._body(receive), self.reading)
        await asyncio.wait([read])
        if read.cancelled():
            return await answer.drop()
        body = read.result()
        if body is None:
            return None
        if len(body) > self.most:
            return await self._too_long(f"more than {self.most:,}")(scope, receive, send)
        sent = [{"type": "http.request", "body": bytes(body)}]
        left = asyncio.Event()

        async def replay() -> Message:
            if sent:
                return sent.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            work.cancel()

        # The application takes this header for its own key of a request, and two requests of one key stop its batches.
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        work = _begun(self.app({**scope, "headers": headers}, replay, answer.send), self.running)
        watching = asyncio.ensure_future(watch())
        await asyncio.wait([work])
        watching.cancel()
        if not work.cancelled():
            work.result()  # raises what the application raised
        elif not left.is_set():
            await answer.drop()

    def end(self) -> int:
        """Read no more bodies, and return the number of requests that run."""
        self.is_ending = True
        for work in self.reading:
            work.cancel()
        return len(self.running)

    def drop(self) -> None:
        """Cancel all that runs; its clients are told."""
        for work in self.running:
            work.cancel()

    def _refused(self, scope: Message) -> JSONResponse | None:
        told: dict[bytes, bytes] = dict(scope["headers"])
        shown = _digest(told.get(b"authorization", b""))
        if self.digest and scope["path"] != "/health" and not secrets.compare_digest(shown, self.digest):
            return error_response(401, "This server needs its API key (Authorization: Bearer KEY).")
        for name, value in scope["headers"]:
            if self.is_local and name == b"host" and not is_local(_hostname(value)):
                return error_response(
                    421,
                    "This server answers by the name localhost alone, and the request has another Host. Start it with "
                    "--api-key, or with another --host.",
                )
        length = told.get(b"content-length", b"")[:15]
        if length.isdigit() and int(length) > self.most:
            return self._too_long(f"{int(length):,}")
        return error_response(503, ENDING) if self.is_ending else None

    def _too_long(self, found: str) -> JSONResponse:
        return error_response(413, f"The body has {found} bytes, and this server reads {self.most:,} bytes at most.")

    async def _body(self, receive: Receive) -> bytearray | None:
        """Read a body up to the limit and one piece; None if the client leaves meanwhile."""
        body, more = bytearray(), True
        while more and len(body) <= self.most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body


class Answer:
    """Answer to one request, as far as it was sent."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._asked, self._send = (scope, receive), send
        self.begun, self.is_stream, self.ended = False, False, False

    async def send(self, message: Message) -> None:
        """Send a part of it."""
        if message["type"] == "http.response.start":
            self.begun = True
            self.is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
        self.ended = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    async def drop(self) -> None:
        """End it with an error, unless it is whole or its client takes nothing more."""
        error = error_response(503, ENDING)
        with contextlib.suppress(TimeoutError):
            if not self.begun:
                await asyncio.wait_for(error(*self._asked, self._send), PATIENCE)
            elif self.is_stream and not self.ended:
                event = b"data: " + error.body + b"\n\n"
                if self._asked[0]["path"].endswith("/responses"):  # events of this endpoint have names and no wrapping
                    told = json.loads(bytes(error.body))["error"] | {"type": "error"}
                    event = f"event: error\ndata: {json.dumps(told)}\n\n".encode()
                await asyncio.wait_for(self._send({"type": "http.response.body", "body": event}), PATIENCE)


def _begun(coroutine: Coroutine[Any, Any, Any], among: set[asyncio.Future[Any]]) -> asyncio.Future[Any]:
    work = asyncio.ensure_future(coroutine)
    among.add(work)
    work.add_done_callback(among.discard)
    return work


def _hostname(header: bytes) -> str:
    """Return the name in a Host header, without its port; empty where there is none."""
    try:
        return (urlsplit(f"//{header.decode('latin-1')}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()
