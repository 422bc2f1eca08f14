"""The prompt's construction, and the teacher-forced match against real greedy decoding."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.errors import InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.passkey import PasskeyResult, PasskeyTrial, build, make_prompts, measure, prepare
from ctxext.evaluation.report.retrieval import passkey_panel
from ctxext.evaluation.trials import trials_of, without
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.statistics import wilson_interval
from ctxext.texts.haystack import of_text
from tests._models import tiny

STORY = "".join(f" Day {day}: Mr. A. walked {day % 7} miles. Why? Nobody knew!" for day in range(60))


@pytest.mark.parametrize("length", [400, 401, 537, 900])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_length_depth_and_key(tokenizer: PreTrainedTokenizerFast, length: int, depth: float) -> None:
    prompt = build(tokenizer, length=length, depth=depth)
    text = tokenizer.decode(prompt.prompt)
    assert prompt.length == len(prompt.prompt) == length
    assert len(prompt.key) == 5
    assert text.count(prompt.key) == 1
    start = prompt.key_position
    assert torch.equal(prompt.prompt[start : start + len(prompt.answer)], prompt.answer)
    assert prompt.distance == length - start
    assert text.endswith("The pass key is")
    fixed = len(passkey.OPENING) + len(passkey.KEY_BEFORE)
    noise = length - fixed - len(prompt.answer) - len(passkey.KEY_AFTER) - len(passkey.QUESTION)
    # The key stands between two sentences, so the depth is met to within half a sentence of at most 30 bytes.
    assert abs((start - fixed) / noise - depth) <= 20 / noise


def test_seeds_make_cells_that_differ_and_repeat(tokenizer: PreTrainedTokenizerFast) -> None:
    cells = [(500, 0.5, 0), (500, 0.5, 1), (500, 0.25, 0), (501, 0.5, 0)]
    keys = [build(tokenizer, length=n, depth=d, seed=s).key for n, d, s in cells]
    assert len(set(keys)) == 4
    assert keys == [build(tokenizer, length=n, depth=d, seed=s).key for n, d, s in cells]


def test_special_tokens_stand_in_front_and_count(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build(bos_tokenizer, length=450, depth=0.5)
    assert prompt.length == 450
    assert prompt.prompt[0] == bos_tokenizer.bos_token_id
    assert (prompt.prompt == bos_tokenizer.bos_token_id).sum() == 1
    assert bos_tokenizer.bos_token_id not in prompt.answer


def test_no_space_is_doubled_where_a_tokenizer_puts_one_before_what_it_is_given(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """As Llama 2's does, whose digits behind two spaces are not what it would write itself."""
    spaced = copy.deepcopy(tokenizer)
    spaced.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    for haystack in (None, of_text(spaced, "story", STORY)):
        prompt = build(spaced, length=600, depth=0.5, haystack=haystack)
        assert "  " not in spaced.decode([*prompt.prompt, *prompt.answer])
    assert spaced.decode(prompt.prompt).startswith(" A pass key"), "a beginning stays what the tokenizer makes of it"


def test_build_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidParameterError, match=r"at least \d+ tokens .* found length=100"):
        build(tokenizer, length=100, depth=0.5)
    with pytest.raises(InvalidParameterError, match=r"depth must be from 0 to 1, found 1\.5"):
        build(tokenizer, length=500, depth=1.5)


def greedy(model: LlamaForCausalLM, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    return model.generate(prompt[None], max_new_tokens=steps, do_sample=False, pad_token_id=0)[0, len(prompt) :]


def test_teacher_forcing_is_greedy_decoding(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """For keys that the model does and does not say: make the answer what greedy decoding says, or nearly that."""
    outcomes = set()
    for seed in range(3):
        prompt = build(tokenizer, length=400, depth=0.5, seed=seed)
        said = greedy(model, prompt.prompt, 6)
        wrong_first, wrong_last = said.clone(), said.clone()
        wrong_first[0] = (said[0] + 1) % 256
        wrong_last[-1] = (said[-1] + 1) % 256
        for answer in (prompt.answer, said, wrong_first, wrong_last):
            asked = passkey.Passkey(prompt.prompt, answer, prompt.key, prompt.depth, prompt.key_position)
            trial = measure(model, asked)
            assert trial.correct == torch.equal(greedy(model, prompt.prompt, len(answer)), answer)
            outcomes.add(trial.correct)
    assert outcomes == {True, False}


SETS = {"short_factor": (1.0,) * 8, "long_factor": (4.0,) * 8}
DYNAMIC: dict[str, tuple[str | None, dict[str, Any]]] = {
    "yarn": ("yarn", {}),
    "dynamic_ntk": ("dynamic_ntk", {}),
    "dynamic_ntk, doubling": ("dynamic_ntk", {"growth": "doubling"}),
    "dynamic_yarn": ("dynamic_yarn", {}),
    "longrope": ("longrope", SETS),
    "longrope by its config": (
        None,
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32} | SETS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_what_a_method_writes_is_what_it_is_judged_to_know(name: str) -> None:
    """Greedy decoding token by token, each with the positions of the text so far; inside and across the window."""
    method, options = DYNAMIC[name]
    rope = {"rope_type": "default"} if method else {k: list(v) if k in SETS else v for k, v in options.items()}
    model = tiny(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=32,
        initializer_range=0.3,
        rope_parameters={"rope_theta": 10000.0} | rope,
    ).eval()
    if method:
        ctxext.patch(model, method, factor=4.0, **options)
    judged = []
    for tokens in (20, 28, 30, 31, 32, 62, 100):
        for seed in range(2):
            prompt = torch.randint(1, 97, (tokens,), generator=torch.Generator().manual_seed(1000 * tokens + seed))
            written, losses = prompt, []
            for _ in range(5):
                with torch.no_grad():
                    logits = model(written[None], use_cache=False).logits[0, -1]
                losses.append(-logits.double().log_softmax(-1).max())
                written = torch.cat([written, logits.argmax()[None]])
            if method:
                assert torch.equal(written[tokens:], greedy(model, prompt, 5))
            right = passkey.Passkey(prompt, written[tokens:], "12345", 0.5, 3)
            wrong = replace(right, answer=torch.cat([written[tokens:-1], (written[-1:] + 1) % 97]))
            trial = measure(model, right)
            assert trial.loss == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)
            judged.append((trial.correct, measure(model, wrong).correct))
    assert set(judged) == {(True, False)}


def test_loss_is_that_of_the_answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build(tokenizer, length=400, depth=0.0)
    tokens = torch.cat([prompt.prompt, prompt.answer])
    with torch.no_grad():
        log_probabilities = model(tokens[None]).logits[0].double().log_softmax(dim=-1)
    expected = [-log_probabilities[399 + i, token].item() for i, token in enumerate(prompt.answer)]
    assert measure(model, prompt).loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def run(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, **options: Any) -> PasskeyResult:
    survey = prepare(Checkpoint("tiny", model, tokenizer), **options)
    survey.measure(survey.begin())
    (found,) = trials_of(PasskeyResult, survey, haystack="noise")
    return found


def test_run_covers_the_grid(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    found = run(model, tokenizer, lengths=[400, 410], depths=[0.0, 1.0], trials=2, seed=5)
    cells = [(trial.length, trial.depth, trial.seed) for trial in found.trials]
    assert cells == [(n, d, s) for n in (400, 410) for d in (0.0, 1.0) for s in (5, 6)]
    # A length is that of prompt and answer, for which eight tokens are left.
    prompt = build(tokenizer, length=402, depth=1.0, seed=6)
    assert found.trials[-1] == replace(measure(model, prompt, seed=6), length=410)
    assert found.longer_than(400).trials == found.trials[4:]
    with pytest.raises(InvalidParameterError, match="no cell"):
        run(model, tokenizer, lengths=[400], depths=[])


def test_the_last_tokens_of_a_prompt(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    (asked,) = make_prompts(bos_tokenizer, [508], [0.8])
    whole = asked.passkey
    cut = without(whole.prompt, asked.dropped(308), prefix=asked.prefix)
    assert cut.tolist() == [whole.prompt[0].item(), *whole.prompt[-299:].tolist()]
    place = whole.key_position - asked.dropped(308)
    assert torch.equal(cut[place : place + 6], whole.answer)
    assert (asked.dropped(508), asked.dropped(None)) == (0, 0)


def test_lengths_that_the_model_is_not_meant_for(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidParameterError, match=r"600 tokens are more than the 512 .* is trained for"):
        run(model, tokenizer, lengths=[400, 600], depths=[0.5])
    ctxext.patch(model, "yarn", factor=2)
    assert len(run(model, tokenizer, lengths=[600], depths=[0.5]).trials) == 1
    with pytest.raises(InvalidParameterError, match=r"1,100 tokens .* 1,024 .* was extended to, by yarn"):
        run(model, tokenizer, lengths=[1100], depths=[0.5])


def test_wilson_interval_by_hand() -> None:
    """Newcombe's table of 1998, method 3: 81/263, 15/148, 0/20, 1/29."""
    for correct, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(correct / trials, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(1.0, 1)[1] == 1.0
    for mean, trials in ((0.5, 0), (1.1, 3)):
        with pytest.raises(InvalidParameterError, match="at least 1 trial"):
            wilson_interval(mean, trials)


def test_a_depth_that_is_given_twice_is_asked_once(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(make_prompts(tokenizer, [500, 600, 500], [0.5])) == 2, "nor a length"
    names = [prompt.name for prompt in make_prompts(tokenizer, [500], [0.5, 0.5, 0.0, 0.004, 1 / 8, 0.5])]
    assert names == [f"500 tokens at {depth}%" for depth in ("50", "0", "0.4", "12.5")]
    panel = passkey_panel("", [(0.0, 512, 1, 1, 0.1), (0.004, 512, 0, 1, 5.0)], 256)
    assert "50% at 512" in panel.words


def test_cells_are_sums() -> None:
    made = [(900, 0.5, True, 1.0), (400, 1.0, True, 2.0), (400, 0.0, True, 1.0), (400, 0.0, False, 4.0)]
    trials = tuple(PasskeyTrial(n, depth, 300, 0, "12345", correct, loss) for n, depth, correct, loss in made)
    found = PasskeyResult(trials)
    assert (found.accuracy, found.loss) == (0.75, 2.0)
    cells = [(*place, cell.correct, len(cell.trials), cell.loss) for place, cell in found.cells.items()]
    assert cells == [(0.0, 400, 1, 2, 2.5), (1.0, 400, 1, 1, 2.0), (0.5, 900, 1, 1, 1.0)]
    assert found.cells[0.0, 400].accuracy == 0.5
    assert found.cells[0.0, 400].interval == tuple(100 * bound for bound in wilson_interval(0.5, 2))
    assert found.only(length=400).accuracy == pytest.approx(2 / 3)
