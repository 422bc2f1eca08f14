"""What ``ctxext inspect`` says of a checkpoint that was extended: its positions as they were, and its extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedModel

import ctxext
from ctxext.checkpoints.inspect import Inspection, inspect_adapter, inspect_checkpoint, rope_of_checkpoint
from ctxext.checkpoints.load import load_saved
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, PatchStateError
from ctxext.methods import Method, known_methods
from ctxext.rotary.sites import find_sites
from ctxext.spec import LLAMA, RopeSpec
from tests._checkpoints import rewrite, try_only
from tests._famous import famous_checkpoint
from tests._gguf import write_gguf
from tests._models import FOR_LLAMA, MODELS, bert, tiny
from tests._products import some
from tests._programs import command
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

OF_TABLES = ("pi", "tile", "hierarchical", "group", "stretch")
# Methods of models without rotations.
ELSEWHERE = [("gpt2", name) for name in OF_TABLES]
ELSEWHERE += [("bert", name) for name in OF_TABLES]
ELSEWHERE += [("bloom", "alibi"), ("mpt", "alibi"), ("t5", "stretch_buckets")]
ENCODINGS = [name for name, kind in known_methods().items() if kind.needs_training]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two methods are tried, and no runtime, for time; which of them apply is another test's matter."""
    try_only(monkeypatch, "yarn", "longrope")
    monkeypatch.setattr("ctxext.checkpoints.inspect.exports_of", lambda *_, **__: {})


def saved(model: PreTrainedModel, name: str, place: Path, **arguments: Any) -> Method:
    """Save a model with the example of a method; return the method."""
    kind, subject = known_methods()[name], Subject.of(model)
    method = kind.example(find_sites(subject, TRAINED_LENGTH)[0].spec if subject.rotaries else LLAMA)
    ctxext.patch(model, method, **arguments).save_pretrained(place)
    return method


def require_right(found: Inspection, method: Method) -> None:
    """What is said is what was asked for, and what the model was before."""
    assert "fails" not in str(found)
    assert found.trained_length == TRAINED_LENGTH
    assert found.description is not None
    assert found.description.method == json.loads(json.dumps(method.to_dict()))
    assert found.description.target_length == method.target_length(TRAINED_LENGTH)
    assert found.extended == f"ctxext {method.name}, trained_length={TRAINED_LENGTH}"


@pytest.mark.slow
@pytest.mark.parametrize("name", some([*FOR_LLAMA, *ENCODINGS], "self_extend", "alibi", "dpe", "fox", "nope", "yarn"))
def test_a_llama_saved_with_any_method_rotates_plainly_before_it(name: str, tmp_path: Path) -> None:
    method = saved(tiny(), name, tmp_path)
    found = inspect_checkpoint(tmp_path)
    require_right(found, method)
    assert [(site.rope_type, site.base, site.rotary_dim) for site in found.positions] == [("default", 10000.0, 32)]
    assert found.no_positions is None
    assert [check.refused for check in found.verdicts] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("case", some(ELSEWHERE, ("gpt2", "pi"), ("bert", "hierarchical"), *ELSEWHERE[-3:]))
def test_a_model_without_rotations_is_described_as_before(case: tuple[str, str], tmp_path: Path) -> None:
    model_type, name = case

    def model() -> PreTrainedModel:
        return bert() if model_type == "bert" else tiny_model(tiny_config(model_type))

    model().save_pretrained(tmp_path / "plain")
    length = {"trained_length": TRAINED_LENGTH} if model_type in ("bloom", "t5") else {}  # which do not say it
    method = saved(model(), name, tmp_path / "extended", **length)
    plain, found = inspect_checkpoint(tmp_path / "plain"), inspect_checkpoint(tmp_path / "extended")
    require_right(found, method)
    assert (found.positions, found.no_positions) == (plain.positions, plain.no_positions) == ((), found.no_positions)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", MODELS)
def test_every_method_on_every_rotary_model(model_type: str, tmp_path: Path) -> None:
    tiny(model_type).save_pretrained(tmp_path / "plain")
    plain, right = inspect_checkpoint(tmp_path / "plain"), 0
    for name in (*FOR_LLAMA, *ENCODINGS):
        try:
            method = saved(tiny(model_type), name, tmp_path / name)
        except CtxextError:
            continue
        found = inspect_checkpoint(tmp_path / name)
        require_right(found, method)
        assert found.positions == plain.positions
        assert (found.window, found.window_caps) == (plain.window, plain.window_caps)
        right += 1
    assert right >= 12


@pytest.mark.nightly
def test_the_command_says_the_same(tmp_path: Path) -> None:
    """As a user makes such a folder, with every method tried and every runtime asked."""
    tiny().save_pretrained(tmp_path / "plain")
    patch_checkpoint(tmp_path / "plain", tmp_path / "new", "self_extend", factor=4.0)
    printed = command("inspect", tmp_path / "new").stdout
    told = json.loads(command("inspect", tmp_path / "new", "--json").stdout)
    assert "fails" not in printed
    assert [site["base"] for site in told["positions"]] == [10000.0]
    assert (told["trained_length"], told["longest"]) == (TRAINED_LENGTH, 4 * TRAINED_LENGTH)
    assert told["description"]["method"] | {"method": "self_extend", "factor": 4.0} == told["description"]["method"]
    refused = [check["method"] for check in told["verdicts"] if check["refused"]]
    assert set(refused) == {check["method"] for check in told["verdicts"]} - {*FOR_LLAMA, *ENCODINGS}


@pytest.mark.slow
def test_what_an_extension_lifted_is_there_again(tmp_path: Path) -> None:
    """A window of all layers that was lifted caps the next extension too."""
    model = tiny("mistral", sliding_window=32)
    ctxext.patch(model, "self_extend", factor=2, sliding_window="lift").save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.window_caps
    assert [check.refused for check in found.verdicts] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["extend", "replace"])
def test_an_extension_of_a_scaled_checkpoint(scaling: str, tmp_path: Path) -> None:
    """The method is proven on what the extension started from, by the answer that was given then."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    trained = TRAINED_LENGTH if scaling == "extend" else TRAINED_LENGTH // 2
    model = tiny(rope_parameters=rope)
    ctxext.patch(model, "self_extend", factor=4, trained_length=trained, scaling=scaling).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.trained_length == trained
    assert [site.rope_type for site in found.positions] == ["linear"]
    assert [check.refused for check in found.verdicts] == [None, None]
    assert {check.target_length for check in found.verdicts} == {4 * trained}


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 2 * TRAINED_LENGTH, TRAINED_LENGTH])
def test_pictures_of_an_extended_checkpoint(given: int | None, tmp_path: Path) -> None:
    """They begin where the next extension would: at the plain rotation, or at the one that the weights know."""
    yarn = ctxext.methods.YaRN(factor=2.0)
    ctxext.patch(tiny(max_position_embeddings=999), yarn, trained_length=TRAINED_LENGTH).save_pretrained(tmp_path)
    rope = rope_of_checkpoint(tmp_path, trained_length=given)
    plain = RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)
    assert rope.trained_length == (given or TRAINED_LENGTH)
    if given == 2 * TRAINED_LENGTH:
        extended = yarn.frequencies(plain, given).inv_freq
        torch.testing.assert_close(torch.tensor(rope.inv_freq), extended.float(), rtol=1e-6, atol=0.0)
    else:
        assert rope.inv_freq is None
    with pytest.raises(PatchStateError, match="trained_length=999 contradicts that"):
        rope_of_checkpoint(tmp_path, trained_length=999)


@pytest.mark.slow
def test_what_others_extended_was_trained_with_that(tmp_path: Path) -> None:
    """As Llama 3.1 was, so that nobody has to say for which length."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = TRAINED_LENGTH
    tiny(rope_parameters=rope, max_position_embeddings=4 * TRAINED_LENGTH).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert (found.trained_length, str(found.extended)[:16]) == (4 * TRAINED_LENGTH, "rope_type=llama3")
    assert {check.target_length for check in found.verdicts} == {16 * TRAINED_LENGTH}


@pytest.mark.nightly
def test_extended_twice_and_by_a_choice(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "plain")
    patch_checkpoint(tmp_path / "plain", tmp_path / "once", "rerope", factor=2.0)
    chosen = known_methods()["self_extend"].of({"factor": 4.0})
    (tmp_path / "choice.json").write_text(json.dumps({"method": chosen.to_dict()}))
    choice = str(tmp_path / "choice.json")
    patch_checkpoint(tmp_path / "once", tmp_path / "twice", choice, trained_length=TRAINED_LENGTH)
    found = inspect_checkpoint(tmp_path / "twice")
    require_right(found, chosen)
    assert [site.base for site in found.positions] == [10000.0]
    with pytest.raises(PatchStateError, match=r"trained_length=128 contradicts that\. Pass the length before .*=64"):
        inspect_checkpoint(tmp_path / "twice", trained_length=128)


@pytest.mark.slow
def test_both_sides_of_an_encoder_decoder(tmp_path: Path) -> None:
    config = tiny_config("t5gemma")
    ctxext.patch(tiny_model(config), "self_extend", factor=4).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert [(site.side, site.rope_type) for site in found.positions] == [("encoder", "default"), ("decoder", "default")]
    assert found.no_positions is None
    assert found.description is not None
    assert [side.target_length for _, side in found.description.sides] == 2 * [4 * TRAINED_LENGTH]
    assert [check.method for check in found.verdicts if check.refused is None] == ["yarn"]  # the other is dynamic


@pytest.mark.slow
def test_an_adapter_says_the_extension_that_it_carries(tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "self_extend", factor=4)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert inspect_adapter(tmp_path).target_length == 4 * TRAINED_LENGTH
    told = json.loads(command("inspect", tmp_path, "--json").stdout)
    assert (told["method"]["method"], told["trained_length"]) == ("self_extend", TRAINED_LENGTH)


def counting(reads: Any, opened: list[Path]) -> Any:
    """Note each file that a reader opens."""

    def read(self: Any, path: Any, *mode: Any) -> None:
        opened.append(Path(path))
        reads(self, path, *mode)

    return read


@pytest.mark.slow
def test_a_gguf_file_that_ctxext_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny(vocab_size=64)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(tmp_path / "plain")
    files = (write_gguf(model, tmp_path / "plain.gguf"), tmp_path / "long.gguf")
    ctxext.export(tmp_path / "plain", to="llama.cpp", method="yarn", factor=4.0, gguf=files)
    opened: list[Path] = []
    monkeypatch.setattr(gguf.GGUFReader, "__init__", counting(gguf.GGUFReader.__init__, opened))
    found = inspect_checkpoint(tmp_path, gguf_file="long.gguf")
    assert opened == [tmp_path / "long.gguf"], "it is read once"
    assert [site.base for site in found.positions] == [10000.0]
    assert found.longest == 4 * TRAINED_LENGTH
    assert found.extended is not None
    assert found.extended.startswith(f"rope_type={found.positions[0].rope_type}")


@pytest.mark.slow
def test_a_gguf_file_is_loaded_by_one_table_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes the table for each module of a model; afterwards, the package is what it was."""
    model: Any = tiny(vocab_size=64)
    path, made = write_gguf(model, tmp_path / "plain.gguf"), list[Any]()

    def counted(*given: Any) -> Any:
        made.append(given)
        return tables(*given)

    tables, reader = gguf.get_tensor_name_map, gguf.GGUFReader
    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    loaded = load_saved(tmp_path, gguf_file=path.name, plain_class=LlamaForCausalLM)
    assert len(made) == 1
    assert gguf.get_tensor_name_map is counted
    assert gguf.GGUFReader is reader
    for name, weights in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weights), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rope", "native"),
    [
        ("Qwen/Qwen3.5-27B", {}, "262,144"),
        ("Qwen/Qwen3.5-27B", {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 262144}, "262,144"),
        ("deepseek-ai/DeepSeek-V3", {}, "163,840"),  # trained with its scaling
        ("unsloth/SmolLM2-360M", {}, None),
    ],
)
def test_a_long_native_length_is_better_left_plain(
    name: str, rope: dict[str, Any], native: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try_only(monkeypatch, "self_extend", "yarn")
    place = famous_checkpoint(name, tmp_path / "model")
    rewrite(place / "config.json", lambda raw: raw.get("text_config", raw).get("rope_parameters", {}).update(rope))
    found = [note for note in inspect_checkpoint(place).notes if "costs them quality" in note]
    assert len(found) == (native is not None)
    assert all(f"Texts of up to {native} tokens" in note and "self_extend changes no bit" in note for note in found)
