"""Requests that the server takes: fields of OpenAI's API that it honours, and a sentence about any other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
# Fields that transformers' serving code passes over without a word, and the values that change nothing.
PASSED_OVER: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "previous_response_id": (),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    # It may name any setting of generate(), files among them.
    "generation_config": (),
}
# What chat templates are called with; a request must not put its own in their place.
OF_TEMPLATES = frozenset(
    {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "return_tensors"}
    | {"return_dict", "padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
    | {"continue_final_message", "processor_kwargs", "load_audio_from_video"}
)


class Sent(BaseModel):
    """Part of a request; fields that are not named here are left to transformers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Function(Sent):
    """A call of a tool that the model made before."""

    name: str
    arguments: Json[Any] | dict[str, Any]


class FunctionCall(Sent):
    """A call of a tool with its name in the conversation."""

    function: Function


class TextPart(Sent):
    """A piece of a message: the server reads text alone."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(Sent):
    """A turn of a conversation."""

    role: Text
    content: str | list[TextPart] | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None


class Thoughts(Sent):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[dict[Literal["text", "type"], str]] | None = None


class CalledFunction(Sent):
    """A call of a tool, as the Responses API writes it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Json[Any]


class FunctionOutput(Sent):
    """The result of a tool, as the Responses API writes it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str


class ToolFunction(Sent):
    """A tool's name and parameters."""

    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Sent):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class FlatTool(ToolFunction):
    """A tool, as the Responses API writes it."""

    type: Literal["function"]


class Sampling(Sent):
    """Fields that every endpoint takes."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    stop: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], float] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Completion(Sampling):
    """A text to continue."""

    prompt: Text
    suffix: str | None = None


class Conversation(Sampling):
    """A conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None


class Answered(Sampling):
    """A conversation to answer, as the Responses API writes it."""

    input: (
        Text
        | Annotated[list[Message | Thoughts | CalledFunction | FunctionOutput], Field(min_length=1)]
        | Annotated[list[TextPart], Field(min_length=1)]
    )
    instructions: str | None = None
    tools: list[Tool | FlatTool] | None = None


def checked(kind: type[Sampling], body: dict[str, Any], vocabulary: int) -> None:
    """Refuse a request that could not be answered as it asks.

    Args:
        kind: the endpoint's request.
        body: what was sent.
        vocabulary: tokens that the model knows.

    Raises:
        HTTPException: 400, with a sentence that names the field.
    """
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise refusal(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
    for name, neutral in PASSED_OVER.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise refusal(f"{name}: this server does not serve it. Leave it out.")
    if taken := OF_TEMPLATES & (request.chat_template_kwargs or {}).keys():
        raise refusal(f"chat_template_kwargs.{min(taken)}: the server sets it. Leave it out.")
    if any(int(token) >= vocabulary for token in request.logit_bias or {}):
        raise refusal(f"logit_bias: the model has {vocabulary} tokens; give smaller ids.")


def refusal(sentence: str) -> HTTPException:
    """Return the error by which a request is refused, with status 400."""
    return HTTPException(status_code=400, detail=sentence)
