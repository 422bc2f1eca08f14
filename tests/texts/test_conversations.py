"""Conversations: read from tables, written by the chat template, with the tokens that an assistant is to write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctxext.errors import InvalidParameterError
from ctxext.texts.conversations import chat_tokens
from ctxext.texts.corpus import corpus_of, tokenise
from ctxext.texts.documents import Document, read_documents
from tests.texts._conversations import MARKED, PARTS, PLAIN, chat_tokenizer, write

# Writes what an assistant thought only while its message is the last, as templates of reasoning models do.
FORGETTING = PLAIN.replace("[a]{{", "[a]{% if loop.last %}hm, {% endif %}{{")
CHAT = [("user", "hi"), ("assistant", "hello"), ("user", "go on"), ("assistant", "so")]


def chat(turns: Sequence[tuple[str, str]] = CHAT) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("chats")
    write(root / "chats.jsonl", {"id": "one", "messages": chat()}, {"id": "two", "messages": chat(CHAT[:2])})
    datasets.Dataset.from_json(str(root / "chats.jsonl")).to_parquet(str(root / "chats.parquet"))
    (root / "chats.json").write_text(json.dumps([{"id": "one", "messages": chat()}, {"messages": chat(CHAT[:2])}]))
    (root / "single.json").write_text(json.dumps({"messages": chat()}))
    write(root / "other.jsonl", {"prompt": "x", "id": "1", "talk": chat()})
    write(root / "texts.jsonl", {"messages": json.dumps(chat())})
    return root


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "chats.json"])
def test_every_table_gives_the_same_conversations(folder: Path, name: str) -> None:
    first, second = read_documents([folder / name])
    assert first == Document("one", "hi\n\nhello\n\ngo on\n\nso", tuple(chat()))
    assert (second.text, second.messages) == ("hi\n\nhello", tuple(chat(CHAT[:2])))


@pytest.mark.parametrize(("name", "column"), [("single.json", None), ("other.jsonl", "talk"), ("texts.jsonl", None)])
def test_a_file_of_one_conversation_also_in_a_json_text_and_in_another_column(
    folder: Path, name: str, column: str | None
) -> None:
    (found,) = read_documents([folder / name], column=column)
    assert list(found.messages) == chat()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"from": "human", "value": "hi"}]}, r"something else than role and content: from, value"),
        ({"messages": ["hi", "hello"]}, r"something else than role and content: str"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "content is list, not text"),
        ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
        ({"messages": chat(), "tools": [{"name": "search"}]}, "with tools, which are not read"),
    ],
)
def test_what_is_no_conversation(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=rf"Column 'messages' of 'chats.jsonl' holds in row 0 .*{message}"):
        list(read_documents([write(tmp_path / "chats.jsonl", row)]))


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_the_template_says_which_tokens_are_answers(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    read = tokenise(Document("one", "", tuple(chat())), tokenizer)
    assert tokenizer.decode(read.input_ids[0]) == "<s>[u]hi;[a]hello;[u]go on;[a]so;"
    assert read.answers is not None
    assert tokenizer.decode(read.input_ids[read.answers]) == "hello;so;"
    assert (read.prefix, read.answered) == (1, 9)
    tail = read.take(7, skip=read.tokens - 7)
    assert tail.answers is not None
    assert tokenizer.decode(tail.input_ids[0]) == "<s>[a]so;"
    assert tokenizer.decode(tail.input_ids[tail.answers]) == "so;"


BARE = PLAIN.removeprefix("{{ bos_token }}")


@pytest.mark.parametrize(
    ("template", "bos", "front"),
    [(PLAIN, "auto", "<s>"), (PLAIN, "none", ""), (BARE, "auto", ""), (BARE, "bos", "<s>")],
)
def test_the_template_decides_what_stands_in_front(template: str, bos: str, front: str) -> None:
    tokenizer = chat_tokenizer(template)
    found = corpus_of([Document("one", "", tuple(chat(CHAT[:2])))], tokenizer, tokens=2, whole=True, bos=bos)
    assert tokenizer.decode(found.documents[0].input_ids[0]) == f"{front}[u]hi;[a]hello;"
    assert found.prefix == ("<s> (id 256)" if front else "none")


def test_a_first_message_answers_nothing() -> None:
    read = tokenise(Document("one", "", tuple(chat([("assistant", "welcome"), *CHAT[:2]]))), chat_tokenizer(PLAIN))
    assert read.answered == len("hello;")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"has no chat template, which the conversation 'one' needs\. Take a tokenizer"),
        (FORGETTING, r"writes the first 2 messages of the conversation 'one' differently where others follow"),
        ("{{ raise_exception('no system, please') }}", r"refuses the conversation 'one': no system, please\."),
        ("{{ messages[0].a.b }}", r"refuses the conversation 'one': .*has no attribute 'a'"),
        ("{{ messages[0].content + 1 }}", r"refuses the conversation 'one': can only concatenate str"),
    ],
)
def test_templates_that_cannot_say_it(template: str | None, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        tokenise(Document("one", "", tuple(chat())), chat_tokenizer(template))


def test_a_corpus_keeps_shorter_conversations_only_with_an_answer() -> None:
    long = ("user", "x" * 40)
    documents = [
        Document("short", "", tuple(chat())),
        Document("late", "", tuple(chat([long, ("assistant", "y")]))),
        Document("silent", "", tuple(chat([("user", "hi")]))),
        Document("text", "x" * 10),
    ]
    kept = corpus_of(documents, chat_tokenizer(PLAIN), tokens=40, shorter=True)
    assert [(one.name, one.tokens) for one in kept.documents] == [("short", 31)]
    with pytest.raises(InvalidParameterError, match="2 conversations have no answer there"):
        corpus_of(documents[1:], chat_tokenizer(PLAIN), tokens=40, shorter=True)
    with pytest.raises(InvalidParameterError, match="0 of 1 documents have the 40 tokens"):
        corpus_of(documents[:1], chat_tokenizer(PLAIN), tokens=40)


def learned(messages: Sequence[Mapping[str, Any]], template: str) -> str:
    """Return what is learned of a conversation, decoded."""
    tokenizer = chat_tokenizer(template)
    read = tokenise(Document("one", "", tuple(messages)), tokenizer)
    assert read.answers is not None
    return str(tokenizer.decode(read.input_ids[read.answers]))


@pytest.mark.parametrize("template", [MARKED, PLAIN])
@pytest.mark.parametrize(
    ("first", "second", "answers"),
    [
        ({"weight": 0}, {"weight": 1}, "so;"),  # OpenAI, Fireworks, Mistral
        ({"weight": 0.0}, {}, "so;"),
        ({"weight": 0}, {"weight": 0}, ""),
        ({"train": False}, {"train": True}, "so;"),  # axolotl
        ({"training": True}, {"training": False}, "hello;"),
        ({"trainable": False}, {}, "so;"),  # Fireworks
        ({"loss": False}, {"loss": None}, "so;"),  # ms-swift; nulls are what a table adds
        ({"weight": 1, "train": False}, {"weight": None}, "so;"),
        ({"name": "bot", "id": 7, "graded_by": "x", "mask": None}, {"metadata": {"lesson": 0}}, "hello;so;"),
    ],
)
def test_messages_that_are_not_to_be_learned(
    template: str, first: dict[str, Any], second: dict[str, Any], answers: str
) -> None:
    messages: list[dict[str, Any]] = [*chat()]
    messages[1] |= first
    messages[3] |= second
    assert learned(messages, template) == answers


UNCLEAR: list[dict[str, Any]] = [
    *({"weight": 0.5}, {"weight": -1}, {"train": "no"}, {"loss_mask": [0, 1]}, {"masked": 1}, {"ignore": True}),
    {"mask": True},  # true leaves it out in one program and counts it in another
    {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
    *({"should_train": False}, {"computeLoss": False}, {"metadata": {"trainable": False}}),
]


@pytest.mark.parametrize("field", UNCLEAR, ids=str)
def test_what_else_says_something_about_the_loss_is_refused_by_name(field: dict[str, Any]) -> None:
    messages: list[dict[str, Any]] = [*chat()]
    messages[1] |= field
    ((name, value),) = field.get("metadata", field).items()
    said = re.escape(f"Message 2 of the conversation 'one' has {name}={value!r}"[:70])  # long values are cut
    with pytest.raises(InvalidParameterError, match=said):
        learned(messages, PLAIN)


def test_what_a_row_says_about_its_loss_is_refused_by_name(tmp_path: Path) -> None:
    file = write(
        tmp_path / "chats.jsonl", {"messages": chat(), "weight": 1, "grade": 0}, {"messages": chat(), "weight": 0.5}
    )
    documents = read_documents([file])
    assert next(documents).messages == tuple(chat())
    with pytest.raises(InvalidParameterError, match=r"row 1 a conversation with weight=0\.5"):
        next(documents)


def test_a_mark_that_cannot_be_told_apart_from_others_is_refused() -> None:
    messages: list[dict[str, Any]] = [*chat()]
    messages[1]["weight"] = 0
    with pytest.raises(InvalidParameterError, match="differently where others follow"):
        learned(messages, MARKED.replace("[a]{%", "[a]{% if loop.last %}hm, {% endif %}{%"))


def test_conversations_without_a_message_to_learn_are_left_out_and_counted() -> None:
    silent = [*chat(CHAT[:1]), {"role": "assistant", "content": "no", "weight": 0}]
    with pytest.raises(InvalidParameterError, match="1 conversations have no answer there"):
        corpus_of([Document("one", "", tuple(silent))], chat_tokenizer(PLAIN), tokens=40, shorter=True)


# How Llama 3.1's and Qwen2.5's templates write a call; the one asks whether the key is there at all.
CALLS = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if 'tool_calls' in m %}{% for t in m.tool_calls %}{% if t.function is "
    'defined %}{% set t = t.function %}{% endif %}{{ \'{"name": "\' + t.name + \'", "arguments": \' }}'
    "{{ t.arguments | tojson }}{{ '}' }}{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


NO_CALLS = [3, "f()", {"function": "f"}]


def called(name: str, arguments: Any, *, bare: bool = False) -> list[dict[str, Any]]:
    """Return a conversation with one call of a tool."""
    call = {"name": name, "arguments": arguments}
    calls = [call if bare else {"id": "1", "type": "function", "function": call}]
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]


@pytest.mark.parametrize("name", ["calls.jsonl", "calls.json", "calls.parquet"])
@pytest.mark.parametrize(
    ("conversations", "calls"),
    [
        ([called("f", {"city": "Bonn"})], ['{"city": "Bonn"}']),
        ([called("f", '{"city": "Bonn"}')], ['{"city": "Bonn"}']),
        ([called("f", '{"city":"Bonn","day":null}', bare=True)], ['{"city": "Bonn", "day": null}']),
        ([called("f", "")], ["{}"]),
        ([called("f", {"city": "Bonn"}), called("g", {"at": {"x": 1}})], ['{"city": "Bonn"}', '{"at": {"x": 1}}']),
        ([called("f", {"day": "2026-01-02", "at": [{"a": 1}]})], ['{"day": "2026-01-02", "at": [{"a": 1}]}']),
    ],
)
def test_tool_calls_as_tables_store_them(
    conversations: list[list[dict[str, Any]]], calls: list[str], name: str, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": messages} for messages in conversations]
    if name.endswith(".jsonl"):
        write(tmp_path / name, *rows)
    elif name.endswith(".json"):
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / name))
    found = [learned(document.messages, CALLS) for document in read_documents([tmp_path / name])]
    # The first is of f, the second of g.
    assert found == [
        f'{{"name": "{tool}", "arguments": {call}}};four;' for tool, call in zip("fg", calls, strict=False)
    ]


@pytest.mark.parametrize(
    ("said", "read"), [("a\r\nb\rc", "a\nb\nc"), ("\ufeffhi", "hi"), ("half of \ud83d", "half of \ufffd")]
)
def test_texts_of_messages_are_read_as_other_texts(said: str, read: str, tmp_path: Path) -> None:
    (found,) = read_documents(
        [write(tmp_path / "chats.jsonl", {"messages": chat([("user", said), ("assistant", said)])})]
    )
    assert found.text == f"{read}\n\n{read}"
    assert learned(found.messages, PLAIN) == f"{read};"
    for arguments in ({"city": [said]}, json.dumps({"city": [said]})):
        answer, _, _ = learned(called("f", arguments), CALLS).partition(";")
        assert json.loads(answer)["arguments"] == {"city": [read]}


def test_messages_and_calls_that_are_json_texts() -> None:
    messages = called("f", {"city": "Bonn"})
    messages[1]["tool_calls"] = json.dumps(messages[1]["tool_calls"])
    assert learned(messages, CALLS) == '{"name": "f", "arguments": {"city": "Bonn"}};four;'
    old = [*chat(CHAT[:1]), {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]
    template = PLAIN.replace(
        "{{ m.content }}", "{{ m.function_call.arguments | tojson if m.function_call else m.content }}"
    )
    assert learned(old, template) == "{};"


@pytest.mark.parametrize("call", [*({"name": "f", "arguments": given} for given in ("{not json", "[1]", 3)), *NO_CALLS])
def test_calls_and_arguments_that_are_no_objects_are_refused(call: Any) -> None:
    messages = called("f", {})
    messages[1]["tool_calls"] = [call]
    said = "has a call of a tool that is no JSON object" if call in NO_CALLS else "calls 'f' with arguments="
    with pytest.raises(InvalidParameterError, match=f"Message 2 of the conversation 'one' {said}"):
        learned(messages, CALLS)


def test_a_null_that_a_file_states_stays_and_an_empty_list_of_calls_is_none(tmp_path: Path) -> None:
    messages = [message | {"tool_calls": message.get("tool_calls", [])} for message in called("f", {"day": None})]
    (found,) = read_documents([write(tmp_path / "chats.jsonl", {"messages": messages})])
    assert learned(found.messages, CALLS) == '{"name": "f", "arguments": {"day": null}};four;'


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_a_template_that_goes_over_the_parts_of_a_content_is_given_parts(template: str) -> None:
    conversation = Document("one", "", tuple(chat()))
    expected = chat_tokens(conversation, chat_tokenizer(template))
    assert any(expected[1])
    assert chat_tokens(conversation, chat_tokenizer(template.replace("m.content", PARTS))) == expected
