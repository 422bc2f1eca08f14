"""What every method promises. A new file in ``ctxext/methods`` gets all of this for nothing."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ctxext.methods
from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.methods import METHODS, BiasMethod, Method, RopeMethod, TableMethod
from ctxext.methods.alibi import ALiBi
from ctxext.methods.remap import RemapMethod
from ctxext.spec import AlibiSpec, RopeSpec

KNOWN = ((8, 1e4, 64), (20, 1e4, 2048), (64, 1e6, 131072), (64, 150000, 4096), (128, 5e5, 8192))
SPECS = [RopeSpec(*spec) for spec in KNOWN]
BIAS_METHODS = [cls for cls in METHODS.values() if issubclass(cls, BiasMethod)]
ROPE_METHODS = [cls for cls in METHODS.values() if issubclass(cls, RopeMethod)]
TABLE_METHODS = [cls for cls in METHODS.values() if issubclass(cls, TableMethod)]

every_method = pytest.mark.parametrize("cls", ctxext.methods().values(), ids=ctxext.methods())
every_rope_method = pytest.mark.parametrize("cls", ROPE_METHODS, ids=[cls.name for cls in ROPE_METHODS])
every_bias_method = pytest.mark.parametrize("cls", BIAS_METHODS, ids=[cls.name for cls in BIAS_METHODS])
every_table_method = pytest.mark.parametrize("cls", TABLE_METHODS, ids=[cls.name for cls in TABLE_METHODS])
every_spec = pytest.mark.parametrize("rope", SPECS, ids=lambda r: f"{r.rotary_dim}-{r.base:g}-{r.trained_length}")


def plain(rope: RopeSpec) -> torch.Tensor:
    pairs = range(rope.rotary_dim // 2)
    return torch.tensor([math.exp(-2 * i / rope.rotary_dim * math.log(rope.base)) for i in pairs], dtype=torch.float64)


def test_every_public_file_holds_a_method_and_has_a_test_file() -> None:
    folder = Path(ctxext.methods.__file__).parent
    shared = {"base", "encoding", "formulas", "parameters", "remap"}
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")} - shared
    tests = {path.stem.removeprefix("test_") for path in (Path(__file__).parents[1] / "methods").glob("test_*.py")}
    assert len(files) >= 10
    modules = {cls.__module__.rpartition(".")[2] for cls in METHODS.values()}
    assert files == modules, "a file without a method: begin the names of helpers with an underscore"
    assert files <= tests, f"methods without a file tests/methods/test_NAME.py: {sorted(files - tests)}"


@every_method
def test_class_explains_itself(cls: type[Method]) -> None:
    module = importlib.import_module(cls.__module__)
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == cls.__module__]
    assert [value for value in own if isinstance(value, type) and issubclass(value, Method)] == [cls], "one a file"
    doc = inspect.getdoc(cls) or ""  # Python 3.13 takes the indentation away itself
    for part in ("Pick it", "Args:", "Source:", cls.source):
        assert part in doc, f"the docstring of {cls.__name__} does not contain {part!r}"
    for field in dataclasses.fields(cls):
        assert f"    {field.name}: " in doc, f"the docstring of {cls.__name__} has no line of Args for {field.name}"
    assert 0 < len(cls.summary) <= 72, f"the summary of {cls.__name__} has more than 72 characters, or none"
    assert ctxext.methods()[cls.name] is cls


@every_method
def test_dict_round_trip_is_json_and_equal(cls: type[Method]) -> None:
    method = cls.example(SPECS[0])
    data = json.loads(json.dumps(method.to_dict(), allow_nan=False))
    assert data["method"] == cls.name
    again = cls.from_dict(data)
    assert again == method
    assert hash(again) == hash(method)
    assert again.to_dict() == method.to_dict()


@every_method
def test_pickles_and_is_frozen(cls: type[Method]) -> None:
    method = cls.example(SPECS[0])
    assert pickle.loads(pickle.dumps(method)) == method
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.factor = 2.0  # type: ignore[misc]


@every_method
@pytest.mark.parametrize(
    "factor", [0.5, 0, -4, math.nan, math.inf, 10**400, "4", True, None, [4.0]], ids=lambda f: repr(f)[:8]
)
def test_bad_factor_is_refused(cls: type[Method], factor: Any) -> None:
    with pytest.raises(InvalidParameterError, match="factor must be a finite number, at least 1, found"):
        dataclasses.replace(cls.example(SPECS[0]), factor=factor)


@every_method
def test_whole_factor_is_the_same_method(cls: type[Method]) -> None:
    whole, real = (dataclasses.replace(cls.example(SPECS[0]), factor=factor) for factor in (3, 3.0))
    assert json.dumps(whole.to_dict()) == json.dumps(real.to_dict())


@every_method
def test_unknown_parameter_suggests_the_nearest(cls: type[Method]) -> None:
    data = cls.example(SPECS[0]).to_dict()
    data["factr"] = data.pop("factor")
    with pytest.raises(UnknownNameError, match=rf"Unknown {cls.name} parameter 'factr'\. Did you mean 'factor'\?"):
        cls.from_dict(data)


@every_method
def test_target_length_is_the_promise(cls: type[Method]) -> None:
    method = cls.example(SPECS[0])
    assert method.target_length(4096) == 4096 * method.factor > 4096


@every_rope_method
@every_spec
def test_frequencies_are_sound(cls: type[RopeMethod], rope: RopeSpec) -> None:
    method = cls.example(rope)
    for length in (1, rope.trained_length, rope.trained_length + 1, 4 * rope.trained_length):
        found = method.frequencies(rope, length)
        assert found.inv_freq.dtype is torch.float64
        assert found.inv_freq.shape == (rope.rotary_dim // 2,)
        assert (found.inv_freq == 0).all() if cls.needs_training else (found.inv_freq > 0).all()
        assert (found.inv_freq <= plain(rope) * (1 + 1e-12)).all(), "an extension turned faster than the model"
        assert (found.inv_freq.diff() <= 0).all(), "a later pair turned faster"
        assert 1 <= found.attention_scale < math.inf
    is_extended = bool((found.inv_freq < plain(rope) * 0.999).any())
    assert is_extended != issubclass(cls, RemapMethod), "a table of frequencies extends; remapped positions leave it"


@every_rope_method
@every_spec
def test_result_depends_on_length_iff_dynamic(cls: type[RopeMethod], rope: RopeSpec) -> None:
    method = cls.example(rope)
    at_trained = method.frequencies(rope, rope.trained_length)
    below = method.frequencies(rope, rope.trained_length // 2)
    above = method.frequencies(rope, 4 * rope.trained_length)
    assert torch.equal(below.inv_freq, at_trained.inv_freq), "the length mattered inside the trained window"
    assert below.attention_scale == at_trained.attention_scale
    assert method.dynamic == (not torch.equal(above.inv_freq, at_trained.inv_freq))


@every_rope_method
@every_spec
def test_factor_one_is_plain_or_the_frequencies_are_given(cls: type[RopeMethod], rope: RopeSpec) -> None:
    method = cls.example(rope)
    one = dataclasses.replace(method, factor=1.0)
    given = cls.needs_training or {"short_factor", "inv_freq"} & {field.name for field in dataclasses.fields(cls)}
    found, expected = one.frequencies(rope, rope.trained_length), plain(rope)
    if given:
        expected = method.frequencies(rope, rope.trained_length).inv_freq
    if cls.needs_training or not given:
        assert found.attention_scale == 1
    torch.testing.assert_close(found.inv_freq, expected, rtol=1e-12, atol=0)


@every_bias_method
@pytest.mark.parametrize("given", [None, tuple(0.3 / (1 + head) for head in range(12))], ids=["paper", "given"])
def test_slopes_are_sound(cls: type[BiasMethod], given: tuple[float, ...] | None) -> None:
    alibi = AlibiSpec(num_heads=12, trained_length=64, slopes=given)
    trained = ALiBi().slopes(alibi, 1)
    method = cls.example(SPECS[0])
    at_trained, above = method.slopes(alibi, 64), method.slopes(alibi, 256)
    for found in (at_trained, above):
        assert found.dtype is torch.float64
        assert found.shape == (12,)
        assert (found > 0).all()
        assert (found <= trained).all(), "an extension made the bias steeper than the model's"
    assert torch.equal(method.slopes(alibi, 1), at_trained), "the length mattered inside the trained window"
    assert method.dynamic == (not torch.equal(above, at_trained))
    assert torch.equal(dataclasses.replace(method, factor=1.0).slopes(alibi, 64), trained)


@every_table_method
@pytest.mark.parametrize(("trained", "target"), [(32, 32), (32, 33), (32, 128), (77, 248), (512, 4096), (512, 768)])
def test_rows_are_sound(cls: type[TableMethod], trained: int, target: int) -> None:
    indices, weights = cls.example(SPECS[0]).rows(trained, target)
    assert (indices.dtype, weights.dtype) == (torch.int64, torch.float64)
    assert indices.shape == weights.shape == (target, indices.shape[1])
    assert 1 <= indices.shape[1] <= 3
    assert 0 <= indices.min() <= indices.max() < trained, "a row that the model has not learned"
    torch.testing.assert_close(weights.sum(1), torch.ones(target, dtype=torch.float64), rtol=1e-12, atol=0)
    dense = torch.zeros(target, trained, dtype=torch.float64).scatter_add_(1, indices, weights)
    assert torch.equal(dense[0], torch.eye(trained, dtype=torch.float64)[0]), "the first position moved"
    assert (dense.abs().sum(0) > 0).all(), "a learned row is used nowhere"
    if target == trained:
        assert torch.equal(dense, torch.eye(trained, dtype=torch.float64))


@pytest.fixture
def transformers_log() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    # A warning that transformers prints once per process must not hide behind an earlier test.
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def stock_rotary(method: RopeMethod, rope: RopeSpec, parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    dynamic_ntk = parameters["rope_type"] == "dynamic"
    longest = rope.trained_length if dynamic_ntk else method.target_length(rope.trained_length)
    heads = {"hidden_size": 2 * rope.rotary_dim, "num_attention_heads": 2, "head_dim": rope.rotary_dim}
    stored = json.loads(json.dumps(parameters, allow_nan=False))
    return LlamaRotaryEmbedding(LlamaConfig(**heads, max_position_embeddings=longest, rope_parameters=stored))


def test_most_methods_have_a_stock_form() -> None:
    rope = SPECS[0]
    tables = [cls for cls in ROPE_METHODS if not issubclass(cls, RemapMethod)]
    without = {cls.name for cls in tables if cls.example(rope).rope_parameters(rope) is None}
    assert "dynamic_yarn" in without
    assert len(without) < len(tables) / 2


@every_rope_method
@every_spec
def test_stock_form_is_the_same_mathematics(cls: type[RopeMethod], rope: RopeSpec, transformers_log: list[str]) -> None:
    method = cls.example(rope)
    parameters = method.rope_parameters(rope)
    if parameters is None:
        pytest.skip(f"{cls.name} has no stock form")
    rotary = stock_rotary(method, rope, parameters)
    assert transformers_log == []
    for length in (rope.trained_length, rope.trained_length + 1, 4 * rope.trained_length):
        rotary(torch.zeros(1), torch.tensor([[0, length - 1]]))
        expected = method.frequencies(rope, length)
        # What does not turn is divided by so much that no text would notice: formulas.NEVER.
        torch.testing.assert_close(rotary.inv_freq.double(), expected.inv_freq, rtol=1e-5, atol=1e-29)
        assert rotary.attention_scaling == pytest.approx(expected.attention_scale, rel=1e-12)
    assert transformers_log == []
