"""Every field of OpenAI's request types is honoured, asks for nothing, or is refused by a sentence that names it."""

from __future__ import annotations

import itertools
import json
import random
import sys
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from openai.types import completion_create_params as of_texts
from openai.types.chat import completion_create_params as of_chats
from openai.types.responses import response_create_params as of_responses

from ctxext.caches.continuous import PAGED_IN_LAYERS
from ctxext.serving.endpoints import Chats
from ctxext.serving.requests import NEUTRAL, Answered, Completion, Conversation
from tests._programs import ROOT
from tests._tokenizer import make_letters
from tests.serving._asking import CHAT, RESPONSES, TEXT, Asking, asking, letters

KINDS: dict[str, tuple[type[Any], Any]] = {
    CHAT: (Conversation, of_chats.CompletionCreateParamsStreaming),
    TEXT: (Completion, of_texts.CompletionCreateParamsStreaming),
    RESPONSES: (Answered, of_responses.ResponseCreateParamsStreaming),
}
MESSAGES = [{"role": "user", "content": "once upon"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 7},
    TEXT: {"prompt": "once upon", "max_tokens": 7},
    RESPONSES: {"input": "once upon", "max_output_tokens": 7},
}
# Fields that change no answer, by OpenAI's own definition.
LABELS = {"cache_salt", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
LABELS |= {"safety_identifier", "user"}
SAMPLED = {"temperature": 1, "seed": 3, "model": "tiny", "logit_bias": {"1": -100}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# A value of each field that asks for something, and fields that it needs beside it.
ASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "messages": ([{"role": "user", "content": "another"}], {}),
    **dict.fromkeys(("prompt", "input", "model"), ("another", {})),
    "instructions": ("be brief", {}),
    **dict.fromkeys(("stream", "echo", "logprobs", "background", "store"), (True, {})),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "temperature": (2, {}),
    "top_p": (0, {}),
    "top_k": (1, {}),
    "min_p": (1, {}),
    "repetition_penalty": (9, {}),
    "frequency_penalty": (2, {"temperature": 0}),
    "presence_penalty": (2, {"temperature": 0}),
    "logit_bias": ({"50": 100}, {}),
    "seed": (4, {}),
    "stop": ([chr(code) for code in range(32, 127)], {}),
    "stop_token_ids": (list(range(99)), {}),
    "min_tokens": (3, {"logit_bias": {"1": 100}, "temperature": 0}),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"), (2, {})),
    "top_logprobs": (2, {"logprobs": True}),
    "response_format": ({"type": "json_object"}, {}),
    "text": ({"format": {"type": "json_object"}}, {}),
    "reasoning_effort": ("low", {}),
    "reasoning": ({"effort": "low"}, {}),
    "tools": (TOOLS, {}),
    "tool_choice": ("none", {"tools": TOOLS}),
    "parallel_tool_calls": (False, {"tools": TOOLS}),
    "chat_template_kwargs": ({"mood": "calm"}, {}),
    "metadata": ({"a": "b"}, {}),
    "prompt_cache_options": ({"mode": "implicit"}, {}),
    "access_programs": ({"cyber": "standard"}, {}),
    "audio": ({"voice": "alloy", "format": "wav"}, {}),
    "background_options": ({"completion_window": "2h"}, {}),
    "context_management": ([{"type": "compaction"}], {}),
    "conversation": ("conv_1", {}),
    "function_call": ({"name": "f"}, {}),
    "functions": ([{"name": "f"}], {}),
    "image": ({"quality": "high"}, {}),
    "include": (["message.output_text.logprobs"], {}),
    "max_tool_calls": (1, {}),
    "modalities": (["text", "audio"], {}),
    "moderation": ({"model": "m"}, {}),
    "prediction": ({"type": "content", "content": "x"}, {}),
    "previous_response_id": ("resp_1", {}),
    "service_tier": ("priority", {}),
    "suffix": ("the end", {}),
    "truncation": ("auto", {}),
    "verbosity": ("low", {}),
    "web_search_options": ({"search_context_size": "low"}, {}),
}
OTHERWISE = {  # the same name asks for something else there
    (TEXT, "logprobs"): (1, {}),
    (RESPONSES, "prompt"): ({"id": "p"}, {}),
    (RESPONSES, "tools"): ([TOOL], {}),
    (RESPONSES, "tool_choice"): ("none", {"tools": [TOOL]}),
    (RESPONSES, "parallel_tool_calls"): (False, {"tools": [TOOL]}),
    (RESPONSES, "top_logprobs"): (2, {}),
}
BATCHES = pytest.param(True, marks=pytest.mark.skipif(not PAGED_IN_LAYERS, reason="batches need transformers 5.24"))


@pytest.fixture(scope="module", params=[False, BATCHES], ids=["in turn", "together"])
def server(request: pytest.FixtureRequest) -> Iterator[Asking]:
    """A server whose template reads tools and reasoning_effort."""
    with asking(letters(), together=request.param) as started:
        yield started


def fields(path: str) -> set[str]:
    """Fields of OpenAI's request, those of a streamed one included."""
    return set(typing.get_type_hints(KINDS[path][1]))


def read(path: str) -> set[str]:
    """Fields that the server reads."""
    types = typing.get_type_hints(KINDS[path][0])
    return {name for name, field in KINDS[path][0].model_fields.items() if types[name] is not type(None)}


def kept(path: str, name: str) -> str:
    """What the table says of a field."""
    if name in NEUTRAL:
        return "refused, except " + ", ".join(map(repr, NEUTRAL[name])) if NEUTRAL[name] else "refused"
    if name in LABELS and name in fields(path):
        return "changes no answer"
    if name in read(path):
        return "honoured"
    return "refused" if name in fields(path) else ""


def test_the_page_has_the_table_of_all_fields() -> None:
    known = {path: fields(path) | (read(path) - LABELS) for path in KINDS}
    rows = [
        [f"`{name}`", *(kept(path, name) if name in known[path] else "" for path in KINDS)]
        for name in sorted(set().union(*known.values()))
    ]
    page = (ROOT / "docs/guides/serving.md").read_text(encoding="utf-8").partition("## Fields of a request")[2]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert [shown[0], *shown[2:]] == [["field", "chat", "completions", "responses"], *rows]


@pytest.mark.parametrize("path", KINDS)
def test_each_field_of_openai_is_known_here(path: str) -> None:
    """A field that a new release of the package brings fails here, by its name."""
    assert fields(path) - read(path) - NEUTRAL.keys() - LABELS <= {"prompt", "top_logprobs"} & fields(RESPONSES)
    assert fields(path) | read(path) <= ASKS.keys() | LABELS


def same(answer: Any) -> Any:
    """An answer without what differs each time."""
    if isinstance(answer, dict):
        varies = ("id", "created", "created_at", "item_id", "completed_at")
        return {name: same(value) for name, value in answer.items() if name not in varies}
    return [same(value) for value in answer] if isinstance(answer, list) else answer


WALK = [(path, name) for path in KINDS for name in sorted(fields(path) | read(path))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "stream"),
    [
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in ((False, False), (False, True), (True, False))),
        pytest.param(True, True, marks=BATCHES.marks),
    ],
    indirect=["server"],
)
def test_no_field_is_passed_over(server: Asking, stream: bool) -> None:
    """A field that asks for something changes the answer, or is refused by its name."""
    passed, unnamed = [], []
    answers: dict[tuple[str, str], Any] = {}
    for path, name in WALK:
        value, beside = OTHERWISE.get((path, name), ASKS.get(name, ("x", {})))
        body = BASE[path] | {field: other for field, other in SAMPLED.items() if field in read(path)}
        body |= {"stream": stream} | beside
        required = name in BASE[path]  # a length, too: without one, answers are long
        less = body if required else {field: body[field] for field in body if field != name}
        key = (path, json.dumps(less, sort_keys=True))
        without = answers[key] = answers[key] if key in answers else server.raw(path, less)
        assert without[0] == 200, (path, name, without)
        status, answer = server.raw(path, body | {name: value})
        if status in (400, 404):
            unnamed += [] if name in answer["error"]["message"] else [(path, name, answer)]
        else:
            assert status == 200, (path, name, answer)
            changed = same(answer) != same(without[1])
            passed += [(path, name)] if changed == (name in LABELS) else []
    assert (passed, unnamed) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("server", [False, pytest.param(True, marks=pytest.mark.nightly)], indirect=True)
@pytest.mark.parametrize("path", KINDS)
def test_null_is_as_good_as_nothing(server: Asking, path: str) -> None:
    plain = server.raw(path, BASE[path])
    nulls = dict.fromkeys((fields(path) | read(path)) - BASE[path].keys())
    assert same(list(server.raw(path, nulls | BASE[path]))) == same(list(plain))
    for name in ("messages", "prompt", "input"):
        if name in BASE[path]:
            assert name in server.refused(path, **BASE[path] | {name: None})


@pytest.mark.slow
@pytest.mark.parametrize("server", [False, pytest.param(True, marks=pytest.mark.nightly)], indirect=True)
@pytest.mark.parametrize("path", KINDS)
def test_values_that_ask_for_nothing_are_taken(server: Asking, path: str) -> None:
    for name, values in NEUTRAL.items():
        for value in values if name in fields(path) else ():
            assert server.raw(path, BASE[path] | {name: value})[0] == 200, (path, name, value)
    assert "nobody" in server.refused(path, **BASE[path], nobody=1)


def test_images_are_refused_as_such(server: Asking) -> None:
    for path, part in ((CHAT, {"type": "image_url", "image_url": {"url": "x"}}), (RESPONSES, {"type": "input_image"})):
        content = [{"role": "user", "content": [part]}]
        body = {"messages": content} if path == CHAT else {"input": content}
        assert "this server reads only text" in server.refused(path, **body)


@pytest.mark.parametrize(("path", "name"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_each_part_of_a_text_is_a_line(server: Asking, path: str, name: str) -> None:
    contents: list[Any] = ["once\nupon", [{"type": "text", "text": word} for word in ("once", "upon")]]
    bodies = [BASE[path] | {name: [{"role": "user", "content": content}]} for content in contents]
    assert same(server.raw(path, bodies[0])[1]) == same(server.raw(path, bodies[1])[1])


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value] if levels % 2 else {"x": value}
    return value


ANYTHING: list[Any] = [None, True, False, 0, -1, 3, 1.5, 1e308, 10**40, -(10**40)]
ANYTHING += ["", "x", "\ud800", "a\udfff", "0" * 5000]
ANYTHING += [[], [[]], [None], [3], ["x"], ["\ud800"], [{}], {}, {"x": 1}, {"type": "x"}, {"\ud800": 1}, {"": None}]
ANYTHING += [{"type": "function"}, {"type": "json_schema"}, {"type": "json_object"}, {"5": 1}, {"5": float("nan")}]
ANYTHING += [float("nan"), float("-inf"), [float("inf")], deep(60), deep(300), deep(301), [[]] * 2000, "text", "none"]
NO_MESSAGES: list[Any] = [
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{}]}],
    *([{"role": "user", "content": content}] for content in (3, "\ud800", [{"type": "text"}], [{}])),
    *([{"role": role, "content": "x"}] for role in (3, "nobody")),
]
NO_JSON = [b"[]", b"3", b"", b"[" * 9999, b"\xff\x00{", b'{"prompt": "once", "max_to', b'{"prompt":"a","prompt":"b"}']
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" + "[]," * 40_000 + "1]"}}]}
WHOLE = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "top_k", "seed", "min_tokens")
WHOLE += ("logprobs", "top_logprobs", "temperature", "metadata", "prompt", "stop_token_ids", "logit_bias")
DIGITS = [
    (path, {name: shape(10**4299)}, name)
    for path, name in itertools.product(KINDS, WHOLE)
    for shape in ((lambda n: n), (lambda n: [n]), (lambda n: {"5": n}))
    if name in fields(path) | read(path)
]
# Requests that cost much before their first token or at each, and what their refusals say.
COSTLY: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": [[5]] * 2000, "n": 128}, "2,000 prompts and n = 128 are more than 2,048 answers"),
    (TEXT, {"prompt": ["a"] * 2049}, "2,049 prompts and n = 1"),
    (TEXT, {"prompt": [[]] * 40_000}, "more than 32,768 lists, objects and names"),
    (TEXT, {f"{n:x}": 1 for n in range(40_000)}, "more than 32,768"),
    (TEXT, {"prompt": [5] * (2**21 + 1)}, "2,097,152 values in lists"),
    (TEXT, {"metadata": {"a": [{}] * 40_000}}, "more than 32,768"),
    (CHAT, {"messages": [*MESSAGES, CALL]}, "arguments: more than 32,768"),
    (RESPONSES, {"input": [{"role": "user", "content": 3}] * 8000}, "input.0.content: "),
    (TEXT, {"stop": "a" * 1025}, "stop: String should have at most 1024"),
    (CHAT, {"stop": ["a", "a" * 1025]}, "stop.1: String should have at most 1024"),
    (TEXT, {"stop": ["a"] * 129}, "stop: List should have at most 128"),
    (TEXT, {"stop_token_ids": [5] * 1025}, "stop_token_ids: List should have at most 1024"),
    (TEXT, {"prompt": ["a", "ab" * 20_000]}, "more than 900 tokens, the window"),
    (CHAT, {"messages": [{"role": "user", "content": "ab" * 20_000}]}, "more than 900 tokens, the window"),
    (RESPONSES, {"input": "ab" * 4000}, "The prompt has 8001 tokens"),
    (TEXT, {"prompt": [-1]}, "prompt.0: Input should be greater than or equal to 0"),
    (TEXT, {"prompt": [3, -1]}, "prompt.1: Input should be greater"),
    (TEXT, {"prompt": [[3], [-1]]}, "prompt.1.0: Input should be greater"),
    (TEXT, {"prompt": [3, "a"]}, "prompt.1: Input should be a valid integer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("server", [False, pytest.param(True, marks=pytest.mark.nightly)], indirect=True)
def test_requests_without_bounds_are_refused(server: Asking) -> None:
    for path, more, sentence in COSTLY:
        assert sentence in server.refused(path, **BASE[path] | more), more.keys()
    sys.set_int_max_str_digits(5000)  # Python reads 4,300 digits, and writes no more
    written = [(path, json.dumps(BASE[path] | more), name) for path, more, name in DIGITS]
    sys.set_int_max_str_digits(4300)
    for path, body, name in written:
        answer = server.client.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, name in answer.text) == (400, True), (path, name, answer.text)
    for kind in ("text/plain", "multipart/form-data", "application/jsonp", ""):
        answer = server.client.post(TEXT, content=json.dumps(BASE[TEXT]), headers={"content-type": kind})
        assert (answer.status_code, "application/json" in answer.text) == (400, True)
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.client.post(TEXT, content=json.dumps(BASE[TEXT]), headers=kind).status_code == 200


REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
JSON = {"type": "json_object"}
BARE = {"type": "json_schema"}
NAMED = BARE | {"json_schema": {"name": "x", "schema": {}}}
LOW = {"reasoning_effort": "low"}
# Fields that cannot be honoured together, and how their refusal begins; None where they are served.
TOGETHER: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, REQUIRED | {"stop_token_ids": [50]}, "stop_token_ids: an answer of a forced form"),
    (RESPONSES, {"tools": [TOOL], "tool_choice": TOOL | {"parameters": None}, "stop": "a"}, "tool_choice."),
    (RESPONSES, {"tools": [TOOL], "tool_choice": "required", "stop_token_ids": [5]}, "stop_token_ids"),
    (CHAT, {"response_format": JSON, "stop_token_ids": [50], "min_tokens": 3}, "stop_token_ids"),
    (RESPONSES, {"text": {"format": JSON}, "stop_token_ids": [50]}, "stop_token_ids"),
    (CHAT, {"response_format": {"type": "text"}, "stop_token_ids": [50]}, None),
    (CHAT, {"response_format": JSON, "min_tokens": 3}, "min_tokens: an answer of a forced form"),
    (CHAT, REQUIRED | {"min_tokens": 3}, "min_tokens: an answer of a forced form"),
    (
        RESPONSES,
        {"text": {"format": NAMED["json_schema"] | BARE}, "min_tokens": 1},
        "min_tokens: an answer of a forced",
    ),
    (CHAT, {"response_format": {"type": "text"}, "min_tokens": 3}, None),
    (CHAT, {"max_completion_tokens": 5}, "max_tokens, max_completion_tokens: they mean the same"),
    (CHAT, {"max_completion_tokens": 7}, None),
    (CHAT, LOW | {"chat_template_kwargs": {"reasoning_effort": "high"}}, "chat_template_kwargs: reasoning_effort is"),
    (RESPONSES, {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": 1}}, "chat_template"),
    (CHAT, LOW | {"chat_template_kwargs": LOW}, None),
    (CHAT, LOW | {"chat_template_kwargs": {"mood": "calm"}}, None),
    (CHAT, {"response_format": BARE}, "response_format: the type 'json_schema' needs a schema. Give"),
    (RESPONSES, {"text": {"format": BARE | {"name": "x"}}}, "text.format: the type 'json_schema' needs"),
    (CHAT, {"response_format": NAMED | {"type": "json_object"}}, "response_format: a schema belongs to the type"),
    (RESPONSES, {"text": {"format": JSON | {"schema": {}}}}, "text.format: a schema belongs to the type 'json_schema'"),
    *((path, {"min_tokens": 8}, "min_tokens: the answer may have 7 tokens") for path in BASE),
    (TEXT, {"max_tokens": None, "min_tokens": 892}, "min_tokens: the answer may have"),
    *((path, {"min_tokens": 7}, None) for path in BASE),
    (TEXT, {"logit_bias": {"40": 100, "040": -100}}, "logit_bias.040"),
    (TEXT, {"logit_bias": {"0": -100}}, None),
    (CHAT, {"tools": TOOLS * 2}, "tools: two of them are named 'f'"),
    (RESPONSES, {"tools": [TOOL, TOOLS[0]]}, "tools: two of them"),
]


@pytest.mark.slow
@pytest.mark.parametrize("server", [False], indirect=True)
def test_fields_that_cannot_be_honoured_together_are_refused(server: Asking) -> None:
    for path, more, begins in TOGETHER:
        if begins is None:
            assert server.raw(path, BASE[path] | more)[0] == 200, more
        else:
            assert server.refused(path, **BASE[path] | more).startswith(begins), more


@pytest.mark.parametrize(("role", "other"), [("developer", "system"), ("system", "user"), ("user", None)])
def test_a_message_that_the_template_passes_over_is_refused(role: str, other: str | None) -> None:
    """Templates such as Qwen's have a branch for each role that they know, and none for others."""
    chats = Chats.__new__(Chats)
    chats.tokenizer, chats.served = make_letters(), SimpleNamespace(window=None)
    known = ["user", "assistant", other]
    chats.tokenizer.chat_template = (
        f"{{% for m in messages if m.role in {known} %}}{{{{ m.content | trim }}}}{{% endfor %}}"
    )
    messages = [{"role": role, "content": " a\n bc "}, {"role": "user", "content": "def"}]
    request = Conversation(messages=messages)
    if other is None:
        assert len(chats.prompt(request, messages)) == len("a\n bcdef")
        return
    with pytest.raises(HTTPException, match=f"passes over messages of '{role}'. Send '{other}'"):
        chats.prompt(request, messages)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("server", [False, pytest.param(True, marks=pytest.mark.nightly)], indirect=True)
def test_no_request_breaks_the_server(server: Asking, part: int) -> None:
    """Wrong types in every field, one and several at a time: an answer, or a refusal in OpenAI's form."""
    draw = random.Random(0)
    tries: list[tuple[str, dict[str, Any]]] = []
    for path in KINDS:
        names = sorted(fields(path) | read(path) | {"nobody"})
        tries += [(path, {name: draw.choice(ANYTHING)}) for name in names]
        tries += [(path, {name: draw.choice(ANYTHING) for name in draw.sample(names, 3)}) for _ in range(20)]
    for path, name in itertools.product(KINDS, ("messages", "input", "prompt", "tools", "stop", "logit_bias")):
        values = ANYTHING + NO_MESSAGES * (name in ("messages", "input"))
        tries += [(path, {name: value}) for value in values if name in fields(path)]
    assert len(tries) > 400
    for path, fault in tries[part::3]:
        status, answer = server.raw(path, BASE[path] | fault)
        assert status in (200, 400), (path, fault, answer)
        assert status == 200 or len(answer["error"]["message"]) > 10, (path, fault)
    for path, body in itertools.product(KINDS, NO_JSON):
        answered = server.client.post(path, content=body, headers={"content-type": "application/json"})
        assert (answered.status_code, len(answered.json()["error"]["message"]) > 10) == (400, True), (path, body)
