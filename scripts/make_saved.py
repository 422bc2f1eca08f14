"""Write tests/golden/saved/<commit>.json: what an earlier ctxext saved, and what it computed then.

    git worktree add --detach ../before COMMIT
    PYTHONPATH=../before python scripts/make_saved.py

Only verbs that every commit has are used (``patch``, ``save``, ``load``). Weights are not stored: they follow from the
names of the tensors, so that ``tests/test_saved_before.py`` builds the same models again.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]
TRAINED = 64
SPREAD = 0.2  # of random weights: at 0.02, the usual value, attention is so flat that positions hardly move logits
PAIRS = 8  # of a head of 16 dimensions
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": TRAINED,
    "pad_token_id": 0,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED // 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BY_LAYER = {"full_attention": PLAIN | {"rope_theta": 1e6}, "sliding_attention": PLAIN}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL | {"rope_parameters": PLAIN}),
    "scaled": ("llama", SMALL | {"rope_parameters": LLAMA_3}),
    "mistral": ("mistral", SMALL | {"rope_parameters": PLAIN, "sliding_window": TRAINED}),
    "gemma3": (
        "gemma3_text",
        SMALL
        | {"rope_parameters": BY_LAYER, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "bloom": ("bloom", {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0}),
}
LONG = [round(4.0 ** (pair / (PAIRS - 1)), 6) for pair in range(PAIRS)]
SHORT = [round(1.1 ** (pair / (PAIRS - 1)), 6) for pair in range(PAIRS)]
FREQUENCIES = [round(10000.0 ** (-pair / PAIRS) / 4, 9) for pair in range(PAIRS)]
# A name for each: the base model, and what patch was told.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "abf": ("llama", {"method": "abf", "factor": 4}),
    "alibi": ("llama", {"method": "alibi", "factor": 4}),
    "dynamic_ntk": ("llama", {"method": "dynamic_ntk", "factor": 1, "reach": 4.0}),
    "dynamic_pi": ("llama", {"method": "dynamic_pi", "factor": 4}),
    "dynamic_yarn": ("llama", {"method": "dynamic_yarn", "factor": 4, "growth": "doubling"}),
    "llama3": ("llama", {"method": "llama3", "factor": 4}),
    "longrope": ("llama", {"method": "longrope", "factor": 4, "short_factor": SHORT, "long_factor": LONG}),
    "ntk": ("llama", {"method": "ntk", "factor": 4}),
    "ntk_by_parts": ("llama", {"method": "ntk_by_parts", "factor": 4}),
    "pi": ("llama", {"method": "pi", "target_length": 200}),
    "table": ("llama", {"method": "table", "factor": 4, "inv_freq": FREQUENCIES, "attention_scale": 1.1}),
    "yarn": ("llama", {"method": "yarn", "factor": 4, "beta_fast": 16}),
    "yarn in the place of llama3": (
        "scaled",
        {"method": "yarn", "factor": 4, "trained_length": TRAINED // 2, "scaling": "replace"},
    ),
    "yarn without a window": ("mistral", {"method": "yarn", "factor": 4, "sliding_window": "lift"}),
    "yarn by layer": ("gemma3", {"method": "yarn", "factor": 4}),
    "dynamic_pi on bloom": ("bloom", {"method": "dynamic_pi", "factor": 4, "trained_length": TRAINED}),
}
ADAPTED = "yarn"


def plain_config(base: str) -> PreTrainedConfig:
    """The config of one of the base models, not extended."""
    model_type, fields = BASES[base]
    return CONFIG_MAPPING[model_type](**json.loads(json.dumps(fields)))


def plain_model(base: str) -> PreTrainedModel:
    """One of the base models in evaluation mode, with the same weights whatever made it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(plain_config(base)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.ones_like(weight) if "norm" in name else values(name, weight.shape))
    return model


def adapter_tensors(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """The weights of the adapter."""
    return {name: values(name, shape) for name, shape in shapes.items()}


def values(name: str, shape: Any) -> Tensor:
    """Random weights that follow from a tensor's name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return SPREAD * torch.randn(*shape, generator=generator)


@torch.no_grad()
def reading(model: Any) -> dict[str, Any]:
    """What a model computes on a text of three times its trained length.

    Returns:
        ``logits`` at every 16th position, of every 8th token; ``rotary``: cos and sin of the last position, of every
        kind of layer; empty where none is rotated.
    """
    rotations: list[list[list[float]]] = []

    def note(_: Any, __: Any, cos_and_sin: tuple[Tensor, Tensor]) -> None:
        rotations.append([[round(value, 7) for value in part[0, -1, :PAIRS].tolist()] for part in cos_and_sin])

    modules = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    hooks = [module.register_forward_hook(note) for module in modules]
    tokens = torch.randint(1, 64, (1, 3 * TRAINED), generator=torch.Generator().manual_seed(1))
    logits = model(tokens, use_cache=False).logits[0, TRAINED // 4 - 1 :: TRAINED // 4, ::8]
    for hook in hooks:
        hook.remove()
    return {"rotary": sorted(rotations), "logits": [[round(value, 6) for value in row] for row in logits.tolist()]}


def saved_model(base: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A base model, extended and saved: its config, and what it reads."""
    import ctxext

    known = inspect.signature(ctxext.patch).parameters
    # Before there was a choice of scaling, an extension always replaced what the config had.
    then = {name: value for name, value in arguments.items() if name != "scaling" or name in known}
    model = ctxext.patch(plain_model(base), **then)
    with tempfile.TemporaryDirectory() as place:
        ctxext.save(model, place)
        config = json.loads((Path(place) / "config.json").read_text())
    return {"base": base, "arguments": arguments, "config": config} | reading(model)


def saved_adapter() -> dict[str, Any]:
    """A LoRA on an extended base model, saved: its files, and what both read once they are loaded."""
    from peft import LoraConfig, get_peft_model

    import ctxext

    base, arguments = CASES[ADAPTED]
    model = get_peft_model(ctxext.patch(plain_model(base), **arguments), LoraConfig(r=2, target_modules=["v_proj"]))
    with tempfile.TemporaryDirectory() as place:
        plain, adapter = Path(place, "plain"), Path(place, "adapter")
        plain_model(base).save_pretrained(plain)
        ctxext.save(model, adapter)
        weights = adapter / "adapter_model.safetensors"
        shapes = {name: list(tensor.shape) for name, tensor in load_file(weights).items()}
        save_file(adapter_tensors(shapes), weights)
        files = {path.name: json.loads(path.read_text()) for path in sorted(adapter.glob("*.json"))}
        return {"base": base, "shapes": shapes, "files": files} | reading(ctxext.load(adapter, base=plain))


def _lines(found: dict[str, Any]) -> str:
    """As JSON, a line for every model."""
    models = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in found["models"].items())
    rest = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in ("provenance", "adapter")]
    return "{" + ",\n".join([*rest, '"models": {\n' + models + "}"]) + "}"


def main() -> None:
    """Run every case with the ctxext that is imported, and write what it saved."""
    import ctxext

    code = Path(ctxext.__file__).parents[1]
    commit, at = (
        subprocess.run(
            ["git", "-C", str(code), "log", "-1", f"--format={form}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for form in ("%H", "%cI")
    )
    provenance = {
        "commit": commit,
        "committed_at": at,
        "command": "PYTHONPATH=<a worktree of that commit> python scripts/make_saved.py",
        "versions": {
            "ctxext": ctxext.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    }
    models = {name: saved_model(*case) for name, case in CASES.items()}
    found = {"provenance": provenance, "models": models, "adapter": saved_adapter()}
    spread = [value for case in models.values() for row in case["logits"] for value in row]
    assert all(map(math.isfinite, spread)), "a case has no numbers to compare"
    place = ROOT / "tests/golden/saved" / f"{commit[:7]}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(_lines(found) + "\n")
    print(f"{place.relative_to(ROOT)}: {len(models)} models and an adapter, {place.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
