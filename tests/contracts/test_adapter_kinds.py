"""Every kind of PEFT adapter: ``generate`` gives the tokens of one pass after another, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

import ctxext
from ctxext.errors import IncompatibleError, PatchStateError
from tests._models import logits, on_recent, tiny, tokens
from tests._products import some
from tests.walk.tiny import TRAINED_LENGTH

METHODS = ("yarn", "self_extend", "dynamic_ntk")
NEW = 4
# Where PEFT's defaults do not fit a model of this width, or name what a user chooses.
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_layers": 1, "adapter_len": 4},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "FROD": {"progressbar": False},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "OFT": {"oft_block_size": 4},
    "P_TUNING": {"encoder_hidden_size": 16},
    "POLY": {"n_tasks": 1, "n_skills": 2},
    "TRAINABLE_TOKENS": {"token_indices": [41, 50, 77]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
}
PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")
# These have no tokens of one pass to compare with: LILY averages over all tokens of a call, and a model with XLORA
# adapters has no cache.
APART = ("LILY", "XLORA", "SHADOW")
KINDS = [kind.value for kind in PeftType if kind.value not in APART]


def adapter(kind: str, **more: Any) -> Any:
    """A PEFT config of this kind for a tiny causal model."""
    given = OPTIONS.get(kind, {}) | ({"num_virtual_tokens": 4} if kind in {*PREFIXES, *PROMPTS} - {"CPT"} else {})
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**{"task_type": "CAUSAL_LM"} | given | more)


def drawn(model: Any) -> Any:
    """The model, with every weight of its adapter drawn at random: most fresh ones do nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_(0, 2.0, generator=generator)
    return model.eval()


def adapted(base: PreTrainedModel, kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return drawn(get_peft_model(base, adapter(kind, **more)))


def tasks(kind: str) -> dict[str, Tensor]:
    return {"task_ids": torch.zeros(1, dtype=torch.long)} if kind in ("MULTITASK_PROMPT_TUNING", "POLY") else {}


def by_one_pass(model: Any, ids: Tensor, **given: Any) -> Tensor:
    for _ in range(NEW):
        last = logits(model, ids, attention_mask=torch.ones_like(ids), **given)[:, -1:]
        ids = torch.cat([ids, last.argmax(-1)], 1)
    return ids


def generated(model: Any, ids: Tensor, **given: Any) -> Tensor:
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found: Tensor = model.generate(input_ids=ids, **{"attention_mask": torch.ones_like(ids)} | options | given)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", some(KINDS, "PREFIX_TUNING", "PROMPT_TUNING", "LORA"))
def test_generate_is_one_pass_after_another(kind: str, method: str) -> None:
    dynamic, virtual = method == "dynamic_ntk", kind in (*PREFIXES, *PROMPTS)
    ids = tokens(TRAINED_LENGTH - 2)
    for patched_first in (False, True):
        base = tiny()
        if patched_first:
            model = adapted(ctxext.patch(base, method, factor=4.0), kind)
        else:
            model = ctxext.patch(adapted(base, kind), method, factor=4.0)
        if not patched_first and kind == "ADAPTION_PROMPT" and method == "self_extend":
            with pytest.raises(PatchStateError, match="adapter that wraps or copies attention layers is added after"):
                generated(model, ids)
        elif dynamic and virtual:
            with pytest.raises(IncompatibleError, match=r"learned by PEFT|unless PEFT put a learned prompt"):
                generated(model, ids, **tasks(kind))
        else:
            expected = by_one_pass(model, ids, **tasks(kind))
            assert torch.equal(generated(model, ids, **tasks(kind)), expected)
            if virtual:
                assert not torch.equal(generated(model.get_base_model(), ids), expected), "the prompt matters"


def test_every_kind_is_one_of_these() -> None:
    assert {kind.value for kind in PeftType} == {*KINDS, *APART}
    assert {*PREFIXES, *PROMPTS, *OPTIONS} <= set(KINDS)
    learned = {kind for kind in KINDS if adapter(kind).is_prompt_learning}
    assert learned == {*PREFIXES, *PROMPTS}, "ADAPTION_PROMPT is one by its name alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [on_recent("PREFIX_TUNING", reason="stock models fail without a cache"), "PROMPT_TUNING"]
)
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_rows_beams_and_a_prompt_in_chunks(kind: str, method: str) -> None:
    model = ctxext.patch(adapted(tiny(), kind), method, factor=4.0)
    ids = tokens(TRAINED_LENGTH - 2, rows=2)
    for row in (0, 1):
        alone = by_one_pass(model, ids[row : row + 1])
        assert torch.equal(generated(model, ids)[row : row + 1], alone)
    options: dict[str, Any] = {"num_beams": 3}
    assert torch.equal(generated(model, ids, **options), generated(model, ids, **options, use_cache=False))
    chunked = generated(model, ids, prefill_chunk_size=16)
    assert torch.equal(chunked, generated(model, ids))


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_unpatch_gives_back_what_peft_took(kind: str) -> None:
    model = adapted(tiny(), kind)
    before = model.base_model_prepare_inputs_for_generation
    ctxext.patch(model, "dynamic_ntk", factor=4.0)
    ids = tokens(TRAINED_LENGTH - 2)
    with pytest.raises(IncompatibleError, match=r"learned by PEFT|unless PEFT put a learned prompt"):
        generated(model, ids)
    base = model.get_base_model()
    assert torch.equal(generated(base, ids), by_one_pass(base, ids)), "without its prompt, the base recomputes still"
    ctxext.unpatch(model)
    assert model.base_model_prepare_inputs_for_generation == before
    assert not base._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_an_encoder_decoder_reads_its_prompt(kind: str) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    base = T5ForConditionalGeneration(config).eval()
    model = adapted(base, kind, task_type="SEQ_2_SEQ_LM")
    ctxext.patch(model, "stretch_buckets", factor=4.0, trained_length=128)
    ids, start = tokens(40), torch.zeros(1, 1, dtype=torch.long)
    written = start
    for _ in range(NEW):
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": written}
        with torch.no_grad():
            found = model(**given, use_cache=False)
        written = torch.cat([written, found.logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated(model, ids), written)


def test_an_adapter_with_a_decoder_of_its_own_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"'default' \(SHADOW\) runs a decoder that ctxext does not extend"):
        ctxext.patch(get_peft_model(tiny(), adapter("SHADOW")), "yarn", factor=4.0)
    model = get_peft_model(ctxext.patch(tiny(), "yarn", factor=4.0), adapter("SHADOW"))
    with pytest.raises(IncompatibleError, match="SHADOW"):
        model(tokens(8))
