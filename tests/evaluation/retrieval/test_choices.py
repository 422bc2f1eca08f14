"""``ctxext eval retrieval``: questions that are what they claim, the model's own losses, and what is made of them."""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import ctxext
from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation.report.retrieval import retrieval_page, retrieval_sentences
from ctxext.evaluation.retrieval import TASK_NAMES, choices
from ctxext.evaluation.retrieval.associations import KINDS
from ctxext.evaluation.retrieval.choices import ChoicePrompt, ChoiceTrial, RetrievalReport, RetrievalResult
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import logits_of_answers
from ctxext.measuring.provenance import provenance_of
from ctxext.measuring.readers import find_readers
from ctxext.measuring.survey import jobs_of
from ctxext.texts.haystack import of_text
from tests._models import tiny
from tests._programs import command
from tests._tokenizer import BYTES_AFTER_BOS

LENGTHS = (1500, 2100)
STORY = "".join(f" Day {day}: the cart went {day % 7} miles. Why? Nobody knew." for day in range(200))


@pytest.fixture(scope="module")
def prompts() -> list[ChoicePrompt]:
    from tests._tokenizer import make_tokenizer

    return choices.make_prompts(make_tokenizer(bos=True), LENGTHS, samples=6)


LEAST = r"A prompt for rounds needs at least \d+ tokens .* found length=200"
Texts = Callable[[str], list[tuple[ChoicePrompt, str]]]


@pytest.fixture
def texts(prompts: list[ChoicePrompt]) -> Texts:
    """The prompts of a task, each with its text."""
    every = [(prompt, BYTES_AFTER_BOS.decode(prompt.text, skip_special_tokens=True)) for prompt in prompts]
    return lambda task: [(prompt, text) for prompt, text in every if prompt.task == task]


def test_a_prompt_has_exactly_its_length(prompts: list[ChoicePrompt]) -> None:
    grid = [(prompt.length, prompt.task, prompt.index) for prompt in prompts]
    assert grid == list(itertools.product(LENGTHS, TASK_NAMES, range(6)))
    for prompt in prompts:
        longest = max(map(len, prompt.requests))
        assert {len(answer) for answer in prompt.answers} == {len(prompt.answers[0])}
        assert len(prompt.text) + longest + len(prompt.answers[0]) == prompt.length
        assert prompt.text[0] == BYTES_AFTER_BOS.bos_token_id
        assert len(prompt.requests) == len(prompt.answers) == len(set(prompt.questions.answers)) == 4
        for request, answer in itertools.product(prompt.questions.requests, prompt.questions.answers):
            assert answer not in re.findall(r"\w+", request)


def test_the_same_questions_are_asked_at_every_length(prompts: list[ChoicePrompt]) -> None:
    half = len(prompts) // 2
    for short, long in zip(prompts[:half], prompts[half:], strict=True):
        assert short.questions == long.questions
        assert (short.identity, len(short.text)) != (long.identity, len(long.text))


def test_prompts_repeat_and_follow_their_seed(prompts: list[ChoicePrompt]) -> None:
    def identities(**given: Any) -> list[Any]:
        made = choices.make_prompts(BYTES_AFTER_BOS, [LENGTHS[0]], samples=2, **given)
        return [prompt.identity for prompt in made]

    first = [prompt.identity for prompt in prompts if prompt.length == LENGTHS[0] and prompt.index < 2]
    assert identities() == first, "more lengths and more samples change nothing"
    assert set(map(str, identities(seed=1))).isdisjoint(map(str, first))
    in_story = identities(haystack=of_text(BYTES_AFTER_BOS, "story", STORY))
    assert in_story[:2] == first[:2], "rounds bring their own text"
    assert set(map(str, in_story[2:])).isdisjoint(map(str, first))


def test_rounds_are_answered_by_their_order(texts: Texts) -> None:
    ordinals = ["first", "second", "third", "fourth"]
    for prompt, text in texts("rounds"):
        given = re.findall(r"Give me a code word for (\w+)\.\nAssistant: The code word is (\w+)\.", text)
        for request, answer in zip(prompt.questions.requests, prompt.questions.answers, strict=True):
            ((nth, topic),) = re.findall(r"the (\w+) code word for (\w+)", request)
            words = [word for about, word in given if about == topic]
            assert len(words) == 2
            assert words[ordinals.index(nth)] == answer
        assert len(given) > 8


def test_a_ledger_adds_up(texts: Texts) -> None:
    kinds = set()
    for prompt, text in texts("aggregate"):
        read = re.findall(r"Ledger: (\w+) sold (\d) (\w+)", text)
        entries = [(name, int(number), good) for name, number, good in read]
        for request, answer in zip(prompt.questions.requests, prompt.questions.answers, strict=True):
            if found := re.findall(r"number of entries of (\w+)", request):
                expected = str(sum(name == found[0] for name, _, _ in entries))
            elif found := re.findall(r"Most of the (\w+) were sold by", request):
                counted = Counter(name for name, _, good in entries if good == found[0])
                ((expected, most), (_, second)) = counted.most_common()
                assert most > second
            else:
                (found,) = re.findall(r"sum of all (\w+) that (\w+) sold", request)
                expected = str(sum(number for name, number, good in entries if (good, name) == found))
            kinds.add(request.split()[1])
            assert expected == answer, (request, entries)
    assert kinds == {"number", "of", "sum"}


def test_chains_lead_to_their_values(texts: Texts) -> None:
    for prompt, text in texts("variables"):
        held: dict[str, str] = {}
        for name, other, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
            held[name] = value or held[other]
        assert len(held) == 8
        for request, answer in zip(prompt.questions.requests, prompt.questions.answers, strict=True):
            ((asked,),) = [re.findall(r"VAR (\w+) =$", request)]
            assert held[asked] == answer
            assert f"VAR {asked} = {answer}" not in text, "it takes a hop"


SMALL_WORDS = "the a an of to is and or for in on at by from with that this who one as its his her next"


def content(text: str) -> set[str]:
    """The first four letters of every word that has a meaning of its own: what plays shares with playing."""
    words = re.findall(r"[a-z]+", text.replace("{name}", "").lower())
    return {word[:4] for word in words if word not in SMALL_WORDS.split()}


def test_no_association_shares_a_content_word_with_its_question() -> None:
    pairs = [
        (sentence.format(name="{name}", fact=fact), request.format(asked=asked))
        for sentence, request, facts in KINDS
        for fact, asked in facts
    ]
    assert len(pairs) >= 40
    assert len({request for _, request in pairs}) == len(pairs)
    shared = {pair: content(pair[0]) & content(pair[1]) for pair in pairs}
    assert {pair: words for pair, words in shared.items() if words} == {}
    assert all(content(sentence) and content(request) for sentence, request in pairs)
    assert all(len(facts) >= 8 for _, _, facts in KINDS), "enough for the most choices"


def test_associations_are_hidden_and_asked(texts: Texts) -> None:
    for prompt, text in texts("associations"):
        sentence, request, facts = KINDS[prompt.index % len(KINDS)]
        known = {request.format(asked=asked): fact for fact, asked in facts}
        for asked, name in zip(prompt.questions.requests, prompt.questions.answers, strict=True):
            assert sentence.format(name=name, fact=known[asked.strip()]) in text


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 8])
def test_any_number_of_choices(number: int) -> None:
    for prompt in choices.make_prompts(BYTES_AFTER_BOS, [3000], samples=3, choices=number):
        assert len(prompt.requests) == len(set(prompt.questions.answers)) == number
        assert len(set(prompt.questions.requests)) == number


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"tasks": ["round"]}, UnknownNameError, "Unknown retrieval task 'round'. Did you mean 'rounds'?"),
        ({"samples": 1}, InvalidParameterError, "found 1 lengths, 4 tasks, 1 samples and 4 choices"),
        ({"choices": 9}, InvalidParameterError, "2 to 8 choices"),
        ({"lengths": []}, InvalidParameterError, "found 0 lengths"),
        ({"lengths": [200]}, InvalidParameterError, LEAST),
    ],
)
def test_what_cannot_be_asked_is_refused(given: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        choices.make_prompts(BYTES_AFTER_BOS, **{"lengths": [1500]} | given)


METHODS = ["unpatched", "yarn", "dynamic_ntk", "self_extend", "dual_chunk"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_answers_behind_a_cache_have_the_logits_of_a_whole_pass(model: LlamaForCausalLM, method: str) -> None:
    """Each request and answer read in one pass with the text, in the test; dynamic methods fit the longest."""
    if method != "unpatched":
        ctxext.patch(model, method, factor=2)
    generator = torch.Generator().manual_seed(2)
    text, *parts = (torch.randint(0, 256, (size,), generator=generator) for size in (700, 5, 9, 1, 3))
    requests, answers = parts[:2], parts[2:]
    found = logits_of_answers(model, text, requests, answers)
    options = {"ctxext_length": 700 + 9 + 3} if method == "dynamic_ntk" else {}
    for request, rows in zip(requests, found, strict=True):
        for answer, logits in zip(answers, rows, strict=True):
            tokens = torch.cat([text, request, answer])[None]
            with torch.no_grad():
                hidden = model.model(tokens, use_cache=False, **options).last_hidden_state
                expected = model.lm_head(hidden)[0, -len(answer) - 1 : -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def trial(losses: Any, *, length: int = 512, index: int = 0, task: str = "rounds") -> ChoiceTrial:
    names = tuple("abcd"[: len(losses)])
    return ChoiceTrial(task, length, index, names, tuple(map(tuple, losses)), 1)


def test_choices_and_margins_by_hand() -> None:
    knows = trial([[1.0, 7.0, 5.0], [3.0, 4.0, 5.0], [2.0, 7.0, 2.0]])
    # Means by answer: 2, 6, 4.
    assert knows.gains == [[1.0, -1.0, -1.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 2.0]]
    assert knows.score == 100
    assert knows.margin == pytest.approx((1 + 2 + 2) / 3 - (-1 - 1 - 1 - 1 + 0 - 1) / 6)
    one_of_three = trial([[1.0, 3.0, 5.0], [1.0, 4.0, 5.0], [4.0, 2.0, 2.0]])
    # Means 2, 3, 4; gains [1, 0, -1], [1, -1, -1], [-2, 1, 2].
    assert one_of_three.score == pytest.approx(200 / 3)
    # However unlikely a word is by itself, it counts for nothing; a tie is lost.
    blind = trial([[1.0, 9.0], [1.0, 9.0]])
    assert (blind.score, blind.margin) == (0, 0)
    assert trial([[3.0, 1.0], [1.0, 3.0]]).score == 0
    result = RetrievalResult((knows, trial([[5.0, 1.0, 1.0]] * 3)))
    assert result.chance == pytest.approx(1 / 3)
    assert result.score == 50
    assert result.margin.mean == pytest.approx(knows.margin / 2)
    assert result.margin.standard_error == pytest.approx(knows.margin / 2)  # two values, sqrt(2) apart by their std


def test_a_model_that_prefers_an_answer_is_found_out(
    model: LlamaForCausalLM, prompts: list[ChoicePrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knows every answer, one that always says the first, and what each of them is shown."""
    shown: list[torch.Tensor] = []

    def knowing(_: Any, text: torch.Tensor, requests: Any, answers: Any) -> Any:
        shown.append(text)
        return [[_preferring(answers[place], answers) for _ in answers] for place in range(len(requests))]

    def stubborn(_: Any, text: torch.Tensor, requests: Any, answers: Any) -> Any:
        return [[_preferring(answers[0], answers) for _ in answers] for _ in requests]

    prompt = prompts[0]
    monkeypatch.setattr(choices, "logits_of_answers", knowing)
    known = ChoiceTrial(**prompt.ask(model, None, "", lambda *_: None))
    assert (known.score, known.writes, known.answers) == (100, 4, prompt.questions.answers)
    assert known.margin > 1
    assert prompt.ask(model, 512, "", lambda *_: None) == prompt.ask(model, None, "", lambda *_: None)
    assert torch.equal(shown[0], prompt.text)
    last = len(prompt.text) - (prompt.length - 512) - 1
    assert torch.equal(shown[1], torch.cat([prompt.text[:1], prompt.text[-last:]]))
    assert len(shown[1]) + max(map(len, prompt.requests)) + len(prompt.answers[0]) == 512
    monkeypatch.setattr(choices, "logits_of_answers", stubborn)
    said = ChoiceTrial(**prompt.ask(model, None, "", lambda *_: None))
    assert (said.score, said.writes) == (0, 1)
    assert said.margin == pytest.approx(0, abs=1e-6)


def _preferring(answer: torch.Tensor, answers: list[torch.Tensor]) -> torch.Tensor:
    assert {len(other) for other in answers} == {len(answer)}
    logits = torch.zeros(len(answer), 257)
    logits[range(len(answer)), answer] = 3.0
    return logits


def result(scores: dict[int, list[float]], label: str = "yarn") -> RetrievalResult:
    """Two choices; a score of 100, 50 (one of two) or 0 for each text."""
    matrices = {100: [[0.0, 1.0], [1.0, 0.0]], 0: [[1.0, 0.0], [0.0, 1.0]]}
    every = [(length, *each) for length, of_length in scores.items() for each in enumerate(of_length)]
    trials = [trial(matrices[int(score)], length=length, index=index) for length, index, score in every]
    return RetrievalResult(tuple(trials), label, label)


def test_effective_length_by_hand() -> None:
    """Two choices: 20 of 20 is 1 above chance, 19 of 20 is 0.9, 18 of 20 is 0.8; 0.85 of the base's 1 is kept."""
    right = {n: [100.0] * n + [0.0] * (20 - n) for n in (20, 19, 18, 12, 3)}
    found = result({512: right[20], 1024: right[19], 2048: right[18], 4096: right[3]})
    assert found.effective_length(512) == 1024
    # With 0.9 as the base, 0.8 is kept.
    assert found.effective_length(1024) == 2048
    assert found.effective_length(300) is None
    # 12 of 20 may be chance, of which nothing can be kept.
    assert result({512: right[12], 1024: right[20]}).effective_length(512) is None
    assert result({512: right[20], 1024: right[3]}).effective_length(512) == 512


def test_the_page_shows_what_was_chosen(model: LlamaForCausalLM) -> None:
    provenance = provenance_of(Checkpoint("tiny", model, BYTES_AFTER_BOS), seed=0)
    right = {512: [100.0] * 6, 1024: [100.0] * 4 + [0.0] * 2}
    wrong = {512: [100.0] * 6, 1024: [0.0] * 6}
    readings = (result(wrong, "unpatched"), result(wrong, "truncated"), result(right, "yarn x2"))
    report = RetrievalReport(readings=readings, base=512, haystack="noise", trained_length=512, provenance=provenance)
    assert RetrievalReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    sentences = retrieval_sentences(report)
    difference = readings[2].only(length=1024).beyond(readings[1].only(length=1024))
    assert difference.mean == pytest.approx(100 * 4 / 6)
    assert sentences[0].startswith("yarn x2 at 1K tokens: 67% right, truncated 0%; difference +67 ± 21 points")
    assert "unpatched 12 of 24; truncated 12 of 24; yarn x2 12 of 24" in sentences[1]
    assert "guessing is right in 50%" in sentences[2]
    page = retrieval_page(report).markdown()
    assert "| yarn x2 | 100% +1.000 ± 0.000 | 67% +0.333 ± 0.422 |" in page
    assert re.search(r"\| yarn x2 \| 512 \| 512 \|", page)
    assert readings[2].only(length=512).beyond(readings[1].only(length=1024)) is None


ASKED = ["--dtype", "fp32", "-m", "yarn", "-f", "4", "-l", "700", "-l", "900", "--samples", "2"]
ASKED += ["--task", "associations"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("error::UserWarning:ctxext")
def test_the_command_writes_its_report(checkpoint: str, tmp_path: Path) -> None:
    outputs = [tmp_path / f"choices.{kind}" for kind in ("json", "md", "png")]
    command("eval", "retrieval", checkpoint, *ASKED, *(part for path in outputs for part in ("-o", path)), code=0)
    read = RetrievalReport.from_dict(json.loads(outputs[0].read_text(encoding="utf-8")))
    assert [reading.reading for reading in read.readings] == ["unpatched", "truncated", "yarn x4"]
    assert read.base == 700
    assert read.provenance.extensions["yarn x4"].method is not None
    page = outputs[1].read_text(encoding="utf-8")
    assert "](choices.png)" in page
    assert "| last 512 |" in page
    assert outputs[2].read_bytes().startswith(b"\x89PNG")


def test_readings_are_compared_over_the_same_texts() -> None:
    first = result({512: [100.0, 0.0, 100.0]})
    second = replace(first, trials=tuple(replace(each, index=each.index + 1) for each in first.trials))
    assert first.beyond(second) is None
    difference = first.beyond(result({512: [0.0, 0.0, 100.0]}), margin=True)
    assert difference.mean == pytest.approx((1.0 - -1.0) / 3)


def guessed(generator: torch.Generator, number: int, index: int = 0) -> ChoiceTrial:
    """A text of which nothing is known: answers are likelier or not by themselves, whatever is asked."""
    losses = torch.randn(number, number, generator=generator) + 3 * torch.randn(1, number, generator=generator)
    return trial(losses.tolist(), index=index)


@pytest.mark.nightly
def test_the_luck_of_a_reading_is_that_of_all_ways_to_deal_out_the_answers() -> None:
    generator = torch.Generator().manual_seed(0)
    for number in (2, 3, 4):
        texts = [guessed(generator, number, index) for index in range(2)]
        texts.append(trial([[1.0] * number] * number, index=2))  # a tie is lost, however answers are dealt out
        found = RetrievalResult(tuple(texts))
        deals = list(itertools.permutations(range(number)))
        totals = [
            sum(
                place == chosen
                for each, deal in zip(texts, dealt, strict=True)
                for place, chosen in zip(deal, each.chosen, strict=True)
            )
            for dealt in itertools.product(deals, repeat=3)
        ]
        right = sum(place == chosen for each in texts for place, chosen in enumerate(each.chosen))
        assert found.luck == pytest.approx(sum(total >= right for total in totals) / len(totals))


@pytest.mark.parametrize(
    ("number", "samples"),
    [
        pytest.param(number, samples, marks=pytest.mark.slow if (number, samples) == (3, 8) else pytest.mark.nightly)
        for number in (2, 3, 4)
        for samples in (2, 3, 4, 5, 6, 8, 12)
    ],
)
def test_guessing_has_an_effective_length_in_few_runs(number: int, samples: int) -> None:
    """In at most 2.5 percent, give or take what 400 runs leave open."""
    generator, runs = torch.Generator().manual_seed(0), 400
    made = [tuple(guessed(generator, number, index) for index in range(samples)) for _ in range(runs)]
    results = [RetrievalResult(trials) for trials in made]
    effective = sum(found.effective_length(512) is not None for found in results)
    assert effective / runs < 0.025 + 3 * math.sqrt(0.025 * 0.975 / runs)


@pytest.mark.parametrize("number", [5, 8])
def test_eight_choices_are_dealt_out_without_trying_all_deals(number: int) -> None:
    began = time.process_time()
    found = [guessed(torch.Generator().manual_seed(seed), number) for seed in range(3)]
    found.append(trial([[1.0] * number] * number))
    matrix = [[float(answer != 2) + answer * (asked < 2) for answer in range(number)] for asked in range(number)]
    found.append(trial(matrix))
    chances = [each.by_chance for each in found]
    assert time.process_time() - began < 1
    for each, shares in zip(found, chances, strict=True):
        if number == 5:
            deals = [sum(map(operator.eq, deal, each.chosen)) for deal in itertools.permutations(range(number))]
            assert shares == pytest.approx([deals.count(right) / len(deals) for right in range(len(shares))])
        assert sum(shares) == pytest.approx(1)
        expected = (number - each.chosen.count(None)) / number
        assert sum(right * share for right, share in enumerate(shares)) == pytest.approx(expected)


def test_a_window_shorter_than_a_question_is_refused(prompts: list[ChoicePrompt]) -> None:
    loaded = Checkpoint("tiny", tiny("llama", vocab_size=257), BYTES_AFTER_BOS)
    least = max(prompt.least for prompt in prompts)
    for trained in (least - 1, least):
        readers = find_readers(loaded, methods=["pi"], lengths=LENGTHS, trained_length=trained)
        if trained < least:
            with pytest.raises(InvalidParameterError, match=rf"a window of {trained} tokens shows nothing"):
                jobs_of(readers, prompts)
        else:
            assert jobs_of(readers, prompts)


def test_three_texts_without_a_mistake_are_no_luck() -> None:
    knows = [trial([[float(i != j) for j in range(4)] for i in range(4)], index=index) for index in range(3)]
    assert RetrievalResult(tuple(knows)).luck == pytest.approx(1 / 24**3)
    assert RetrievalResult(tuple(knows)).effective_length(512) == 512
