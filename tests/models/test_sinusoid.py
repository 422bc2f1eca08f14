"""Sinusoids that are added to the input: their rows, and what cannot be; the walk holds them to stock code."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.models import find_architecture
from ctxext.models.sinusoid import Sinusoids, usable_methods
from tests._formulas import spectrum
from tests._products import crossed
from tests.models._sinusoids import CASES, FACTOR, LENGTH, WIDTH, AsClass, Case, build
from tests.walk.check import State
from tests.walk.stock import logits_of
from tests.walk.tiny import tiny_config, tiny_model

LONG = LENGTH * FACTOR


every_case = pytest.mark.parametrize("name", CASES)


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, found here as what is called so."""
    names = ("embed_positions.weight", "embed_positions.weights", "pos_encoding", "position_embeddings.weight")
    held = [*model.named_parameters(), *model.named_buffers()]
    found = {name: tensor.detach() for name, tensor in held if name.endswith(names)}
    assert found
    return found


def frequencies(case: Case, method: str) -> tuple[Tensor, Tensor]:
    """The spectrum that the class is trained with, and what a method makes of it, as the papers write it."""
    half = WIDTH // 2
    k = torch.arange(half, dtype=torch.float64)
    plain = torch.exp(-k * math.log(10000) / (half - 1)) if case.fairseq else 1 / 10000 ** (2 * k / WIDTH)
    if method == "pi":
        return plain, plain / FACTOR
    if method == "ntk":  # each a little more, from nothing for the fastest to the factor for the slowest
        return plain, plain / FACTOR ** (k / (half - 1))
    turns = LENGTH * plain / (2 * math.pi)
    kept = ((turns - 1) / 31).clamp(0, 1)
    assert method == "ntk_by_parts"
    return plain, kept * plain + (1 - kept) * plain / FACTOR


def rows(case: Case, method: str, count: int) -> Tensor:
    """The vectors of the first ``count`` tokens, float64."""
    plain, moving = frequencies(case, method)
    angle = case.first * plain + torch.arange(count, dtype=torch.float64)[:, None] * moving
    made = torch.empty(count, WIDTH, dtype=torch.float64)
    half = WIDTH // 2
    sines, cosines = slice(0, half), slice(half, None)
    if case.interleaved:
        sines, cosines = slice(0, None, 2), slice(1, None, 2)
    made[:, sines], made[:, cosines] = torch.sin(angle), torch.cos(angle)
    return made


def text(length: int, rows: int = 2) -> Tensor:
    return torch.randint(40, 128, (rows, length), generator=torch.Generator().manual_seed(3))


# --- what the rows become --------------------------------------------------------------------------------------------


@every_case
def test_it_is_found(name: str) -> None:
    model = build(name)
    found = find_architecture(Subject.of(model))
    assert isinstance(found, Sinusoids)
    assert {table.first for table in found.tables(Subject.of(model))} == {CASES[name].first}
    assert [table.name for table in found.tables(Subject.of(model))] == list(tables_of(model))
    assert ctxext.describe(model).trained_length == LENGTH


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), crossed(list(CASES), ["ntk", "pi", "ntk_by_parts"]))
def test_every_row_is_the_methods_own(name: str, method: str) -> None:
    case, model = CASES[name], build(name)
    before = {name: table.clone() for name, table in tables_of(model).items()}
    ctxext.patch(model, method, factor=FACTOR)
    for path, table in tables_of(model).items():
        assert len(table) == case.first + LONG
        assert torch.equal(table[: case.first], before[path][: case.first])
        torch.testing.assert_close(table[case.first :].double(), rows(case, method, LONG), rtol=0, atol=2.0**-24)
        torch.testing.assert_close(table[case.first], before[path][case.first], rtol=0, atol=1e-6)


@pytest.mark.slow
@every_case
def test_it_computes_what_a_longer_model_with_these_rows_computes(name: str) -> None:
    """Stock code with a longer config, into which the rows are put by hand."""
    case, model = CASES[name], build(name)
    length = "n_positions" if case.model_type == "ctrl" else "max_position_embeddings"
    other = build(name, **{length: LONG})
    other.load_state_dict(
        {key: value for key, value in model.state_dict().items() if key not in tables_of(model)}, strict=False
    )
    short = logits_of(model, text(LENGTH))
    ctxext.patch(model, "ntk", factor=FACTOR)
    with torch.no_grad():
        for table in tables_of(other).values():
            table[case.first :] = rows(case, "ntk", LONG)
    for length in (LENGTH, LONG):
        found = logits_of(model, text(length))
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, logits_of(other, text(length)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(short, logits_of(model, text(LENGTH)), atol=1e-3)


def test_yarn_without_its_temperature_is_its_ramp() -> None:
    model = ctxext.patch(build("PegasusForConditionalGeneration"), "yarn", factor=FACTOR, attention_factor=1.0)
    found = spectrum({"type": "yarn", "factor": FACTOR, "original_max_position_embeddings": LENGTH}, WIDTH)
    angle = torch.arange(LONG, dtype=torch.float64)[:, None] * found.inv_freq
    for table in tables_of(model).values():
        torch.testing.assert_close(table.double(), torch.cat([angle.sin(), angle.cos()], 1), rtol=0, atol=2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.grows])
def test_a_text_beyond_the_target_goes_on_as_extended(name: str) -> None:
    case, model = CASES[name], build(name)
    short = text(LENGTH)
    ctxext.patch(model, "pi", factor=FACTOR)
    before = logits_of(model, short)
    assert torch.isfinite(logits_of(model, text(3 * LENGTH))).all()
    for table in tables_of(model).values():
        assert len(table) >= case.first + 3 * LENGTH
        torch.testing.assert_close(
            table[case.first :].double(), rows(case, "pi", len(table) - case.first), rtol=0, atol=2.0**-24
        )
    assert torch.equal(logits_of(model, short), before), "what was read before is read alike afterwards"
    ctxext.unpatch(model)
    assert all(len(table) == case.first + LENGTH for table in tables_of(model).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["MarianForCausalLM", "XGLMForCausalLM"])
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    model = ctxext.patch(build(name).to(dtype), "pi", factor=FACTOR)
    [table] = tables_of(model).values()
    assert table.dtype is dtype
    assert torch.equal(table[CASES[name].first :], rows(CASES[name], "pi", LONG).to(dtype))


# --- saved, loaded, undone -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_was_trained_in_a_table_that_is_saved_stays(tmp_path: Path) -> None:
    model = ctxext.patch(build("PegasusForConditionalGeneration"), "pi", factor=FACTOR)
    with torch.no_grad():
        for table in tables_of(model).values():
            table[LENGTH:].mul_(1.01)
    expected = logits_of(model, text(LONG))
    ctxext.save(model, tmp_path)
    assert torch.equal(logits_of(ctxext.load(tmp_path).eval(), text(LONG)), expected)


@pytest.mark.slow
def test_inspect_says_what_extends_it(tmp_path: Path) -> None:
    build("XGLMForCausalLM").save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.no_positions == "none: it adds sinusoids to its input, from model.embed_positions.weights"
    extending = {one.method for one in found.verdicts if one.refused is None}
    assert extending == set(usable_methods()) == {"pi", "ntk", "ntk_by_parts", "llama3", "abf"}


@pytest.mark.slow
def test_copies_are_undone_by_themselves() -> None:
    model = build("M2M100ForConditionalGeneration")
    olds = {path: table.clone() for path, table in tables_of(model).items()}
    ctxext.patch(model, "pi", factor=FACTOR)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        logits_of(again, text(3 * LENGTH))
        assert all(len(table) >= 3 * LENGTH for table in tables_of(again).values())
        ctxext.unpatch(again)
        assert all(torch.equal(table, olds[path]) for path, table in tables_of(again).items())
    assert all(len(table) == 2 + LONG for table in tables_of(model).values()), "a copy's growth is its own"


@pytest.mark.slow
def test_a_model_on_the_meta_device() -> None:
    for name in ("MarianMTModel", "XGLMForCausalLM"):
        with torch.device("meta"):
            model = getattr(transformers, name)(tiny_config(CASES[name].model_type, **CASES[name].changes))
        assert ctxext.describe(ctxext.patch(model, "pi", factor=FACTOR)).target_length == LONG
        assert all(table.is_meta and len(table) == LONG + CASES[name].first for table in tables_of(model).values())


# --- read ------------------------------------------------------------------------------------------------------------


def test_generate_beyond_the_old_end_equals_decoding_without_a_cache() -> None:
    """Where the class computes further rows itself; others decode as stock code does with a longer table."""
    model = ctxext.patch(build("XGLMForCausalLM"), "pi", factor=FACTOR)
    greedy = prompt = text(LENGTH - 4, rows=1)
    for _ in range(12):
        greedy = torch.cat([greedy, logits_of(model, greedy)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None), greedy)


# --- refused ---------------------------------------------------------------------------------------------------------


def test_another_spectrum() -> None:
    model = build("PegasusForConditionalGeneration")
    angle = torch.arange(LENGTH)[:, None] * 500.0 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))
    with torch.no_grad():
        for table in tables_of(model).values():
            table.copy_(torch.cat([angle.sin(), angle.cos()], 1))
    before = State.of(model, text(16))
    with pytest.raises(IncompatibleError, match="they are neither those of the Transformer's paper nor of"):
        ctxext.patch(model, "pi", factor=2)
    assert before.difference(model) is None


def test_a_table_that_reading_tokens_never_asks_for() -> None:
    model = AsClass("MusicgenForCausalLM").from_config(tiny_config("musicgen_decoder"))
    before = model.config.to_dict()
    with pytest.raises(IncompatibleError, match="reading tokens never asks for a row of"):
        ctxext.patch(model, "pi", factor=FACTOR)
    assert model.config.to_dict() == before


def test_audio_is_left_as_it_is() -> None:
    """The decoder's text is longer; the encoder's table is for frames of sound, which no token asks for."""
    config = tiny_config("speech_to_text", max_source_positions=96, max_target_positions=LENGTH)
    model = AsClass("Speech2TextForConditionalGeneration").from_config(config)
    ctxext.patch(model, "pi", factor=FACTOR)
    assert (model.config.max_source_positions, model.config.max_target_positions) == (96, LONG)
    assert {len(table) for table in tables_of(model).values()} == {96 + 2, LONG + 2}


@pytest.mark.slow
def test_a_table_that_is_longer_than_what_was_trained() -> None:
    """Its rows are all computed anew, and its size stays, where the target is not beyond it."""
    model = build("CTRLLMHeadModel", n_positions=128)
    ctxext.patch(model, "pi", factor=2, trained_length=16)
    found = ctxext.describe(model)
    assert (found.trained_length, found.target_length, model.config.n_positions) == (16, 32, 128)
    [table] = tables_of(model).values()
    torch.testing.assert_close(table.double(), rows(CASES["CTRLLMHeadModel"], "pi", 128), rtol=0, atol=2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["m2m_100", "xglm"])
def test_a_cast_between_patch_and_unpatch_holds_for_what_comes_back(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    cast = copy.deepcopy(model).half()
    ctxext.unpatch(ctxext.patch(model, "pi", factor=2).half())
    for (name, found), expected in zip(model.named_buffers(), cast.buffers(), strict=True):
        assert torch.equal(found, expected), name
