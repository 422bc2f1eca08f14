"""Saving and loading whole models: what comes back is what was saved, and nothing loads plain without a word."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mypy.api
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import ctxext
from ctxext.checkpoints.export import export_config, require_consistent
from ctxext.checkpoints.source import read_any_config
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.core.subject import Subject
from ctxext.errors import BackendUnavailableError, CheckpointError, CtxextError, InvalidParameterError, PatchStateError
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.methods.yarn import YaRN
from ctxext.rope_types import ROPE_TYPE
from ctxext.rotary import stored_form
from ctxext.rotary.sites import find_sites
from ctxext.rotary.stored_form import StoredForm
from tests._models import FOR_LLAMA, logits, tiny, tokens
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH

every_method = pytest.mark.parametrize("name", FOR_LLAMA)


def example(name: str) -> Method:
    model, cls = tiny(), METHODS[name]
    if not issubclass(cls, RopeMethod):
        return cls(factor=4)
    return cls.example(find_sites(Subject.of(model), TRAINED_LENGTH)[0].spec)


def unpatched(loaded: PreTrainedModel, before: State, plain: Path) -> None:
    """Bit for bit the plain model, but for the path that it was loaded from."""
    ctxext.unpatch(loaded)
    loaded.config._name_or_path = str(plain)
    assert before.difference(loaded) is None
    assert not hasattr(loaded.config, "ctxext")


def described(model: PreTrainedModel) -> list[str]:
    """What is said of it, but for where a trainer finds its like: a model that was saved extended, where it lies."""
    return [line for line in str(ctxext.describe(model)).splitlines() if "ctxext.training.reference" not in line]


@pytest.mark.slow
@every_method
def test_load_equals_patching_in_place(name: str, plain: Path, tmp_path: Path) -> None:
    """Saved and restored, extended while loading, and loaded by transformers with ctxext imported."""
    model, method = LlamaForCausalLM.from_pretrained(plain).eval(), example(name)
    before = State.of(model, tokens())
    expected = logits(ctxext.patch(model, method), tokens())
    model.save_pretrained(tmp_path)

    for loaded in (ctxext.load(tmp_path), ctxext.load(plain, method)):
        assert torch.equal(logits(loaded, tokens()), expected)
        assert described(loaded) == described(model)
        assert loaded.config.ctxext == model.config.ctxext
        assert not loaded.training
        unpatched(loaded, before, plain)

    if ctxext.describe(model).stock:
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens()), expected)
    else:
        with pytest.raises(CheckpointError, match=r"ctxext\.load\(path\)"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_stock_code_need_not_say_that_it_cannot_check_our_rope_types(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("transformers.modeling_rope_utils")
    log.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, log.name)
    try:
        config = tiny().config
        for rope_type in ("ctxext_rope", "ctxext_unrotated", "another"):
            config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4}
            config.validate_rope()
    finally:
        log.removeHandler(caplog.handler)
    assert {record.getMessage().rpartition("=")[2] for record in caplog.records} == {"'another'"}


@pytest.mark.nightly
def test_in_other_precisions_and_places(plain: Path) -> None:
    inputs = tokens()
    low = LlamaForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval()
    expected = logits(ctxext.patch(low, "yarn", factor=4), inputs)
    loaded = ctxext.load(plain, "yarn", factor=4, dtype=torch.bfloat16)
    assert torch.equal(logits(loaded, inputs), expected)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    full = logits(ctxext.load(plain, "yarn", factor=4), inputs)
    for device_map in ({"": "cpu"}, "cpu", "auto"):
        placed = ctxext.load(plain, "yarn", target_length=4 * TRAINED_LENGTH, device_map=device_map)
        assert torch.equal(logits(placed, inputs), full)
        assert not any(value.is_meta for value in (*placed.parameters(), *placed.buffers()))


def test_with_parameters_of_the_method_and_of_transformers(plain: Path) -> None:
    loaded = ctxext.load(plain, "yarn", factor=4, beta_fast=16, attn_implementation="eager")
    assert ctxext.describe(loaded).method == YaRN(factor=4, beta_fast=16).to_dict()
    assert loaded.config._attn_implementation == "eager"


@pytest.mark.slow
def test_in_a_subfolder_below_another_checkpoint_of_its_type(plain: Path, tmp_path: Path) -> None:
    """Whose config.json says nothing of it: neither of its length, nor as the base of adapters."""
    tiny("llama", 1, max_position_embeddings=TRAINED_LENGTH // 2).save_pretrained(tmp_path)
    shutil.copytree(plain, tmp_path / "inside")
    loaded = ctxext.load(tmp_path, "pi", factor=2, subfolder="inside")
    assert torch.equal(logits(loaded, tokens()), logits(ctxext.patch(tiny(), "pi", factor=2), tokens()))
    adapted = get_peft_model(loaded, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), tokens()), logits(adapted, tokens()))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ctxext.load(tmp_path, "pi", factor=2, subfolder="elsewhere")


STOCK_FORMS: list[tuple[str, str, dict[str, Any]]] = [
    *(("llama", name, {}) for name in ("yarn", "pi", "llama3", "dynamic_ntk", "abf")),
    ("llama", "longrope", {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}),
    ("gemma3_text", "yarn", {}),
    ("gpt_neox", "pi", {}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "name", "parameters"), STOCK_FORMS)
def test_what_transformers_loaded_is_saved_and_loads_again(
    model_type: str, name: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """transformers keeps the old name of ``rope_type`` in the configs that it reads; that contradicts nothing."""
    model = ctxext.patch(tiny(model_type), name, factor=4, **parameters)
    expected = logits(model, tokens())
    ctxext.save(model, tmp_path / "first")
    by_stock = AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval()
    ctxext.save(by_stock, tmp_path / "second")
    ctxext.save(
        get_peft_model(by_stock, LoraConfig(target_modules="all-linear")).merge_and_unload(), tmp_path / "third"
    )
    for place in (tmp_path / "second", tmp_path / "third"):
        assert torch.equal(logits(ctxext.load(place), tokens()), expected)
        export_config(read_any_config(place), to="vllm")


@pytest.mark.parametrize(
    ("name", "changed", "value", "said"),
    [
        ("yarn", "factor", 8.0, r"'factor': 8\.0.* radians per token"),
        ("yarn", "attention_scaling", 1.5, r"its cos differs by .* in a text of"),
        ("pi", "inv_freq", 2.0, r"radians per token, and the config's"),
        ("abf", "rope_theta", 5e5, r"'rope_theta': 500000\.0"),
        ("dynamic_ntk", "rope_theta", 5e5, r"'rope_theta': 500000\.0"),
    ],
)
def test_what_was_changed_after_the_extension_is_not_saved(
    name: str, changed: str, value: float, said: str, tmp_path: Path
) -> None:
    model = ctxext.patch(tiny(), name, factor=4)
    if changed == "inv_freq":
        model.model.rotary_emb.inv_freq *= value
    elif changed == "attention_scaling":
        model.model.rotary_emb.attention_scaling = value
    else:
        model.config.rope_parameters[changed] = value
    with pytest.raises(PatchStateError, match=rf"{said}.*Call ctxext\.unpatch\(model\)"):
        ctxext.save(model, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["dynamic_yarn", "alibi"])
def test_an_extended_checkpoint_is_extended_anew(first: str, plain: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(plain).eval()
    before = State.of(model, tokens())
    ctxext.patch(model, first, factor=4).save_pretrained(tmp_path)
    with pytest.raises(PatchStateError, match=rf"already extended \(ctxext {first}, trained_length=64\)"):
        ctxext.load(tmp_path, "pi", factor=2)
    with pytest.raises(PatchStateError, match=r"=64 .* Only ctxext computes that extension, so no method can begin"):
        ctxext.load(tmp_path, "pi", factor=2, scaling="extend")
    loaded = ctxext.load(tmp_path, "pi", factor=2, trained_length=TRAINED_LENGTH)
    assert torch.equal(logits(loaded, tokens()), logits(ctxext.patch(tiny(), "pi", factor=2), tokens()))
    unpatched(loaded, before, plain)


@pytest.mark.parametrize("case", ["llama yarn self_extend", "llama ntk rerope", "bert pi tile", "t5gemma pi yarn"])
def test_an_extension_that_weights_were_trained_with_is_extended(case: str, tmp_path: Path) -> None:
    """As any checkpoint whose config has the same scaling, which is one that lost its ``ctxext`` entry."""
    (kind, first, then), ours, foreign = case.split(), tmp_path / "ours", tmp_path / "foreign"
    ctxext.patch(tiny(kind), first, factor=2).save_pretrained(ours)
    shutil.copytree(ours, foreign)
    (foreign / "config.json").write_text(json.dumps(json.loads((ours / "config.json").read_text()) | {"ctxext": None}))
    expected = ctxext.load(foreign, then, factor=2, trained_length=128).config.ctxext
    model = type(tiny(kind)).from_pretrained(ours)
    for given in ({"trained_length": 128}, {"scaling": "extend"}):
        assert ctxext.load(ours, then, factor=2, **given).config.ctxext == expected
        assert ctxext.patch(model, then, factor=2, **given).config.ctxext == expected
        assert "ctxext" in ctxext.unpatch(model).config.to_dict()


@pytest.mark.slow
def test_trained_weights_of_an_encoding_are_not_drawn_anew(tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(), "kerple", factor=2), tmp_path / "long")
    refused = pytest.raises(CheckpointError, match=r"holds weights that were trained with kerple, and a new kerple")
    with refused:
        ctxext.load(tmp_path / "long", "kerple", factor=4, trained_length=TRAINED_LENGTH)
    with refused:
        patch_checkpoint(tmp_path / "long", tmp_path / "longer", "kerple", factor=4, trained_length=TRAINED_LENGTH)
    assert not (tmp_path / "longer").exists()
    other = ctxext.load(tmp_path / "long", "yarn", factor=4, trained_length=TRAINED_LENGTH)
    assert ctxext.describe(other).target_length == 4 * TRAINED_LENGTH


@pytest.mark.slow
def test_an_adapter_that_stock_code_trained_finds_its_base_where_it_lies_now(tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(), "yarn", factor=2), tmp_path / "base")
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(trained, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    for base in (tmp_path / "moved", ctxext.load(tmp_path / "moved")):
        assert ctxext.describe(ctxext.load(tmp_path / "adapter", base=base)).target_length == 2 * TRAINED_LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("older", ["saves", "loads"])
def test_a_form_that_one_version_of_transformers_rebuilds_is_loaded_by_another(
    older: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the stock form of ``dynamic_ntk`` in Qwen2-VL, which transformers 5.16 does not rebuild."""
    rebuilt_wrong = stored_form._rebuilt_wrong

    def refuses_dynamic(form: StoredForm) -> str | None:
        is_stock = any(form.rope_type(site) == "dynamic" for site in form.sites)
        return "its length is not followed" if is_stock else rebuilt_wrong(form)

    def of_version(name: str) -> None:
        monkeypatch.setattr(stored_form, "_rebuilt_wrong", refuses_dynamic if older == name else rebuilt_wrong)

    of_version("saves")
    model = ctxext.patch(tiny(), "dynamic_ntk", factor=4)
    ctxext.save(model, tmp_path)
    of_version("loads")
    loaded = ctxext.load(tmp_path)
    types = [each.config.rope_parameters["rope_type"] for each in (model, loaded)]
    assert sorted(types) == [ROPE_TYPE, "dynamic"]
    torch.testing.assert_close(logits(loaded, tokens(91)), logits(model, tokens(91)), atol=1e-4, rtol=0)
    require_consistent(read_any_config(tmp_path))


@pytest.mark.slow
def test_another_attention_backend_on_another_machine(tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "alibi", factor=4, attention="reference")
    model.config.ctxext["attention"] = "flash"  # as a machine that has it saves
    model.save_pretrained(tmp_path)
    if find_spec("flash_attn") is None:
        with pytest.raises(BackendUnavailableError, match=r"Attention backend 'flash' cannot .* These can: .*sdpa"):
            ctxext.load(tmp_path)
    loaded = ctxext.load(tmp_path, attention="sdpa")
    assert loaded.config.ctxext["attention"] == "sdpa"
    assert ctxext.describe(loaded).attention.startswith("sdpa")
    expected = ctxext.patch(tiny(), "alibi", factor=4, attention="sdpa")
    assert torch.equal(logits(loaded, tokens()), logits(expected, tokens()))


def test_describe_a_checkpoint_that_transformers_loaded(tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    found, expected = ctxext.describe(loaded), ctxext.describe(model)
    assert found.edits == ()
    assert all(getattr(found, name) == getattr(expected, name) for name in ("method", "fingerprint", "stored_as"))
    with pytest.raises(CtxextError, match="was not patched in place"):
        ctxext.unpatch(loaded)


def scored(model: PreTrainedModel, path: Path) -> Path:
    """Scores of its heads, in a file."""
    ctxext.heads(model, seeds=(0,)).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["none", "file", "object"])
def test_heads_are_scored_on_the_weights_that_are_loaded(form: str, plain: Path, tmp_path: Path) -> None:
    file = scored(LlamaForCausalLM.from_pretrained(plain), tmp_path / "heads.json")
    given: Any = {"method": "retrieval_heads", "factor": 4, "heads": str(file) if form == "file" else None}
    if form == "object":
        given = {"method": RetrievalHeads(factor=4)}
    wanted = ctxext.patch(LlamaForCausalLM.from_pretrained(plain), **given)
    loaded = ctxext.load(plain, **given)
    assert loaded.config.ctxext == wanted.config.ctxext
    assert torch.equal(logits(loaded, tokens(150)), logits(wanted, tokens(150)))


@pytest.mark.parametrize("first", ["yarn", "retrieval_heads"])
def test_heads_of_a_checkpoint_that_was_saved_extended_are_scored_without_that(first: str, tmp_path: Path) -> None:
    wanted = ctxext.patch(tiny(), "retrieval_heads", factor=4)
    ctxext.patch(tiny(), first, factor=2).save_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path, "retrieval_heads", factor=4, trained_length=TRAINED_LENGTH)
    assert loaded.config.ctxext["method"] == wanted.config.ctxext["method"]
    assert torch.equal(logits(loaded, tokens(150)), logits(wanted, tokens(150)))
    assert torch.equal(logits(ctxext.unpatch(loaded), tokens(60)), logits(tiny(), tokens(60)))


def test_scores_of_other_weights_are_refused_when_a_checkpoint_is_loaded(plain: Path, tmp_path: Path) -> None:
    file = scored(tiny(seed=7), tmp_path / "heads.json")
    with pytest.raises(InvalidParameterError, match="holds the scores of another model"):
        ctxext.load(plain, "retrieval_heads", factor=4, heads=file)


@pytest.mark.nightly
def test_load_is_typed(tmp_path: Path) -> None:
    """An editor knows what it returns: the class that is asked for, or a model that generates."""
    program = tmp_path / "program.py"
    program.write_text(
        "import ctxext\n"
        "class Special: ...\n"
        "reveal_type(ctxext.load('x', 'yarn', factor=4))\n"
        "reveal_type(ctxext.load('x', auto_class=Special))\n"
        "ctxext.load('x', factor='four')\n"
    )
    config = Path(ctxext.__file__).parents[1] / "pyproject.toml"
    said, _, _ = mypy.api.run(["--config-file", str(config), "--python-executable", sys.executable, str(program)])
    assert 'Revealed type is "ctxext.checkpoints.load.LoadedModel"' in said
    assert 'Revealed type is "program.Special"' in said
    assert "No overload variant" in said or "incompatible type" in said
