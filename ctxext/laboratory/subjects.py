"""Models to compare: one small Llama with each encoding instead of its rotation, and models that need none."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, logging

from ctxext.core import patching
from ctxext.core.rebuild import on_meta
from ctxext.laboratory.tasks import REACH
from ctxext.methods import BiasMethod, EncodingMethod, RopeMethod, known_methods

ROPE = "rope"
"""Name of the model as it is, with rotation."""
EXTENSIONS = ("pi", "ntk", "yarn", "self_extend", "nope")
"""Methods put on the trained rotation at the end, untrained: a stretch, two spectra, a remapping, no rotation."""


@dataclass(frozen=True, kw_only=True)
class Body:
    """Sizes that all models have in common; ``hidden`` is a multiple of 16."""

    hidden: int
    layers: int
    heads: int = 4

    def llama(self, vocabulary: int, trained_length: int) -> LlamaConfig:
        """Return the config of the model that all encodings are put on."""
        return LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=trained_length,
            bos_token_id=None,
            eos_token_id=None,
        )


@dataclass(frozen=True)
class Variant:
    """One way to know the order of tokens, as a model that is trained from nothing.

    A slow one needs several times the steps until the order of tokens is used at all.
    """

    name: str
    kind: Literal["rotation", "encoding", "recurrent"]
    is_slow: bool = False

    def build(self, body: Body, *, vocabulary: int, trained_length: int, seed: int) -> PreTrainedModel:
        """Build a new model, its weights drawn from the seed; encodings are put on by ``ctxext.patch``."""
        torch.manual_seed(seed)
        if self.kind == "recurrent":
            return _built(_recurrent_config(self.name, body, vocabulary, trained_length))
        model = _built(body.llama(vocabulary, trained_length))
        return model if self.kind == "rotation" else patching.patch(model, self.name, factor=float(REACH))


def subjects() -> dict[str, Variant]:
    """Return rotation, every method that can take its place on an untrained model, and recurrent models, by name.

    A method that is found in the folder of methods is here without another line.
    """
    every = [Variant(ROPE, "rotation"), *_encodings(), *(Variant(name, "recurrent") for name in RECURRENT)]
    return {subject.name: subject for subject in every}


def _encodings() -> Iterator[Variant]:
    for name, kind in known_methods().items():
        # Vectors that are added, and no positions at all, leave a plateau late: relative scores have left it long ago.
        if issubclass(kind, EncodingMethod):
            yield Variant(name, "encoding", is_slow=kind.form == "input")
        elif issubclass(kind, RopeMethod) and kind.needs_training:
            yield Variant(name, "encoding", is_slow=True)
        elif issubclass(kind, BiasMethod) and not issubclass(kind, RopeMethod):  # pi, say, only stretches positions
            yield Variant(name, "encoding")


RECURRENT = ("mamba2", "xlstm", "recurrent_gemma", "minimax", "rwkv")
"""Recurrent and linear models of transformers, as they are."""


def _recurrent(name: str, width: int, body: Body, vocabulary: int, trained: int) -> PreTrainedConfig:
    heads, reach = body.heads, REACH * trained
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": body.layers, "vocab_size": vocabulary}
    split: dict[str, Any] = {"num_attention_heads": heads, "head_dim": width // heads}
    if name == "mamba2":
        return transformers.Mamba2Config(
            **sizes, state_size=16, n_groups=1, chunk_size=16, expand=2, head_dim=16, num_heads=width // 8
        )
    if name == "xlstm":
        return transformers.xLSTMConfig(
            **sizes, num_blocks=body.layers, num_heads=4, chunk_size=16, max_inference_chunksize=reach
        )
    if name == "recurrent_gemma":
        window = max(2, trained // 2)  # less than the whole text, as in the published model
        return transformers.RecurrentGemmaConfig(
            **sizes, **split, intermediate_size=3 * width, lru_width=width, attention_window_size=window
        )
    if name == "minimax":
        # Its lightning attention alone: linear attention that each head forgets at a different rate. It represents
        # RetNet, which transformers does not have: both multiply keys of the past by a fixed power of a number per head
        # and know no softmax. What RetNet has besides, a rotation of queries and keys and another gate, is left out. So
        # are the layers with softmax that MiniMax puts between: they would bring rotation.
        return transformers.MiniMaxConfig(
            **sizes,
            **split,
            layer_types=["linear_attention"] * body.layers,
            block_size=64,
            num_key_value_heads=heads,
            intermediate_size=2 * width,
            max_position_embeddings=reach,
            num_local_experts=1,
            num_experts_per_tok=1,
        )
    return transformers.RwkvConfig(**sizes, attention_hidden_size=width, context_length=reach, use_cache=False)


@functools.lru_cache(maxsize=64)
def _recurrent_config(name: str, body: Body, vocabulary: int, trained: int) -> PreTrainedConfig:
    """Return the config at the width at which a recurrent model has about as many weights as the Llama."""
    wanted = _weights(body.llama(vocabulary, trained))
    configs = [_recurrent(name, width, body, vocabulary, trained) for width in range(16, 2 * body.hidden + 1, 16)]
    return min(configs, key=lambda config: abs(_weights(config) - wanted))


def _weights(config: PreTrainedConfig) -> int:
    with on_meta():
        return sum(weight.numel() for weight in _built(config).parameters())


def _built(config: PreTrainedConfig) -> PreTrainedModel:
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # each says that its fast kernels are not installed
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    finally:
        logging.set_verbosity(before)
    return model
