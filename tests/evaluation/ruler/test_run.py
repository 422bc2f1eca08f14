"""Lengths that are kept to the token, errors that say what to do, and a whole run on a tiny model."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ctxext.errors import IncompatibleError, InvalidParameterError, install_line
from ctxext.evaluation.ruler.run import RulerResult, RulerTrial, ask, draw, reply_to, ruler_prompts
from ctxext.evaluation.ruler.tasks import TASKS
from ctxext.evaluation.ruler.tasks.base import Setting, Task, largest_fit, words
from ctxext.evaluation.trials import relative_effective_length
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.readers import find_readers
from ctxext.measuring.statistics import wilson_interval
from ctxext.measuring.survey import jobs_of
from ctxext.texts.documents import Document
from tests._models import tiny, trained_for
from tests._tokenizer import BYTES_AFTER_BOS, make_tokenizer

PROSE = Document("prose", " ".join(f"On day {day} it rained, and nobody came." for day in range(40)))


def count(text: str) -> int:
    """A tokenizer of words and single digits, so that the tokens of a word depend on which it is."""
    return len(re.findall(r"\d|[^\W\d]+|[^\w\s]", text))


def task_for(name: str, length: int) -> Task:
    return TASKS[name](Setting(length, count, PROSE))


@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_reply_fill_the_length(name: str) -> None:
    for length in (1024, 4096, 5001):
        task = task_for(name, length)
        made = draw(task, index=0, seed=1)
        assert made.tokens == count(made.prompt)
        assert made.tokens + task.tokens_to_generate <= length
        # One unit more would not have fitted: at most 45 tokens for a line of UUIDs, 9 for a numbered word thrice.
        largest = {"niah_multikey_3": 60, "niah_multikey_2": 30, "niah_single_1": 24, "vt": 24, "cwe": 21, "fwe": 4}
        assert length - made.tokens - task.tokens_to_generate < largest.get(name, 3)
        again = task.question(made.size, random.Random(f"ruler {name} {length} 1 0"))
        assert (again.prompt, again.answers) == (made.prompt, made.answers)
        others = [draw(task, index=1, seed=1, near=made.size), draw(task, index=0, seed=2)]
        assert len({made.prompt, *(other.prompt for other in others)}) == 3


@pytest.mark.parametrize("name", TASKS)
def test_the_least_length_is_named_and_right(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"needs at least [\d,]+ tokens.*found.* 140\b") as caught:
        draw(task_for(name, 140), index=0, seed=1)
    found = re.search(r"at least ([\d,]+) tokens", str(caught.value))
    least = int(found[1].replace(",", ""))
    # The prompt of another length draws other words, which may be a few tokens shorter or longer.
    assert draw(task_for(name, least + 24), index=0, seed=1).size >= 1
    with pytest.raises(InvalidParameterError, match="at least"):
        draw(task_for(name, least - 24), index=0, seed=1)


def test_common_words_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS["cwe"], "most", 60)
    with pytest.raises(InvalidParameterError, match=r"cwe has 60 words, too few for 4,000 tokens: they make 862\."):
        draw(task_for("cwe", 4000), index=0, seed=1)


def test_words_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(words("nouns")) > 6000
    assert {"jazzy"} <= set(words("adjectives"))
    words.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(InvalidParameterError, match=re.escape(install_line("eval"))):
        words("nouns")


def text_tokens(asked: list[int], unit: int, fixed: int, noise: int, size: int) -> int:
    asked.append(size)
    return fixed + unit * size + random.Random(size).randint(0, noise)


@pytest.mark.parametrize("near", [None, 3, 70, 5000])
@pytest.mark.parametrize("noise", [0, 40])
def test_largest_fit(noise: int, near: int | None) -> None:
    for trial in range(30):
        generator = random.Random(trial)
        unit, fixed, room = generator.randint(1, 30), generator.randint(0, 300), generator.randint(400, 20_000)
        asked: list[int] = []
        tokens = partial(text_tokens, asked, unit, fixed, noise)
        found = largest_fit(tokens, 1, room, near=near)
        assert tokens(found) <= room < tokens(found + 1)
        assert len(asked) < 40
        assert max(asked) <= max(2.2 * room / unit + 50, near or 0)
        if not noise:
            fits = [size for size in range(1, 31) if tokens(size) <= room]
            assert largest_fit(tokens, 1, room, most=30, near=near) == max(fits)


def test_relative_effective_length_by_hand() -> None:
    assert relative_effective_length({1024: 80.0, 2048: 68.0, 4096: 67.9}) == 2048
    assert relative_effective_length({4096: 70.0, 1024: 80.0, 2048: 10.0}) == 4096
    assert relative_effective_length({1024: 0.0, 2048: 10.0}) is None


@pytest.fixture
def long_model(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return trained_for(model, 2048)


def decode_by_hand(model: LlamaForCausalLM, prompt: list[int], steps: int) -> list[int]:
    """Whole forward passes, no cache, no generation settings."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answered(model: LlamaForCausalLM, tokenizer: Any, *, samples: int = 10, **given: Any) -> RulerResult:
    prompts, chat = ruler_prompts(tokenizer, samples=samples, **given), bool(given.get("chat"))
    return RulerResult(tuple(ask(model, tokenizer, each.task, each.question(), chat=chat) for each in prompts))


@pytest.mark.nightly
def test_a_whole_run(long_model: LlamaForCausalLM) -> None:
    """Greedy whatever the checkpoint's own settings say; the BOS token counts."""
    long_model.generation_config.do_sample = True
    long_model.generation_config.repetition_penalty = 3.0
    arguments = {"lengths": [1500, 1024, 1500], "tasks": ["niah_single_1", "fwe"], "samples": 2, "essay": PROSE}
    found = answered(long_model, BYTES_AFTER_BOS, **arguments)
    cells = [(trial.length, trial.task, trial.index) for trial in found.trials]
    assert cells == [(n, task, i) for n in (1024, 1500) for task in ("niah_single_1", "fwe") for i in (0, 1)]
    assert (found.rows, found.lengths) == (("niah_single_1", "fwe"), (1024, 1500))
    # Prompts are those of `draw`.
    setting = Setting(1024, lambda text: 1 + len(text.encode()), PROSE)
    made = draw(TASKS["niah_single_1"](setting), index=1, seed=42)
    trial = found.trials[1]
    assert (trial.answers, trial.prompt_tokens) == (made.answers, 1 + len(made.prompt.encode()))
    written = decode_by_hand(long_model, BYTES_AFTER_BOS(made.prompt).input_ids, 128)
    assert trial.reply == BYTES_AFTER_BOS.decode(written, skip_special_tokens=True)
    assert trial.score == 100.0 * (made.answers[0] in trial.reply)


OFTEN_SAID: list[dict[str, Any]] = [{"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}]
OFTEN_SAID += [{"num_return_sequences": 2, "do_sample": True}, {"return_dict_in_generate": True}]
OFTEN_SAID += [{"prompt_lookup_num_tokens": 3}, {"no_repeat_ngram_size": 1}, {"guidance_scale": 3.0}]
OFTEN_SAID += [{"encoder_repetition_penalty": 0.1}, {"min_length": 999}, {"min_new_tokens": 8}, {"max_time": 1e-9}]
OF_TOKENS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings", "eos")


@pytest.mark.parametrize(
    "says", [*OFTEN_SAID, *OF_TOKENS], ids=lambda says: says if says in OF_TOKENS else next(iter(says))
)
def test_a_reply_is_greedy_whatever_the_checkpoint_says(says: Any) -> None:
    asked, prompt = trained_for(tiny("llama", vocab_size=257), 512), BYTES_AFTER_BOS("Which number is it?").input_ids
    first = decode_by_hand(asked, prompt, 1)
    said = {"suppress_tokens": first, "begin_suppress_tokens": first, "bad_words_ids": [first], "stop_strings": ["a"]}
    if says == "eos":  # which ends a reply: this alone holds
        asked.generation_config.eos_token_id = first[0]
        assert reply_to(asked, BYTES_AFTER_BOS, prompt, tokens=8) == BYTES_AFTER_BOS.decode(first)
        return
    expected = BYTES_AFTER_BOS.decode(decode_by_hand(asked, prompt, 8), skip_special_tokens=True)
    vars(asked.generation_config).update({says: said[says]} if isinstance(says, str) else says)
    assert reply_to(asked, BYTES_AFTER_BOS, prompt, tokens=8) == expected


def test_a_reply_does_not_depend_on_what_was_asked_before() -> None:
    """transformers keeps the frequencies of the longest text, so that a run that goes on would differ."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    loaded = Checkpoint("tiny", tiny("llama", vocab_size=257, rope_parameters=rope), BYTES_AFTER_BOS)
    prompts = ruler_prompts(BYTES_AFTER_BOS, lengths=[1024, 1500], tasks=["niah_single_1"], samples=1)
    short, long = jobs_of(find_readers(loaded, lengths=[1024, 1500], unpatched=False)[-1:], prompts)
    alone, _, again = (job.ask(loaded.model, lambda *_: None).values["trial"] for job in (short, long, short))
    assert again == alone


def test_a_reply_out_of_nan_is_refused_and_scores_nothing() -> None:
    """Greedy decoding takes NaN for the likeliest token: the first of the vocabulary, again and again."""
    broken = trained_for(tiny("llama", vocab_size=257), 2048)
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.nan
    said = r"returned NaN or infinite losses: while it wrote .*another --dtype.*, or leave this method out\.$"
    with pytest.raises(IncompatibleError, match=said):
        answered(broken, BYTES_AFTER_BOS, lengths=[1024], tasks=["niah_single_1"], samples=1)


@pytest.mark.parametrize(("bos", "trained"), [(False, 128), (True, 129), (True, 64)])
def test_a_window_without_room_for_the_reply_is_refused_before_anything_is_asked(bos: bool, trained: int) -> None:
    tokenizer = make_tokenizer(bos=bos)
    loaded = Checkpoint("tiny", tiny("llama", vocab_size=257), tokenizer)
    prompts = ruler_prompts(tokenizer, lengths=[1024], tasks=["niah_single_1"], samples=1)
    readers = find_readers(loaded, methods=["pi"], lengths=[1024], trained_length=trained)
    with pytest.raises(InvalidParameterError, match=rf"a window of {trained} tokens shows nothing.* from 1(29|30) on"):
        jobs_of(readers, prompts)
    assert jobs_of(find_readers(loaded, methods=["pi"], lengths=[1024], trained_length=130), prompts)


def test_averages_are_of_whole_lengths() -> None:
    def trial(task: str, length: int, index: int, score: float) -> RulerTrial:
        return RulerTrial(task, length, index, 1000, "", ("a",), score)

    trials = [trial("vt", 1024, 0, 100.0), trial("vt", 1024, 1, 40.0)]
    trials += [trial("cwe", 1024, 0, 10.0), trial("vt", 2048, 0, 5.0)]
    found = RulerResult(tuple(trials))
    assert found.averages == {1024: 40.0}
    assert found.relative_effective_length == 1024
    assert found.cells["vt", 1024].empty == 2
    assert found.cells["vt", 1024].interval == tuple(100 * bound for bound in wilson_interval(0.7, 2))


def test_a_chat_template_is_put_around_the_message(
    long_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def generate(ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        read.append(BYTES_AFTER_BOS.decode(ids[0]))
        return torch.cat([ids, ids[:, :1]], dim=1)

    monkeypatch.setattr(long_model, "generate", generate)
    with pytest.raises(InvalidParameterError, match="no chat template"):
        answered(long_model, BYTES_AFTER_BOS, lengths=[1024], tasks=["niah_single_1"], chat=True)
    template = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    monkeypatch.setattr(BYTES_AFTER_BOS, "chat_template", template)
    answered(long_model, BYTES_AFTER_BOS, lengths=[2048], tasks=["niah_single_1", "vt", "cwe"], samples=1, chat=True)
    needle, tracking, common = read
    assert re.fullmatch(r"<s>\[user\]A special magic.*provided text\?\[/\] The special magic.* is", needle, re.DOTALL)
    # The solved example stands in the same message for vt, and is a message of its own for cwe: as NVIDIA has it.
    assert tracking.count("[user]") == 1
    assert tracking.count("Question:") == 2
    assert [part.count("Question:") for part in common.split("[user]")] == [0, 1, 1]


@pytest.mark.parametrize(("bos", "template", "kept"), [(True, "<s>", 1), (True, "", 0), (False, "<s>", 1)])
def test_a_window_keeps_the_special_tokens_that_a_chat_template_writes(
    bos: bool, template: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma and Llama 3 read badly without their first token, so that truncation would look worse than it is."""
    tokenizer, loaded = make_tokenizer(bos=bos), trained_for(tiny("llama", vocab_size=257), 2048)
    tokenizer.chat_template = template + "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    read: list[list[int]] = []

    def generate(ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        read.append(ids[0].tolist())
        return torch.cat([ids, ids[:, :1]], dim=1)

    monkeypatch.setattr(loaded, "generate", generate)
    (prompt,) = ruler_prompts(tokenizer, lengths=[1024], tasks=["niah_single_1"], samples=1, chat=True)
    prompt.ask(loaded, None, "", lambda *_: None)
    prompt.ask(loaded, 400, "", lambda *_: None)
    whole, cut = read
    assert len(cut) == 400 - 128
    assert cut == [*whole[:kept], *whole[len(whole) - len(cut) + kept :]]
    assert prompt.least == kept + 128 + 1


def test_other_merges_and_other_words_are_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals tell them apart, though vocabulary, task and seed are the same."""

    def merged(*merges: tuple[str, str]) -> Any:
        made = make_tokenizer(bos=True)
        parts = json.loads(made.backend_tokenizer.to_str())
        parts["model"]["vocab"] |= {"th": 257, "he": 258}
        parts["model"]["merges"] = [*merges]
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), bos_token="<s>")

    def identities(tokenizer: Any) -> list[Any]:
        return [one.identity for one in ruler_prompts(tokenizer, lengths=[1024], tasks=["niah_single_1"], samples=2)]

    one, other = merged(("t", "h"), ("h", "e")), merged(("h", "e"), ("t", "h"))
    assert one.get_vocab() == other.get_vocab()
    assert identities(one) == identities(merged(("t", "h"), ("h", "e")))
    assert identities(one)[0] != identities(one)[1]
    assert identities(one) != identities(other)
    before = identities(one)
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"another {package}")
    assert identities(one) != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": []}, "nothing to measure"),
        ({"samples": 0}, "nothing to measure"),
        ({"lengths": [1024, 500]}, r"niah_single_1 needs at least [\d,]+ tokens.*found a length of 500"),
    ],
)
def test_bad_input(
    long_model: LlamaForCausalLM, change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_model, "generate", lambda *_, **__: pytest.fail("asked before everything was checked"))
    arguments: dict[str, object] = {"lengths": [1024], "tasks": ["niah_single_1"]} | change
    asked: Callable[..., object] = answered
    with pytest.raises(InvalidParameterError, match=message):
        asked(long_model, BYTES_AFTER_BOS, **arguments)
