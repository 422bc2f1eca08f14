"""The prompt's construction, and the teacher-forced match against real greedy decoding."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ctxext.errors import InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.passkey import PasskeyResult, PasskeyTrial, build, measure, run


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


def test_loss_is_that_of_the_answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build(tokenizer, length=400, depth=0.0)
    tokens = torch.cat([prompt.prompt, prompt.answer])
    with torch.no_grad():
        log_probabilities = model(tokens[None]).logits[0].double().log_softmax(dim=-1)
    expected = [-log_probabilities[399 + i, token].item() for i, token in enumerate(prompt.answer)]
    assert measure(model, prompt).loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_run_covers_the_grid(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    seen: list[PasskeyTrial] = []
    found = run(model, tokenizer, lengths=[400, 410], depths=[0.0, 1.0], trials=2, seed=5, on_trial=seen.append)
    cells = [(trial.length, trial.depth, trial.seed) for trial in found.trials]
    assert cells == [(n, d, s) for n in (400, 410) for d in (0.0, 1.0) for s in (5, 6)]
    assert tuple(seen) == found.trials
    with pytest.raises(InvalidParameterError, match="no cell"):
        run(model, tokenizer, lengths=[400], depths=[])


def test_accuracy_and_loss_are_means() -> None:
    trials = tuple(
        PasskeyTrial(400, 0.0, 300, 0, "12345", correct, loss) for correct, loss in [(True, 1.0), (False, 4.0)]
    )
    assert PasskeyResult(trials).accuracy == 0.5
    assert PasskeyResult(trials).loss == 2.5
