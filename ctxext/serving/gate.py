"""The entrance to the server: it refuses strangers and bodies without end, and ends the work that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxext.errors import CtxextError

BODY = 8 << 20  # bytes of a body; a longer window allows longer ones
PATIENCE = 2.0  # seconds in which a client can take the end of a dropped answer
# Names of this machine that lead no other machine here, with or without a port.
LOCAL = re.compile(r"(localhost\.?|127(\.\d+){3}|::1|\[::1\])(:\d*)?", re.IGNORECASE)


def error_response(status: int, sentence: str, code: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's API writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": sentence, "type": kind, "param": None, "code": code or status}
    return JSONResponse({"error": error}, status_code=status)


def status_of(error: Exception) -> tuple[int, str]:
    """Return the status of an answer that ends in an error, and the sentence that says why."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    return (400, str(error)) if isinstance(error, CtxextError) else (500, f"{type(error).__name__}: {error}")


def unknown_model(asked: str, served: str) -> JSONResponse:
    """Return the answer to a request for a model that is not served."""
    return error_response(404, f"This server has no model {asked!r}: it serves {served!r}.", "model_not_found")


class Gate:
    """Entrance to the application: it refuses strangers, and ends the work for clients that went away.

    Clients show the ``key``, unless it is None; the longest body that is read has ``most`` bytes. Browsers show answers
    to web pages of these ``origins``.
    """

    def __init__(
        self, app: ASGIApp, key: str | None = None, host: str = "", most: int = BODY, origins: Sequence[str] = ()
    ) -> None:
        self.app, self.most = app, most
        self.key = None if key is None else f"Bearer {key}".encode()
        self.is_local = key is None and LOCAL.fullmatch(host) is not None
        self.running: set[Any] = set()  # tasks
        self._outside: ASGIApp = self._enter
        if origins:  # their browsers first ask without a key
            self._outside = CORSMiddleware(self._enter, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outside(scope, receive, send)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refused := self._refused(scope):
            return await refused(scope, receive, send)
        task: Any = asyncio.current_task()
        left = False
        last: dict[str, Message] = {}  # that was sent, of each type

        async def answer(message: Message) -> None:
            last[message["type"]] = message
            await send(message)

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            task.cancel()

        self.running.add(task)
        try:
            body, more = bytearray(), True
            while more and len(body) <= self.most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                more = message.get("more_body", False)
            if len(body) > self.most:
                long = error_response(413, f"The body is longer than {self.most:,} bytes, the most that is read.")
                return await long(scope, receive, send)
            unread = [{"type": "http.request", "body": bytes(body)}]

            async def replay() -> Message:
                return unread.pop() if unread else await asyncio.Future()

            watching = asyncio.ensure_future(watch())
            try:
                await self.app(scope, replay, answer)
            finally:
                watching.cancel()
        except asyncio.CancelledError:
            if not left:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(_dropped(scope, receive, send, last), PATIENCE)
        finally:
            self.running.discard(task)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if self.key and scope["path"] != "/health" and not secrets.compare_digest(shown, self.key):
            return error_response(401, "This server needs its API key (Authorization: Bearer KEY).")
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        # A page in a browser may point its domain to 127.0.0.1 (DNS rebinding), and asks under that domain.
        if self.is_local and not all(map(LOCAL.fullmatch, hosts)):
            sentence = f"Host {hosts[0]!r} is not answered, but localhost. Start the server with --api-key or --host."
            return error_response(421, sentence)
        return None


async def _dropped(scope: Scope, receive: Receive, send: Send, last: dict[str, Message]) -> None:
    """End an answer by an error: before its start, or as the last event of a stream, which alone has no length."""
    error = error_response(503, "The server is ending, and drops this request.")
    start, body = last.get("http.response.start"), last.get("http.response.body", {"more_body": True})
    if start is None:
        await error(scope, receive, send)
    elif body.get("more_body") and b"content-length" not in dict(start["headers"]):
        told = json.loads(bytes(error.body))
        event = f"event: error\ndata: {json.dumps(told | told['error'] | {'type': 'error'})}\n\n"
        await send({"type": "http.response.body", "body": event.encode()})
