"""Conversations: read from tables, written by the chat template, with the tokens that an assistant is to write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ctxext.errors import InvalidParameterError
from ctxext.texts.corpus import corpus_of, tokenise
from ctxext.texts.documents import Document, read_documents
from tests._tokenizer import make_tokenizer

MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[a]{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}[u]{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Writes what an assistant thought only while its message is the last, as templates of reasoning models do.
FORGETTING = PLAIN.replace("[a]{{", "[a]{% if loop.last %}hm, {% endif %}{{")
CHAT = [("user", "hi"), ("assistant", "hello"), ("user", "go on"), ("assistant", "so")]


def chat(turns: Sequence[tuple[str, str]] = CHAT) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(bos=True)
    tokenizer.chat_template = template
    return tokenizer


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("chats")
    write(root / "chats.jsonl", {"id": "one", "messages": chat()}, {"id": "two", "messages": chat(CHAT[:2])})
    datasets.Dataset.from_json(str(root / "chats.jsonl")).to_parquet(str(root / "chats.parquet"))
    (root / "chats.json").write_text(json.dumps([{"id": "one", "messages": chat()}, {"messages": chat(CHAT[:2])}]))
    (root / "single.json").write_text(json.dumps({"messages": chat()}))
    write(root / "other.jsonl", {"prompt": "x", "id": "1", "talk": chat()})
    return root


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "chats.json"])
def test_every_table_gives_the_same_conversations(folder: Path, name: str) -> None:
    first, second = read_documents([folder / name])
    assert first == Document("one", "hi\n\nhello\n\ngo on\n\nso", tuple(chat()))
    assert (second.text, second.messages) == ("hi\n\nhello", tuple(chat(CHAT[:2])))


def test_a_file_of_one_conversation_and_a_column_of_another_name(folder: Path) -> None:
    (single,) = read_documents([folder / "single.json"])
    (named,) = read_documents([folder / "other.jsonl"], column="talk")
    assert list(single.messages) == list(named.messages) == chat()


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
    with pytest.raises(InvalidParameterError, match=rf"Column 'messages' of 'chats' holds in row 0 .*{message}"):
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


@pytest.mark.parametrize(
    ("template", "bos", "text", "prefix"),
    [
        (PLAIN, "auto", "<s>[u]hi;[a]hello;", "<s> (id 256)"),
        (PLAIN, "none", "[u]hi;[a]hello;", "none"),
        (PLAIN.removeprefix("{{ bos_token }}"), "auto", "[u]hi;[a]hello;", "none"),
        (PLAIN.removeprefix("{{ bos_token }}"), "bos", "<s>[u]hi;[a]hello;", "<s> (id 256)"),
    ],
)
def test_the_template_decides_what_stands_in_front(template: str, bos: str, text: str, prefix: str) -> None:
    tokenizer = chat_tokenizer(template)
    found = corpus_of([Document("one", "", tuple(chat(CHAT[:2])))], tokenizer, tokens=2, whole=True, bos=bos)
    assert tokenizer.decode(found.documents[0].input_ids[0]) == text
    assert found.prefix == prefix


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
