"""The smallest honest random config of any type of language model: default structure, small numbers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctxext.models.table_rows import is_sinusoidal
from tests.walk.special import SPECIAL

TRAINED_LENGTH = 64
VOCABULARY = 128
LAYERS = 2
SPREAD = 0.2  # of random weights: at 0.02, the usual value, attention is so flat that positions hardly move logits

_SMALL: dict[int, str] = {
    2: "encoder_layers decoder_layers n_layer n_layers num_layers num_hidden_layers max_window_layers num_dense_layers "
    "num_experts_per_tok moe_topk moe_k num_experts_per_token top_k top_k_experts num_key_value_heads kv_n_heads "
    "swa_num_key_value_heads num_global_key_value_heads mamba_n_groups linear_num_key_heads",
    4: "num_attention_heads mamba_n_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts linear_num_value_heads index_n_heads mamba_d_conv "
    "swa_num_attention_heads num_heads",
    1: "num_shared_experts n_shared_experts moe_num_shared_experts first_k_dense_replace n_group topk_group "
    "moe_layer_start_index num_expert_group",
    0: "num_nextn_predict_layers num_mtp_layers pad_token_id",
    16: "rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim sliding_window mamba_d_state mamba_chunk_size "
    "chunk_size attention_chunk_size attention_window_size sliding_window_size hidden_size_per_layer_input state_size "
    "ssm_state_size",
    32: "head_dim kv_lora_rank index_head_dim linear_key_head_dim linear_value_head_dim kv_channels global_head_dim "
    "swa_head_dim swa_v_head_dim moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size ffn_dim_per_expert attention_head_dim mamba_head_dim",
    48: "q_lora_rank shared_intermediate_size",
    64: "max_position_embeddings n_positions max_seq_len model_max_length original_max_position_embeddings "
    "mamba_d_head index_topk",
    128: "vocab_size hidden_size d_model n_embd embedding_size lru_width vocab_size_per_layer_input "
    "unpadded_vocab_size hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size",
    192: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
}
SMALL = {name: value for value, names in _SMALL.items() for name in names.split()}


# What a type is walked as: the first of these that knows it.
KINDS: dict[str, Any] = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "speech": transformers.AutoModelForSpeechSeq2Seq,
    "encoder": transformers.AutoModelForTextEncoding,
    "tokens": transformers.AutoModelForTokenClassification,
    "answers": transformers.AutoModelForQuestionAnswering,
    "pictures": transformers.AutoModelForImageTextToText,
}


def _has_text_of_its_own(config_class: Any, others: set[str]) -> bool:
    """Whether the text part of a model that reads pictures is of no type that is walked alone."""
    part = config_class.sub_configs.get("text_config")
    return part is not AutoConfig and (part is None or part.model_type not in others)


def model_types(kind: str | None = None) -> list[str]:
    """Every type of language model in the installed transformers, by its own name; those of one kind where asked."""
    names: dict[str, str] = {}
    for name, loader in KINDS.items():
        alone = set(names)
        for config_class in loader._model_mapping:
            registered_here = not config_class.__module__.startswith("transformers.")  # by a test
            if config_class not in loader._model_mapping or registered_here:
                continue
            if name != "pictures" or _has_text_of_its_own(config_class, alone):
                names.setdefault(config_class.model_type, name)
    return sorted(model_type for model_type, name in names.items() if kind in (None, name))


def kind_of(config_class: type) -> str:
    """What models of a config are walked as."""
    return next(name for name, loader in KINDS.items() if config_class in loader._model_mapping)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The type's default config with small numbers; ``changes`` are fields of its text part."""
    return _shrunk(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {}) | changes)


def tiny_model(config: PreTrainedConfig, seed: int = 0, loader: Any = None) -> PreTrainedModel:
    """A random model, by the first of ``KINDS`` unless told, with weights so wide that positions show in its logits."""
    torch.manual_seed(seed)
    model: PreTrainedModel = (loader or KINDS[kind_of(type(config))]).from_config(config)
    tied = set()
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear | nn.Embedding) and id(weight) not in tied:
                if isinstance(module, nn.Embedding) and not weight.is_meta and is_sinusoidal(weight):
                    continue  # what its class computes is no random weight
                tied.add(id(weight))
                weight.normal_(0.0, SPREAD)
                if getattr(module, "padding_idx", None) is not None:
                    weight[module.padding_idx] = 0.0
        for name, parameter in model.named_parameters():
            if name.endswith(".temp"):  # zero at first: attention would be flat, and positions without effect
                parameter.fill_(1.0)
    return model.eval()


def _shrunk(config_class: Any, special: dict[str, Any]) -> PreTrainedConfig:
    """Build ``config_class`` from its own defaults with every known size made small."""
    names = {field.name for field in dataclasses.fields(config_class)}
    given = dict(special)
    default = config_class(**given)
    small = {name: value for name, value in SMALL.items() if name in names and _resizable(default, name)}
    small |= _ratios(default, names)
    small |= _token_ids(default, names) | {"initializer_range": SPREAD} | _layers(default, small)
    small |= _trained_length(default)
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            changes = given.pop(name, {})
            small[name] = _shrunk(type(part), changes)
    return config_class(**(small | given))


def _trained_length(default: Any) -> dict[str, Any]:
    """The rope dict of a type that is scaled by default, so that its scaling reaches the small trained length."""
    rope = copy.deepcopy(vars(default).get("rope_parameters"))
    if not isinstance(rope, dict) or "original_max_position_embeddings" not in rope:
        return {}
    if "factor" not in rope:
        return {"rope_parameters": rope | {"original_max_position_embeddings": TRAINED_LENGTH}}
    return {"rope_parameters": rope | {"original_max_position_embeddings": TRAINED_LENGTH // 4, "factor": 4.0}}


def _ratios(default: Any, names: set[str]) -> dict[str, Any]:
    """Where the default config has two sizes equal on purpose, keep them equal."""
    values = vars(default)
    ratios: dict[str, Any] = {}
    if "num_key_value_heads" in names and values.get("num_key_value_heads") == values.get("num_attention_heads"):
        ratios["num_key_value_heads"] = SMALL["num_attention_heads"]
    if "head_dim" in names and values.get("head_dim") == values.get("qk_rope_head_dim", 0):
        ratios["head_dim"] = SMALL["qk_rope_head_dim"]
    if values.get("num_experts_per_tok") == 1:
        ratios["num_experts_per_tok"] = 1
    return ratios


def _resizable(default: Any, name: str) -> bool:
    value = vars(default).get(name)
    optional = name in ("sliding_window", "q_lora_rank", "pad_token_id", "attention_chunk_size")
    if name in ("num_dense_layers", "first_k_dense_replace", "max_window_layers") and not value:
        return False
    if optional and value is None:
        return name == "pad_token_id"
    return not isinstance(value, list | tuple)


def _token_ids(default: Any, names: set[str]) -> dict[str, int]:
    """Special tokens inside the small vocabulary."""
    special = sorted(name for name in names if name.endswith(("_token_id", "_token_index", "_token_ids")))
    present = [name for name in special if name != "pad_token_id" and vars(default).get(name) is not None]
    return {name: 1 + place for place, name in enumerate(present)}


def _layers(default: Any, small: dict[str, Any]) -> dict[str, Any]:
    """As few layers as show every kind of layer once, and at least two; every per-layer list is cut alike."""
    count_name = next((n for n in ("num_hidden_layers", "n_layers", "n_layer", "num_layers") if n in small), None)
    if count_name is None:
        return {}
    count = getattr(default, count_name)
    lists = {k: v for k, v in vars(default).items() if isinstance(v, list) and len(v) == count and _per_layer(v)}
    kinds: dict[str, int] = {}
    for layer, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(str(kind), layer)
    chosen = sorted(kinds.values())
    chosen += [layer for layer in range(count) if layer not in chosen][: max(0, LAYERS - len(chosen))]
    chosen.sort()
    return {count_name: len(chosen)} | {name: [values[layer] for layer in chosen] for name, values in lists.items()}


def _per_layer(values: list[Any]) -> bool:
    return values != list(range(len(values)))
