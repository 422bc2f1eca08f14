"""The Trainer of the recipe: rates of its groups of weights, and gradients that are no numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, TrainingArguments

import ctxext
from ctxext.errors import InvalidParameterError
from ctxext.training.trainer import LongTrainer, NotANumberError
from tests._host_reads import Counting
from tests._models import tiny, tokens
from tests.training._recipe import QUIET
from tests.training._trainer import trainer_of


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 1e-5])
def test_the_embedding_has_a_rate_of_its_own(rate: float | None, tmp_path: Path) -> None:
    """One step of Adam moves every weight by its rate."""
    trainer = trainer_of(tmp_path, embedding_learning_rate=rate)
    model = trainer.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
    trainer.train()
    trained = [weight for group in trainer.optimizer.param_groups for weight in group["params"]]
    assert len(trained) == len({id(weight) for weight in trained}) == len(before)
    after = dict(model.named_parameters())
    moved = {name: (after[name] - weight).abs().max().item() for name, weight in before.items()}
    embedding = {name for name in moved if "embed_tokens" in name}
    assert len(embedding) == 1
    for name, distance in moved.items():
        expected = rate if rate is not None and name in embedding else 0.0 if "lora_A" in name else 1e-3
        assert distance == pytest.approx(expected, rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["lora_A", "embed_tokens"])
def test_a_gradient_that_is_no_number_stops_training_before_weights_change(
    wrong: float, part: str, tmp_path: Path
) -> None:
    """One number among all of them, in the last weight of its kind, under a loss that is a number."""
    trainer = trainer_of(tmp_path)
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = wrong
        return gradient

    [weight for name, weight in trained.items() if part in name][-1].register_hook(spoiled)
    with pytest.raises(NotANumberError, match=r"A gradient is not finite \(the loss is \d\.\d+\) in step 1"):
        trainer.train()
    assert all(torch.equal(weight, before[name]) for name, weight in trained.items())


@pytest.mark.nightly
def test_reads_of_a_step_do_not_grow_with_the_weights(tmp_path: Path) -> None:
    def reads(layers: int, steps: int) -> int:
        trainer = trainer_of(tmp_path, layers=layers, steps=steps)
        with Counting() as counting:
            trainer.train()
        return counting.found.total()

    few, many = (reads(layers, steps=6) - reads(layers, steps=2) for layers in (1, 3))
    assert few == many


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["a number", "NaN"])
def test_an_evaluation_reads_what_training_does_and_takes_any_loss(loss: str, tmp_path: Path) -> None:
    """The number of a sequence is for messages about training, and no argument of a model."""
    trainer, read = trainer_of(tmp_path), list[set[str]]()
    trainer.model.register_forward_pre_hook(lambda _, args, kwargs: read.append(set(kwargs)), with_kwargs=True)
    if loss == "NaN":
        trainer.model.get_input_embeddings().weight.data.fill_(torch.nan)
    found = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert math.isnan(found) == (loss == "NaN")
    assert all("index" not in names for names in read)
    if loss == "NaN":
        with pytest.raises(NotANumberError, match=r"The loss is nan in step 1"):
            trainer.train()


class Untold(LlamaForCausalLM):
    """A class that takes the number of tokens in a step, and does not tell its loss: XGLM of transformers 5.16."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        output = super().forward(input_ids, **kwargs)
        output.loss = self.loss_function(output.logits, labels, vocab_size=(self.config.vocab_size))
        return output


class Told(LlamaForCausalLM):
    """A class that picks the number, as BLOOM of transformers 5.16 does."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        count = kwargs.pop("num_items_in_batch", None)
        output = super().forward(input_ids, **kwargs)
        width = self.config.vocab_size
        output.loss = self.loss_function(output.logits, labels, vocab_size=width, num_items_in_batch=count)
        return output


@pytest.mark.slow
def test_a_loss_that_is_not_told_of_a_step_is_not_added_up_over_it(tmp_path: Path) -> None:
    steps = []
    for kind in (LlamaForCausalLM, Told, Untold):
        model = kind(tiny().config)
        model.load_state_dict(tiny().state_dict())
        rows = [{"input_ids": row, "labels": row, "index": torch.tensor(0)} for row in tokens(rows=4)]
        shape = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
        arguments = TrainingArguments(str(tmp_path), remove_unused_columns=False, **shape, **QUIET)
        trainer = LongTrainer(model, arguments, train_dataset=rows)
        trainer.train()
        steps.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    for step in steps[1:]:
        assert step == pytest.approx(steps[0], rel=0.05)


def test_a_step_that_does_not_fit_into_memory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(LongTrainer, "training_step", full)
    with pytest.raises(InvalidParameterError, match=r"Out of memory at a step of training\. .* lower data\.length"):
        trainer_of(tmp_path).train()


@pytest.mark.slow
def test_a_language_model_inside_another_keeps_packed_documents_apart(tmp_path: Path) -> None:
    """With a cache of its own, which the Trainer's word to the whole config does not keep it from, it would not."""
    model: Any = ctxext.patch(tiny("llava"), "yarn", factor=4).train()
    packed, positions = tokens(32), torch.arange(16).repeat(2)[None]
    rows = [{"input_ids": packed[0], "labels": packed[0], "index": torch.tensor(0)}]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, remove_unused_columns=False, **QUIET)
    LongTrainer(model, arguments, train_dataset=rows)
    found = model(input_ids=packed, position_ids=positions).logits[:, 16:]
    torch.testing.assert_close(found, model(input_ids=packed[:, 16:]).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_no_step_fills_a_cache_however_often_the_trainer_runs(tmp_path: Path) -> None:
    """With a cache, packed documents would see each other; afterwards the model writes text with one again."""
    trainer, caching = trainer_of(tmp_path), []
    config = trainer.subject.config
    trainer.model.register_forward_pre_hook(lambda *_: caching.append(config.use_cache))
    for run in (trainer.train, trainer.train, lambda: trainer.evaluate(trainer.train_dataset)):
        run()
        assert config.use_cache
    assert len(caching) >= 3
    assert not any(caching)
