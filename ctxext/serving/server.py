"""An OpenAI-compatible server of one checkpoint, extended by any method, over the serving code of transformers.

Transformers brings the endpoints, streaming, tools and continuous batches. Here is what it lacks: a model from ctxext's
loader, a window that no request may exceed, a key, requests that are checked before they are served, and an end to the
work for clients that went away.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
from types import FrameType
from typing import Any, NoReturn

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager, GenerationState

from ctxext.errors import CtxextError, InvalidParameterError
from ctxext.serving.gate import BODY, PATIENCE, Gate, error_response, unknown_model
from ctxext.serving.load import Served
from ctxext.serving.requests import Answered, Completion, Conversation, Sampling, checked, refusal
from ctxext.surgery.subject import base_model

# Tokens of an answer whose request does not say how many; as many as transformers' own server gives.
ANSWER = 1024
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
COLDEST = 0.01  # temperature below which the likeliest token is taken: logits divided by less may overflow


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


def fit(inputs: Any, settings: GenerationConfig, window: int | None) -> None:
    """Refuse a request that does not fit the window, and let an answer of no stated length end with the window.

    Args:
        inputs: the tokens of the prompt.
        settings: settings of this request; ``max_new_tokens`` is None if the request names no length.
        window: most tokens of prompt and answer.

    Raises:
        HTTPException: 400, with the numbers.
    """
    ids = inputs["input_ids"]
    prompt = len(ids) if isinstance(ids, list) else int(ids.shape[-1])
    if not prompt:
        raise refusal("The prompt has no tokens.")
    asked = settings.max_new_tokens
    if window is None:
        settings.max_new_tokens = asked or ANSWER
        return
    if prompt + (asked or 1) > window:
        answer = f", and the answer may take {asked}: {prompt + asked} together" if asked else ""
        raise refusal(
            f"The prompt has {prompt} tokens{answer}. The window of this model is {window} tokens. Shorten the prompt "
            f"or max_tokens."
        )
    settings.max_new_tokens = asked or min(ANSWER, window - prompt)


class Fitted:
    """Part of both managers: a streamed answer begins with a look at whether the request fits the window."""

    window: int | None

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **more: Any) -> Any:
        """Answer a request piece by piece, or refuse it."""
        fit(inputs, gen_config, self.window)
        return super().generate_streaming(model, processor, inputs, gen_config, **more)  # type: ignore[misc]


class OneByOne(Fitted, GenerateManager):  # type: ignore[misc]
    """Manager of requests that are answered in turn; one whose client went away ends at the next token."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        fit(inputs, gen_config, self.window)
        gone = threading.Event()

        def stopped(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((ids.shape[0],), gone.is_set(), device=ids.device)

        def answered() -> Any:
            if gone.is_set():
                return None
            return model.generate(
                **inputs, generation_config=gen_config, tokenizer=processor, stopping_criteria=[stopped]
            )

        try:  # the work is not cancelled from outside: its thread would end with it
            sequences = await asyncio.shield(asyncio.wrap_future(self.submit(answered)))
        except asyncio.CancelledError:
            gone.set()
            raise
        prompt = inputs["input_ids"].shape[-1]
        tokens = sequences[0, prompt:]
        return processor.decode(tokens, skip_special_tokens=True), prompt, tokens


class Together(Fitted, CBGenerateManager):  # type: ignore[misc]
    """Manager of requests that are answered in continuous batches."""

    def __init__(self, window: int | None, tokens: int | None) -> None:
        config = ContinuousBatchingConfig()
        config.num_blocks = None if tokens is None else math.ceil(tokens / config.page_size)
        super().__init__(config)
        self.window = window
        self.sampling: tuple[Any, ...] | None = None

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Start the batches with the settings of the first request, and refuse another request's if they differ."""
        sampling = (gen_config.do_sample, gen_config.temperature, gen_config.top_p, gen_config.repetition_penalty)
        if self.sampling not in (None, sampling):
            raise refusal(
                "Continuous batches sample all requests alike: temperature, top_p and frequency_penalty must be "
                "those of the first request since the server started."
            )
        self.sampling = sampling
        super().init_cb(model, gen_config)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        fit(inputs, gen_config, self.window)
        try:
            answer: tuple[str, int, Any] = await super().generate_non_streaming(
                model, processor, inputs, gen_config, request_id
            )
        except asyncio.CancelledError:
            self._cb.cancel_request(request_id)
            raise
        return answer


class CheckedRequests:
    """First step of the handlers of all endpoints: refuse what cannot be answered as it is asked."""

    asked: type[Sampling]
    model_manager: ServedModels

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Check a request, and hand it over to transformers' handler."""
        checkpoint = self.model_manager.served.checkpoint
        checked(self.asked, body, base_model(checkpoint.model).config.get_text_config().vocab_size)
        if self.asked is not Completion and checkpoint.tokenizer.chat_template is None:
            raise refusal("This model's tokenizer has no chat template. Ask /v1/completions.")
        served = self.model_manager.served
        if body.get("model") not in (None, served.name):
            return unknown_model(body["model"], served.name)
        body.setdefault("stream", False)  # a field of the Responses API that transformers takes for true
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except TemplateError as error:
            raise refusal(f"The model's chat template refuses the messages: {error}") from error

    def _build_generation_config(self, body: dict[str, Any], of_model: Any, use_cb: bool = False) -> Any:
        settings = super()._build_generation_config(body, of_model, use_cb=use_cb)  # type: ignore[misc]
        if all(body.get(name) is None for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")):
            settings.max_new_tokens = None
        if body.get("temperature") is not None:
            settings.do_sample = body["temperature"] >= COLDEST
        return settings


class Completions(CheckedRequests, CompletionHandler):  # type: ignore[misc]
    """Handler of /v1/completions."""

    asked = Completion


class Chats(CheckedRequests, ChatCompletionHandler):  # type: ignore[misc]
    """Handler of /v1/chat/completions."""

    asked = Conversation


class Answers(CheckedRequests, ResponseHandler):  # type: ignore[misc]
    """Handler of /v1/responses."""

    asked = Answered


def application(
    served: Served,
    *,
    key: str | None = None,
    host: str = "",
    continuous_batching: bool = False,
    cached_tokens: int | None = None,
) -> Gate:
    """Build the application that answers requests.

    Args:
        served: from ``load_served``.
        key: what clients must show; None answers everybody.
        host: as for ``Gate``.
        continuous_batching: answer several requests in each pass of the model.
        cached_tokens: tokens of all requests whose keys and values such batches hold; default what is free on a GPU,
            and 8 windows on a CPU, whose memory others need too.

    Raises:
        IncompatibleError: continuous batches would be wrong for this model.
    """
    state = GenerationState(continuous_batching=continuous_batching)
    models = ServedModels(served, state)
    if continuous_batching:
        model: Any = served.checkpoint.model
        model.init_continuous_batching()  # refuses a model that it would not be right for
        if cached_tokens is None and model.device.type == "cpu":
            cached_tokens = 8 * (served.window or ANSWER)
        state._cb_manager, state._cb_model_id = Together(served.window, cached_tokens), served.name
    state._generate_managers[served.name] = OneByOne(served.window)
    handlers = [kind(models, state) for kind in (Chats, Completions, Answers)]
    # The two that are missing take sound, and decisions of models with another head.
    app: FastAPI = build_server(models, *handlers, None, None, state)
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") in ENDPOINTS]

    @app.get("/health")
    def health() -> JSONResponse:
        alive = state.is_cb_alive()
        facts = {"status": "ok" if alive else "the worker of continuous batching has died", "model": served.name}
        return JSONResponse(facts | served.facts, status_code=200 if alive else 503)

    @app.get("/v1/models/{name:path}")
    def model_of(name: str) -> JSONResponse:
        return JSONResponse(models.list_models()[0]) if name == served.name else unknown_model(name, served.name)

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(400, f"The body is not a JSON object: {error.errors()[0]['msg']}.")

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))

    @app.exception_handler(CtxextError)
    async def impossible(_: Request, error: CtxextError) -> JSONResponse:
        return error_response(400, str(error))

    # 64 bytes a token are more than any text has, and ids with their commas.
    return Gate(app, key, host, max(BODY, 64 * (served.window or 0)))


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


def serve(gate: Gate, listening: socket.socket) -> NoReturn:
    """Answer requests until Ctrl-C or SIGTERM, and end this process; a second one drops the requests that run.

    Threads may still be within a step of an answer that nobody waits for. No thread can be ended from outside, and an
    interpreter that ends in the usual way meanwhile aborts.
    """
    server = uvicorn.Server(uvicorn.Config(gate, log_level="info", lifespan="on"))
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
            logging.getLogger("uvicorn.error").info("%d %s; Ctrl-C again drops what runs.", count, runs)
        server.should_exit = True

    def signalled(number: int, _: FrameType | None) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(end, number)  # not within any step of this thread

    server.handle_exit = signalled  # type: ignore[assignment,method-assign]
    server.run(sockets=[listening])
    os._exit(status)
