"""What every method for tables of learned positions promises, on models of every structure that has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

import ctxext
from ctxext.errors import PatchStateError
from ctxext.methods import METHODS, TableMethod
from tests._products import pairwise
from tests.walk.check import State, Stock
from tests.walk.stock import logits_of
from tests.walk.tiny import tiny_config, tiny_model

# Rows that they have by default: 32 positions each, one reserved row more where padding is counted out.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 32, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    "gpt_neo": {"max_position_embeddings": 32, "window_size": 8},
    "opt": {"max_position_embeddings": 32, "eos_token_id": None, "pad_token_id": 1},
    "bert": {"max_position_embeddings": 32},
    "roberta": {"max_position_embeddings": 34, "pad_token_id": 1},
    "bart": {"max_position_embeddings": 32, "pad_token_id": 1},
    "led": {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32, "attention_window": 8},
}
LENGTH, FACTOR = 32, 2
TABLE_METHODS = {name: cls for name, cls in METHODS.items() if issubclass(cls, TableMethod)}
EXACT = {"tile", "hierarchical"}  # the first rows are the trained ones

every_method = pytest.mark.parametrize("method", TABLE_METHODS)
# Each method on one structure, and one method of each kind on each structure.
CASES = [(name, "roberta") for name in TABLE_METHODS] + [
    (name, model_type) for model_type in MODELS for name in ("pi", "hierarchical") if model_type != "roberta"
]
every_case = pytest.mark.parametrize(("method", "model_type"), CASES, ids=["-".join(case) for case in CASES])


def table_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model with a table for 32 tokens, whose rows differ enough to show."""
    loader = AutoModelForSeq2SeqLM if model_type in ("bart", "led") else None
    return tiny_model(tiny_config(model_type, **(MODELS[model_type] | changes)), loader=loader)


def example(name: str) -> TableMethod:
    method = TABLE_METHODS[name].of({"factor": FACTOR})
    assert isinstance(method, TableMethod)
    return method


def tables_of(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """By name, found here as what a config for 8 more tokens would give 8 more rows; two names may be one weight."""
    names = ("wpe.weight", "position_embeddings.weight", "embed_positions.weight")
    found = {name: weight for name, weight in model.named_parameters() if name.endswith(names)}
    assert found
    return found


def text(length: int, rows: int = 2) -> Tensor:
    return torch.randint(40, 128, (rows, length), generator=torch.Generator().manual_seed(3))


def test_there_are_methods() -> None:
    assert {"pi", "tile", "group", "hierarchical", "stretch"} <= TABLE_METHODS.keys()


@every_case
def test_rows_are_those_of_the_method_and_reserved_rows_stay(method: str, model_type: str) -> None:
    model = table_model(model_type)
    olds = {name: weight.detach().double().clone() for name, weight in tables_of(model).items()}
    ctxext.patch(model, example(method))
    indices, weights = example(method).rows(LENGTH, FACTOR * LENGTH)
    dense = torch.zeros(FACTOR * LENGTH, LENGTH, dtype=torch.float64).scatter_add_(1, indices, weights)
    for name, new in tables_of(model).items():
        old, reserved = olds[name], len(olds[name]) - LENGTH
        assert new.shape == (reserved + FACTOR * LENGTH, old.shape[1])
        assert torch.equal(new[:reserved].double(), old[:reserved])
        torch.testing.assert_close(new[reserved:].double(), dense @ old[reserved:], rtol=1e-6, atol=1e-6)
        assert model.get_submodule(name.rpartition(".")[0]).num_embeddings == len(new)


@pytest.mark.slow
@every_case
def test_loading_restores_and_unpatching_brings_the_model_back(
    method: str, model_type: str, stock: Stock, tmp_path: Path
) -> None:
    """Loaded by ctxext, and bit for bit the same by a process that never imports it."""
    model = table_model(model_type)
    inputs = text(LENGTH - 2)
    model.save_pretrained(tmp_path / "plain")  # saving fills in fields of the config
    before = State.of(model, inputs)
    weights = dict(model.named_parameters(remove_duplicate=False))
    ctxext.patch(model, example(method))
    extended = logits_of(model, text(FACTOR * LENGTH))
    assert torch.isfinite(extended).all()
    model.save_pretrained(tmp_path / "long")
    save_file({"input_ids": text(FACTOR * LENGTH)}, tmp_path / "inputs.safetensors")
    found = stock.logits(tmp_path / "long", tmp_path / "inputs.safetensors")
    assert isinstance(found, Tensor), found
    assert torch.equal(found, extended)
    assert "Texts of up to 32 tokens are read exactly as before." in str(ctxext.describe(model)) or method not in EXACT

    ctxext.unpatch(model)
    assert before.difference(model) is None
    again = dict(model.named_parameters(remove_duplicate=False))
    assert all(again[name] is weight for name, weight in weights.items()), "another object stands in a weight's place"

    for loaded in (ctxext.load(tmp_path / "long"), ctxext.load(tmp_path / "plain", example(method))):
        assert torch.equal(logits_of(loaded.eval(), text(FACTOR * LENGTH)), extended)
        assert ctxext.describe(loaded).target_length == FACTOR * LENGTH
        if ctxext.core.patching.patched_state(loaded) is None:
            assert method == "stretch", "behind its first rows most trained ones are in mixtures only"
            with pytest.raises(PatchStateError, match="was not patched in place"):
                ctxext.unpatch(loaded)
            continue
        ctxext.unpatch(loaded)
        loaded.config._name_or_path = before.config["_name_or_path"]
        assert torch.equal(logits_of(loaded, inputs), before.logits)
        for name, weight in loaded.state_dict().items():
            assert torch.equal(weight, before.weights[name]), name


@pytest.mark.parametrize(("method", "model_type"), pairwise(sorted(EXACT), list(MODELS)))
def test_short_texts_are_read_exactly_as_before(method: str, model_type: str) -> None:
    model = table_model(model_type)
    before = logits_of(model, text(LENGTH))
    ctxext.patch(model, example(method))
    assert torch.equal(logits_of(model, text(LENGTH)), before)


@pytest.mark.parametrize(("side", "model_type"), pairwise(["left", "right"], list(MODELS)))
def test_padding_changes_nothing(side: str, model_type: str) -> None:
    """A padded row says of its tokens what it says of them alone, where the model itself does so before."""
    model = table_model(model_type)
    assert padding_error(model, side, LENGTH) < 1e-4, "the unextended model reads padded texts so"
    ctxext.patch(model, "pi", factor=FACTOR)
    assert padding_error(model, side, FACTOR * LENGTH) < 1e-4


def padding_error(model: PreTrainedModel, side: str, length: int) -> float:
    """How far the logits of a text with 5 tokens of padding are from those of the text alone."""
    if model.config.is_encoder_decoder:  # what the decoder is fed is padded on the right always
        model = model.get_encoder()
    alone, padding = text(length - 5, rows=1), model.config.pad_token_id or 0
    pads = torch.full((1, 5), padding)
    parts = (pads, alone) if side == "left" else (alone, pads)
    mask = torch.cat([torch.full_like(part, int(part is alone)) for part in parts], 1)
    arguments: dict[str, Any] = {"attention_mask": mask}
    # These count slots, so positions of left-padded rows have to be given, as ``generate`` does; BART takes none.
    if side == "left" and model.config.model_type in ("bart", "led"):
        return 0.0
    if side == "left" and model.config.model_type in ("gpt2", "gpt_neo", "bert"):
        arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(torch.cat(parts, 1), **arguments)[0]
        expected = model(alone, attention_mask=torch.ones_like(alone))[0]
    kept = found[:, 5:] if side == "left" else found[:, :-5]
    return float((kept - expected).abs().max())


# GPT-Neo with a static cache decodes otherwise than without one when it is not extended, too.
GENERATING = [
    pytest.param(name, model_type, cache, marks=[pytest.mark.nightly] * (cache != "dynamic" and name != "hierarchical"))
    for name, model_type in [*((name, "gpt2") for name in TABLE_METHODS), ("pi", "opt"), ("hierarchical", "gpt_neo")]
    for cache in ("dynamic", "static", None)
    if (model_type, cache) != ("gpt_neo", "static")
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "model_type", "cache"), GENERATING)
def test_generate_at_twice_the_length_equals_decoding_without_a_cache(
    method: str, model_type: str, cache: str | None
) -> None:
    model = ctxext.patch(table_model(model_type), example(method))
    prompt, new = text(LENGTH - 4, rows=1), FACTOR * LENGTH - (LENGTH - 4)
    greedy = prompt
    for _ in range(new):
        greedy = torch.cat([greedy, logits_of(model, greedy)[:, -1:].argmax(-1)], 1)
    arguments: dict[str, Any] = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    found = model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, **arguments)
    assert torch.equal(found, greedy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_method
def test_half_precision_is_rounded_once(method: str, dtype: torch.dtype) -> None:
    model = table_model("gpt2").to(dtype)
    old = model.transformer.wpe.weight.detach().double()
    ctxext.patch(model, example(method))
    indices, weights = example(method).rows(LENGTH, FACTOR * LENGTH)
    exact = torch.einsum("ij,ijd->id", weights, old[indices])
    new = model.transformer.wpe.weight
    assert new.dtype is dtype
    assert torch.equal(new, exact.to(dtype))


@pytest.mark.slow
def test_a_shared_table_stays_shared() -> None:
    model = table_model("bart")
    model.model.decoder.embed_positions.weight = model.model.encoder.embed_positions.weight
    ctxext.patch(model, "pi", factor=2)
    assert model.model.decoder.embed_positions.weight is model.model.encoder.embed_positions.weight
    assert len(model.model.decoder.embed_positions.weight) == 2 + 2 * LENGTH
    ctxext.unpatch(model)
    assert model.model.decoder.embed_positions.weight is model.model.encoder.embed_positions.weight


@pytest.mark.slow
def test_training_the_new_rows_is_kept_by_loading(tmp_path: Path) -> None:
    model = ctxext.patch(table_model("gpt2"), "tile", factor=2)
    with torch.no_grad():
        model.transformer.wpe.weight[LENGTH:].mul_(1.5)
    expected = logits_of(model, text(2 * LENGTH))
    ctxext.save(model, tmp_path)
    loaded = ctxext.load(tmp_path).eval()
    assert torch.equal(logits_of(loaded, text(2 * LENGTH)), expected)
    ctxext.unpatch(loaded)
    assert torch.equal(loaded.transformer.wpe.weight, model.transformer.wpe.weight[:LENGTH])


@pytest.mark.slow
def test_extending_again_replaces_the_extension(tmp_path: Path) -> None:
    plain = table_model("opt")
    plain.save_pretrained(tmp_path / "plain")
    ctxext.patch(plain, "tile", factor=2).save_pretrained(tmp_path / "long")
    with pytest.raises(PatchStateError, match=r"already extended \(ctxext tile, trained_length=32\)"):
        ctxext.load(tmp_path / "long", "pi", factor=4)
    again = ctxext.load(tmp_path / "long", "pi", factor=4, trained_length=LENGTH).eval()
    expected = ctxext.load(tmp_path / "plain", "pi", factor=4).eval()
    assert torch.equal(logits_of(again, text(4 * LENGTH)), logits_of(expected, text(4 * LENGTH)))


def test_a_shorter_trained_length_mixes_only_those_rows() -> None:
    model = table_model("gpt2")
    old = model.transformer.wpe.weight.detach().clone()
    ctxext.patch(model, "tile", factor=4, trained_length=16)
    assert ctxext.describe(model).target_length == 64
    assert torch.equal(model.transformer.wpe.weight, old[:16].repeat(4, 1))


@pytest.mark.nightly
def test_sides_of_different_reach(tmp_path: Path) -> None:
    model = table_model("led", max_encoder_position_embeddings=64)
    ctxext.patch(model, "tile", factor=2)
    assert (model.config.max_encoder_position_embeddings, model.config.max_decoder_position_embeddings) == (128, 64)
    described = ctxext.describe(model)
    assert (described.trained_length, described.target_length) == (64, 128)
    assert "Its tables differ in length" in str(described)
    ctxext.save(model, tmp_path)
    ctxext.unpatch(ctxext.load(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"factor": 1.5}, {"target_length": 40}])
def test_any_target(change: dict[str, Any], tmp_path: Path) -> None:
    model = ctxext.patch(table_model("roberta"), "pi", **change)
    length = ctxext.describe(model).target_length
    assert length == change.get("target_length", 48)
    assert torch.isfinite(logits_of(model, text(length))).all()
    ctxext.save(model, tmp_path)
    loaded = ctxext.load(tmp_path).eval()
    assert torch.equal(logits_of(loaded, text(length)), logits_of(model, text(length)))
    with pytest.raises(PatchStateError):  # odd rows are in mixtures only
        ctxext.unpatch(loaded)
