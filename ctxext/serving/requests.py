"""Requests that the server takes: fields of OpenAI's API that it honours, and a sentence about any other."""

from __future__ import annotations

import json
import math
import re
from functools import cached_property
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ctxext.files import JsonObject

Count = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Tops = Annotated[int, Field(ge=0, le=20)]
Answers = Annotated[int, Field(ge=1, le=128)]
First = Field(fail_fast=True)  # one error is told: millions of them would be collected without a thread's switch
Several = Field(min_length=1, fail_fast=True)
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Tokens = Annotated[list[Token], Several]
Prompts = Text | Annotated[list[Text], Several] | Tokens | Annotated[list[Tokens], Several]
SURROGATE = re.compile("[\ud800-\udfff]")
DEEPEST = 64  # levels of lists and objects in a request
PARTS, VALUES = 1 << 15, 1 << 21  # lists, objects and names of fields in a request; values in its lists
NOT_SERVED = "this server does not serve it. Leave it out."
Asked = TypeVar("Asked", bound="Sampling")

# Fields of OpenAI's that are taken with a value that asks for nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": ({},),
    "audio": (),
    "background": (False,),
    "background_options": ({},),
    "context_management": ([],),
    "conversation": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "image": ({},),
    "include": ([],),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "previous_response_id": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Variables of chat templates that the server sets.
OF_SERVER = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class JsonReader(json.JSONDecoder):
    """Reader of JSON in Python's own steps, between which other threads run; the usual one, in C, stops them."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self.parse_array = self._list
        self.scan_once = py_make_scanner(self)
        self.parts = self.values = 0

    def _count(self, parts: int, values: int = 0) -> None:
        self.parts, self.values = self.parts + parts, self.values + values
        if self.parts > PARTS or self.values > VALUES:
            raise ValueError(f"more than {PARTS:,} lists, objects and names, or than {VALUES:,} values in lists")

    def _list(self, *rest: Any) -> tuple[list[Any], int]:
        self._count(1)
        values, end = JSONArray(*rest)
        self._count(0, len(values))
        return values, end

    def _object(self, pairs: list[tuple[str, Any]]) -> JsonObject:
        self._count(1 + len(pairs))
        if len(named := dict(pairs)) < len(pairs):
            raise ValueError("an object in which a name comes twice")
        return named


def read_json(text: str) -> Any:
    """Read JSON.

    Raises:
        ValueError: it is none, or has too many parts.
    """
    try:
        return JsonReader().decode(text)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels of lists and objects") from None


def _arguments(sent: str) -> Any:
    """Return the arguments of a call of a tool, which are sent as JSON in a text."""
    value = read_json(sent)
    if problem := _unreadable(value):
        raise ValueError(problem)
    return value


Arguments = Annotated[str, AfterValidator(_arguments)]


class Sent(BaseModel):
    """Part of a request; fields that are not named here are handed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Exactly(Sent):
    """Part of a request all of whose fields are named here."""

    model_config = ConfigDict(extra="forbid")


class Function(Sent):
    """A call of a tool that the model made before."""

    name: str
    arguments: JsonObject | Arguments


class FunctionCall(Sent):
    """A call of a tool with its name in the conversation."""

    function: Function


def _text_alone(kind: str) -> str:
    if kind not in ("text", "input_text", "output_text"):
        raise ValueError(f"this server reads only text, found {kind!r}")
    return kind


class TextPart(Sent):
    """A piece of a message: the server reads text alone."""

    type: Annotated[str, AfterValidator(_text_alone)]
    text: str


class Message(Sent):
    """A turn of a conversation."""

    role: Text
    content: str | Annotated[list[TextPart], First] | None = None
    tool_calls: Annotated[list[FunctionCall], First] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None


class Thoughts(Sent):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[dict[Literal["text", "type"], str]], First] | None = None


class CalledFunction(Sent):
    """A call of a tool, as the Responses API writes it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments


class FunctionOutput(Sent):
    """The result of a tool, as the Responses API writes it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str


class ToolFunction(Sent):
    """A tool's name and parameters."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Sent):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class FlatTool(ToolFunction):
    """A tool, as the Responses API writes it."""

    type: Literal["function"]


class ChosenName(Exactly):
    """Name of the tool that has to be called."""

    name: str


class ChosenTool(Exactly):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenName


class FlatChosenTool(ChosenName):
    """The tool that has to be called, as the Responses API writes it."""

    type: Literal["function"]


class Schema(Sent):
    """A JSON schema that the answer has to keep."""

    schema_: Annotated[JsonObject, Field(alias="schema")]


class Format(Exactly):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @property
    def schema_(self) -> JsonObject | None:
        """Schema that the answer has to keep."""
        return None if self.json_schema is None else self.json_schema.schema_


class FlatFormat(Sent):
    """The form of an answer, as the Responses API writes it."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class TextSettings(Exactly):
    """Settings of the text of an answer."""

    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Exactly):
    """Settings of the reasoning before an answer."""

    effort: str | None = None


class Obfuscation(Exactly):
    """Settings of a stream, as the Responses API has them."""

    include_obfuscation: Literal[False] | None = None


class StreamOptions(Obfuscation):
    """Settings of a stream."""

    include_usage: bool | None = None


class Sampling(Exactly):
    """Fields that every endpoint takes."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=128, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=1024, fail_fast=True)] | None = None
    min_tokens: Token | None = None
    # Requests of other owners do not go on from what this one reads.
    cache_salt: Text | None = None
    prompt_cache_key: str | None = None
    # These change no answer, by OpenAI's own definition: labels of a request, and wishes about a cache.
    metadata: JsonObject | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @cached_property
    def bias(self) -> dict[int, float]:
        """Summands of the logits of tokens."""
        return {int(token): value for token, value in (self.logit_bias or {}).items()}


class Completion(Sampling):
    """A text to continue."""

    prompt: Prompts
    max_tokens: Token | None = None
    stream_options: StreamOptions | None = None
    n: Answers | None = None
    best_of: Answers | None = None
    echo: bool | None = None
    logprobs: Tops | None = None


class Templated(Sampling):
    """Fields of requests that a chat template turns into a prompt."""

    tools: Annotated[list[Tool | FlatTool], First] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | FlatChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def functions(self) -> list[ToolFunction]:
        """Tools that may be called."""
        tools = () if self.tool_choice == "none" else self.tools or ()
        return [tool.function if isinstance(tool, Tool) else tool for tool in tools]

    @property
    def shown(self) -> list[JsonObject]:
        """Tools as chat templates read them."""
        tools = [tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.functions]
        return [{"type": "function", "function": tool} for tool in tools]

    @property
    def forced(self) -> dict[str, JsonObject]:
        """Parameters by name of the tools that the model must choose from; empty if it may answer otherwise."""
        if self.tool_choice in (None, "none", "auto"):
            return {}
        name = getattr(getattr(self.tool_choice, "function", self.tool_choice), "name", None)
        return {tool.name: tool.parameters or {} for tool in self.functions if name in (None, tool.name)}

    @property
    def format_asked(self) -> Format | FlatFormat | None:
        """Form of the answer."""
        return getattr(self, "response_format", None) or getattr(getattr(self, "text", None), "format", None)

    @property
    def schema_asked(self) -> JsonObject | None:
        """Schema of the answer; None if its form is free."""
        asked = self.format_asked
        if asked is None or asked.type == "text":
            return None
        return {"type": "object"} if asked.type == "json_object" else asked.schema_

    @property
    def effort(self) -> str | None:
        """Effort of the reasoning before the answer."""
        return getattr(self, "reasoning_effort", None) or getattr(getattr(self, "reasoning", None), "effort", None)


class Conversation(Templated):
    """A conversation to answer."""

    messages: Annotated[list[Message], Several]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    n: Answers | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    response_format: Format | None = None
    reasoning_effort: str | None = None


class Answered(Templated):
    """A conversation to answer, as the Responses API writes it."""

    input: (
        Text
        | Annotated[list[Message | Thoughts | CalledFunction | FunctionOutput], Several]
        | Annotated[list[TextPart], Several]
    )
    instructions: str | None = None
    max_output_tokens: Count | None = None
    prompt: None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    top_logprobs: Literal[0] | None = None
    stream_options: Obfuscation | None = None


def checked(kind: type[Asked], text: bytes, vocabulary: int) -> Asked:
    """Read a request, and refuse one that could not be answered as it asks.

    ``vocabulary`` counts the tokens that the model knows.

    Raises:
        HTTPException: 400, with a sentence that names the field.
    """
    try:
        body = read_json(text.decode())
    except ValueError as error:
        raise refusal(f"The body is not JSON that is read: {error}.") from None
    if not isinstance(body, dict):
        raise refusal("The body is not a JSON object.")
    sent = {name: value for name, value in body.items() if value is not None}
    for name, value in sent.items():
        if problem := _unreadable(value):
            raise refusal(f"{name}: {problem}.")
    for name in sent.keys() - kind.model_fields.keys():
        if name not in NEUTRAL or sent.pop(name) not in NEUTRAL[name]:
            raise refusal(f"{name}: {NOT_SERVED}")
    try:
        request = kind.model_validate(sent)
    except ValidationError as error:
        raise refusal(_sentence(error, sent)) from None
    if (clash := _clash(request)) is not None:
        raise refusal(clash)
    prompt: Any = getattr(request, "prompt", ())
    rows = prompt if isinstance(prompt, list) else []
    flat = [token for row in rows for token in (row if isinstance(row, list) else [row])]
    # The schema knows no vocabulary. A larger id would fail inside the model, and on a GPU end all later requests too.
    for name, tokens in (
        ("logit_bias", request.bias),
        ("stop_token_ids", request.stop_token_ids or []),
        ("prompt", flat),
    ):
        if any(isinstance(token, int) and token >= vocabulary for token in tokens):
            raise refusal(f"{name}: the model has {vocabulary} tokens; give smaller ids.")
    return request


def refusal(sentence: str) -> HTTPException:
    """Return the error by which a request is refused, with status 400."""
    return HTTPException(status_code=400, detail=sentence)


def _clash(request: Sampling) -> str | None:
    """Return a sentence about fields that cannot be honoured together; None if there are none."""
    if getattr(getattr(request, "stream_options", None), "include_usage", None) and not request.stream:
        return "stream_options: include_usage is for streams. Set stream, or leave it out."
    if isinstance(request, Completion) and request.best_of not in (None, request.n or 1):
        return f"best_of: {request.best_of} answers, of which {request.n or 1} would be returned, are not served."
    if isinstance(request, Conversation) and request.top_logprobs and not request.logprobs:
        return "top_logprobs: only with logprobs. Set logprobs, or leave it out."
    if not isinstance(request, Templated):
        return None
    if (asked := request.format_asked) is not None and (asked.type == "json_schema") != (asked.schema_ is not None):
        name, place = ("response_format", "json_schema.") if isinstance(asked, Format) else ("text.format", "")
        if asked.schema_ is None:
            return f"{name}: the type 'json_schema' needs a schema. Give it as {place}schema."
        return f"{name}: a schema belongs to the type 'json_schema', found {asked.type!r}. Leave the schema out."
    lengths = {getattr(request, name, None) for name in ("max_tokens", "max_completion_tokens")} - {None}
    if len(lengths) > 1:
        return "max_tokens, max_completion_tokens: they mean the same, and differ. Leave one out."
    if request.effort not in (None, (request.chat_template_kwargs or {}).get("reasoning_effort", request.effort)):
        return "chat_template_kwargs: reasoning_effort is given twice, and differs. Leave one out."
    names = [function.name for function in request.functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"tools: two of them are named {twice!r}. Rename one."
    items = getattr(request, "input", None)
    if isinstance(items, list) and isinstance(items[0], Thoughts | CalledFunction | FunctionOutput):
        return "input: reasoning, a call and its output follow a message. Begin with a message."
    if request.tool_choice not in (None, "none", "auto"):
        if not request.forced:
            return "tool_choice: no such tool in tools."
        if request.schema_asked is not None:
            return "tool_choice: a call of a tool has no other format."
        if request.stop:
            return "stop: a call of a tool that tool_choice demands ends by itself. Leave stop out."
    # JSON that is complete ends an answer below min_tokens, and may have no other token than one that ends it.
    for name in ("stop_token_ids", "min_tokens") if request.forced or request.schema_asked is not None else ():
        if getattr(request, name):
            return f"{name}: an answer of a forced form ends by itself. Leave {name} out."
    if request.functions and request.parallel_tool_calls is False and not request.forced:
        return "parallel_tool_calls: false is served only where tool_choice is 'required' or a name."
    return None


def _unreadable(value: Any, level: int = 1) -> str | None:
    """Return the fault of a value that nothing here can read; None if there is none."""
    if level > DEEPEST:
        return f"more than {DEEPEST} levels of lists and objects"
    if isinstance(value, str) and SURROGATE.search(value):
        return "text that is not Unicode (half of a surrogate pair)"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a whole number of more than 64 bits"
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((fault for part in parts if (fault := _unreadable(part, level + 1))), None)


def _sentence(error: ValidationError, sent: JsonObject) -> str:
    """Return a sentence about the innermost of a request's errors: a union has one for each of its types."""
    faults = error.errors(include_url=False, include_input=False)
    worst = max(  # the one that came furthest
        faults,
        key=lambda fault: (
            len(fault["loc"]),
            not fault["type"].endswith("_type"),
            [step for step in fault["loc"] if isinstance(step, int)],
        ),
    )
    path: list[str] = []
    value: Any = sent
    for step in worst["loc"]:
        inside = step in value if isinstance(value, dict) else isinstance(value, list) and isinstance(step, int)
        value = value[step] if inside else value
        if inside or (worst["type"] == "missing" and step == worst["loc"][-1]):
            path.append(str(step))
    if worst["type"] in ("extra_forbidden", "none_required"):
        return f"{'.'.join(path)}: {NOT_SERVED}"
    return f"{'.'.join(path)}: {worst['msg'].removeprefix('Value error, ')}."
