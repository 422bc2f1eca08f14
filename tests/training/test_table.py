"""Training a table of positions alone, and filling in masked tokens: what stays, what changes, what is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast, RobertaForMaskedLM

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError
from ctxext.models import architecture_of
from ctxext.training.checkpoints import last_checkpoint
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.masked import MaskedSequences, shift_of
from ctxext.training.sequences import IGNORED, TrainingSequences
from ctxext.training.settings import Settings, checked_settings
from ctxext.training.table import TrainedTable
from tests._models import bert, gpt2, tiny
from tests._tokenizer import make_two_sided_tokenizer
from tests.training._recipe import losses, recipe
from tests.walk.tiny import TRAINED_LENGTH as TRAINED

MADE: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "roberta": partial(bert, RobertaForMaskedLM, max_position_embeddings=TRAINED + 260),
    "gpt2": partial(gpt2, vocab_size=260, n_positions=TRAINED),
}


def made(kind: str, method: str | None = None) -> Any:
    """A model of a kind, extended by 2 where a method is named."""
    return MADE[kind]() if method is None else ctxext.patch(MADE[kind](), method, factor=2)


def rows_of(model: Any) -> Tensor:
    """The table, without rows for padding."""
    (table,) = architecture_of(Subject.of(model)).tables(Subject.of(model))  # type: ignore[attr-defined]
    weight: Tensor = model.get_parameter(table.name)
    return weight.detach()[table.first :]


@pytest.fixture(scope="module")
def both_ends() -> PreTrainedTokenizerFast:
    return make_two_sided_tokenizer()


@pytest.fixture
def settings(corpus: Path, both_ends: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
    """Settings that train the new rows of a table."""

    def make(kind: str = "bert", method: str = "hierarchical", **changes: Any) -> Settings:
        checkpoint = tmp_path / kind
        if not checkpoint.exists():
            made(kind).save_pretrained(checkpoint)
            both_ends.save_pretrained(checkpoint)
        values: dict[str, Any] = {
            "checkpoint": str(checkpoint),
            "dtype": "fp32",
            "output": str(tmp_path / "run"),
            "table": "new_rows",
            "extension": {"method": method, "factor": 2},
            "data": {"train": str(corpus), "length": 128, "masked": None if kind == "gpt2" else 0.15},
            "training": {"steps": 4, "learning_rate": 1e-2, "checkpoint_every": 2},
        }
        for name, value in changes.items():
            section, _, leaf = name.rpartition("__")
            (values[section] if section else values)[leaf] = value
        return checked_settings(values, "test")

    return make


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["hierarchical", "tile", "stretch", "pi"])
def test_learned_rows_stay_bit_for_bit_wherever_the_method_put_them(settings: Any, tmp_path: Path, method: str) -> None:
    recipe.finetune(settings(method=method))
    before, after = made("bert"), AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert after.config.max_position_embeddings == 2 * TRAINED
    old, new, begin = rows_of(before), rows_of(after), rows_of(made("bert", method))
    places = {"pi": range(0, 2 * TRAINED, 2), "stretch": range(20)}.get(method, range(TRAINED))
    kept = torch.zeros(2 * TRAINED, dtype=torch.bool)
    kept[list(places)] = True
    same = (new == begin).all(dim=1)
    if method == "stretch":  # of the rows behind, those that fall on learned ones stay too
        kept = same
        assert same[:20].all()
        assert same.sum() < TRAINED
    assert torch.equal(same, kept), "what was learned changed, or new rows were not trained"
    assert torch.equal(new[list(places)], old[: len(places)])
    others = [name for name, weight in before.named_parameters() if "position" not in name]
    assert all(torch.equal(before.get_parameter(name), after.get_parameter(name)) for name in others)
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert f"of {2 * TRAINED} rows of bert.embeddings.position_embeddings.weight are trained" in report["trained"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["roberta", "gpt2"])
def test_rows_for_padding_and_causal_models_too(settings: Any, tmp_path: Path, kind: str) -> None:
    recipe.finetune(settings(kind))
    loader = AutoModelForCausalLM if kind == "gpt2" else AutoModelForMaskedLM
    after = loader.from_pretrained(tmp_path / "run" / "model")
    (table,) = architecture_of(Subject.of(after)).tables(Subject.of(after))  # type: ignore[attr-defined]
    weight = {name: model.get_parameter(table.name) for name, model in (("old", made(kind)), ("new", after))}
    kept = table.first + TRAINED
    assert torch.equal(weight["new"][:kept], weight["old"][:kept])
    assert (weight["new"][kept:] != 0).any(dim=1).all()
    again = ctxext.load(tmp_path / "run" / "model")
    assert torch.equal(again.get_parameter(table.name), weight["new"]), "loading made new rows of the old"


@pytest.mark.nightly
def test_a_table_trained_in_bfloat16_is_measured_at_the_end(settings: Any, corpus: Path, tmp_path: Path) -> None:
    """Where the loss in chunks has replaced a forward, and accelerate has wrapped and unwrapped it."""
    recipe.finetune(settings("gpt2", dtype="bf16", evaluation={"text": [str(corpus)], "lengths": [100]}))
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["evaluation"]["after"]["perplexity"]["answer"]


@pytest.mark.parametrize("trained", [{}, {"table": None, "merge": True}], ids=["table", "adapter"])
def test_a_tokenizer_that_cannot_be_saved_beside_the_model_is_refused_before_anything_is_trained(
    settings: Any, tmp_path: Path, trained: dict[str, Any]
) -> None:
    asked = settings("roberta", **trained)
    config = tmp_path / "roberta" / "config.json"
    config.write_text(config.read_text().replace('"pad_token_id": 259', '"pad_token_id": 3'))
    with pytest.raises(InvalidParameterError, match="pads with the token 259"):
        recipe.finetune(asked)
    assert last_checkpoint(tmp_path / "run") is None


@pytest.mark.nightly
def test_the_loss_falls_and_the_whole_table_is_trained_where_that_is_asked(settings: Any, tmp_path: Path) -> None:
    recipe.finetune(settings(table="whole", training__steps=60, training__accumulation=2, training__learning_rate=0.1))
    found = list(losses(tmp_path / "run").values())
    assert found[0] == pytest.approx(7, abs=1), "a mean over passes, not their sum"
    assert sum(found[-10:]) < 0.95 * sum(found[:10])
    after = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert (rows_of(after)[:TRAINED] != rows_of(made("bert"))).any(dim=1).all()


@pytest.mark.nightly
def test_skip_wise_positions_train_new_rows_from_short_sequences(settings: Any, tmp_path: Path) -> None:
    short = {"data__length": 32, "data__positions": "pose", "training__accumulation": 8}
    recipe.finetune(settings("roberta", **short))
    after = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    changed = (rows_of(after) != rows_of(made("roberta", "hierarchical"))).any(dim=1)
    assert not changed[:TRAINED].any()
    assert changed[TRAINED:].sum() > 32, "beyond what the sequences are long"


@pytest.mark.nightly
def test_an_adapter_on_a_rotary_encoder_fills_in_masked_tokens(
    settings: Any, both_ends: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny("modernbert", vocab_size=260).save_pretrained(tmp_path / "rotary")
    both_ends.save_pretrained(tmp_path / "rotary")
    own = {"table": None, "checkpoint": str(tmp_path / "rotary"), "merge": True, "data__length": 100}
    recipe.finetune(settings(method="yarn", **own))
    ids = torch.arange(30, 120)[None]
    merged = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "merged").eval()
    adapted = ctxext.load(tmp_path / "run" / "adapter").eval()
    plain = tiny("modernbert", vocab_size=260)
    with torch.no_grad():
        ours, theirs, before = (model(input_ids=ids).logits for model in (merged, adapted, plain))
    assert torch.allclose(ours, theirs, atol=1e-4 * before.abs().max())
    assert not torch.allclose(ours, before, atol=1e-2 * before.abs().max())


def sequences(documents: TokenisedDocuments, length: int = 32, **options: Any) -> TrainingSequences:
    return TrainingSequences(documents, length=length, count=12, seed=0, target_length=128, **options)


def test_masks_are_the_sequences_own_and_special_tokens_are_never_masked(
    documents: TokenisedDocuments, both_ends: PreTrainedTokenizerFast
) -> None:
    whole = sequences(documents)
    found, again, other = (MaskedSequences(whole, both_ends, share=0.3, seed=seed) for seed in (0, 0, 1))
    assert len(found) == 12
    for index in reversed(range(12)):
        again[index]
    asked = 0
    for index in range(12):
        item, same, text = found[index], again[index], whole[index]["input_ids"]
        assert all(torch.equal(item[name], same[name]) for name in item)
        wanted = item["labels"] != IGNORED
        assert torch.equal(item["labels"][wanted], text[wanted])
        assert torch.equal(item["input_ids"][1:-1][~wanted[1:-1]], text[1:-1][~wanted[1:-1]])
        assert item["input_ids"][[0, -1]].tolist() == [256, both_ends.sep_token_id]
        assert not wanted[[0, -1]].any()
        asked += int(wanted.sum())
    assert 0.2 < asked / (12 * 30) < 0.4
    assert any(not torch.equal(found[index]["labels"], other[index]["labels"]) for index in range(12))


def test_a_sequence_that_would_be_spared_has_one_token_to_fill_in(
    documents: TokenisedDocuments, both_ends: PreTrainedTokenizerFast
) -> None:
    found = MaskedSequences(sequences(documents, 8), both_ends, share=1e-6, seed=0)
    for index in range(12):
        wanted = found[index]["labels"] != IGNORED
        assert wanted.sum() == 1
        assert found[index]["input_ids"][wanted].tolist() == [257]
        assert found[index]["labels"][wanted] == sequences(documents, 8)[index]["input_ids"][wanted]


@pytest.mark.slow
def test_positions_are_told_as_the_model_counts_them() -> None:
    for kind, shift in (("bert", 0), ("roberta", 260)):
        assert shift_of(made(kind, "tile")) == shift
    deaf = made("bert")
    forward = deaf.forward
    deaf.forward = lambda input_ids, position_ids=None: forward(input_ids=input_ids)
    with pytest.raises(IncompatibleError, match=r"Set data\.positions to consecutive"):
        shift_of(deaf)


def test_a_row_that_was_changed_is_not_saved_without_a_word() -> None:
    model = made("bert", "tile")
    table = TrainedTable(model, only_new=True)
    table.require_kept()
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=0.1, weight_decay=0.1)
    model(input_ids=torch.arange(128)[None]).logits.sum().backward()
    optimizer.step()
    with pytest.raises(VerificationError, match="without weight decay"):
        table.require_kept()


@pytest.mark.slow
def test_what_has_no_table_to_train_is_refused() -> None:
    for model, said in (
        (made("bert"), "has no extended table"),
        (ctxext.patch(tiny(), "yarn", factor=2), "has no extended table"),
        (ctxext.patch(made("bert").bfloat16(), "pi", factor=2), "Load the model in float32"),
    ):
        with pytest.raises(IncompatibleError, match=said):
            TrainedTable(model, only_new=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training__weight_decay": 0.1}, "set training.weight_decay to 0"),
        ({"stages": [{"steps": 1, "factor": 1.5}]}, "would drop the rows just trained"),
        ({"data__positions": "packed"}, "do not keep packed documents apart"),
        ({"data__masked": 1.0}, "data.masked"),
        ({"checkpoint": "model.gguf"}, "data.masked needs a masked language model"),
        ({"evaluation": {"passkey_lengths": 100}}, "with ctxext eval masked"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        settings(**changes)
