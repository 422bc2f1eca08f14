"""A process of stock transformers that never imports ctxext: loads checkpoints and computes their logits.

One request per line of standard input, one answer per line of standard output, both JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutput

STOCK_LOGITS = "stock_logits.safetensors"
HEARD = 32  # frames of sound that a writer attends to


def output_of(model: Any, inputs: Any, written: Any = None) -> Any:
    """Everything that a model of any kind gives for tokens, which an encoder-decoder reads or writes unless told."""
    arguments = {"input_ids": inputs}
    takes = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        channels = getattr(model.config.get_text_config(decoder=True), "num_channels", None)
        ids = inputs if written is None else written
        # Some write several tokens at each place.
        arguments["decoder_input_ids"] = ids if not channels else ids[..., None].expand(-1, -1, channels)
        if "input_ids" not in takes:
            del arguments["input_ids"]
            arguments["encoder_outputs"] = heard(model)
    if type(model.config) in AutoModelForCausalLM._model_mapping:
        arguments["use_cache"] = False
    if "bbox" in takes:
        arguments["bbox"] = torch.zeros(*inputs.shape, 4, dtype=torch.long)
    with torch.no_grad():
        return model(**arguments)


def heard(model: Any) -> Any:
    """What an encoder of sound could have said: random states, the same for every model of the same width."""
    text = model.config.get_text_config(decoder=True)
    width = next(
        size for name in ("cross_attention_hidden_size", "d_model", "hidden_size") if (size := getattr(text, name, 0))
    )
    states = torch.randn(1, HEARD, width, generator=torch.Generator().manual_seed(1))
    said = BaseModelOutput(last_hidden_state=states)
    said.attention_mask = None  # some ask for it
    return said


def logits_of(model: Any, inputs: Any) -> Any:
    """What a model of any kind says of tokens: logits, or the states of one that has no others."""
    output = output_of(model, inputs)
    return output.logits if "logits" in output else output[0]


def answer(request: dict[str, str]) -> dict[str, str]:
    """Load the checkpoint, write the logits of the given tokens beside it; any error is the answer."""
    directory = request["directory"]
    try:
        config = AutoConfig.from_pretrained(directory)
        # A part of a larger model may be saved alone; some configs make a causal model and one of two sides.
        known = type(config) in AutoModelForCausalLM._model_mapping and not config.is_encoder_decoder
        loader = AutoModelForCausalLM if known else getattr(transformers, config.architectures[0])
        model = loader.from_pretrained(directory, use_safetensors=True).eval()
    except Exception as error:  # whatever stock code says is the finding
        return {"error": f"{type(error).__name__}: {error}"}
    logits = logits_of(model, load_file(request["inputs"])["input_ids"])
    save_file({"logits": logits.contiguous()}, os.path.join(directory, STOCK_LOGITS))
    return {"logits": STOCK_LOGITS}


def main() -> None:
    """Serve until standard input closes."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        reply = answer(json.loads(line))
        if any(name.partition(".")[0] == "ctxext" for name in sys.modules):
            raise RuntimeError("this process must never import ctxext")
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
