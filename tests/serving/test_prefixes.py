"""Prompts that begin like one that was read: the same answers as without, and only what is new is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient
from transformers import StaticCache

import ctxext
from ctxext.caches.prefix import new_cache, why_no_prefix
from ctxext.core.subject import Subject
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.serving.load import Served
from ctxext.serving.server import application
from tests._models import byte_model
from tests.serving import _asking
from tests.serving._asking import CHAT, RESPONSES, TEXT, Asking, letters, tiny
from tests.serving._running import answering

WINDOW, TRAINED = 400, 100
METHODS: dict[str, dict[str, Any]] = {name: {} for name in ("none", "yarn", "dual_chunk")}
METHODS |= {"self_extend": {"window": 40}, "streaming": {"window": 60}}
METHODS |= {"retrieval_heads": {"heads": [0, 3], "window": 60}}


@contextmanager
def served(
    method: str, *, keep: int | None, together: bool = False, compiles: bool = False, window: int = WINDOW
) -> Iterator[Asking]:
    """Serve a tiny model, extended by a method."""
    tokenizer = letters()
    model = tiny(tokenizer)
    if method != "none":
        ctxext.patch(model, method, factor=4, trained_length=TRAINED, **METHODS.get(method, {}))
    kept: dict[str, Any] = {"continuous_batching": True, "cached_tokens": 4096} if together else {"keep_tokens": keep}
    app: Any = application(Served("tiny", Checkpoint("tiny", model, tokenizer), window, {}), compiles=compiles, **kept)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield Asking(client, model, tokenizer)


def conversations(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Requests of which many begin like earlier ones: continued, cut and changed, of several owners."""
    chance, texts = random.Random(seed), [[4, 5, 6]]
    for _ in range(count):
        text = chance.choice(texts)
        text = text[: chance.choice([len(text), chance.randint(1, len(text))])]
        text = [*text, *(chance.randrange(4, 90) for _ in range(chance.choice([1, 20, 150])))][: WINDOW - 20]
        texts.append(text)
        owner = chance.choice([{}, {}, {"cache_salt": "a"}, {"prompt_cache_key": "b"}])
        drawn = chance.choice([{"temperature": 0}, {"temperature": 0.8, "seed": chance.randrange(99), "n": 2}])
        yield {"prompt": text, "max_tokens": chance.randint(1, 16), **owner, **drawn}


def answers(asked: Asking, requests: list[dict[str, Any]]) -> tuple[list[list[str]], list[int]]:
    """Texts of all answers, and the tokens that were not read for each request."""
    found = [asked.raw(TEXT, request) for request in requests]
    assert [status for status, _ in found] == [200] * len(found), found
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in found]
    return [[choice["text"] for choice in answer["choices"]] for _, answer in found], cached


def longest(requests: list[dict[str, Any]], at: int) -> int:
    """Most tokens of a request that an earlier one of the same owner begins with."""

    def owner(request: dict[str, Any]) -> tuple[Any, Any]:
        return request.get("cache_salt"), request.get("prompt_cache_key")

    mine, common = requests[at], 0
    for other in requests[:at]:
        if owner(other) == owner(mine):
            same = [a == b for a, b in zip(other["prompt"], mine["prompt"], strict=False)]
            common = max(common, same.index(False) if False in same else len(same))
    return common


@pytest.mark.parametrize("count", [24, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", METHODS)
def test_answers_do_not_depend_on_what_was_kept(method: str, count: int) -> None:
    requests = list(conversations(1, count))
    with served(method, keep=0) as anew, served(method, keep=None) as kept:
        (expected, read), (found, cached) = answers(anew, requests), answers(kept, requests)
        facts = kept.client.get("/health").json()["kept"]
    assert found == expected
    assert read == [0] * len(requests)
    assert sum(count > 0 for count in cached) > 5
    # An answer may also go on as the next prompt does.
    assert all(count <= longest(requests, at) + 16 for at, count in enumerate(cached))
    assert 0 < facts["tokens"] <= 2 * WINDOW
    assert facts["bytes"] > 0
    assert facts["why_none"] is None


def test_a_text_that_others_went_on_from_falls_after_those_that_nobody_used() -> None:
    first, second, third = ([token, *range(4, 90), *range(4, 90)] for token in (5, 6, 7))
    with served("none", keep=450) as kept:
        texts = (first, second, [*first[:40], 91], third, [*first[:40], 92], [*second[:40], 93])
        _, cached = answers(kept, [{"prompt": text, "max_tokens": 1, "temperature": 0} for text in texts])
    assert cached == [0, 0, 40, 0, 40, 0]


@_asking.takes_graphs
@pytest.mark.slow
@pytest.mark.usefixtures("_without_checker")
@pytest.mark.parametrize("method", ["none", "self_extend"])
def test_steps_as_graphs_give_the_same_answers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one cache, which keeps what was read last, also where nothing may be kept."""
    monkeypatch.setattr("ctxext.serving.answers.as_graphs", _asking.in_eager_graphs)
    requests = list(conversations(3, 16))
    with served(method, keep=0) as anew, served(method, keep=None, compiles=True) as kept:
        (expected, _), (found, cached) = answers(anew, requests), answers(kept, requests)
    assert found == expected
    assert sum(count > 0 for count in cached) > 2
    made = list[Any]()
    monkeypatch.setattr("ctxext.serving.prefixes.new_cache", lambda *of: made.append(new_cache(*of)) or made[-1])
    with served(method, keep=0, compiles=True) as none:
        assert answers(none, requests[:6]) == (expected[:6], [0] * 6)
    assert [type(cache) for cache in made] == [StaticCache]  # one for all, which graphs run over


def test_a_step_more_than_there_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(conversations(1, 8))
    with served("self_extend", keep=0) as anew, served("self_extend", keep=None) as kept:
        expected = answers(anew, requests)[0]
        _asking.take_a_step_more(monkeypatch)
        assert answers(kept, requests)[0] == expected


@pytest.mark.parametrize("method", ["none", "self_extend"])
def test_ten_turns_about_a_long_text_read_what_is_new(method: str) -> None:
    """A chat through OpenAI's client: 8,000 letters, and then a question and an answer at a time."""
    tokenizer, read = letters(), list[int]()
    model = tiny(tokenizer)
    if method != "none":
        ctxext.patch(model, method, factor=4, trained_length=2250)
    model.register_forward_pre_hook(
        lambda _, given, named: read.append((named["input_ids"] if named else given[0]).shape[1]), with_kwargs=True
    )
    messages: list[Any] = [{"role": "user", "content": "a ship came in at dawn, " * 333 + "who was on board?"}]
    with answering(Served("tiny", Checkpoint("tiny", model, tokenizer), 9000, {})) as server:
        for turn in range(10):
            answer = server.client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
            usage = answer.usage
            new, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0
            assert sum(read) == new - cached + max(0, usage.completion_tokens - 1)
            assert new - cached < 60 if turn else cached == 0
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": f"and who came in as number {turn}?"}]
            read.clear()


@pytest.mark.parametrize("method", ["none", "self_extend"])
def test_continuous_batches_share_blocks_of_requests_without_an_owner(method: str) -> None:
    text = [4 + number % 80 for number in range(330)]
    requests = [{"prompt": text, "max_tokens": 4, "temperature": 0, **owner} for owner in ({}, {}, {"cache_salt": "a"})]
    with served(method, keep=None) as one, served(method, keep=None, together=True) as together:
        (expected, _), (found, cached) = answers(one, requests), answers(together, requests)
    assert found == expected
    assert cached[0] == cached[2] == 0 < cached[1] < len(text)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_every_endpoint_tells_the_tokens_that_were_not_read(path: str, *, stream: bool) -> None:
    text = "a text of some thirty letters, at least"
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    body = {TEXT: {"prompt": text}, RESPONSES: {"input": text}}.get(path, chat)
    body |= {"stream": stream, "max_output_tokens" if path == RESPONSES else "max_tokens": 2}
    body |= {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
    with served("none", keep=None) as asked:
        counts = []
        for _ in range(2):
            status, answer = asked.raw(path, body)
            assert status == 200, answer
            if stream:
                answer = answer[-1]["response"] if path == RESPONSES else answer[-2]
            usage = answer["usage"]
            details = usage["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]
            counts.append((details["cached_tokens"], usage["input_tokens" if path == RESPONSES else "prompt_tokens"]))
    (first, tokens), (second, _) = counts
    assert (first, second) == (0, tokens - 1)


def test_positions_that_follow_the_length_keep_nothing() -> None:
    with served("dynamic_ntk", keep=None) as asked:
        assert answers(asked, [{"prompt": [5] * 50, "max_tokens": 2}] * 2)[1] == [0, 0]
        assert "follow its length" in asked.client.get("/health").json()["kept"]["why_none"]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_stock_model_whose_positions_follow_the_length_keeps_nothing(kind: str) -> None:
    sets = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64} | sets
    config = byte_model().config
    config.rope_parameters = rope
    assert why_no_prefix(Subject.of(type(byte_model())(config))) == "the positions of a text follow its length"


def test_a_request_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had read may be read in part."""
    requests = [{"prompt": [4 + n % 70 for n in range(200)], "max_tokens": 4, "temperature": 0}] * 2
    with served("self_extend", keep=None) as asked:
        layer = asked.model.model.layers[1]
        handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
        assert asked.raw(TEXT, requests[0])[0] == 500
        handle.remove()
        found, cached = answers(asked, requests)
    with served("self_extend", keep=0) as anew:
        assert found == answers(anew, requests)[0]
    assert cached == [0, 199]
