"""The verbs: what they do, and every bad input with what the user reads; the model is as it was after each."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import nn

import ctxext
from ctxext.core import steps
from ctxext.core.rebuild import own_defaults
from ctxext.core.saved import TESTED
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError, UnknownNameError
from ctxext.methods import METHODS, known_methods
from ctxext.methods.yarn import YaRN
from ctxext.spec import ExtensionArguments
from tests._models import logits, tiny, tokens
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH

ROOT = Path(ctxext.__file__).parents[1]


def refused(model: Any, error: type[CtxextError], message: str, *arguments: Any, **parameters: Any) -> None:
    """``patch`` refuses, says so, and leaves weights, config and logits bit for bit."""
    config, before = model.config.to_dict(), State.of(model, tokens(TRAINED_LENGTH))
    with pytest.raises(error) as caught:
        ctxext.patch(model, *arguments, **parameters)
    assert message in str(caught.value)
    assert model.config.to_dict() == config
    assert before.difference(model) is None


def test_exports_are_sorted_and_importable() -> None:
    assert sorted(ctxext.__all__) == ctxext.__all__
    assert all(hasattr(ctxext, name) for name in ctxext.__all__)
    public = {name: value for name, value in vars(ctxext).items() if not name.startswith("_")}
    things = {name for name, value in public.items() if not isinstance(value, ModuleType)}
    assert things <= set(ctxext.__all__), "public, and not exported"


def test_methods_is_a_listing_and_a_package() -> None:
    listed = ctxext.methods()
    assert listed == known_methods()
    assert list(listed) == sorted(listed)
    assert len(listed) >= 10
    assert listed["yarn"] is YaRN is ctxext.methods.YaRN
    listed.clear()
    assert ctxext.methods(), "the caller's dict is its own"


def test_methods_exports_every_class_by_name() -> None:
    package = importlib.import_module("ctxext.methods")
    for cls in known_methods().values():
        assert getattr(package, cls.__name__) is cls
    for cls in METHODS.values():
        assert cls.__name__ in dir(package)
    namespace: dict[str, Any] = {}
    exec("from ctxext.methods import *", namespace)
    assert set(package.__all__) <= set(namespace)
    with pytest.raises(AttributeError, match=r"no attribute 'Yarn'; its methods: .*YaRN"):
        package.Yarn  # noqa: B018


@pytest.mark.slow
def test_a_name_and_an_object_are_the_same() -> None:
    model = tiny()
    plain = logits(model, tokens())
    assert ctxext.patch(model, "yarn", factor=4, beta_fast=16) is model
    by_name = logits(model, tokens())
    ctxext.unpatch(model)
    ctxext.patch(model, YaRN(factor=4, beta_fast=16))
    assert torch.equal(logits(model, tokens()), by_name)
    assert not torch.equal(by_name, plain)
    ctxext.unpatch(model)
    ctxext.patch(model, ctxext.method("yarn", factor=4, beta_fast=16))
    assert torch.equal(logits(model, tokens()), by_name)


@pytest.mark.parametrize(
    ("lengths", "factor"),
    [
        ({"target_length": 4 * TRAINED_LENGTH}, 4.0),
        ({"target_length": 4 * TRAINED_LENGTH, "factor": 4}, 4.0),
        ({"target_length": 4 * TRAINED_LENGTH, "trained_length": 2 * TRAINED_LENGTH}, 2.0),
        ({"target_length": 2 * TRAINED_LENGTH + 1, "factor": 2}, 2.0),
        ({"target_length": TRAINED_LENGTH}, 1.0),
    ],
)
def test_factor_from_the_target_length(lengths: dict[str, Any], factor: float) -> None:
    model = ctxext.patch(tiny(), "pi", **lengths)
    found = ctxext.describe(model)
    assert found.method["factor"] == factor
    assert found.target_length == factor * (lengths.get("trained_length") or TRAINED_LENGTH)


def test_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    monkeypatch.setattr("ctxext.core.saved.TESTED", installed)
    model = tiny()
    plain = ctxext.describe(model)
    assert (plain.method, plain.trained_length, plain.target_length) == (None, TRAINED_LENGTH, TRAINED_LENGTH)
    assert str(plain) == f"llama: not extended by ctxext, {TRAINED_LENGTH} tokens"
    ctxext.patch(model, "yarn", factor=4)
    found = ctxext.describe(model)
    assert found.method == YaRN(factor=4).to_dict()
    assert (found.trained_length, found.target_length) == (TRAINED_LENGTH, 4 * TRAINED_LENGTH)
    assert found.stock
    assert found.stored_as == "stock rope_type 'yarn'"
    assert len(found.fingerprint) == 12
    assert "LlamaRotaryEmbedding.inv_freq" in found.edits
    for part in ("yarn", "factor=4.0", f"{TRAINED_LENGTH} -> {4 * TRAINED_LENGTH}", "plain transformers"):
        assert part in str(found)
    assert repr(found) == str(found)  # what an interactive session shows
    assert repr(found).splitlines()[0].startswith("llama extended by yarn (factor=4.0, ")
    assert f"\n  length       {TRAINED_LENGTH} -> {4 * TRAINED_LENGTH} tokens\n" in repr(found)
    assert model.config.ctxext["fingerprint"] == found.fingerprint
    ctxext.unpatch(model)
    assert ctxext.describe(model) == plain


@pytest.mark.parametrize(("name", "newer"), [("transformers", "5.99.0.dev0"), ("torch", "3.0.0+cu140")])
def test_a_version_that_was_never_tested_is_a_sentence(name: str, newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=4)
    for installed, says in ((newer, True), (TESTED[name] + "+cpu", False), (TESTED[name] + ".post1", False)):
        monkeypatch.setattr(f"ctxext.core.saved.{name}.__version__", installed)
        for described in (model, tiny()):
            note = f"  note         ctxext 0.1.0 was tested with {name} up to {TESTED[name]}, and this is {installed}."
            assert (note in str(ctxext.describe(described))) is says
    monkeypatch.setattr(f"ctxext.core.saved.{name}.__version__", newer)
    assert any(name in note for note in ctxext.describe(model).notes)
    assert not any(name in note for note in model.config.ctxext["notes"])  # of this machine, not of the checkpoint


def test_the_tested_versions_are_those_that_are_pinned() -> None:
    pins = (Path(ctxext.__file__).parents[1] / ".ci" / "constraints.txt").read_text().split()
    assert {f"{name}=={version}" for name, version in TESTED.items()} <= set(pins)


def test_describe_shortens_long_tables() -> None:
    model = tiny()
    table = METHODS["table"].example(ctxext.spec.RopeSpec(32, 1e4, TRAINED_LENGTH))
    ctxext.patch(model, table)
    assert "<16 values>" in str(ctxext.describe(model))


def test_patch_and_load_take_the_same_arguments() -> None:
    """Those of ``ExtensionArguments``, of the same types, so that one list cannot drift from the others."""
    names = [field.name for field in fields(ExtensionArguments) if field.name != "parameters"]
    of_patch, of_load = (inspect.signature(verb).parameters for verb in (ctxext.patch, ctxext.load))
    assert [name for name in of_patch if name not in ("model", "parameters")] == names
    for name in names:
        assert (of_patch[name].annotation, of_patch[name].default) == (of_load[name].annotation, of_load[name].default)
        assert f"{name}: " in (ctxext.patch.__doc__ or "")


def test_patched_extends_inside_its_block_only() -> None:
    model, inputs = tiny("llama"), tokens(3 * TRAINED_LENGTH)
    before = State.of(model, inputs)
    expected = logits(ctxext.patch(tiny("llama"), "yarn", factor=4, beta_fast=16), inputs)
    with ctxext.patched(model, "yarn", factor=4, beta_fast=16) as extended:
        assert extended is model
        assert torch.equal(logits(model, inputs), expected)
        assert not torch.equal(expected, before.logits)
    assert before.difference(model) is None
    with pytest.raises(ZeroDivisionError), ctxext.patched(model, YaRN(factor=2.0)):
        raise ZeroDivisionError
    assert before.difference(model) is None
    with pytest.raises(UnknownNameError, match="Did you mean 'yarn'"), ctxext.patched(model, "yran", factor=2):
        pytest.fail("the block ran")
    assert before.difference(model) is None


def test_a_model_that_is_unpatched_inside_the_block_of_patched_stays_plain() -> None:
    model, inputs = tiny("llama"), tokens(3 * TRAINED_LENGTH)
    before = State.of(model, inputs)
    with ctxext.patched(model, "yarn", factor=4):
        ctxext.unpatch(model)
    assert before.difference(model) is None
    with pytest.raises(ZeroDivisionError), ctxext.patched(model, "pi", factor=4):
        1 / len(ctxext.describe(ctxext.unpatch(model)).edits)
    assert before.difference(model) is None
    with ctxext.patched(model, "yarn", factor=4):  # what the block put on in its place is taken off, too
        ctxext.patch(ctxext.unpatch(model), "alibi", factor=2)
    assert before.difference(model) is None


def test_unpatch_without_patch() -> None:
    model = tiny()
    with pytest.raises(PatchStateError, match=r"This LlamaForCausalLM was not patched in place.*original checkpoint"):
        ctxext.unpatch(model)
    ctxext.unpatch(ctxext.patch(model, "pi", factor=2))
    with pytest.raises(PatchStateError, match="nothing to undo"):
        ctxext.unpatch(model)


class Wrapped(nn.Module):
    """As DataParallel and its kin hold a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [nn.DataParallel, Wrapped, torch.compile], ids=["parallel", "module", "compile"])
def test_through_wrappers(wrap: Callable[[nn.Module], Any]) -> None:
    model, other = tiny(), ctxext.patch(tiny(), "ntk", factor=2)
    before, wrapper = State.of(model, tokens(TRAINED_LENGTH)), wrap(model)
    assert ctxext.patch(wrapper, "ntk", factor=2) is wrapper
    assert torch.equal(logits(model, tokens()), logits(other, tokens()))
    assert ctxext.describe(wrapper).method == ctxext.describe(other).method
    assert ctxext.unpatch(wrapper) is wrapper
    assert before.difference(model) is None


@pytest.fixture
def chosen(tmp_path: Path) -> Path:
    """A file such as ``ctxext choose`` writes."""
    path = tmp_path / "choice.json"
    path.write_text(json.dumps({"method": YaRN(factor=4, beta_slow=2.0, divisor=3.0).to_dict(), "sentences": []}))
    return path


def test_the_method_of_a_choice(chosen: Path) -> None:
    ids = tokens(4 * TRAINED_LENGTH)
    by_object = ctxext.patch(tiny("llama"), YaRN(factor=4, beta_slow=2.0, divisor=3.0))
    assert torch.equal(logits(ctxext.patch(tiny("llama"), str(chosen)), ids), logits(by_object, ids))


def test_a_choice_extends_as_it_was_measured(tmp_path: Path) -> None:
    """Not from another length: that would be another extension than the one that was chosen."""
    path, half = tmp_path / "choice.json", TRAINED_LENGTH // 2
    about = {"trained_length": half, "sliding_window": "lift", "seed": 0}
    path.write_text(json.dumps({"method": YaRN(factor=4).to_dict(), "provenance": about}))
    lifted = ctxext.patch(tiny("mistral", sliding_window=half), str(path)).config
    assert lifted.sliding_window is None
    assert lifted.ctxext["trained_length"] == lifted.rope_parameters["original_max_position_embeddings"] == half
    tiny("mistral", sliding_window=half).save_pretrained(tmp_path)
    assert ctxext.load(tmp_path, str(path), trained_length=half).config.ctxext["target_length"] == 4 * half
    said = rf"chosen with trained_length={half}, found 7\. Give the same \(--trained-length\), or the method by"
    for function, model in ((ctxext.patch, tiny("llama")), (ctxext.load, tmp_path)):
        with pytest.raises(InvalidParameterError, match=said):
            function(model, str(path), trained_length=7)
    refused(tiny("mistral"), InvalidParameterError, "with sliding_window=lift", str(path), sliding_window="keep")


def test_an_extension_below_the_length_that_the_config_says_is_told(tmp_path: Path) -> None:
    """As of a choice for a model of 8K tokens, on one of 32K: it reached 16K from then on."""
    path, quarter = tmp_path / "choice.json", TRAINED_LENGTH // 4
    path.write_text(json.dumps({"method": YaRN(factor=2).to_dict(), "provenance": {"trained_length": quarter}}))
    said = f"The config says {TRAINED_LENGTH} tokens already, and this reaches {2 * quarter}, from trained_length="
    model = ctxext.patch(tiny(), str(path))
    model.save_pretrained(tmp_path / "saved")
    low = {"factor": 2, "trained_length": quarter}
    bloom = ctxext.patch(tiny("bloom", seq_length=TRAINED_LENGTH), "pi", **low)
    for extended in (model, ctxext.load(tmp_path / "saved"), ctxext.patch(tiny(), "self_extend", **low), bloom):
        assert any(note.startswith(said) for note in ctxext.describe(extended).notes)
    others: list[tuple[int, int | None]] = [(2, None), (4, quarter), (8, quarter)]
    for factor, length in others:
        notes = ctxext.describe(ctxext.patch(tiny(), "yarn", factor=factor, trained_length=length)).notes
        assert not any("tokens already" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no method"),
        ('{"method": "yarn"}', "holds no method"),
        ('{"method": {"method": "yearn"}}', "'yearn' is unknown"),
        ('{"method": {"method": "yarn", "factor": 2, "slow": 1}}', "slow"),
        ('{"method": {"method": "yarn", "factor": 2}, "provenance": {"trained_length": "8"}}', "found '8'"),
        (None, "Cannot read the method"),
    ],
)
def test_a_file_without_a_method(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "choice.json"
    if text is not None:
        path.write_text(text)
    refused(tiny("llama"), CtxextError, message, str(path))


def test_a_choice_takes_no_parameters_beside_it(chosen: Path) -> None:
    refused(tiny("llama"), InvalidParameterError, "already holds its parameters", str(chosen), factor=2)


FRESH = """
from ctxext.core.patching import patch
from ctxext.methods.base import method
from tests._models import tiny
from tests.walk.tiny import tiny_config, tiny_model

def guarded(model):
    return [hook.extension for hook in vars(model)["_ctxext_guards"]]

sided = tiny_config("t5gemma")
for part in (sided.encoder, sided.decoder):
    part.attn_logit_softcapping = None
for model, name in ((tiny("bloom"), "pi"), (tiny(), "dynamic_ntk"), (tiny_model(sided), "yarn"), (tiny(), "t5_bias")):
    patch(model, method(name, factor=4.0))
    assert guarded(model), name
    if name == "dynamic_ntk":
        assert "prepare_inputs_for_generation" in vars(model)
    if name == "yarn":
        assert model._ctxext.sides.keys() == {"encoder", "decoder"}
"""


@pytest.mark.nightly
def test_the_verb_finds_every_room_in_a_fresh_process() -> None:
    """Whatever a program imports first, the rooms have registered before the first extension."""
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("moment", steps.Moment)
def test_a_failure_in_any_moment_leaves_the_model_as_it_was(
    moment: steps.Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = steps.Step(moment, Mock(side_effect=IncompatibleError("failed in it")))
    monkeypatch.setattr(steps, "_STEPS", [*steps.steps(), failing])
    model = tiny()
    refused(model, IncompatibleError, "failed in it", "yarn", factor=4.0)
    assert not [name for name in vars(model) if name.startswith("_ctxext")]


@pytest.mark.slow
def test_patching_twice() -> None:
    model = ctxext.patch(tiny(), "yarn", factor=4)
    message = "This LlamaForCausalLM is already extended by 'yarn' (factor 4). Call ctxext.unpatch(model) first"
    for again in ("yarn", "pi", "alibi", "no such method"):
        refused(model, PatchStateError, message, again, factor=2)
    refused(model, PatchStateError, message, "pi", factor=2, trained_length=TRAINED_LENGTH)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (YARN, "rope_type=yarn, factor 4, original_max_position_embeddings=16"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "rope_type=linear, factor 4"),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_an_extended_checkpoint_says_relative_to_what(rope: dict[str, Any], said: str) -> None:
    model = tiny(rope_parameters=rope)
    message = f"This checkpoint is already extended ({said}). If its weights were trained with that scaling"
    for arguments in ({"factor": 2}, {"target_length": 32}, {"target_length": 512}):
        refused(model, PatchStateError, message, "pi", **arguments)
    ctxext.patch(model, "pi", factor=8, trained_length=16, scaling="replace")
    plain = ctxext.patch(tiny(max_position_embeddings=16), "pi", factor=8)
    assert torch.equal(logits(model, tokens()), logits(plain, tokens())), "the old extension shows through"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self_extend", "alibi", "dual_chunk", "retrieval_heads"])
def test_a_description_has_ten_lines_and_verbose_the_rest(method: str) -> None:
    model = ctxext.patch(tiny(), method, factor=2)
    short, whole = str(ctxext.describe(model)), str(ctxext.describe(model, verbose=True))
    assert len(short.splitlines()) <= 10
    for word in ("edited", "Piece", "None"):
        assert word not in short
    assert f"fingerprint  {model.config.ctxext['fingerprint']}" in short
    assert "edited" in whole
    assert ctxext.describe(model) == ctxext.describe(model, verbose=True)


@pytest.mark.parametrize(
    ("model_type", "method"), [("llama", "yarn"), ("bert", "pi"), ("gpt2", "pi"), ("bloom", "alibi")]
)
def test_a_config_that_its_class_refuses_to_read_back(model_type: str, method: str) -> None:
    model = tiny(model_type)
    model.config.problem_type, model.config.num_labels = "single_label_classification", 1
    with pytest.raises(IncompatibleError, match="could not be read back from a file: `problem_type="):
        ctxext.patch(model, method, factor=4)


@pytest.mark.slow
def test_a_config_in_the_place_of_the_extended_one_is_refused(tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=2)
    own = model.config
    for other in (copy.deepcopy(own), tiny().config):
        model.config = other
        for verb in (ctxext.unpatch, lambda changed: ctxext.save(changed, tmp_path / "saved")):
            with pytest.raises(PatchStateError, match=r"was replaced after ctxext\.patch"):
                verb(model)
    model.config = own
    assert not hasattr(ctxext.unpatch(copy.deepcopy(model)).config, "ctxext")
    assert not hasattr(ctxext.unpatch(model).config, "ctxext")


@pytest.mark.slow
def test_parts_of_an_extended_model_are_not_extended_again() -> None:
    model = ctxext.patch(tiny("t5gemma"), "abf", factor=2)
    with pytest.raises(PatchStateError, match="around this T5GemmaEncoder is already extended"):
        ctxext.patch(model.get_encoder(), "abf", factor=2)
    inner = ctxext.patch((whole := tiny()).model, "yarn", factor=2)
    with pytest.raises(PatchStateError, match=r"Call ctxext\.unpatch on the LlamaModel that was"):
        ctxext.unpatch(whole)
    ctxext.unpatch(inner)


def test_what_was_changed_meanwhile_stays_where_two_models_had_one_config() -> None:
    model = tiny()
    other = type(model)(model.config)
    ctxext.patch(model, "yarn", factor=2)
    model.resize_token_embeddings(136)
    model.config.pad_token_id = 3
    ctxext.unpatch(model)
    assert (model.config.vocab_size, model.config.pad_token_id) == (136, 3)
    assert (other.config.vocab_size, other.config.rope_parameters) == (128, model.config.rope_parameters)
    assert model(tokens(), labels=tokens()).loss.isfinite()


@pytest.mark.slow
def test_threads_leave_the_default_dtype_as_it_was() -> None:
    models, errors = [tiny() for _ in range(4)], list[Exception]()

    def extend(model: nn.Module) -> None:
        try:
            for _ in range(3):
                ctxext.unpatch(ctxext.patch(model, "yarn", factor=2))
        except CtxextError as error:
            errors.append(error)

    torch.set_default_dtype(torch.bfloat16)
    try:
        threads = [threading.Thread(target=extend, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (torch.get_default_dtype(), errors) == (torch.bfloat16, [])
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_second_thread_does_not_extend_what_the_first_one_extends() -> None:
    model, errors = tiny(), list[str]()

    def second() -> None:
        try:
            ctxext.patch(model, "pi", factor=2, trained_length=TRAINED_LENGTH)
        except PatchStateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=second)
    with own_defaults():  # for which the other thread waits, as long as this one extends
        thread.start()
        thread.join(0.5)
        ctxext.patch(model, "yarn", factor=4)
    thread.join()
    assert len(errors) == 1
    assert "is already extended by 'yarn'" in errors[0]
    assert ctxext.describe(model).method == YaRN(factor=4).to_dict()
