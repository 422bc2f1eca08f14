"""Endpoints of OpenAI's API: from a request to prompts, and from the pieces of answers to what the API writes."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import meta
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent
from starlette.exceptions import HTTPException
from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_template_utils import _compile_jinja_template

from ctxext.core.rebuild import FAILURES
from ctxext.files import JsonObject
from ctxext.serving.answers import (
    LOG,
    AnswerPiece,
    Draw,
    NumberedPieces,
    OneByOne,
    Together,
    TokenText,
    Told,
    pieces_of,
)
from ctxext.serving.gate import status_of, unknown_model
from ctxext.serving.load import Served
from ctxext.serving.requests import (
    OF_SERVER,
    Answered,
    Completion,
    Conversation,
    Sampling,
    Templated,
    checked,
    refusal,
)
from ctxext.texts.conversations import OF_TEMPLATES, content_for

ANSWER = 1024  # tokens of an answer whose request does not say how many; as many as transformers' own server gives
ANSWERS = 2048  # answers to all prompts of a request
LONG = 1 << 20  # bytes of a request that waits for others of its size, so that it makes no short one wait
SHORT_WORK, LONG_WORK = ThreadPoolExecutor(2, "short request"), ThreadPoolExecutor(1, "long request")
WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
INSTEAD = {"developer": "system", "system": "user"}  # roles of instructions, and what more templates know
TOLD = 1024  # tokens of an echoed prompt in one event


async def in_thread(work: Callable[..., Any], *given: Any, long: bool = False) -> Any:
    """Run work in a thread: the event loop answers others meanwhile, and notices a client that leaves."""
    return await asyncio.get_running_loop().run_in_executor(LONG_WORK if long else SHORT_WORK, work, *given)


def fit(prompt: int, asked: int | None, window: int | None) -> int:
    """Return the most tokens of an answer: the number in the request, or the rest of the window.

    Raises:
        HTTPException: 400, with the numbers, where the request does not fit the window.
    """
    if not prompt:
        raise refusal("The prompt has no tokens.")
    if window is None:
        return ANSWER if asked is None else asked
    if prompt + (1 if asked is None else asked) > window:
        answer = f", and the answer may take {asked}: {prompt + asked} together" if asked else ""
        raise refusal(
            f"The prompt has {prompt} tokens{answer}. The window of this model is {window} tokens. Shorten the prompt "
            f"or max_tokens."
        )
    return min(ANSWER, window - prompt) if asked is None else asked


class Endpoint:
    """Handler of one path."""

    asked: ClassVar[type[Sampling]]
    kind: ClassVar[str]  # beginning of the ids of answers
    objects: ClassVar[tuple[str, str]]  # names of an answer, and of a piece of it in a stream
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)

    def __init__(self, served: Served, engine: OneByOne | Together, reader: TokenText) -> None:
        self.served, self.engine, self.reader = served, engine, reader
        self.model: Any = served.checkpoint.model
        self.tokenizer: Any = served.checkpoint.tokenizer

    async def handle_request(self, body: bytes, request_id: str) -> Any:
        """Answer a request, or refuse it."""
        long = len(body) > LONG
        request: Any = await in_thread(checked, self.asked, body, self.reader.vocabulary, long=long)
        if request.model not in (None, self.served.name):
            return unknown_model(request.model, self.served.name)
        draws = await in_thread(self.draws, request, long=long)
        return await self.answer(request, draws, request_id)

    def draws(self, request: Any) -> list[Draw]:
        """Return the answers that a request asks for, before the first token of each."""
        raise NotImplementedError

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text; refuse early one whose beginning is far beyond the window."""
        read, window = partial(self.tokenizer, add_special_tokens=special), self.served.window
        # Few tokens of the beginning would join otherwise in the whole text.
        if window and len(text) > 32 * window and len(read(text[: 32 * window]).input_ids) > 2 * window:
            raise refusal(f"The prompt has more than {window} tokens, the window of this model. Shorten it.")
        return list(read(text).input_ids)

    def draw(self, request: Any, prompt: list[int], number: int, tops: int | None, **more: Any) -> Draw:
        """Return an answer to a prompt, if both fit the window."""
        if max(prompt, default=0) >= self.reader.vocabulary:  # by which a GPU fails in all later requests, too
            raise refusal(f"The prompt has token {max(prompt)}, and the model knows {self.reader.vocabulary} tokens.")
        asked = (given for name in self.lengths if (given := getattr(request, name)) is not None)
        windows = [most for most in (self.served.window, self.engine.room) if most is not None]
        limit = fit(len(prompt), next(asked, None), min(windows, default=None))
        if limit < (request.min_tokens or 0):
            raise refusal(f"min_tokens: the answer may have {limit} tokens at most. Give no more, or raise its length.")
        usual = self.model.generation_config
        return Draw(prompt, request, usual, limit, tops, self.reader, number=number, **more)

    def pieces(self, request: Any, draws: list[Draw]) -> NumberedPieces:
        """Return the pieces of answers as they come, each with the number of its answer."""
        return pieces_of(self.engine, draws)

    def choice(self, request: Any, number: int, piece: AnswerPiece) -> JsonObject:
        """Return an answer, or a piece of it in a stream, as the API writes it."""
        raise NotImplementedError

    async def answer(self, request: Any, draws: list[Draw], request_id: str) -> Any:
        """Return the answers to a request, whole or as a stream."""
        head = {"id": f"{self.kind}-{request_id}", "created": int(time.time()), "model": self.served.name}
        if not request.stream:
            whole = [AnswerPiece() for _ in draws]
            async for number, piece in self.pieces(request, draws):
                whole[number] += piece

            def written() -> Response:
                choices = [self.choice(request, number, piece) for number, piece in enumerate(whole)]
                answer = head | {"object": self.objects[0], "choices": choices, "usage": usage(draws)}
                # json.dumps, which is written in C, would let no other thread run.
                return Response("".join(WRITER.iterencode(answer)), media_type="application/json")

            return await in_thread(written)
        counted = request.stream_options is not None and request.stream_options.include_usage
        head |= {"object": self.objects[1]} | ({"usage": None} if counted else {})

        async def lines() -> AsyncIterator[str]:
            async for number, piece in self.pieces(request, draws):
                if piece != AnswerPiece():
                    yield _line(head | {"choices": [self.choice(request, number, piece)]})
            if counted:
                yield _line(head | {"choices": [], "usage": usage(draws)})
            yield "data: [DONE]\n\n"

        return streamed(lines(), lambda error: [_line({"error": error}), "data: [DONE]\n\n"])


def _line(event: JsonObject) -> str:
    return f"data: {json.dumps(event)}\n\n"


def usage(draws: list[Draw]) -> JsonObject:
    """Return the token counts of a request: each prompt once, and all answers."""
    firsts = [draw for draw in draws if draw.number == 0]
    prompt, answers = sum(len(draw.prompt) for draw in firsts), sum(len(draw.tokens) for draw in draws)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": sum(draw.cached for draw in firsts)},
    }


def streamed(lines: AsyncIterator[str], failed: Callable[[JsonObject], list[str]]) -> StreamingResponse:
    """Return a stream of events, in which an error is an event, too."""

    async def guarded() -> AsyncIterator[str]:
        try:
            async for line in lines:
                yield line
        except (HTTPException, *FAILURES) as error:  # no handler further out can tell the client of a stream
            status, sentence = status_of(error)
            if not isinstance(error, HTTPException):
                LOG.error("A stream failed.", exc_info=error)
            for line in failed({"message": sentence, "type": "server_error", "code": status}):
                yield line

    return StreamingResponse(guarded(), media_type="text/event-stream")


class Completions(Endpoint):
    """Handler of /v1/completions."""

    asked = Completion
    kind, objects = "cmpl", ("text_completion", "text_completion")

    def draws(self, request: Completion) -> list[Draw]:
        """Return the answers that a request asks for: ``n`` to each of its prompts."""
        prompt: Any = request.prompt
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        if len(prompts) * (request.n or 1) > ANSWERS:
            raise refusal(
                f"prompt, n: {len(prompts):,} prompts and n = {request.n or 1} are more than {ANSWERS:,} answers. "
                f"Send several requests."
            )
        rows = [self.tokens(row) if isinstance(row, str) else row for row in prompts]
        if request.echo and request.logprobs is not None and isinstance(self.engine, Together):
            raise refusal("echo: with logprobs, it is not served in continuous batches.")
        return [self.draw(request, row, number, request.logprobs) for row in rows for number in range(request.n or 1)]

    async def pieces(self, request: Completion, draws: list[Draw]) -> NumberedPieces:
        """Yield the pieces of answers as they come, behind their prompts where the request asks for these."""
        shift = [0] * len(draws)
        for number, draw in enumerate(draws) if request.echo else ():
            if draw.number == 0:  # others of the same prompt say the same
                text = await in_thread(self.tokenizer.decode, draw.prompt, True)  # without special tokens
                told: list[Told] = []
                if request.logprobs is not None and isinstance(self.engine, OneByOne):
                    told = await self.engine.read(draw.prompt, self.reader, request.logprobs)
            shift[number] = len(text)
            for first in range(0, len(told) or 1, TOLD):
                yield number, AnswerPiece("" if first else text, told=told[first : first + TOLD])
                await asyncio.sleep(0)  # others are answered in between
        async for number, piece in super().pieces(request, draws):
            moved = [replace(told, start=told.start + shift[number]) for told in piece.told]
            yield number, replace(piece, told=moved)

    def choice(self, request: Completion, number: int, piece: AnswerPiece) -> JsonObject:
        """Return an answer, or a piece of it in a stream, as the API writes it."""
        logprobs = None
        if request.logprobs is not None:
            tops = [
                None if told.logprob is None else {told.text: told.logprob} | dict(reversed(told.tops))
                for told in piece.told
            ]
            logprobs = {"tokens": [told.text for told in piece.told], "top_logprobs": tops}
            logprobs["token_logprobs"] = [told.logprob for told in piece.told]
            logprobs["text_offset"] = [told.start for told in piece.told]
        return {"index": number, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}


class CallParser(ResponseParser):  # type: ignore[misc]
    """Parser of an answer, which takes a call of a tool that the model wrote badly for words."""

    def _open_explicit(self, events: list[JsonObject], field: Any, m: Any) -> None:
        self._begun = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[JsonObject]) -> None:
        before = len(events)
        try:
            super()._close_current(events)
            for call in response_events_to_chunks(events[before:]):
                if isinstance(call, ToolCall) and not isinstance(call.name, str):
                    raise TypeError(call.name)
        except OF_TEMPLATES:
            said = self._buffer[self._begun : self._pos]
            events[before:] = [{"type": "region_chunk", "field": "content", "text": said}]
            self._reset_to_implicit()

    def end(self) -> list[JsonObject]:
        """Return the last events."""
        events: list[JsonObject] = []
        self._process(events, eos=True)
        return events


class Speech:
    """Words, reasoning and calls of tools in the text of one answer.

    Args:
        parser: Parser that tells thoughts, words and calls apart; None if all are words.
        forced: Names of tools; the whole text is a call of one of them.
    """

    def __init__(self, parser: Any, forced: Iterable[str]) -> None:
        self.parser, self.forced, self.text, self.called = parser, forced, "", 0
        self.begun = [] if parser is None else response_events_to_chunks(parser.initial_events)

    def piece(self, raw: AnswerPiece) -> AnswerPiece:
        """Return the piece of an answer that a piece of its raw text is."""
        said = AnswerPiece(told=raw.told, finish=raw.finish)
        for item in self._items(raw):
            if isinstance(item, ToolCall):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"index": self.called, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
                said.calls.append(call | {"function": function})
                self.called += 1
            elif isinstance(item, ReasoningText):
                said.reasoning += item
            else:
                said.text += item
        if raw.finish == "stop" and self.called:
            said.finish = "tool_calls"
        return said

    def _items(self, raw: AnswerPiece) -> list[Any]:
        self.text += raw.text
        if self.forced:  # also where the text was cut at its greatest length
            names = [name for name in self.forced if raw.finish is not None and self.text.startswith(call_of(name))]
            rest = self.text[: -1 if raw.finish == "stop" else None]
            return [ToolCall(name, rest[len(call_of(name)) :]) for name in names]
        if self.parser is None:
            return [raw.text]
        items, self.begun = self.begun, []
        items += response_events_to_chunks(self.parser.feed(raw.text)) if raw.text else []
        if raw.finish is not None:
            items += response_events_to_chunks(self.parser.end())
        return items


def call_of(name: str) -> str:
    """Return how the text of a forced call of a tool begins."""
    return f'{{"name":{json.dumps(name)},"arguments":'


def _call_schema(name: str, place: int, parameters: JsonObject) -> JsonObject:
    """Return the schema of a call, one of several, within which references of its parameters still hold."""
    inside = json.dumps(parameters).replace('"$ref": "#', f'"$ref": "#/anyOf/{place}/properties/arguments')
    properties = {"name": {"const": name}, "arguments": {"type": "object"} | json.loads(inside)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class Templates(Endpoint):
    """Handler of requests that a chat template turns into a prompt."""

    def prompt(self, request: Templated, messages: list[JsonObject]) -> list[int]:
        """Return the tokens of a conversation, or refuse what its template cannot show."""
        if self.tokenizer.chat_template is None:
            raise refusal("This model's tokenizer has no chat template. Ask /v1/completions.")
        tools = request.shown or None  # a tokenizer with several templates chooses by them
        try:
            environment = _compile_jinja_template(template := self.tokenizer.get_chat_template(tools=tools)).environment
            read = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
        except OF_TEMPLATES as error:
            raise refusal(f"This model's chat template cannot be read ({error}). Ask /v1/completions.") from error
        if tools and "tools" not in read:
            raise refusal("tools: this model's chat template does not show them. Leave them out.")
        variables = (request.chat_template_kwargs or {}) | (
            {} if request.effort is None else {"reasoning_effort": request.effort}
        )
        for name in variables.keys() - (read - OF_SERVER):
            raise refusal(f"{name}: this model's chat template does not read it. Leave it out.")
        written, instructions = content_for(self.tokenizer), dict[str, str]()
        for message in messages:
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            message["content"] = written(text)
            if message["role"] in INSTEAD:
                instructions[" ".join(text.split())] = message["role"]
        try:
            prompt: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
            )
        except OF_TEMPLATES as error:
            raise refusal(f"The model's chat template refuses the messages: {error}") from error
        words = " ".join(prompt.split()) if instructions else ""
        for text, role in instructions.items():
            if text not in words:
                raise refusal(
                    f"role: this model's chat template passes over messages of {role!r}. Send {INSTEAD[role]!r}."
                )
        return self.tokens(prompt, special=False)

    def conversation(self, request: Any) -> list[JsonObject]:
        """Return the messages of a request."""
        raise NotImplementedError

    def draws(self, request: Any) -> list[Draw]:
        """Return the answers that a request asks for."""
        prompt = self.prompt(request, self.conversation(request))
        calls = [
            _call_schema(name, place, parameters) for place, (name, parameters) in enumerate(request.forced.items())
        ]
        schema = {"anyOf": calls} if calls else request.schema_asked
        tops = (request.top_logprobs or 0) if getattr(request, "logprobs", None) else None
        numbers = range(getattr(request, "n", None) or 1)
        form = {"names": self._names()} if schema is None else {"grammar": self.reader.grammar(schema)}
        return [self.draw(request, prompt, number, tops, **form) for number in numbers]

    def _names(self) -> dict[int, str]:
        """Return the names of special tokens by which reasoning and calls of tools are found."""
        sought = str(get_response_template(self.tokenizer, self.model)).replace(r"\\", "\\")
        special = self.reader.special.items()
        return {token: name for token, name in special if name in sought or re.escape(name) in sought}

    def _parser(self, request: Any, prompt: list[int]) -> Any:
        """Return what tells reasoning and calls of tools from words; None where all are words."""
        form = get_response_template(self.tokenizer, self.model)
        if form is None or request.forced or request.schema_asked is not None:
            return None
        text, anchors = self.tokenizer.decode(prompt), form.get("start_anchor", [])
        begun = "start_anchor_pattern" in form or any(
            anchor in text for anchor in ([anchors] if isinstance(anchors, str) else anchors)
        )
        return CallParser(form, prefix=text if begun else "", tools=request.shown or None)

    async def pieces(self, request: Any, draws: list[Draw]) -> NumberedPieces:
        """Yield the pieces of answers as they come: words, reasoning, calls of tools."""
        speeches = await in_thread(
            lambda: [Speech(self._parser(request, draw.prompt), request.forced) for draw in draws]
        )
        async for number, raw in super().pieces(request, draws):
            yield number, speeches[number].piece(raw)


class Chats(Templates):
    """Handler of /v1/chat/completions."""

    asked = Conversation
    kind, objects = "chatcmpl", ("chat.completion", "chat.completion.chunk")
    lengths = ("max_completion_tokens", "max_tokens")

    def conversation(self, request: Conversation) -> list[JsonObject]:
        """Return the messages of a request."""
        return [message.model_dump(exclude_none=True) for message in request.messages]

    async def pieces(self, request: Any, draws: list[Draw]) -> NumberedPieces:
        """Yield the pieces of answers as they come, behind the role of each in a stream."""
        for number in range(len(draws)) if request.stream else ():
            yield number, AnswerPiece(finish="")
        async for number, piece in super().pieces(request, draws):
            yield number, piece

    def choice(self, request: Conversation, number: int, piece: AnswerPiece) -> JsonObject:
        """Return an answer, or a piece of it in a stream, as the API writes it."""
        whole, first = not request.stream, piece.finish == ""
        said: JsonObject = {"role": "assistant"} if whole or first else {}
        if piece.text or first or whole:
            said["content"] = None if piece.calls and not piece.text else piece.text
        if piece.reasoning:
            said["reasoning_content"] = piece.reasoning
        if piece.calls:
            said["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} if whole else call
                for call in piece.calls
            ]
        logprobs = None
        if request.logprobs and not first:
            content = [
                _token(told.text, told.logprob) | {"top_logprobs": [_token(*top) for top in told.tops]}
                for told in piece.told
                if not told.hidden
            ]
            logprobs = {"content": content, "refusal": None}
        told = {"message" if whole else "delta": said, "logprobs": logprobs}
        return {"index": number, **told, "finish_reason": piece.finish or None}


def _token(text: str, logprob: float | None) -> JsonObject:
    """Return a token as the chat API writes it; half a letter has no bytes that can be told."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class Responses(Templates):
    """Handler of /v1/responses; transformers writes its events."""

    asked = Answered
    kind, lengths = "resp", ("max_output_tokens",)

    def conversation(self, request: Answered) -> list[JsonObject]:
        """Return the messages of a request, behind its instructions."""
        given = request.model_dump(exclude_none=True)["input"]
        messages: list[JsonObject] = ResponseHandler._normalize_input({"input": given})
        return [{"role": "system", "content": request.instructions}] * bool(request.instructions) + messages

    async def answer(self, request: Answered, draws: list[Draw], request_id: str) -> Any:
        """Return the answer to a request, whole or as a stream."""
        written = {"id": f"resp_{request_id}", "created_at": time.time(), "model": self.served.name}
        written |= {"object": "response", "tools": [], "parallel_tool_calls": request.parallel_tool_calls is not False}
        events = _ResponseStreamBuilder(request_id=request_id, response_defaults=written | {"tool_choice": "auto"})
        lines = self._events(request, draws, events)
        if request.stream:
            return streamed(lines, lambda error: events.error(error["message"]))
        last = [line async for line in lines][-1]
        return JSONResponse(json.loads(last.removeprefix("data: "))["response"])

    async def _events(self, request: Answered, draws: list[Draw], events: Any) -> AsyncIterator[str]:
        """Yield the events of an answer; the last one holds it whole."""
        output: list[Any] = []
        names = events.msg_id, events.reasoning_id

        def closed() -> list[str]:
            """End the item that is open, and prepare the id, place and text of the next one."""
            lines: list[str] = []
            if events.reasoning_open:
                lines += events.finish_reasoning()
                output.append(events.reasoning_item)
            if events.message_open:
                lines += events.finish_message()
                output.append(events.message_item)
            events.msg_id, events.reasoning_id = (f"{name}_{len(output)}" if output else name for name in names)
            events.output_index, events.content, events.full_reasoning = len(output), "", ""
            return lines

        for line in events.start_response():
            yield line
        finish, blank = None, ""
        async for _, piece in self.pieces(request, draws):
            finish = piece.finish or finish
            lines: list[str] = []
            if piece.reasoning:
                lines += [] if events.reasoning_open else closed() + events.start_reasoning()
                lines += events.reasoning_delta(piece.reasoning)
            blank += "" if events.message_open else piece.text  # blanks alone begin no message
            if piece.text and (events.message_open or blank.strip()):
                lines += [] if events.message_open else closed() + events.start_message()
                lines += events.text_delta(blank or piece.text)
                blank = ""
            for call in piece.calls:
                lines, blank = lines + closed(), ""
                events.output_index -= 1  # transformers counts on before a call, and not behind it
                lines += events.tool_call(call["id"], **call["function"])
                output.append(events.tool_calls[-1])
            for line in lines:
                yield line
        # Even an empty answer has a message, where clients look for its text.
        empty = not (events.message_open or events.message_item or events.tool_calls)
        message = closed() + events.start_message() + (events.text_delta(blank) if blank else []) if empty else []
        for line in message + closed():
            yield line
        counted = compute_usage(len(draws[0].prompt), len(draws[0].tokens))
        counted.input_tokens_details.cached_tokens = draws[0].cached
        cut = finish == "length"
        status: Any = "incomplete" if cut else "completed"
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        kind: Any = ResponseIncompleteEvent if cut else ResponseCompletedEvent
        response = events._response(status, output=output, usage=counted, **more)
        yield events._emit(kind(type=f"response.{status}", sequence_number=events.seq, response=response))
