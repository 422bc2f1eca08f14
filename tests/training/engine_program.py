"""One process of a distributed run of the recipe: ``main(cases, environment, log)``.

Each case is a name, an engine, the words of a command line, and whether it is interrupted or resumed. What is left of
it lies in its output directory, and beside ``run.json``, ``recorded.pt``: every weight's whole gradient in every step,
and the buffers after the last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ctxext.errors import IncompatibleError
from ctxext.training import trainer as trainers
from ctxext.training.settings import read_settings
from tests.training._recipe import Stop, recipe
from tests.training.cpu_engines import admit_processes, admit_ring_attention

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
FSDP |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
CONTEXT = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
REPLICATED = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
ENGINES: dict[str, dict[str, str]] = {
    "data": {},
    "sharded": FSDP,
    "machines": FSDP | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | REPLICATED,
    "context": FSDP | CONTEXT | {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"},
}


class Recorder(TrainerCallback):
    def __init__(self, output: str) -> None:
        self.output = Path(output)
        self.steps: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.steps.append({name: whole(weight.grad) for name, weight in trained.items()})
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if state.is_world_process_zero:
            torch.save({"gradients": self.steps, "buffers": buffers}, self.output / "recorded.pt")


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else None if gradient is None else gradient.clone()


def run(case: dict[str, Any]) -> None:
    environment = ENGINES.get(case["engine"], {})
    os.environ.update(environment)
    settings = read_settings(case["config"], case["words"])
    arguments, prepare = recipe.training_arguments, trainers.LongTrainer.__init__

    def with_accelerators(settings: Any, device: str) -> Any:
        made = arguments(settings, device)
        assert made.world_size == int(os.environ["WORLD_SIZE"])
        made.adam_epsilon = 1e-3  # with 1e-8 a gradient that is rounding moves its weight as far as any other does
        if environment:
            admit_processes()
        return made

    def with_recorder(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        self.add_callback(Recorder(settings.output))
        if case["interrupted"]:
            self.add_callback(Stop())

    try:
        recipe.training_arguments, trainers.LongTrainer.__init__ = with_accelerators, with_recorder
        recipe.finetune(settings, resume=case["resumed"])
    except KeyboardInterrupt:
        assert case["interrupted"]
    except IncompatibleError as error:
        Path(settings.output, "refused.txt").write_text(str(error), encoding="utf-8")
    finally:
        recipe.training_arguments, trainers.LongTrainer.__init__ = arguments, prepare
        for key in environment:
            del os.environ[key]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def main(cases: list[dict[str, Any]], environment: dict[str, str], log: Path) -> None:
    """Run cases one after the other, with all that is said in a file."""
    os.environ.update(environment)
    with log.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    admit_ring_attention()
    for case in cases:
        print("case", case["name"], flush=True)
        run(case)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
