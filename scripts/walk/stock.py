"""A process of stock transformers that never imports ctxext: loads checkpoints and computes their logits.

One request per line of standard input, one answer per line of standard output, both JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

STOCK_LOGITS = "stock_logits.safetensors"


def logits_of(model: Any, inputs: Any) -> Any:
    """What a model of any kind says of tokens; an encoder-decoder reads them on both sides."""
    arguments = {"input_ids": inputs}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = inputs
    if type(model.config) in AutoModelForCausalLM._model_mapping:
        arguments["use_cache"] = False
    with torch.no_grad():
        return model(**arguments).logits


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
