"""A tiny Llama as a GGUF file, written with the gguf package and not by llama.cpp's converter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import LlamaForCausalLM

from tests._checkpoints import TRAINED
from tests._formulas import spectrum

HALF = 8
PLAIN = 10000.0 ** (-np.arange(HALF) / HALF)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def scaled_by(kind: str, factor: float, **more: Any) -> np.ndarray:
    """Return the frequencies of a published scaling."""
    rope = {"type": kind, "factor": factor, "original_max_position_embeddings": TRAINED}
    return spectrum(rope | more, 2 * HALF).inv_freq.numpy()


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    *,
    architecture: str = "llama",
    alignment: int = 32,
    quantised: tuple[str, ...] = (),
    rope_freqs: Any = None,
    tensors: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    **keys: Any,
) -> Path:
    """Write a model in float32, ``quantised`` tensors in Q8_0; two underscores in ``keys`` stand for a dot."""
    config = model.config
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    size = config.vocab_size
    said: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": shared,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    said |= {name.replace("__", "."): value for name, value in keys.items()}
    writer = gguf.GGUFWriter(path, architecture)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for name, value in said.items():
        whole = name if name.startswith(("general.", "split.")) else f"{architecture}.{name}"
        if name in leave_out:
            continue
        kind = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        kind(whole, value)
    writer.add_name("tiny é")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "aab", *(f"t{index}" for index in range(6, size))])
    writer.add_token_types([3, 3] + [1] * (size - 2))
    writer.add_token_scores([-0.1 * index for index in range(size)])
    writer.add_token_merges(["a b", "a ab"])  # two: transformers 5.17 takes a list of one for a string
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    for name, tensor in _tensors(model, heads, shared).items():
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: LlamaForCausalLM, heads: int, shared: int) -> dict[str, np.ndarray]:
    found = {}
    for name, weight in model.state_dict().items():
        tensor = np.ascontiguousarray(weight.float().numpy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs lie beside each other there
            count = heads if "q_proj" in name else shared
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        in_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        found[f"blk.{in_layer[1]}.{IN_LAYERS[in_layer[2]]}.weight" if in_layer else NAMES[name]] = tensor
    return found
