"""An OpenAI-compatible server of one checkpoint, extended by any method, over the serving code of transformers.

Transformers brings generation, its batches and the parsing of tool calls. Here is what it lacks: a model from ctxext's
loader, a key, and an end to the work for clients that went away.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError
from ctxext.serving.answers import OneByOne, Together
from ctxext.serving.endpoints import ANSWER, Chats, Completions, Responses
from ctxext.serving.load import Served
from ctxext.surgery.continuous import PAGED_IN_LAYERS

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class ServedModels(ModelManager):  # type: ignore[misc]
    """Manager of the one model that is served, which ctxext has loaded."""

    def __init__(self, served: Served, state: GenerationState) -> None:
        self.served, self.state = served, state
        super().__init__(force_model=served.name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name as it is: no revision belongs to it."""
        return model_id

    def _load_processor(self, *_: Any, **__: Any) -> Any:
        return self.served.checkpoint.tokenizer

    def _load_model(self, *_: Any, **__: Any) -> Any:
        return self.served.checkpoint.model

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """List the model, with its window as vLLM calls it and all that is known of its extension."""
        listed: list[dict[str, Any]] = super().list_models(cache_dir)
        return [model | {"max_model_len": self.served.window, "ctxext": self.served.facts} for model in listed]

    def shutdown(self) -> None:
        """End the threads that answer requests, and let the model go."""
        self.state.shutdown()
        super().shutdown()


class Gate:
    """Entrance to the application: it refuses strangers, and ends the work for clients that went away."""

    def __init__(self, app: App, key: str | None) -> None:
        self.app = app
        self.digest = None if key is None else _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if self.digest and scope["path"] != "/health" and not secrets.compare_digest(_digest(shown), self.digest):
            return await _error(401, "This server needs its API key (Authorization: Bearer KEY).")(scope, receive, send)
        sent = [await receive()]
        while sent[-1].get("more_body"):
            sent.append(await receive())
        left = asyncio.Event()

        async def replay() -> Message:
            if sent:
                return sent.pop(0)
            await left.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            work.cancel()

        work = asyncio.ensure_future(self.app(scope, replay, send))
        watching = asyncio.ensure_future(watch())
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            watching.cancel()


def _digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()


def _error(status: int, sentence: str) -> JSONResponse:
    """Return an error as OpenAI's API writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": sentence, "type": kind, "code": status}}, status_code=status)


def application(
    served: Served, *, key: str | None = None, continuous_batching: bool = False, cached_tokens: int | None = None
) -> App:
    """Build the application that answers requests.

    Args:
        served: from ``load_served``.
        key: what clients must show; None answers everybody.
        continuous_batching: answer several requests in each pass of the model.
        cached_tokens: tokens of all requests whose keys and values such batches hold; default what is free on a GPU,
            and 8 windows on a CPU, whose memory others need too.

    Raises:
        IncompatibleError: continuous batches would be wrong for this model.
    """
    state = GenerationState(continuous_batching=continuous_batching)
    models = ServedModels(served, state)
    model: Any = served.checkpoint.model
    engine: OneByOne | Together
    if continuous_batching and not PAGED_IN_LAYERS:
        raise IncompatibleError("--continuous-batching needs transformers 5.24 or newer. Leave it out, or update.")
    if continuous_batching:
        if cached_tokens is None and model.device.type == "cpu":
            cached_tokens = 8 * (served.window or ANSWER)
        engine = state._cb_manager = Together(model, cached_tokens)
    else:
        engine = OneByOne(model)
    handlers = [kind(served, engine) for kind in (Chats, Completions, Responses)]
    # The two that are missing take sound, and decisions of models with another head.
    app: FastAPI = build_server(models, *handlers, None, None, state)
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") in ENDPOINTS]

    @app.get("/health")
    def health() -> JSONResponse:
        alive = state.is_cb_alive()
        facts = {"status": "ok" if alive else "the worker of continuous batching has died", "model": served.name}
        return JSONResponse(facts | served.facts, status_code=200 if alive else 503)

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
        return _error(400, f"The body is not a JSON object: {error.errors()[0]['msg']}.")

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(CtxextError)
    async def impossible(_: Request, error: CtxextError) -> JSONResponse:
        return _error(400, str(error))

    return Gate(app, key)


def bound(host: str, port: int) -> socket.socket:
    """Take an address before the model is loaded, which may last minutes.

    Args:
        host: name or address of an interface.
        port: 0 takes any that is free.

    Raises:
        InvalidParameterError: no such host, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        raise InvalidParameterError(f"{host}:{port} cannot be listened on: {error.strerror}. Give another.") from error
    return taken


def serve(app: App, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM; those that run then are finished first."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="info", lifespan="on"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn passes a signal on, once it has ended everything
        server.run(sockets=[listening])
