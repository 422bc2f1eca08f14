"""What holds a model beside its tokenizer: taken like a wrapper, its limit raised and given back, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel, ModernBertConfig, ModernBertModel

import ctxext
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.methods import METHODS
from tests._models import RECENT, tiny
from tests._tokenizer import make_tokenizer
from tests.walk.tiny import TRAINED_LENGTH

TRAINED, TARGET = 32, 128
SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": TRAINED,
}  # fmt: skip


def tokenizer(limit: int = TRAINED) -> Any:
    found = make_tokenizer(bos=True)
    found.pad_token = found.convert_ids_to_tokens(1)
    found.model_max_length = limit
    return found


def encoder(place: Path, kind: str = "bert", limit: int = TRAINED) -> Any:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs ctxext[embed]")
    torch.manual_seed(0)
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    model: Any = BertModel(BertConfig(**SHAPE))
    if kind == "modernbert":
        model = ModernBertModel(ModernBertConfig(**SHAPE, **special, global_attn_every_n_layers=1))
    model.save_pretrained(place)
    tokenizer(limit).save_pretrained(place)
    return sentence_transformers.SentenceTransformer(str(place), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("bert", "hierarchical"), ("modernbert", "yarn")])
def test_a_sentence_transformer_is_extended_and_given_back(kind: str, method: str, tmp_path: Path) -> None:
    if kind == "modernbert" and not RECENT:
        pytest.skip("transformers 5.16 cannot build a ModernBertConfig without sliding windows")
    model = encoder(tmp_path / "plain", kind)
    texts = ["a" * 100 + "b", "a" * 100 + "c"]
    before = model.encode(texts)
    assert ctxext.patch(model, method, factor=4) is model
    assert model.max_seq_length == TARGET
    assert (ctxext.describe(model).target_length, ctxext.describe(model[0].auto_model).target_length) == (TARGET,) * 2
    assert not [note for note in ctxext.describe(model).notes if "cut" in note]
    first, second = model.encode(texts)
    assert abs(first - second).max() > 1e-6  # a word behind the trained length counts
    with pytest.raises(PatchStateError, match="already extended"):
        ctxext.patch(model, method, factor=4)
    ctxext.unpatch(model)
    assert model.max_seq_length == TRAINED
    assert (model.encode(texts) == before).all()


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="transformers 5.16 cannot build a ModernBertConfig without sliding windows")
def test_a_loaded_sentence_transformer_cuts_at_what_the_config_says(tmp_path: Path) -> None:
    for method in ("yarn", "dynamic_ntk"):
        model = encoder(tmp_path / "plain", "modernbert")
        ctxext.patch(model, method, factor=4)
        texts = ["a" * 100 + "b"]
        expected = model.encode(texts)
        notes = " ".join(ctxext.describe(model).notes)
        model.save(str(tmp_path / method))
        loaded = type(model)(str(tmp_path / method), device="cpu")
        said = f"after each load: lm-eval by max_length={TARGET}, sentence-transformers by max_seq_length={TARGET}"
        assert (said in notes) is (method == "dynamic_ntk") is (loaded.max_seq_length == TRAINED)
        loaded.max_seq_length = TARGET
        assert abs(loaded.encode(texts) - expected).max() < 1e-5


def test_a_shorter_choice_stays_and_is_named(tmp_path: Path) -> None:
    model = encoder(tmp_path / "plain", limit=24)
    ctxext.patch(model, "tile", factor=4)
    assert model.max_seq_length == 24
    (note,) = [note for note in ctxext.describe(model).notes if "cut" in note]
    assert "24" in note
    assert "Set it to 128" in note
    model.max_seq_length = TARGET
    assert not [note for note in ctxext.describe(model).notes if "cut" in note]


def test_a_cross_encoder(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs ctxext[embed]")
    BertForSequenceClassification(BertConfig(**SHAPE, num_labels=1, initializer_range=0.5)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("a" * 60, "a" * 40 + "b"), ("a" * 60, "a" * 40 + "c")]
    before = model.predict(pairs)
    ctxext.patch(model, "tile", factor=4)
    assert model.tokenizer.model_max_length == TARGET
    first, second = model.predict(pairs)
    assert abs(first - second) > 1e-7
    ctxext.unpatch(model)
    assert (model.predict(pairs) == before).all()


def test_a_pipeline() -> None:
    made = tokenizer(TRAINED_LENGTH)
    held: Any = transformers.pipeline("text-generation", model=tiny(vocab_size=300), tokenizer=made, device="cpu")
    ctxext.patch(held, "yarn", factor=4)
    assert made.model_max_length == 4 * TRAINED_LENGTH
    assert ctxext.describe(held).method["method"] == "yarn"
    ctxext.unpatch(held)
    assert (made.model_max_length, ctxext.describe(held).method) == (TRAINED_LENGTH, None)


class Alone(nn.Module):
    """A model of a user's own around one of transformers, without a tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"backbone": tiny()})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Alone(), r"found Alone\. It holds one: extend its inner\.backbone"),
        (nn.Linear(2, 2), r"found Linear\. Give the model that it was made from"),
        ("llama", r"found str\. Load it first: ctxext\.load\('llama', method="),
        (Path("llama"), r"Load it first: ctxext\.load\('llama', method="),
        (None, r"found NoneType\. Give the model"),
    ],
)
def test_what_is_no_model_is_told_the_next_step(model: Any, message: str) -> None:
    for verb in (lambda given: ctxext.patch(given, "yarn", factor=4), ctxext.describe, ctxext.unpatch):
        with pytest.raises(IncompatibleError, match=message):
            verb(model)


@pytest.mark.slow
def test_a_config_that_keeps_the_trained_length_is_named() -> None:
    """Programs that read max_position_embeddings cut at the old window; each other method says the new one."""
    for name in ("dynamic_ntk", "yarn", "dynamic_yarn", "dynamic_pi", "self_extend", "alibi", "ntk"):
        factor = {} if name in ("alibi",) else {"factor": 4}
        model = ctxext.patch(tiny(), METHODS[name].of(factor))
        said = [note for note in ctxext.describe(model).notes if "max_position_embeddings=" in note]
        short = model.config.max_position_embeddings < ctxext.describe(model).target_length
        assert bool(said) is short is (name == "dynamic_ntk"), name
