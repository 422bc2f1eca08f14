"""``choose(..., search=True)``: gradients go on from the rounds, resumably, and are believed on other texts only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import ctxext
from ctxext.choosing import budget, choose, search
from ctxext.choosing.budget import Costs
from ctxext.choosing.choice import Choice
from ctxext.choosing.losses import MeasuredLosses
from ctxext.choosing.search import NEEDLE, Descent, State, hidden_key
from ctxext.choosing.texts import TextStretch, split_texts
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation.passkey import PasskeyPrompt
from ctxext.measuring.journal import Journal
from ctxext.measuring.statistics import PairedDifference
from ctxext.measuring.truncation import UNPATCHED
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.pi import PI
from ctxext.methods.yarn import YaRN
from ctxext.texts.corpus import TokenisedDocument
from tests._choices import on_disk, told
from tests._models import byte_model
from tests._programs import command

TARGET = 1024
TEXTS = [
    "".join(f"{name} {i}: the rain falls and {i * i % 97} rivers run.\n" for i in range(30))
    for name in ("One", "Two", "Three", "Four")
]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates, one text for each look and a few steps: the rest is the same, and longer."""
    monkeypatch.setattr(choose, "candidates", lambda *_: (YaRN(factor=2), PI(factor=2)))
    monkeypatch.setattr(budget, "ENOUGH", 1)
    monkeypatch.setattr(budget, "STEPS", 4)
    monkeypatch.setattr(budget, "FEWEST", 2)


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A random model whose attention is too sharp, so that another rotation and scale are better on every text."""
    found = byte_model()
    with torch.no_grad():
        for layer in found.model.layers:
            layer.self_attn.q_proj.weight *= 3
    return found


def searched(model: Any, tokenizer: PreTrainedTokenizerFast, **given: Any) -> Choice:
    asked: dict[str, Any] = {
        "texts": TEXTS,
        "target_length": TARGET,
        "keys": False,
        "search": True,
        "budget": "44 passes",
    } | given
    return ctxext.choose(model, tokenizer, **asked)


@pytest.mark.slow
def test_what_is_found_is_stock_and_judged_on_texts_that_nothing_was_chosen_on(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    choice = searched(model, bos_tokenizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not ctxext.describe(model).method
    found = choice.search
    assert found is not None
    assert [len(one.losses) for one in found.starts] == [4, 4]
    assert {one.name for one in found.starts} >= {"the trained frequencies"}
    assert found.starts[0].beyond <= found.starts[1].beyond
    parts = [set(found.searched_on), set(found.texts), set(choice.held_out.names)]
    assert len(set.union(*parts)) == sum(map(len, parts)), "texts for three things"
    name = f"searched from {found.starts[0].name}"
    method = choice.candidate(name).method
    assert isinstance(method, LongRoPE)
    assert method.short_factor == method.long_factor
    assert method.attention_factor is not None
    form = method.rope_parameters(choose.find_sites(Subject.of(model), 512)[0].spec)
    assert form["rope_type"] == "longrope"
    assert found.accepted, found.why_not
    assert (choice.finish.choice, choice.finish.runner_up) == (name, found.rival)
    assert choice.name == name
    assert choice.record["search"]["accepted"]
    assert any("was taken: on" in one for one in choice.to_dict()["sentences"])
    assert {one.name: one.exact for one in choice.runtimes}["transformers"]
    json.dumps(choice.to_dict())
    ctxext.patch(model, choice.method)
    assert ctxext.describe(model).target_length == TARGET


@pytest.mark.nightly  # test_choose has the same of a choice without a search
def test_killed_anywhere_the_same_call_goes_on_to_the_same_choice(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = searched(model, bos_tokenizer, folder=tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "cells.jsonl").read_text().splitlines()]
    steps = [place for place, line in enumerate(lines) if "state" in line]
    assert len(steps) == 8
    real, kept = Journal.append, 0

    def dying(self: Journal, line: Any) -> None:
        nonlocal kept
        kept += 1
        if kept == steps[2]:  # having kept as many lines as are before the third step
            raise KeyboardInterrupt
        real(self, line)

    monkeypatch.setattr(Journal, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        searched(model, bos_tokenizer, folder=tmp_path / "killed")
    assert not ctxext.describe(model).method
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    monkeypatch.setattr(Journal, "append", real)
    again = searched(model, bos_tokenizer, folder=tmp_path / "killed")
    assert told(again) == told(whole)
    assert (tmp_path / "killed" / "cells.jsonl").read_text().count("\n") == len(lines)
    assert told(searched(model, bos_tokenizer)) == told(whole), "the same seed finds the same"


@pytest.mark.slow
def test_where_nothing_can_be_gained_nothing_is_taken(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    with torch.no_grad():
        for layer in model.model.layers:  # every token sees all others alike, however they are rotated
            layer.self_attn.q_proj.weight.zero_()
    choice = searched(model, bos_tokenizer)
    found = choice.search
    assert found is not None
    assert not found.accepted
    assert "by two standard errors" in found.why_not
    assert choice.name == found.rival
    assert any("Nothing of it was taken" in one for one in choice.to_dict()["sentences"])
    course = choice.finish.course(f"searched from {found.starts[0].name}")
    assert course.dropped == found.why_not


@pytest.mark.parametrize(
    ("gain", "damage", "end", "keys", "says"),
    [
        ((-0.1, 0.01), (0.0, 0.01), (0.0, 0.01), (0.1, 0.1), ""),
        (
            (-0.1, 0.06),
            (0.0, 0.01),
            (0.0, 0.01),
            (0.1, 0.1),
            "not better than it by two standard errors: -0.100 ± 0.060",
        ),
        ((0.1, 0.01), (0.0, 0.01), (0.0, 0.01), (0.1, 0.1), "not better"),
        ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.1, 0.1), "not better"),
        ((-0.1, 0.01), (0.1, 0.01), (0.0, 0.01), (0.1, 0.1), "more damage inside the window"),
        (
            (-0.1, 0.01),
            (0.0, 0.01),
            (0.1, 0.01),
            (0.1, 0.1),
            "worse at the end of the texts than YaRN as published: +0.100",
        ),
        ((-0.1, 0.01), (0.0, 0.01), (0.0, 0.01), (9.0, 0.1), "1 of 2 hidden keys lost that it reads"),
        ((-0.1, 0.01), (0.0, 0.01), (0.0, 0.01), (9.0, 9.0), ""),
    ],
)
def test_the_rule_of_acceptance(
    gain: tuple[float, float],
    damage: tuple[float, float],
    end: tuple[float, float],
    keys: tuple[float, float],
    says: str,
) -> None:
    pairs = [PairedDifference(mean, error, 6400, 100) for mean, error in (gain, damage, end)]
    heard = {"new": (0.1, keys[0]), "old": (0.1, keys[1])}
    found = search.why_not(*pairs, heard, name="new", label="it")
    assert found.startswith(says) if says else found == ""


def test_adam_of_the_descent_is_that_of_one_optimiser() -> None:
    """State by state as a journal keeps it, against one run of torch's own with the same rates."""
    units, start = torch.tensor([1.0, 0.1, 0.5]).double(), torch.tensor([0.0, 1.0, 0.2]).double()
    descent = Descent(start=start, units=units, steps=12)
    goal = torch.tensor([1.0, 1.1, -0.3]).double()
    state, states = State.begin(3), []
    moved = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([moved], betas=(0.9, 0.95))
    for step in range(12):
        gradient = 2 * (descent.vector(state.at) - goal)
        kept = json.loads(json.dumps(vars(descent.after(state, step, float(step), gradient))))
        state = State(**{key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()})
        states.append(state)
        adam.zero_grad()
        (start + units * moved - goal).square().sum().backward()
        adam.param_groups[0]["lr"] = descent.rate(step)
        adam.step()
    assert torch.allclose(torch.tensor(state.at, dtype=torch.float64), moved, atol=1e-14)
    last = torch.tensor([one.at for one in states[9:]]).double().mean(0)
    assert torch.allclose(descent.result(states), start + units * last, atol=1e-12)
    assert [one.loss for one in states] == list(map(float, range(12)))
    assert descent.rate(0) < descent.rate(4) > descent.rate(11)


def test_a_hidden_key_counts_beside_the_text(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.tensor([bos_tokenizer(TEXTS[0]).input_ids[: TARGET + 1]])
    stretch = TextStretch(TokenisedDocument("one", ids, 1), "one")
    found = hidden_key(bos_tokenizer, stretch, length=TARGET, depth=0.25, seed=3)
    text = bos_tokenizer.decode(found.input_ids[0])
    key = text[-5:]
    assert text.count(key) == 2
    assert f"The pass key is{text[text.index(key) - 1]}{key}" in text
    assert "the rain falls" in text
    assert found.input_ids.shape[1] <= TARGET + 1
    assert found.weights.shape[1] == found.input_ids.shape[1] - 1
    assert found.weights.sum().item() == pytest.approx(1 + NEEDLE, rel=1e-5)
    assert found.weights[0, -1] > 100 * found.weights[0, 0] / 6


@pytest.mark.slow
def test_keys_are_a_part_of_it_only_where_the_model_reads_any(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    measured = MeasuredLosses._keys

    def keys(own: MeasuredLosses, names: Sequence[str], prompts: Sequence[PasskeyPrompt]) -> Any:
        asked.append((list(names), [(prompt.length, prompt.passkey.depth) for prompt in prompts]))
        return measured(own, names, prompts)

    monkeypatch.setattr(MeasuredLosses, "_keys", keys)
    choice = searched(model, bos_tokenizer, keys=True)
    assert choice.search is not None
    assert not choice.search.needles, "a random model reads none"
    (inside,) = [one for one in asked if UNPATCHED in one[0]]
    assert inside == ([UNPATCHED], [(512, 0.25)]), "at the start of a window models that read keys miss theirs"

    monkeypatch.setattr(search, "READ", math.inf)
    found = searched(model, bos_tokenizer, keys=True).search
    assert found is not None
    assert found.needles
    assert found.starts != choice.search.starts


@pytest.mark.slow
def test_a_key_that_cannot_be_asked_for_is_not_one_that_is_too_short(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = MeasuredLosses._keys

    def keys(own: MeasuredLosses, names: Sequence[str], prompts: Sequence[PasskeyPrompt]) -> Any:
        if UNPATCHED in names:
            raise InvalidParameterError("Out of memory at a key.")
        return measured(own, names, prompts)

    monkeypatch.setattr(MeasuredLosses, "_keys", keys)
    with pytest.raises(InvalidParameterError, match="Out of memory"):
        searched(model, bos_tokenizer, keys=True)


def test_a_part_of_the_texts_is_kept_back() -> None:
    def document(name: str, tokens: int) -> TokenisedDocument:
        own = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(ord(name[0])))
        return TokenisedDocument(name, own, 0)

    eight = split_texts([document(str(n), 250) for n in range(8)], tokens=100, seed=0, search=True)
    named = [{one.document for one in part} for part in (eight.choosing, eight.accepting, eight.held_out)]
    assert [len(names) for names in named] == [2, 1, 5]
    assert len(set.union(*named)) == 8
    three = split_texts([document(str(n), 100) for n in range(3)], tokens=100, seed=0, search=True)
    assert [len(part) for part in (three.choosing, three.accepting, three.held_out)] == [1, 1, 1]
    one = split_texts([document("one", 800)], tokens=100, seed=0, search=True)
    assert [len(part) for part in (one.choosing, one.accepting, one.held_out)] == [2, 1, 5]
    with pytest.raises(InvalidParameterError, match="third part of the texts"):
        split_texts([document(str(n), 100) for n in range(2)], tokens=100, seed=0, search=True)


def test_the_budget_is_kept_and_shared() -> None:
    model = {"trained": 512, "length": 1024, "judged": 90, "others": 10, "windows": (256, 512), "turning_point": 4096}
    costs = Costs(**model, choosing=5, accepting=2, held_out=5, keys=True)
    most = costs.most(*costs.sizes(None))
    for allowed in (None, most, most - 10, 60.0):
        sizes, search = costs.sizes(allowed)
        assert search is not None
        assert costs.most(sizes, search) <= (allowed or most) + 1e-9
        assert budget.FEWEST <= search.steps <= budget.STEPS
        assert allowed or search.steps == budget.STEPS
    for allowed in (1.0, 20.0):
        with pytest.raises(InvalidParameterError, match="budget is too small"):
            costs.sizes(allowed)


@pytest.mark.slow
def test_what_cannot_be_searched_is_said_before_the_first_pass(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InvalidParameterError, match="third part of the texts"):
        searched(model, bos_tokenizer, texts=[text[:1100] for text in TEXTS[:2]])
    with pytest.raises(InvalidParameterError, match="too small"):
        searched(model, bos_tokenizer, budget="8 passes")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(IncompatibleError, match="quantised"):
        searched(model, bos_tokenizer)


@pytest.mark.slow
def test_the_command_searches_and_shows_it(
    model: LlamaForCausalLM, bos_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    asked = on_disk(model, bos_tokenizer, TEXTS[:4], tmp_path)
    asked += [
        "--target",
        TARGET,
        "--dtype",
        "fp32",
        "--no-passkey",
        "--search",
        "--budget",
        "44 passes",
    ]
    asked += ["-o", tmp_path / "choice.json", "-o", tmp_path / "choice.md", "-o", tmp_path / "choice.png"]
    done = command(*asked, "--save", tmp_path / "extended")
    assert done.exit_code == 0, done.output
    assert "A search of the frequencies took 4 steps" in done.output
    page = (tmp_path / "choice.md").read_text(encoding="utf-8")
    assert "## The search" in page
    found = json.loads((tmp_path / "choice.json").read_text(encoding="utf-8"))
    assert found["search"]["starts"][0]["losses"]
    saved = json.loads((tmp_path / "extended" / "config.json").read_text(encoding="utf-8"))
    assert saved["ctxext"]["chosen"]["search"]["steps"] == 4
    assert saved["rope_parameters"]["rope_type"] == "longrope"
    assert saved["rope_parameters"] == found["rope_parameters"]
