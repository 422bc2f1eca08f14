"""What fields of a request do to its answer, by OpenAI's definition, in turn and in continuous batches."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import peft
import pytest
import torch
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from transformers import LlamaForCausalLM

from ctxext.caches.records import PAGED_IN_LAYERS
from ctxext.errors import IncompatibleError
from ctxext.serving.answers import AnswerText, TokenText
from ctxext.serving.server import require_batches
from tests.serving import _asking
from tests.serving._asking import CHAT, RESPONSES, TEXT, Asking, asking, letters, say, tiny
from tests.texts._conversations import PARTS

PROMPT = "once upon a time"
HI: Any = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.slow
BATCHES = pytest.param(True, marks=pytest.mark.skipif(not PAGED_IN_LAYERS, reason="batches need transformers 5.24"))
SEVEN: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1, "seed": 7, "logit_bias": {"1": -100}}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]


@pytest.fixture(scope="module", params=[False, BATCHES], ids=["in turn", "together"])
def server(request: pytest.FixtureRequest) -> Iterator[Asking]:
    """A server of a model that writes printable letters."""
    with asking(letters(), together=request.param) as started:
        yield started


@pytest.fixture(scope="module")
def of_bytes() -> Iterator[Asking]:
    """A server of a model that writes bytes."""
    with asking(_asking.bytewise(), together=False) as started:
        yield started


def brute(server: Asking, prompt: str, count: int, added: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens in float64 with what ``added`` gives to the logits, each from a pass over the whole text."""
    model = server.model.double()
    ids = server.tokenizer(prompt).input_ids
    tokens: list[int] = []
    rows = []
    for _ in range(count):
        with torch.no_grad():
            rows.append(model(torch.tensor([ids + tokens])).logits[0, -1])
        tokens.append(int((rows[-1] + added(tokens)).argmax()))
    return tokens, rows


@pytest.mark.parametrize("together", [False, BATCHES])
@pytest.mark.parametrize("says", _asking.CHECKPOINT_SAYS, ids=lambda says: next(iter(says)))
def test_what_the_checkpoint_says_of_generating_changes_no_answer(says: dict[str, Any], together: bool) -> None:
    with asking(letters(), together=together, says=says) as server:
        [choice] = server.choices(**SEVEN)
        expected, _ = brute(server, PROMPT, 8, lambda _: 0.0)
        assert server.text(prompt=PROMPT, max_tokens=8, temperature=0) == server.tokenizer.decode(expected)
    with asking(letters(), together=together) as plain:
        assert [choice] == plain.choices(**SEVEN)


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_the_stop_sequence(server: Asking, stream: bool) -> None:
    whole = server.text(**SEVEN | {"max_tokens": 24})
    assert len(set(whole)) > 8
    for width, start in ((1, 0), (1, 11), (2, 3), (5, 8)):
        stop = whole[start : start + width]
        expected = whole[: whole.find(stop)]
        for asked in (stop, [stop, whole[start + 1 : start + 30] + "never"]):
            (choice,) = server.choices(**SEVEN | {"max_tokens": 24, "stop": asked, "stream": stream})
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    (choice,) = server.choices(**SEVEN | {"max_tokens": 24, "stop": ["nowhere", whole[-3:] + "x"], "stream": stream})
    assert (choice["text"], choice["finish_reason"]) == (whole, "length")


def test_what_may_begin_a_stop_sequence_is_held_back(of_bytes: Asking) -> None:
    reader, chance = TokenText(of_bytes.tokenizer, 300, frozenset()), random.Random(0)
    for _ in range(300):
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 5))) for _ in range(chance.randint(0, 3))]
        written, given, text = AnswerText(reader, stops, {}), "", "".join(chance.choices("abc", k=9))
        for end in range(1, 10):
            written._grow(text[end - 1])
            given += written.release(written.cut)
            whole = next((text[:n] for n in range(end) if any(text[:end].startswith(s, n) for s in stops)), text[:end])
            tails = [n for n in range(end) for s in stops if len(s) > end - n and s.startswith(whole[n:])]
            assert given == (whole if written.cut else whole[: min(tails, default=end)])
            if whole != text[:end]:
                break


def test_a_stop_sequence_is_not_found_in_the_name_of_a_hidden_token(server: Asking) -> None:
    user = server.tokenizer.convert_tokens_to_ids("<|user|>")
    biased = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logit_bias": {str(user): 100}}
    for stop in ("user", "<|", "|>"):
        (choice,) = server.choices(**biased, stop=stop)
        assert (choice["text"], choice["finish_reason"]) == ("", "length")


@pytest.mark.nightly
def test_a_seed_decides_the_answer_whatever_runs_beside_it(server: Asking) -> None:
    alone = [server.text(**SEVEN | {"seed": seed}) for seed in (7, 8, -7, 2**63 - 1)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(6) as pool:
        asked = [SEVEN | {"seed": seed} for seed in (7, 8, -7, 2**63 - 1)]
        noise = [{"prompt": "x" * 40, "max_tokens": 20, "temperature": 2}] * 4
        answers = list(pool.map(lambda body: server.text(**body), [*noise, *asked, *noise]))
    assert answers[4:8] == alone
    assert len(set(answers[:4])) == 4  # without one, chance decides


@pytest.mark.parametrize(
    "penalties", [{"frequency_penalty": 1.5}, {"presence_penalty": 2}, {"frequency_penalty": -2, "presence_penalty": 1}]
)
def test_penalties_are_those_of_openais_formula(server: Asking, penalties: dict[str, float]) -> None:
    """logits[token] - count * frequency - (count > 0) * presence, over the tokens of the answer."""

    def added(tokens: list[int]) -> torch.Tensor:
        taken = torch.zeros(len(server.tokenizer), dtype=torch.float64)
        for token, count in Counter(tokens).items():
            taken[token] -= count * penalties.get("frequency_penalty", 0) + penalties.get("presence_penalty", 0)
        return taken

    tokens, _ = brute(server, PROMPT, 24, added)
    plain, _ = brute(server, PROMPT, 24, lambda tokens: 0)
    assert tokens != plain
    answer = server.text(prompt=PROMPT, max_tokens=24, temperature=0, **penalties)
    assert answer == server.tokenizer.decode(tokens, skip_special_tokens=True)


def test_logit_bias_is_added_to_the_logits(server: Asking) -> None:
    greedy: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    plain = server.text(**greedy)
    for bias in ({"50": 100}, {"50": 100.0}, {"50": 100, "51": -100}):
        assert server.text(**greedy, logit_bias=bias) == server.tokenizer.decode([50]) * 8
    assert server.text(**greedy, logit_bias={}) == plain
    first = server.tokenizer.convert_tokens_to_ids(plain[0])
    assert plain[0] not in server.text(**greedy, logit_bias={str(first): -100})
    for bias in ({"50": 101}, {"50": -1e9}, {"99999": 1}, {"x": 1}, {"-1": 1}, {"50": "1"}, []):
        assert server.refused(**greedy, logit_bias=bias).startswith("logit_bias")


def test_sampling_is_cut_where_a_request_says(server: Asking) -> None:
    greedy = server.text(**SEVEN | {"temperature": 0})
    for narrow in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 1e-9}):
        assert server.text(**SEVEN | narrow) == greedy
    assert server.text(**SEVEN | {"top_k": 0, "top_p": 1, "min_p": 0}) == server.text(**SEVEN) != greedy
    _, (row, *_) = brute(server, PROMPT, 1, lambda tokens: 0)
    allowed = set(row.topk(3).indices.tolist())
    seen = {server.text(**SEVEN | {"top_k": 3, "max_tokens": 1, "seed": seed, "temperature": 2}) for seed in range(20)}
    assert seen == {server.tokenizer.decode([token], skip_special_tokens=True) for token in allowed}


def test_a_greedy_request_samples_as_one_that_says_nothing_whatever_came_first(server: Asking) -> None:
    server.refused(prompt="x" * 999, temperature=2)
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8}
    assert server.text(**asked) == server.text(**asked, temperature=0) == server.text(**asked, temperature=None)


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_lists_of_prompts_and_several_answers_are_those_of_each_alone(server: Asking, stream: bool) -> None:
    texts = ["one", "and another", "x"]
    ids = [server.tokenizer(text).input_ids for text in texts]
    alone = [server.text(**SEVEN | {"prompt": text}) for text in texts]
    for prompts in (texts, ids):
        asked = SEVEN | {"prompt": prompts, "stream": stream}
        assert [choice["text"] for choice in server.choices(**asked)] == alone
        twice = server.choices(**asked | {"n": 2, "best_of": 2})
        assert [choice["text"] for choice in twice][::2] == alone
        assert len({choice["text"] for choice in twice}) == 6
    assert server.text(**SEVEN | {"prompt": ids[1]}) == alone[1]
    _, answer = server.raw(TEXT, SEVEN | {"prompt": texts, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    counts = {"prompt_tokens": 15, "completion_tokens": 72, "total_tokens": 87}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert "best_of" in server.refused(**SEVEN, best_of=3)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_one_pass(server: Asking, stream: bool) -> None:
    tokens, rows = brute(server, PROMPT, 6, lambda tokens: 0)
    expected = torch.stack(rows).log_softmax(-1)
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": stream}
    (choice,) = server.choices(**asked, logprobs=3)
    told = choice["logprobs"] if stream else [choice["logprobs"]]
    chosen = [value for part in told for value in part["token_logprobs"]]
    torch.testing.assert_close(chosen, expected[range(6), tokens].tolist(), atol=1e-4, rtol=0)
    tops = [sorted(part.values()) for parts in told for part in parts["top_logprobs"]]
    torch.testing.assert_close(tops, expected.topk(3).values.flip(-1).tolist(), atol=1e-4, rtol=0)
    assert "".join(token for part in told for token in part["tokens"]) == choice["text"]
    assert [offset for part in told for offset in part["text_offset"]] == list(range(6))
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "max_tokens": 6, "temperature": 0, "stream": stream}
    (choice,) = server.choices(CHAT, **chat, logprobs=True, top_logprobs=2)
    told = choice["logprobs"] if stream else [choice["logprobs"]]
    content = [token for part in told for token in part["content"]]
    text = choice["text"] if stream else choice["message"]["content"]
    assert "".join(token["token"] for token in content) == text
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)
    assert all(
        len(token["top_logprobs"]) == 2 and bytes(token["bytes"]).decode() == token["token"] for token in content
    )
    assert "top_logprobs" in server.refused(CHAT, **chat, top_logprobs=2)


@pytest.mark.parametrize("server", [False], indirect=True, ids=["in turn"])
def test_prompts_are_echoed_with_their_log_probabilities(server: Asking) -> None:
    ids = server.tokenizer(PROMPT).input_ids
    with torch.no_grad():
        rows = server.model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    for count in (0, 1, 3):
        choice, _ = server.choices(prompt=[ids, ids[:1]], max_tokens=count, temperature=0, echo=True, logprobs=1)
        values = choice["logprobs"]["token_logprobs"]
        assert values[0] is None
        expected = [float(rows[at, token]) for at, token in enumerate(ids[1:])]
        torch.testing.assert_close(values[1 : len(ids)], expected, atol=1e-4, rtol=0)
        assert len(values) == len(ids) + count
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["text"].startswith(PROMPT)
        assert choice["logprobs"]["text_offset"] == list(range(len(values)))
    assert server.text(prompt=PROMPT, max_tokens=0) == ""


@pytest.mark.parametrize(
    "prompt", ["abc", "日本語 x", "😀😀x", "<s>a<|user|>b</s>", "é€\ufffdx", [200, 60, 61], "ab" * 450]
)
def test_offsets_of_an_echoed_prompt_point_into_the_text(of_bytes: Asking, prompt: Any) -> None:
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = of_bytes.choices(**asked)
    text, told = choice["text"], choice["logprobs"]
    for token, start in zip(told["tokens"], told["text_offset"], strict=True):
        assert text.startswith(token, start) or token in _asking.SPECIAL or "\ufffd" in token, (token, start, text)
    assert told["text_offset"] == sorted(told["text_offset"])
    assert max(told["text_offset"]) <= len(text)
    (streamed,) = of_bytes.choices(**asked, stream=True)
    parts = [part for part in streamed["logprobs"] if part["tokens"]]
    assert (streamed["text"], [start for part in parts for start in part["text_offset"]]) == (text, told["text_offset"])


@pytest.mark.parametrize("server", [BATCHES], indirect=True, ids=["together"])
def test_batches_echo_prompts_without_log_probabilities(server: Asking) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "echo": True}
    assert server.text(**asked).startswith(PROMPT)
    assert "echo" in server.refused(**asked, logprobs=1)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_is_streamed_where_it_is_asked_for(server: Asking, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "stream": True}
    body |= {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", "content": PROMPT}]}
    _, events = server.raw(path, body)
    assert events[-1] == "[DONE]"
    assert all("usage" not in event and len(event["choices"]) == 1 for event in events[:-1])
    asked = {"stream_options": {"include_usage": True}}
    _, events = server.raw(path, body | asked)
    *parts, last, done = events
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert all(part["usage"] is None for part in parts)
    assert "stream_options" in server.refused(path, **body | asked | {"stream": False})


def test_tokens_that_end_an_answer_and_the_fewest_before_it(server: Asking) -> None:
    whole = server.text(prompt=PROMPT, max_tokens=12, temperature=0)
    token = server.tokenizer.convert_tokens_to_ids(whole[4])
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop_token_ids": [token]}
    (choice,) = server.choices(**asked)
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(whole[4]) + 1], "stop")
    assert whole[4] not in server.text(**asked, min_tokens=12)
    assert "stop_token_ids" in server.refused(**asked | {"stop_token_ids": [10**6]})


@pytest.mark.parametrize("stream", [False, True])
def test_no_stop_sequence_is_looked_for_before_the_fewest_tokens(server: Asking, stream: bool) -> None:
    asked = SEVEN | {"stream": stream, "logit_bias": {str(hidden): -100 for hidden in range(len(_asking.SPECIAL))}}
    whole = server.text(**asked)
    for at, width, least in ((2, 2, 4), (2, 2, 5), (2, 3, 4), (3, 1, 12), (6, 5, 7)):
        stop = whole[at : at + width]
        ends = [n for n in range(len(whole)) if whole.startswith(stop, n) and n + width >= least]
        expected = whole[: ends[0]] if ends else whole
        assert server.text(**asked, stop=[stop, "nowhere at all"], min_tokens=least) == expected


@pytest.mark.skipif(not PAGED_IN_LAYERS, reason="batches need transformers 5.24")
@pytest.mark.parametrize(
    ("says", "named"),
    [
        ({"no_repeat_ngram_size": 2, "stop_strings": ["x"]}, "stop_strings, no_repeat_ngram_size, which"),
        ({"max_time": 9.0}, "max_time"),
        ({"min_new_tokens": 2}, "min_new_tokens"),
        ({"bad_words_ids": [[7, 8]]}, "bad_words_ids"),
        ({"suppress_tokens": [7], "temperature": 0.5, "do_sample": True, "repetition_penalty": 1.5}, None),
    ],
)
def test_what_batches_cannot_do_of_the_checkpoints_settings_is_refused(says: dict[str, Any], named: str | None) -> None:
    how = contextlib.nullcontext() if named is None else pytest.raises(IncompatibleError, match=named)
    with how, asking(letters(), together=True, says=says) as server:
        answer = server.text(prompt="x", max_tokens=1, temperature=0, logit_bias={"7": 100, "9": 50})
        assert answer == server.tokenizer.decode(9)


@pytest.mark.skipif(not PAGED_IN_LAYERS, reason="batches need transformers 5.24")
@pytest.mark.nightly
def test_a_request_that_batches_have_no_room_for_is_refused_and_stops_no_other() -> None:
    with asking(letters(), together=True, cached=256) as server:
        for asked in ({"prompt": "x" * 400}, {"prompt": "x" * 200, "max_tokens": 57}, {"prompt": ["x", "y" * 300]}):
            assert "256 tokens" in server.refused(**asked)
        assert len(server.text(prompt="x" * 200, max_tokens=56, logit_bias={"1": -100})) > 20


@pytest.mark.parametrize("together", [False, BATCHES])
def test_invalid_bytes_of_byte_tokens_end_no_answer(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change how bytes before them are read, which were given out."""
    ids = _asking.in_pieces().convert_tokens_to_ids
    with asking(_asking.in_pieces(), together=together) as server:
        for pieces, text in (
            ("<0xC3> <0xA9> <0xFF> a ▁b", "é\ufffda b"),
            ("<0xC3> <0xA9> <0xFF>", "é\ufffd"),
            ("<0xC3> <0xA9> <0xE2> <0x82> b c", "é\ufffd\ufffdbc"),
            ("<0xE2> <0x82> <0xAC> ▁ a", "€ a"),
        ):
            said = [ids(piece) for piece in pieces.split()]
            say(monkeypatch, [*said, 1])
            assert {server.text(prompt="a", stream=stream) for stream in (False, True)} == {text}
            if not together:
                (choice,) = server.choices(prompt=said, max_tokens=0, echo=True, logprobs=0)
                assert len(choice["logprobs"]["tokens"]) == len(said)
        monkeypatch.setattr("ctxext.serving.answers.Draw._weighed", lambda *_: {}[0])
        assert server.raw(TEXT, {"prompt": "a"})[0] == 500
        say(monkeypatch, [ids("a"), 1])
        assert server.text(prompt="a") == "a"  # what one request ends in ends no other


def test_an_answer_keeps_the_space_behind_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = _asking.in_pieces().convert_tokens_to_ids
    say(monkeypatch, [*ids(["▁c", "▁c"]), 1])
    half = ids(["▁a", "<0xC3>"])
    with asking(_asking.in_pieces(), together=False) as server:
        assert server.text(prompt="a b" * 9) == server.text(prompt=["a b"]) == " c c"
        assert server.text(prompt="a b", echo=True) == "a b c c"
        (choice,) = server.choices(prompt="a b", echo=True, logprobs=0)
        assert choice["logprobs"]["tokens"][-3:] == [" c", " c", "</s>"]
        assert choice["logprobs"]["text_offset"][-3:-1] == [3, 5]
        assert server.text(prompt=half) == server.text(CHAT, messages=HI) == "c c"
        assert server.text(prompt=half, echo=True) == "a\ufffdc c"


def test_letters_of_several_tokens_are_given_out_whole(of_bytes: Asking) -> None:
    tokens = of_bytes.tokenizer("é€😀").input_ids
    forced = {"prompt": "x", "max_tokens": 1, "temperature": 0}
    assert len(tokens) == 9
    for token in tokens[:1]:
        (choice,) = of_bytes.choices(**forced, logit_bias={str(token): 100}, stream=True)
        assert choice["text"] == "\ufffd"  # half a letter at the end, as ``decode`` writes it
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 30, "temperature": 1, "seed": 3}
    assert of_bytes.text(**asked) == of_bytes.text(**asked, stream=True)


def test_variables_of_the_template_are_set_or_refused(server: Asking) -> None:
    def count(path: str = CHAT, **more: Any) -> int:
        body = {"messages": HI, "max_tokens": 1}
        status, answer = server.raw(path, body | more)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens"])

    plain = count()
    assert count(reasoning_effort="low") == plain + 3
    assert count(chat_template_kwargs={"reasoning_effort": "high", "mood": "calm"}) == plain + 8
    assert count(chat_template_kwargs=None, reasoning_effort=None, tools=None) == plain
    _, answer = server.raw(RESPONSES, {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "low"}})
    assert (answer["usage"]["input_tokens"], answer["status"]) == (plain + 3, "incomplete")
    assert count(tools=TOOLS) > plain == count(tools=TOOLS, tool_choice="none")
    for wrong in ("self", "messages", "tools", "tokenize", "chat_template", "raise_exception", "nobody"):
        assert wrong in server.refused(CHAT, messages=HI, chat_template_kwargs={wrong: 1})
    assert server.raw(CHAT, {"messages": HI, "chat_template_kwargs": {"mood": {}}})[0] == 200


def test_a_template_that_goes_over_the_parts_of_a_content_writes_what_is_said() -> None:
    counts = []
    for content in ("m.content", PARTS):
        template = f"{{% for m in messages %}}{{{{ '<|user|>' + {content} }}}}{{% endfor %}}"
        with asking(letters(template), together=False) as server:
            _, answer = server.raw(CHAT, {"messages": HI, "max_tokens": 1})
            counts.append(answer["usage"]["prompt_tokens"])
    assert counts == [3, 3]


def test_what_a_template_does_not_show_is_refused() -> None:
    with asking(letters(_asking.SILENT), together=False) as server:
        asked = {"messages": HI, "max_tokens": 1}
        named = {"type": "function", "function": {"name": "time"}}
        for choice in (None, "auto", "required", named):
            assert "does not show them" in server.refused(CHAT, **asked, tools=TOOLS, tool_choice=choice)
        assert "reasoning_effort" in server.refused(CHAT, **asked, reasoning_effort="low")
        assert "reasoning_effort" in server.refused(RESPONSES, input="hi", reasoning={"effort": "low"})
        assert server.raw(CHAT, asked | {"tools": TOOLS, "tool_choice": "none"})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_kept(of_bytes: Asking, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="forced formats need llguidance")
    count = {"type": "integer", "minimum": 1, "maximum": 99}
    schema = CITY | {"properties": CITY["properties"] | {"count": count}, "required": ["city", "count"]}
    asked: dict[str, Any] = {"messages": HI, "temperature": 1, "seed": 2, "max_tokens": 99, "stream": stream}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    (choice,) = of_bytes.choices(CHAT, **asked, response_format=named)
    answer = json.loads(choice["text"] if stream else choice["message"]["content"])
    assert answer["city"] in ("Bonn", "Ulm")
    assert 1 <= answer["count"] <= 99
    assert choice["finish_reason"] == "stop"
    flat = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    _, responded = of_bytes.raw(RESPONSES, {"input": "hi", "max_output_tokens": 99, "text": flat})
    assert json.loads(responded["output"][0]["content"][0]["text"]).keys() == {"city", "count"}
    for wrong in ({"type": "nonsense"}, {"$ref": "#/nowhere"}):
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
        assert "schema" in of_bytes.refused(CHAT, **asked, response_format=named)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(600)}, "minProperties": 1},
        {"anyOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}] * 4000},
        {"enum": ["x" * 4_000_000]},
        {"type": "string", "pattern": "(ab|c)*" * 20_000},
    ],
    ids=["properties", "anyOf", "enum", "pattern"],
)
def test_a_schema_that_is_too_large_is_refused_and_not_left_unkept(of_bytes: Asking, schema: Any) -> None:
    """A matcher in error says that the JSON is complete."""
    pytest.importorskip("llguidance", reason="forced formats need llguidance")
    asked: dict[str, Any] = {"messages": HI, "max_tokens": 30}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        status, answer = of_bytes.raw(CHAT, asked | {"response_format": named, "stream": stream, "n": 2})
        error = (answer if status == 400 else answer[-2])["error"]
        assert "schema cannot be kept" in error["message"], answer


def test_tools_that_have_to_be_strict_are_served(of_bytes: Asking) -> None:
    """As agents of pydantic-ai ask by default."""
    tools = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert of_bytes.choices(CHAT, messages=HI, max_tokens=3, tools=tools, **choice)
    flat = [tool["function"] | {"type": "function"} for tool in tools]
    assert of_bytes.raw(RESPONSES, {"input": "hi", "max_output_tokens": 3, "tools": flat})[0] == 200
    assert "tool_choice" in of_bytes.client.get("/health").json()["strict_tools"]


@pytest.mark.nightly
def test_a_tool_that_has_to_be_called_is_called(of_bytes: Asking) -> None:
    pytest.importorskip("llguidance", reason="forced formats need llguidance")
    asked: dict[str, Any] = {"messages": HI, "max_tokens": 99, "tools": TOOLS, "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        (answer,) = of_bytes.choices(CHAT, **asked, tool_choice=choice)
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in (("weather", "time") if choice == "required" else ("time",))
        assert json.loads(call["function"]["arguments"])["city"] in ("Bonn", "Ulm")
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    flat = [{"type": "function"} | tool["function"] for tool in TOOLS]
    body = {"input": "hi", "tools": flat, "tool_choice": {"type": "function", "name": "time"}}
    _, answer = of_bytes.raw(RESPONSES, body)
    (item,) = answer["output"]
    assert (item["type"], item["name"]) == ("function_call", "time")
    named = {"type": "object", "properties": {"place": {"$ref": "#/$defs/City"}}, "required": ["place"]}
    named |= {"$defs": {"City": {"enum": ["Bonn"]}}, "additionalProperties": False}
    tools = [*TOOLS, {"type": "function", "function": {"name": "where", "parameters": named}}]
    choice = {"type": "function", "function": {"name": "where"}}
    (answer,) = of_bytes.choices(CHAT, **asked | {"tools": tools, "tool_choice": choice})
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"place":"Bonn"}'
    assert "tool_choice" in of_bytes.refused(CHAT, **asked, tool_choice={"type": "function", "function": {"name": "x"}})
    assert "parallel_tool_calls" in of_bytes.refused(CHAT, **asked)
    assert "Leave stop out" in of_bytes.refused(CHAT, **asked, tool_choice="required", stop="}")
    called = {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"}
    for item in (called, {"type": "function_call_output", "call_id": "1", "output": "12"}):
        assert "Begin with a message" in of_bytes.refused(RESPONSES, input=[item, called])


def test_a_forced_format_names_the_extra_that_it_needs(of_bytes: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = of_bytes.refused(CHAT, messages=HI, response_format={"type": "json_object"})
    assert "llguidance" in sentence
    assert ".[json]" in sentence


@pytest.mark.parametrize("together", [False, BATCHES])
def test_an_error_inside_a_stream_is_json_and_ends_no_other_answer(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(draw: Any, logits: torch.Tensor) -> torch.Tensor:
        if draw.limit == 3:
            raise RuntimeError('it says "no"\nand breaks')
        return logits

    monkeypatch.setattr("ctxext.serving.answers.Draw._weighed", fails)
    with asking(letters(), together=together) as server:
        for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
            limit = {"max_tokens": 3}
            status, events = server.raw(path, body | limit | {"stream": True})
            assert (status, events[-1]) == (200, "[DONE]")
            assert events[-2]["error"]["message"] == 'RuntimeError: it says "no"\nand breaks'
            status, answer = server.raw(path, body | limit)
            assert (status, answer["error"]["type"]) == (500, "server_error")
        _, events = server.raw(RESPONSES, {"input": "x", "max_output_tokens": 3, "stream": True})
        assert events[-1]["type"] == "response.failed"
        assert len(server.text(prompt="x", max_tokens=4)) > 0
        monkeypatch.setattr("ctxext.serving.endpoints.Completions.choice", lambda *_: {}[0])  # nobody thought of it
        _, events = server.raw(TEXT, {"prompt": "x", "max_tokens": 4, "stream": True})
        assert (events[-2]["error"]["message"], events[-1]) == ("KeyError: 0", "[DONE]")
        status, answer = server.raw(TEXT, {"prompt": "x", "max_tokens": 4})
        assert (status, answer["error"]["message"]) == (500, "KeyError: 0")


@pytest.mark.parametrize("together", [False, BATCHES])
def test_a_token_that_the_model_lacks_is_refused_and_stops_no_other(together: bool) -> None:
    """Of a text as of ids: a tokenizer may have more tokens than its model, such as Gemma 3's."""
    smaller, last = tiny(letters()), len(letters()) - 1
    smaller.resize_token_embeddings(last)
    with asking(letters(), together=together, model=smaller) as server:
        for path, body in ((TEXT, {"prompt": "a ~"}), (CHAT, {"messages": [{"role": "user", "content": "~"}]})):
            status, answer = server.raw(path, body | {"max_tokens": 3})
            said = f"The prompt has token {last}, and the model knows {last} tokens."
            assert (status, answer["error"]["message"]) == (400, said)
        assert len(server.text(prompt="a", max_tokens=3)) > 0


def test_positions_that_follow_the_length_are_those_of_each_request() -> None:
    """Transformers keeps the frequencies of the longest text so far, and those of a batch are shared by its rows."""
    config = tiny(letters()).config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    config.max_position_embeddings = 64
    torch.manual_seed(0)
    dynamic = LlamaForCausalLM(config).eval()
    asked: dict[str, Any] = {"prompt": "once upon a time " * 6, "max_tokens": 12, "temperature": 0}
    with asking(letters(), together=False, model=dynamic) as server:
        alone = server.text(**asked)
        assert server.text(prompt="there was a king " * 40, max_tokens=2)
        assert server.text(**asked) == alone
    with pytest.raises(IncompatibleError, match=r"positions of this llama follow .* Leave out --continuous-batching"):
        require_batches(dynamic)


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_batches_without_an_adapters_virtual_tokens_are_refused(kind: str) -> None:
    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)
    said = r"puts virtual tokens before each text.* Leave out --continuous-batching"
    with pytest.raises(IncompatibleError, match=said):
        require_batches(peft.get_peft_model(tiny(letters()), config))


@pytest.mark.parametrize("together", [False, BATCHES])
def test_an_answer_out_of_nan_is_an_error(together: bool) -> None:
    """Greedy decoding would take the first token of all for the likeliest."""
    broken = tiny(letters())
    broken.get_output_embeddings().weight.data[9] = torch.nan
    with asking(letters(), together=together, model=broken) as server:
        for temperature in (0, 1):
            status, answer = server.raw(TEXT, {"prompt": "x", "max_tokens": 3, "temperature": temperature})
            assert status == 500
            assert "The model gives NaN. Serve it in another --dtype" in answer["error"]["message"]


def said_by(server: Asking, asked: dict[str, Any]) -> tuple[str, str, list[Any], str]:
    """Reasoning, words and calls of tools in the answer of a chat, streamed or not, and how it ends."""
    _, answer = server.raw(CHAT, asked)
    parts = [event["choices"][0] for event in answer[:-1]] if asked["stream"] else answer["choices"]
    spoken = [part["delta" if asked["stream"] else "message"] for part in parts]
    reasoning, words = ("".join(part.get(kind) or "" for part in spoken) for kind in ("reasoning_content", "content"))
    called = [call for part in spoken for call in part.get("tool_calls") or ()]
    return reasoning, words, called, parts[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.nightly
def test_reasoning_and_calls_of_tools_are_found_in_the_text(
    of_bytes: Asking, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form of Qwen 3, whose template transformers knows; the model is made to say it."""
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    text = f"<think>\nwhy\n</think>\n\nwell, then{call}{call.replace('1', '2')}"
    _asking.say_as_qwen(monkeypatch, [*of_bytes.tokenizer(text).input_ids, 1])
    asked: dict[str, Any] = {"messages": HI, "tools": TOOLS, "stream": stream}
    reasoning, words, called, end = said_by(of_bytes, asked)
    assert (reasoning.strip(), words.strip(), end) == ("why", "well, then", "tool_calls")
    assert [json.loads(call["function"]["arguments"]) for call in called] == [{"x": 1}, {"x": 2}]
    assert [call.get("index") for call in called] == ([0, 1] if stream else [None, None])
    assert said_by(of_bytes, asked | {"stop": "l, t"})[1].strip() == "wel"
    _, answer = of_bytes.raw(RESPONSES, {"input": "hi", "tools": TOOLS, "stream": stream})
    output = answer[-1]["response"]["output"] if stream else answer["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[1]["content"][0]["text"].strip() == "well, then"


@pytest.mark.parametrize(
    ("call", "end"),
    [
        ("<tool_call>not json</tool_call>", "stop"),
        ('<tool_call>{"name": "f"}</tool_call>', "stop"),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', "stop"),
        ("<tool_call>[1]</tool_call>", "stop"),
        ('<tool_call>{"name": "f"}', "stop"),
        ('<tool_call>{"name": "f", "argum', "length"),
    ],
)
def test_a_call_that_is_none_is_words(of_bytes: Asking, monkeypatch: pytest.MonkeyPatch, call: str, end: str) -> None:
    good = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text = f"well{call}" + f"then{good}" * call.endswith("</tool_call>")
    said = of_bytes.tokenizer(text).input_ids
    _asking.say_as_qwen(monkeypatch, [*said, 1])
    for stream in (False, True):
        asked = {"messages": HI, "stream": stream, "max_tokens": len(said) + (end == "stop")}
        _, words, called, reason = said_by(of_bytes, asked)
        assert words == text.removesuffix(good)
        assert [call["function"]["name"] for call in called] == ["f"] * text.endswith(good)
        assert reason == ("tool_calls" if called else end)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("well{call}then{call}", ["well", "call", "then", "call"]),
        ("{call}{call}then", ["call", "call", "then"]),
        ("well<think>why</think>{call}", ["well", "why", "call"]),
        ("<think>why</think>", ["why", ""]),
        (" ", [" "]),
        ("<think>why</think>\n\nwell\n{call}\n{call}\n", ["why", "\n\nwell", "call", "call"]),
        ("{call}<think>why</think>then<think>again</think>", ["call", "why", "then", "again"]),
    ],
)
def test_each_item_of_a_response_has_its_own_id_place_and_text(
    of_bytes: Asking, monkeypatch: pytest.MonkeyPatch, text: str, items: list[str]
) -> None:
    said = text.replace("{call}", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    _asking.say_as_qwen(monkeypatch, [*of_bytes.tokenizer(said).input_ids, 1])
    _, events = of_bytes.raw(RESPONSES, {"input": "hi", "tools": TOOLS, "stream": True})
    state: Any = ResponseStreamState(input_tools=openai.NOT_GIVEN, text_format=openai.NOT_GIVEN)
    for event in events:  # as OpenAI's client puts them together
        state.handle_event(TypeAdapter(ResponseStreamEvent).validate_python(event))
    done = [event for event in events if event["type"] == "response.output_item.done"]
    output = events[-1]["response"]["output"]
    assert [event["output_index"] for event in done] == list(range(len(items)))
    assert [event["item"] for event in done] == output
    assert len({item["id"] for item in output}) == len(items)
    assert [item["content"][0]["text"] if "content" in item else "call" for item in output] == items
    _, answer = of_bytes.raw(RESPONSES, {"input": "hi", "tools": TOOLS})
    assert [item.get("content") for item in answer["output"]] == [item.get("content") for item in output]


def test_a_template_is_read_as_it_is_applied_or_refused() -> None:
    named: Any = {"default": _asking.SILENT, "tool_use": _asking.TEMPLATE}
    for template, asked, named_in in (
        (named, {"reasoning_effort": "low"}, "reasoning_effort"),
        (named, {}, None),
        (named, {"tools": TOOLS}, None),
        ({"tool_use": _asking.TEMPLATE}, {}, "template"),
        ("{% if %}", {}, "template"),
    ):
        with asking(_asking.bytewise(template), together=False) as server:
            if named_in is None:
                assert server.raw(CHAT, {"messages": HI, "max_tokens": 1, **asked})[0] == 200
            else:
                assert named_in in server.refused(CHAT, messages=HI, max_tokens=1, **asked)
