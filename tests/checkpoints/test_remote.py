"""Checkpoints saved with ``remote_code=True`` load by their path where the code beside them is trusted, only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, BertModel

import ctxext
from ctxext.checkpoints.remote import RemoteConfig
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from tests._models import RECENT, bert, logits, tiny, tokens
from tests._programs import ran
from tests._tokenizer import make_letters


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["self_extend", "alibi", "yarn", "dynamic_yarn"])
def test_it_loads_by_its_path_where_its_code_is_trusted(method: str, tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), method, factor=4)
    ctxext.save(model, tmp_path / "there", tokenizer=make_letters(), remote_code=True)
    assert not hasattr(model.config, "auto_map")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "there", trust_remote_code=True, dtype=torch.float32)
    assert type(found) is type(model)
    assert torch.equal(logits(found.eval(), tokens()), logits(model, tokens()))
    assert ctxext.describe(found).target_length == 256
    assert len(AutoTokenizer.from_pretrained(tmp_path / "there", trust_remote_code=True)) == 257
    config = AutoConfig.from_pretrained(tmp_path / "there", trust_remote_code=True)
    assert config.max_position_embeddings == 256


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="older transformers are refused")
def test_a_branch_beside_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--branched"
    (repository / "refs").mkdir(parents=True)
    tiny().save_pretrained(repository / "snapshots" / "main")
    ctxext.save(ctxext.patch(tiny(), "self_extend", factor=4), repository / "snapshots" / "long", remote_code=True)
    for name in ("main", "long"):
        (repository / "refs" / name).write_text(name)
    config = RemoteConfig.from_pretrained("me/branched", revision="long")
    assert config.ctxext["target_length"] == 256
    assert config.auto_map["AutoConfig"] == "ctxext_remote.RemoteConfig"


@pytest.mark.nightly
def test_every_auto_class_of_its_type_loads_it_where_its_code_is_trusted(tmp_path: Path) -> None:
    model = ctxext.patch(tiny(pad_token_id=0), "self_extend", factor=4)
    ctxext.save(model, tmp_path / "there", remote_code=True)
    program = f"""
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM
asked = {{"trust_remote_code": True, "dtype": torch.float32}}
ids = torch.tensor({tokens().tolist()})
for given in ({{}}, {{"trust_remote_code": False}}):
    try:
        AutoModelForCausalLM.from_pretrained("there", **given)
    except KeyError as error:
        print("ctxext.load" in str(error))
found = {{}}
with torch.no_grad():
    for kind in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModel):
        loaded = kind.from_pretrained("there", **asked).eval()
        found[kind.__name__] = getattr(loaded, "model", loaded)(ids).last_hidden_state
        print(type(loaded).__name__, loaded.config.ctxext["target_length"])
torch.save(found, "found.pt")
from ctxext.errors import CheckpointError
try:
    LlamaForCausalLM.from_pretrained("there", **asked)
except CheckpointError as error:
    print("ctxext.load" in str(error))
"""
    said = ran(["-c", program], tmp_path).stdout.split()
    kinds = ["LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel"]
    assert said == ["True", "True"] + [word for kind in kinds for word in (kind, "256")] + ["True"]
    with torch.no_grad():
        expected = model.model(tokens()).last_hidden_state
    for states in torch.load(tmp_path / "found.pt").values():
        assert torch.equal(states, expected)


@pytest.mark.slow
def test_older_transformers_would_take_the_code_for_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctxext.save(ctxext.patch(tiny(), "yarn", factor=4), tmp_path / "there", remote_code=True)
    monkeypatch.setattr(transformers, "__version__", "5.18.1")
    with pytest.raises(IncompatibleError, match=r"5\.18\.1 would take the code beside .*there for all .* Use ctxext"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "there", trust_remote_code=True)


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="older transformers are refused")
def test_a_saved_base_model_has_a_name_in_auto_classes_too(tmp_path: Path) -> None:
    model = ctxext.patch(bert(BertModel), "hierarchical", factor=2)
    ctxext.save(model, tmp_path / "there", remote_code=True)
    found = AutoModel.from_pretrained(tmp_path / "there", trust_remote_code=True).eval()
    assert type(found) is BertModel
    with torch.no_grad():
        assert torch.equal(found(tokens(80)).last_hidden_state, model(tokens(80)).last_hidden_state)
    (tmp_path / "there" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        AutoModel.from_pretrained(tmp_path / "there", trust_remote_code=True)


@pytest.mark.nightly
def test_what_is_loaded_names_no_code_any_more(tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(), "self_extend", factor=4), tmp_path / "there", remote_code=True)
    assert (tmp_path / "there" / "ctxext_remote.py").is_file()
    for found in (
        ctxext.load(tmp_path / "there"),
        ctxext.load(tmp_path / "there", trust_remote_code=True),
        AutoModelForCausalLM.from_pretrained(tmp_path / "there", trust_remote_code=True),
    ):
        found.save_pretrained(tmp_path / "again")
        assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
        ctxext.save(found, tmp_path / "saved")
        assert not (tmp_path / "saved" / "ctxext_remote.py").exists()


def test_adapters_and_models_of_no_auto_class_are_refused(tmp_path: Path) -> None:
    model = ctxext.patch(tiny(), "yarn", factor=4)
    with pytest.raises(InvalidParameterError, match="is for whole models"):
        ctxext.save(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), tmp_path, remote_code=True)
    model = ctxext.patch(tiny(), "yarn", factor=4)
    model.__class__ = type("Own", (type(model),), {})
    with pytest.raises(IncompatibleError, match="no AutoModel of transformers loads a Own"):
        ctxext.save(model, tmp_path, remote_code=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="older transformers are refused")
def test_a_config_that_was_changed_is_the_model_s(tmp_path: Path) -> None:
    ctxext.save(ctxext.patch(tiny(pad_token_id=0), "self_extend", factor=4), tmp_path / "there", remote_code=True)
    place, trusted = tmp_path / "there", {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(place, num_labels=5, **trusted)
    config.use_cache = False
    for given in ({"config": config}, {"num_labels": 5, "use_cache": False}):
        found = transformers.AutoModelForSequenceClassification.from_pretrained(place, **given, **trusted)
        assert (found.score.out_features, found.config.num_labels, found.config.use_cache) == (5, 5, False)
        assert ctxext.describe(found).target_length == 256
