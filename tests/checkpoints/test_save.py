"""Saving into a folder that holds something already: what would be read instead of the model is refused, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel, LlamaForCausalLM

import ctxext
from ctxext.errors import CheckpointError, InvalidParameterError, UnknownNameError
from ctxext.files import read_json
from tests._checkpoints import contents
from tests._models import bert, logits, tiny, tokens
from tests._peft import lora
from tests._tokenizer import make_tokenizer
from tests.walk.tiny import TRAINED_LENGTH


def adapted() -> Any:
    return get_peft_model(ctxext.patch(tiny(), "yarn", factor=2), LoraConfig(target_modules=["q_proj"], r=2))


def whole() -> Any:
    return ctxext.patch(tiny(), "yarn", factor=2)


INSTEAD: list[tuple[str, Any, dict[str, Any]]] = [
    *((name, whole, {}) for name in ("adapter_config.json", "params.json", "consolidated.safetensors")),
    *(("model.safetensors", whole, {"variant": "fp16"}), ("model-00001-of-00002.safetensors", adapted, {})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("there", "saved", "how"), INSTEAD)
def test_what_would_be_read_instead_is_refused(there: str, saved: Any, how: dict[str, Any], tmp_path: Path) -> None:
    for name in (there, "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"holds {there}, which programs would read instead of the saved model"):
        ctxext.save(saved(), tmp_path, **how)
    assert contents(tmp_path) == {there: b"{}", "config.json": b"{}"}


@pytest.mark.slow
def test_a_second_save_of_the_same_kind_and_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    for _ in range(2):
        ctxext.save(whole(), tmp_path / "whole", variant="fp16")
        ctxext.save(adapted(), tmp_path / "adapter")
    (tmp_path / "whole" / "config.json").write_text("{")  # which saving replaces
    ctxext.save(whole(), tmp_path / "whole", variant="fp16")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is a symbolic link to .*nowhere, where nothing is"):
        ctxext.save(whole(), tmp_path / "link")


@pytest.mark.parametrize("method", ["iterdir", "mkdir"])
def test_a_folder_that_is_closed_to_the_user_is_refused_in_a_sentence(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    model = whole()
    monkeypatch.setattr(Path, method, closed)
    with pytest.raises(CheckpointError, match=r"Could not save to .*: Permission denied"):
        ctxext.save(model, tmp_path)


@pytest.mark.slow
def test_a_file_in_the_place_of_an_adapter_s_folder_costs_nothing(tmp_path: Path) -> None:
    model = adapted()
    ctxext.save(model, tmp_path)
    before = contents(tmp_path)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=2))
    (tmp_path / "other").write_text("a file")
    with pytest.raises(CheckpointError, match="What lay there before is as it was"):
        ctxext.save(model, tmp_path)
    assert contents(tmp_path) == before | {"other": b"a file"}


@pytest.mark.slow
def test_an_adapter_names_the_revision_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one length, so that nothing but the name tells their weights apart; and one of another length."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--long"
    (repository / "refs").mkdir(parents=True)
    for name, seed, length in (("main", 0, 64), ("v1", 7, 64), ("v2", 3, 99)):
        tiny("llama", seed, max_position_embeddings=length).save_pretrained(repository / "snapshots" / (name * 20))
        (repository / "refs" / name).write_text(name * 20)
    assert ctxext.describe(ctxext.load("me/long", "yarn", factor=2, revision="v2")).trained_length == 99
    stock = LlamaForCausalLM.from_pretrained("me/long", revision="v2")
    assert ctxext.describe(ctxext.patch(stock, "yarn", factor=2)).trained_length == 99
    first = ctxext.load("me/long", "yarn", factor=2, revision="v1")
    model = get_peft_model(first, LoraConfig(target_modules=["q_proj"]))
    ctxext.save(model, tmp_path / "adapter")
    assert read_json(tmp_path / "adapter" / "adapter_config.json")["revision"] == "v1"
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter").eval(), tokens()), logits(model.eval(), tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("by_ctxext", [True, False])
def test_an_adapter_names_the_commit_of_its_base(
    by_ctxext: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main branch may lead to other weights by the time that the adapter is loaded."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--me--base"
    given: dict[str, Any] = {"method": "yarn", "factor": 2}
    (repository / "refs").mkdir(parents=True)

    def adapted_base(commit: str, seed: int, ours: bool) -> Any:
        tiny("llama", seed).save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        stock = ctxext.load("me/base", **given) if ours else LlamaForCausalLM.from_pretrained("me/base")
        model = get_peft_model(stock if ours else ctxext.patch(stock, **given), lora(init_lora_weights=False)).eval()
        ctxext.save(model, tmp_path / commit[0])
        return model

    first = adapted_base("a" * 40, 7, by_ctxext)
    for commit, ours in (("b" * 40, True), ("c" * 40, False)):
        adapted = adapted_base(commit, 3, ours)
        # Which of three transformers read, nothing but transformers 5.16 tells.
        kept = commit if ours else getattr(adapted.config, "_commit_hash", None)
        assert read_json(tmp_path / commit[0] / "adapter_config.json")["revision"] == kept
    assert torch.equal(logits(ctxext.load(tmp_path / "a").eval(), tokens()), logits(first, tokens()))


@pytest.mark.slow
def test_an_adapter_in_a_form_that_is_not_read_is_refused(tmp_path: Path) -> None:
    """Beside the safetensors of an earlier save, these would be loaded in its place without a word."""
    model = adapted()
    ctxext.save(model, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InvalidParameterError, match="safe_serialization=False: ctxext reads adapters from safetensors"):
        ctxext.save(model, tmp_path, safe_serialization=False)
    assert contents(tmp_path) == before
    ctxext.save(model, tmp_path, safe_serialization=True)


@pytest.mark.usefixtures("_any_types")
def test_a_report_is_its_text_and_not_its_name(tmp_path: Path) -> None:
    """The card held the name, and a path ended in an error when all weights had been written."""
    (tmp_path / "report.md").write_text("# Perplexity\n\nIt fell.\n")
    said = r"^results must be the text of a report, found .*read_text\(\)"
    for results in (tmp_path / "report.md", str(tmp_path / "report.md"), ["It fell."], {"loss": 2.0}):
        with pytest.raises(InvalidParameterError, match=said):
            ctxext.save(whole(), tmp_path / "new", results=results)
    assert not (tmp_path / "new").exists()
    ctxext.save(whole(), tmp_path / "new", results=(tmp_path / "report.md").read_text())
    assert "It fell." in (tmp_path / "new" / "README.md").read_text()


def test_an_adapter_under_names_that_peft_does_not_find_is_refused(tmp_path: Path) -> None:
    """As transformers writes its own adapters where it is told to: none of its weights would be found again."""
    model = whole()
    model.peft_config = {"default": LoraConfig(target_modules=["q_proj"], r=2)}
    with pytest.raises(InvalidParameterError, match=r"^save_peft_format=False: ctxext reads adapters by the names"):
        ctxext.save(model, tmp_path / "new", save_peft_format=False)
    assert not (tmp_path / "new").exists()
    ctxext.save(adapted(), tmp_path / "peft", save_peft_format=False)  # which PEFT passes over
    ctxext.load(tmp_path / "peft", base=whole())
    path = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({name.removeprefix("base_model.model."): weight for name, weight in load_file(path).items()}, path)
    base = whole()
    with pytest.raises(CheckpointError, match=r"without base_model\.model\. in front of it.*save_peft_format=False"):
        ctxext.load(tmp_path / "peft", base=base)
    assert not hasattr(base, "peft_config")


@pytest.mark.parametrize("model", [whole, adapted], ids=["whole", "adapter"])
def test_an_argument_that_nothing_takes_is_refused(model: Any, tmp_path: Path) -> None:
    """transformers and PEFT pass over it: the tokenizer was not saved, and the wrong branch of the hub written to."""
    made = model()
    unknown = {"tokeniser": "Did you mean 'tokenizer'", "max_shard_sise": "Did you mean 'max_shard_size'"}
    unknown |= {"processor": ".*Known: .*tokenizer", "revision": ".*Known: "}
    for name, said in unknown.items():
        with pytest.raises(UnknownNameError, match=rf"^Unknown argument of ctxext\.save '{name}'\. {said}"):
            ctxext.save(made, tmp_path / "new", **{name: "x"})
    assert not (tmp_path / "new").exists()
    ctxext.save(made, tmp_path / "new", is_main_process=True, safe_serialization=True, state_dict=None)


class Processor:
    """Of a model that reads images too: a tokenizer and more, saved together."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def save_pretrained(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        (directory / "processor_config.json").write_text("{}")


@pytest.mark.slow
def test_a_processor_is_saved_as_a_tokenizer_is(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos=True)
    tokenizer.model_max_length = TRAINED_LENGTH
    ctxext.save(whole(), tmp_path / "saved", tokenizer=Processor(tokenizer))
    assert read_json(tmp_path / "saved" / "tokenizer_config.json")["model_max_length"] == 2 * TRAINED_LENGTH
    assert (tmp_path / "saved" / "processor_config.json").is_file()
    assert tokenizer.model_max_length == TRAINED_LENGTH
    with pytest.raises(InvalidParameterError, match="tokenizer or processor of transformers, found 'llama'"):
        ctxext.save(whole(), tmp_path / "new", tokenizer="llama")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 8])
@pytest.mark.parametrize("loads", [True, False])
def test_limits_fall_with_the_extension_that_they_were_raised_for(loads: bool, factor: int, tmp_path: Path) -> None:
    """A truncating tokenizer would go on giving texts of the longer window, and ``generate`` on writing."""
    tokenizer, first, given = make_tokenizer(bos=True), tiny(), {"factor": factor, "trained_length": TRAINED_LENGTH}
    tokenizer.model_max_length = first.generation_config.max_length = TRAINED_LENGTH
    ctxext.save(ctxext.patch(first, "yarn", factor=4), tmp_path / "long", tokenizer=tokenizer)
    longer = AutoTokenizer.from_pretrained(tmp_path / "long")
    assert longer.model_max_length == 4 * TRAINED_LENGTH
    if loads:
        model = ctxext.load(tmp_path / "long", "yarn", **given)
    else:
        model = ctxext.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "long"), "yarn", **given)
    assert model.generation_config.max_length == factor * TRAINED_LENGTH
    ctxext.save(model, tmp_path / "other", tokenizer=longer)
    assert AutoTokenizer.from_pretrained(tmp_path / "other").model_max_length == factor * TRAINED_LENGTH
    longer.model_max_length = 10**9  # no limit at all
    ctxext.save(model, tmp_path / "open", tokenizer=longer)
    assert AutoTokenizer.from_pretrained(tmp_path / "open").model_max_length == 10**9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how"),
    [(whole, {"max_shard_size": "5 cats"}), (adapted, {"selected_adapters": ["second"]})],
    ids=["size", "adapter"],
)
def test_what_transformers_and_peft_do_not_take_is_a_sentence(model: Any, how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"is not saved as it was asked to be: .* is as it was\."):
        ctxext.save(model(), tmp_path / "new", **how)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_sentence_transformer_saves_itself(tmp_path: Path) -> None:
    """Without its modules.json, a mean would be taken for whatever pooling it had."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs ctxext[embed]")
    tokenizer = make_tokenizer(bos=True)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    bert(BertModel, pad_token_id=1).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "bert"), device="cpu")
    model[1].pooling_mode = "cls"
    ctxext.patch(model, "tile", factor=2)
    expected = model.encode(["a" * 100])
    with pytest.raises(InvalidParameterError, match="the BertModel of this SentenceTransformer alone"):
        ctxext.save(model, tmp_path / "saved", tokenizer=tokenizer)
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(str(tmp_path / "saved"))
    ctxext.save(model, tmp_path / "saved")  # beside its modules, its model alone
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert (loaded.encode(["a" * 100]) == expected).all()


@pytest.mark.parametrize(
    ("model_type", "field", "value"), [("m2m_100", "dropout", 0.05), ("bloom", "layer_norm_epsilon", 2e-5)]
)
def test_a_number_set_over_a_guard(model_type: str, field: str, value: float, tmp_path: Path) -> None:
    """Many set a dropout in the config before they train; stock code must refuse what is saved after that, too."""
    model = ctxext.patch(tiny(model_type), "pi", factor=2)
    before = dict(model.config.ctxext["original"])
    setattr(model.config, field, value)
    ctxext.save(model, tmp_path)
    assert (getattr(model.config, field), model.config.ctxext["original"]) == (value, before)
    with pytest.raises(StrictDataclassFieldValidationError, match=r"load it with ctxext\.load"):
        type(model).from_pretrained(tmp_path)
    loaded = ctxext.load(tmp_path)
    given = (
        {"input_ids": tokens(), "decoder_input_ids": tokens()} if model_type == "m2m_100" else {"input_ids": tokens()}
    )
    with torch.no_grad():
        assert torch.equal(loaded(**given).logits, model(**given).logits) == (field == "dropout")
    assert getattr(ctxext.unpatch(loaded).config, field) == value
