"""An OpenAI-compatible server of one checkpoint, extended by any method.

Transformers brings generation, its batches and the parsing of tool calls; ctxext the model, the endpoints, the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import re
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from ctxext.caches.continuous import ContinuousBatching
from ctxext.caches.prefix import virtual_tokens, why_no_graph
from ctxext.caches.records import PAGED_IN_LAYERS
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError
from ctxext.measuring.forward import follows_unextended
from ctxext.serving.answers import LOG, OneByOne, Together, TokenText
from ctxext.serving.endpoints import ANSWER, Chats, Completions, Endpoint, Responses
from ctxext.serving.gate import BODY, PATIENCE, Gate, error_response, status_of, unknown_model
from ctxext.serving.load import Served
from ctxext.serving.prefixes import GraphPrefixes, Prefixes
from ctxext.serving.requests import refusal

JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
# Settings of a generation that batches of transformers pass over, and values by which they ask for nothing.
ALONE: dict[str, Any] = dict.fromkeys(("stop_strings", "max_time", "bad_words_ids", "sequence_bias"))
ALONE |= {"guidance_scale": 1} | dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0)
ALONE |= dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "watermarking_config"))
ALONE |= {"exponential_decay_length_penalty": None}
ENDPOINTS = {"/v1/chat/completions": Chats, "/v1/completions": Completions, "/v1/responses": Responses}


def require_batches(model: Any) -> None:
    """Raise ``IncompatibleError`` if continuous batches would be wrong; the model's weights may be missing."""
    if not PAGED_IN_LAYERS:
        raise IncompatibleError("--continuous-batching needs transformers 5.24 or newer. Leave it out, or update.")
    if isinstance(entry := model.init_continuous_batching, ContinuousBatching):
        entry.require()
    subject = Subject.of(model)
    if follows_unextended(subject):
        raise IncompatibleError(
            f"The positions of this {subject.kind} follow the length of its input, and the requests of a batch share "
            f"them. Leave out --continuous-batching, or extend it (--method)."
        )
    if (adapter := virtual_tokens(subject)) is not None:
        raise IncompatibleError(
            f"The adapter ({adapter.peft_type.value}) puts virtual tokens before each text, which continuous batches "
            f"leave out. Leave out --continuous-batching."
        )
    said = model.generation_config
    ignored = [name for name, neutral in ALONE.items() if getattr(said, name, None) not in (None, [], neutral)]
    if ignored:
        raise IncompatibleError(
            f"The checkpoint's generation_config asks for {', '.join(ignored)}, which continuous batches cannot do. "
            f"Leave out --continuous-batching."
        )


def application(
    served: Served,
    *,
    key: str | None = None,
    host: str = "",
    continuous_batching: bool = False,
    cached_tokens: int | None = None,
    keep_tokens: int | None = None,
    compiles: bool = False,
    origins: Sequence[str] = (),
) -> Gate:
    """Build the application that answers requests.

    Args:
        key: Key that clients must show; None answers everybody.
        continuous_batching: answer several requests in each pass of the model.
        cached_tokens: tokens of all requests whose keys and values such batches hold; default the free memory of a GPU,
            and 8 windows on a CPU, whose memory others need too.
        keep_tokens: tokens of prompts and answers whose keys and values are kept for requests that begin alike, where
            these are answered one by one; default two windows, 0 for none.
        compiles: run the steps of an answer as graphs, where requests are answered one by one and the model allows it;
            the prompt and the answer that were read last are kept then, and no others.
        origins: Origins of web pages that browsers may show answers to (CORS), such as ``http://localhost:3000``.

    Raises:
        IncompatibleError: continuous batches would be wrong for this model.
    """
    model: Any = served.checkpoint.model
    if continuous_batching:
        require_batches(model)
    if cached_tokens is None and model.device.type == "cpu":
        cached_tokens = 8 * (served.window or ANSWER)
    if keep_tokens is None:
        keep_tokens = 2 * (served.window or ANSWER)
    subject = served.checkpoint.subject
    engine: OneByOne | Together
    if continuous_batching:
        engine = Together(model, cached_tokens)
    else:
        if compiles and ((reason := why_no_graph(subject)) or not served.window):
            LOG.warning("Steps are no graphs: %s.", reason or "its window is unknown")
            compiles = False
        kept = GraphPrefixes if compiles else Prefixes
        engine = OneByOne(model, kept(subject, keep_tokens, served.window if compiles else None))
        if keep_tokens and engine.prefixes.why_not:
            LOG.info("Every prompt is read from its beginning: %s.", engine.prefixes.why_not)
    ends = model.generation_config.eos_token_id
    ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    reader = TokenText(served.checkpoint.tokenizer, subject.text.vocab_size, ends)
    facts = served.facts
    listed = {"id": served.name, "object": "model", "created": 0, "owned_by": "ctxext"}
    listed |= {"max_model_len": served.window, "ctxext": facts}

    @contextlib.asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.stop()

    app = FastAPI(lifespan=running, openapi_url=None)

    def offer(path: str, kind: type[Endpoint]) -> None:
        endpoint = kind(served, engine, reader)

        @app.post(path)
        async def answer(request: Request) -> Any:
            kind = request.headers.get("content-type", "")
            if not JSON.match(kind):  # any web page may send other types, unasked
                raise refusal(f"Content-Type {kind!r} is not JSON. Send application/json.")
            return await endpoint.handle_request(await request.body(), str(uuid.uuid4()))

    for path, kind in ENDPOINTS.items():
        offer(path, kind)

    @app.get("/v1/models")
    def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [listed]})

    @app.get("/v1/models/{name:path}")
    def model_of(name: str) -> JSONResponse:
        return JSONResponse(listed) if name == served.name else unknown_model(name, served.name)

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = isinstance(engine, OneByOne) or engine.is_alive()
        status = {"status": "ok" if alive else "the worker of continuous batching has died", "model": served.name}
        runs = [{"prompt_tokens": len(draw.prompt), "answer_tokens": len(draw.tokens)} for draw in [*engine.running]]
        status |= {"strict_tools": "kept where tool_choice is 'required' or a name"}
        kept = {"kept": engine.prefixes.facts} if isinstance(engine, OneByOne) else {}
        return JSONResponse(status | facts | kept | {"requests": runs}, status_code=200 if alive else 503)

    async def refused(_: Request, error: Exception) -> JSONResponse:
        return error_response(*status_of(error))

    for refusing in (HTTPException, CtxextError, Exception):  # the last: a defect is JSON, too, and is logged
        app.add_exception_handler(refusing, refused)

    # 64 bytes a token are more than any text has, and ids with their commas.
    return Gate(app, key, host, max(BODY, 64 * (served.window or 0)), origins)


def bound(host: str, port: int) -> socket.socket:
    """Take an address before the model is loaded, which may last minutes.

    Args:
        port: Port to listen to; 0 takes any that is free.

    Raises:
        InvalidParameterError: no such host, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Connections of an earlier server hold it for a minute. Not set at first: two that load would share it.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
    except (OSError, UnicodeError) as error:  # the second of a name that no host can have
        why = error.strerror if isinstance(error, OSError) else "no host can have this name"
        raise InvalidParameterError(f"{host}:{port} cannot be listened on: {why}. Give another.") from error
    return taken


def open_to_clients(listening: socket.socket) -> None:
    """Let clients connect to an address that was taken; a later server may take it at once when this one has ended.

    Raises:
        InvalidParameterError: another program listens there by now.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.listen()
    except OSError as error:
        host, port = listening.getsockname()[:2]
        raise InvalidParameterError(f"{host}:{port} cannot be listened on: {error.strerror}. Give another.") from error


class SmallPieces(H11Protocol):
    """Connection that is read in small pieces: all chunks of a piece are read without a look at other connections."""

    def connection_made(self, transport: Any) -> None:
        """Begin to read."""
        transport.max_size = 1 << 12  # of asyncio's transports
        super().connection_made(transport)


def serve(gate: Gate, listening: socket.socket) -> NoReturn:
    """Answer requests until Ctrl-C or SIGTERM, and end this process; a second one drops the requests that run.

    Threads may still be within a step of an answer that nobody waits for. No thread can be ended from outside, and an
    interpreter that ends in the usual way meanwhile aborts.
    """
    open_to_clients(listening)
    config = uvicorn.Config(gate, log_level="info", lifespan="on", loop="asyncio", http=SmallPieces)
    server = uvicorn.Server(config)
    status = 0

    def end(number: int) -> None:
        nonlocal status
        if server.should_exit:
            status = 128 + number
            for task in gate.running:
                task.cancel()
            asyncio.get_running_loop().call_later(2 * PATIENCE, os._exit, status)
        elif count := len(gate.running):
            runs = "request runs" if count == 1 else "requests run"
            LOG.info("%d %s; Ctrl-C again drops what runs.", count, runs)
        server.should_exit = True

    def signalled(number: int, _: FrameType | None) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(end, number)  # not within any step of this thread

    server.handle_exit = signalled  # type: ignore[assignment,method-assign]
    gc.collect()
    gc.freeze()  # each collection would go over all that was imported, and let no request run meanwhile
    sys.setswitchinterval(0.001)  # seconds that the event loop waits for a thread, some ten times a request
    server.run(sockets=[listening])
    os._exit(status)
