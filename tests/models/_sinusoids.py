"""Models that add sinusoids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import PreTrainedModel

from tests.walk.tiny import tiny_config, tiny_model

LENGTH, FACTOR, WIDTH = 32, 2, 32


@dataclass(frozen=True)
class Case:
    """One structure: which class, how its table is computed, and what a checkpoint holds of it."""

    name: str  # transformers' class
    model_type: str
    first: int = 0  # row of the first token
    fairseq: bool = False  # whether its spectrum is fairseq's; else that of the Transformer's paper
    interleaved: bool = False  # whether sines and cosines alternate
    grows: bool = False  # whether its own code computes a longer table where a text is longer
    changes: dict[str, Any] = field(default_factory=dict)  # fields of its config


PAD = {"pad_token_id": 1}
SPEECHLESS = {"d_model": WIDTH, "max_position_embeddings": LENGTH}
DISTILLED = {"sinusoidal_pos_embds": True, "dim": WIDTH, "hidden_dim": 48, "max_position_embeddings": LENGTH}
CASES = {
    case.name: case
    for case in (
        Case("MarianMTModel", "marian", changes=SPEECHLESS),
        Case("MarianForCausalLM", "marian", changes=SPEECHLESS),
        Case("PegasusForConditionalGeneration", "pegasus", changes=SPEECHLESS),
        Case("FSMTForConditionalGeneration", "fsmt", 2, True, grows=True, changes=SPEECHLESS | PAD),
        Case("XGLMForCausalLM", "xglm", 2, True, grows=True, changes=SPEECHLESS | PAD),
        Case("M2M100ForConditionalGeneration", "m2m_100", 2, True, grows=True, changes=SPEECHLESS | PAD),
        Case("CTRLLMHeadModel", "ctrl", changes={"n_embd": WIDTH, "n_positions": LENGTH}),
        Case("DistilBertForMaskedLM", "distilbert", interleaved=True, changes=DISTILLED),
    )
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    case = CASES[name]
    return tiny_model(tiny_config(case.model_type, **(case.changes | changes)), loader=AsClass(name))


@dataclass(frozen=True)
class AsClass:
    """What ``tiny_model`` takes for an Auto class."""

    name: str

    def from_config(self, config: Any) -> PreTrainedModel:
        model: PreTrainedModel = getattr(transformers, self.name)(config)
        return model
