"""growth="request": one length for each row of a call of generate(), from its first token to its last."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ctxext
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.methods.longrope import LongRoPE
from tests._models import logits, tiny, tokens
from tests._programs import ROOT, ran
from tests.caches import _requests
from tests.caches._requests import EVERY, LONGROPE, METHODS, NEW, PROMPT, TOTAL, build, padded, prepared
from tests.walk.tiny import TRAINED_LENGTH

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

rotary = pytest.mark.parametrize("method", METHODS)
NIGHT = {("llama", "dynamic_yarn"), ("llama", "dynamic_pi"), ("gemma3n_text", "dynamic_pi")}  # like others of the list
every = pytest.mark.parametrize(
    ("model_type", "method"), [pytest.param(*case, marks=[pytest.mark.nightly] * (case in NIGHT)) for case in EVERY]
)


def generated(model: Any, ids: Tensor, **options: Any) -> Tensor:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    found: Tensor = model.generate(ids, attention_mask=mask, **GREEDY | options)
    return found


@contextmanager
def read_by(model: PreTrainedModel) -> Iterator[list[int]]:
    """Tokens per row of each pass of the decoder."""
    widths: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input_ids")
        widths.append((kwargs["inputs_embeds"] if given is None else given).shape[1])

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    yield widths
    handle.remove()


@pytest.mark.slow
@rotary
def test_a_short_row_is_the_plain_models_bit_for_bit_beside_a_long_one(method: str) -> None:
    ids, mask = padded()
    options = GREEDY | {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    plain, found = (model.generate(ids, **options) for model in (tiny(), build(method)))
    if method != "longrope":  # its scale of cos and sin is that of the long texts, also for short ones
        assert torch.equal(found.sequences[1], plain.sequences[1])
        assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(found.logits, plain.logits, strict=True))
    assert not torch.equal(found.logits[0][0], plain.logits[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["doubling", "request"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_of_another_dtype_counts_tokens(dtype: torch.dtype, growth: str) -> None:
    """As transformers takes it; a sum in bfloat16 would be rounded from 257 tokens on."""
    model = ctxext.patch(tiny(), "dynamic_yarn", factor=16.0, growth=growth, trained_length=TRAINED_LENGTH)
    for ids, mask in (padded(), padded(270, 257)):
        expected = generated(model, ids, attention_mask=mask)
        assert torch.equal(generated(model, ids, attention_mask=mask.to(dtype)), expected)
        expected = generated(model, ids[1:], attention_mask=mask[1:])
        assert torch.equal(generated(model, ids[1:], attention_mask=mask[1:].to(dtype)), expected)


@every
def test_decoding_is_one_full_forward_and_reads_each_token_once(model_type: str, method: str) -> None:
    model = build(method, model_type)
    ids, mask = padded()
    with read_by(model) as widths:
        answer = model.generate(ids, attention_mask=mask, **GREEDY, output_logits=True, return_dict_in_generate=True)
    assert widths == [PROMPT] + [1] * (NEW - 1)
    for row, start in enumerate((0, PROMPT - 20)):
        whole = answer.sequences[row : row + 1, start:-1]
        expected = logits(model, whole, ctxext_length=TOTAL - start)[0, -NEW:]
        torch.testing.assert_close(torch.stack(answer.logits)[:, row], expected, atol=3e-4, rtol=0)


@pytest.mark.nightly
def test_one_graph_serves_the_steps_of_all_requests() -> None:
    """In a process of its own: the checker of shapes that tests run under cannot be compiled."""
    kinds = [*METHODS, "gemma3_text", "gemma3n_text"]
    ran(["-m", "tests.contracts.compiled_request_program", *kinds], ROOT, code=0)


def test_a_call_is_checked_before_its_graph() -> None:
    model, ids = build("dynamic_ntk"), tokens(TOTAL + 1)
    cache = StaticCache(config=model.config, max_cache_len=2 * TOTAL)
    _requests.stepped(model, ids[:, :-1], cache, ctxext_length=TOTAL)
    with pytest.raises(InvalidParameterError, match="A text of 73 tokens is longer than the 72 declared for it"):
        prepared(model, ids, cache, ctxext_length=TOTAL)
    says = r"ctxext_length=\[72, 72\] has 2 numbers, but the batch has 1 rows"
    with pytest.raises(InvalidParameterError, match=says):
        prepared(model, ids, cache, ctxext_length=[TOTAL, TOTAL])
    again = prepared(model, ids, copy.deepcopy(cache), ctxext_length=TOTAL + 9)  # its tokens were told less
    assert again["input_ids"].shape == ids.shape
    ctxext.unpatch(model)
    ctxext.patch(model, "dynamic_pi", factor=4.0, growth="request", trained_length=TRAINED_LENGTH)
    again = prepared(model, ids, cache, ctxext_length=TOTAL + 9)
    assert again["input_ids"].shape == ids.shape


@pytest.mark.slow
@rotary
def test_a_cache_of_an_earlier_call_goes_on_where_its_length_holds(method: str) -> None:
    model, ids = build(method), tokens(TOTAL + 8)
    cache = DynamicCache(config=model.config)
    with read_by(model) as widths:
        first = generated(model, ids[:, :20], past_key_values=cache)
        second = generated(model, torch.cat([first, ids[:, :8]], 1), past_key_values=cache)
    assert widths[NEW] == 9  # inside the window, 8 new tokens and the last of the answer
    again = torch.cat([second, ids[:, :TRAINED_LENGTH]], 1)
    with read_by(model) as widths:
        third = generated(model, again, past_key_values=cache)
    assert torch.equal(third, generated(model, again, use_cache=False))
    assert widths == [again.shape[1]] + [1] * (NEW - 1)  # read again at once, and then no more


@pytest.mark.slow
@every
def test_a_loop_of_ones_own_declares_the_length_in_its_first_call(model_type: str, method: str) -> None:
    model, ids = build(method, model_type), tokens(TOTAL)
    whole = logits(model, ids, ctxext_length=TOTAL)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(ids[:, :40], past_key_values=cache, ctxext_length=TOTAL).logits]
        parts += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(40, TOTAL)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=3e-4, rtol=0)
        if method != "longrope":  # its second set is for any length
            with pytest.raises(IncompatibleError, match=r"73 tokens other positions .* pass ctxext_length=<tokens"):
                model(ids[:, :1], past_key_values=copy.deepcopy(cache))
            with pytest.raises(IncompatibleError, match=r"73 tokens other positions than its 72 cached tokens"):
                model(ids[:, :1], past_key_values=cache, ctxext_length=TOTAL + 9)
        cache = DynamicCache(config=model.config)
        model(ids[:, :40], past_key_values=cache)
        with pytest.raises(IncompatibleError, match="65 tokens other positions than its 40 cached tokens"):
            model(ids[:, 40 : TRAINED_LENGTH + 1], past_key_values=cache)


@every
def test_a_plain_call_counts_its_own_tokens_or_takes_a_length_for_each_row(model_type: str, method: str) -> None:
    model, ids = build(method, model_type), tokens(TOTAL, rows=2)
    assert torch.equal(logits(model, ids), logits(model, ids, ctxext_length=TOTAL))
    assert torch.equal(logits(model, ids), logits(model, ids, ctxext_length=[TOTAL, TOTAL]))
    for number in (torch.tensor(TOTAL), np.int64(TOTAL), np.full(2, TOTAL)):
        assert torch.equal(logits(model, ids), logits(model, ids, ctxext_length=number))
    for number in (str(TOTAL), float(TOTAL)):
        with pytest.raises(InvalidParameterError, match="ctxext_length must be a number of tokens"):
            logits(model, ids, ctxext_length=number)
    found = logits(model, ids, ctxext_length=[TOTAL, 2 * TOTAL])
    for row, length in enumerate((TOTAL, 2 * TOTAL)):
        expected = logits(model, ids[row : row + 1], ctxext_length=length)
        torch.testing.assert_close(found[row : row + 1], expected, atol=3e-4, rtol=0)
    with pytest.raises(InvalidParameterError, match=r"ctxext_length=\[72\] has 1 numbers, but the batch has 2 rows"):
        logits(model, ids, ctxext_length=[TOTAL])
    if method != "longrope":  # its second set is for any length
        with pytest.raises(InvalidParameterError, match="A text of 72 tokens is longer than the 70 declared for it"):
            logits(model, ids, ctxext_length=70)
        cache = DynamicCache()
        model(ids[:, :60], past_key_values=cache, ctxext_length=70)
        with pytest.raises(InvalidParameterError, match="A text of 72 tokens is longer than the 70 declared for it"):
            model(ids[:, 60:], past_key_values=cache, ctxext_length=70)


@every
def test_a_shard_has_the_positions_of_the_whole_text(model_type: str, method: str) -> None:
    model, exact = build(method, model_type), tiny(model_type)
    chosen = METHODS[method]
    chosen = {"method": replace(LONGROPE, growth="exact")} if method == "longrope" else chosen | {"growth": "exact"}
    ctxext.patch(exact, trained_length=TRAINED_LENGTH, **chosen)
    part: dict[str, Any] = {"ctxext_length": 96}
    if model_type != "bloom":
        part["position_ids"] = torch.arange(40, TOTAL)[None]
    assert torch.equal(logits(model, tokens(TOTAL - 40), **part), logits(exact, tokens(TOTAL - 40), **part))


def test_a_learned_prefix_fits_into_the_window_or_is_refused() -> None:
    torch.manual_seed(0)
    learned = get_peft_model(tiny(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    plain = tokens(20)
    for _ in range(NEW):  # PEFT's own generate() leaves the prefix out since transformers 5.24
        plain = torch.cat([plain, logits(learned, plain)[:, -1:].argmax(-1)], 1)
    ctxext.patch(learned, **METHODS["dynamic_yarn"])
    given = {"input_ids": tokens(20), "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    assert torch.equal(learned.generate(**given, **GREEDY), plain)
    for length, error, says in (
        (TRAINED_LENGTH - NEW - 1, InvalidParameterError, "Declare all tokens, those of a learned prompt included"),
        (PROMPT, IncompatibleError, "unless PEFT put a learned prompt into it"),
    ):
        given = {"input_ids": tokens(length), "attention_mask": torch.ones(1, length, dtype=torch.long)}
        with pytest.raises(error, match=says):
            learned.generate(**given, **GREEDY)


@rotary
def test_what_is_said_of_it(method: str) -> None:
    notes = " ".join(ctxext.describe(build(method)).notes)
    assert "generate() takes prompt + max_new_tokens and recomputes nothing" in notes
    assert ("Plain transformers loads it, but mixes positions" in notes) == (method in ("dynamic_ntk", "longrope"))


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["exact", "doubling", "request"])
def test_guidance_is_right_or_refused_before_the_first_token(growth: str) -> None:
    """It reads a negative prompt through a cache that nothing recomputes; without one, the last token of the prompt."""
    model = ctxext.patch(tiny(), "dynamic_ntk", factor=2.0, growth=growth)
    how: dict[str, Any] = {"guidance_scale": 2.0, "max_new_tokens": 6}
    with read_by(model) as widths:
        for negative, new in ((2 * TRAINED_LENGTH - 2, 6), (TRAINED_LENGTH - 4, 6), (1, TRAINED_LENGTH + 1)):
            says = r"changes positions between \d+ and \d+ tokens\. guidance_scale"
            with pytest.raises(IncompatibleError, match=says):
                generated(model, tokens(9), **how | {"negative_prompt_ids": tokens(negative), "max_new_tokens": new})
    assert widths == []
    negative = {"negative_prompt_ids": tokens(TRAINED_LENGTH - 5)}
    plain, found = (generated(either, tokens(9), **how, **negative) for either in (tiny(), model))
    assert torch.equal(found, plain)
    if growth == "doubling":  # between two doublings no position changes
        negative = {"negative_prompt_ids": tokens(TRAINED_LENGTH + 1)}
        cached, anew = (generated(model, tokens(9), **how, **negative, use_cache=use) for use in (True, False))
        assert torch.equal(cached, anew)
    long = how | {"max_new_tokens": TRAINED_LENGTH + 1, "use_cache": False}
    assert generated(model, tokens(9), **long).shape[1] == 74


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["exact", "doubling"])
def test_positions_that_change_within_a_padded_prompt_are_refused(growth: str) -> None:
    """Padding is no token: what several tokens are verified with changes where the text is as long, not its slots."""
    model, slots = ctxext.patch(tiny(), "dynamic_ntk", factor=4.0, growth=growth), 2 * TRAINED_LENGTH + 8
    ids, mask = tokens(slots), torch.ones(1, slots, dtype=torch.long)
    mask[:, : slots - TRAINED_LENGTH + 4] = 0  # four tokens below the border, and far from the next one by its slots
    ways: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny()}]
    for how in ways:
        with pytest.raises(IncompatibleError, match=r"positions between 60 and 68 tokens\. Assisted decoding"):
            generated(model, ids, attention_mask=mask, **how | {"max_new_tokens": 8})
        inside = {"attention_mask": mask, "max_new_tokens": 4}  # no slot is a token of the text
        assert torch.equal(generated(model, ids, **inside, **how), generated(model, ids, **inside, use_cache=False))
    negative = {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask, "guidance_scale": 2.0}
    with pytest.raises(IncompatibleError, match=r"positions between 60 and 67 tokens\. guidance_scale"):
        generated(model, tokens(9), **negative, max_new_tokens=8)


def test_an_equal_pair_of_sets_follows_no_length() -> None:
    static = LongRoPE(short_factor=_requests.LONG_SET, long_factor=_requests.LONG_SET, factor=4.0, growth="request")
    assert not static.dynamic
    model = ctxext.patch(tiny(), static)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("growth", ["exact", "request"])
def test_a_part_that_is_patched_alone_is_refused_by_the_generate_of_the_whole(growth: str) -> None:
    """Which recomputes nothing, as it knows of no positions that follow a length."""
    model = tiny()
    ctxext.patch(model.model, "dynamic_ntk", factor=4.0, growth=growth)
    with pytest.raises(IncompatibleError, match=r"The patched model's generate\(\) recomputes the cache"):
        model.generate(tokens(TRAINED_LENGTH - 2), **GREEDY)
