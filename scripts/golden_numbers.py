"""Write docs/evidence/golden.json: what transformers' published functions compute for published configs, in float64.

    python scripts/golden_numbers.py

The functions are those of the installed transformers, with float64 in the place of their float32. No code of ctxext is
read. docs/evidence/golden.md says what each field means.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from scripts.make_golden import execute

ROOT = Path(__file__).resolve().parents[1]
FILE, VERSION, FACTOR = ROOT / "docs" / "evidence" / "golden.json", 1, 4.0
# Each has its config in tests/famous.json, with its source.
CONFIGS = (
    *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    *("NousResearch/Yarn-Llama-2-7b-64k", "lmsys/vicuna-7b-v1.5-16k", "unsloth/SmolLM2-360M"),
    *("Qwen/Qwen2.5-7B-Instruct with its documented YaRN", "Qwen/Qwen3-8B with its documented YaRN"),
    *("Qwen/Qwen3.5-27B", "mistralai/Devstral-2-123B-Instruct-2512", "mistralai/Devstral-Small-2-24B-Instruct-2512"),
    *("google/gemma-3-27b-it", "microsoft/Phi-3-mini-128k-instruct", "microsoft/Phi-4-mini-instruct"),
    *("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", "openbmb/MiniCPM3-4B"),
    *("internlm/internlm3-8b-instruct", "allenai/Olmo-3.1-32B-Instruct"),
)
FUNCTIONS = {  # of modeling_rope_utils, which other libraries add theirs to
    "linear": "_compute_linear_scaling_rope_parameters",
    "dynamic": "_compute_dynamic_ntk_parameters",
    "yarn": "_compute_yarn_parameters",
    "longrope": "_compute_longrope_parameters",
    "llama3": "_compute_llama3_parameters",
}
LATENT = {"deepseek_v2", "deepseek_v3"}  # their code multiplies whole scores by the square of mscale
NAMES = {"default": "rope", "mrope": "rope", "linear": "pi", "dynamic": "dynamic_ntk"}  # else as transformers'
PARAMETERS = {
    *("beta_fast", "beta_slow", "truncate", "attention_factor", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor"),
}
NOTES = {
    "deepseek-ai/DeepSeek-V3": "pytorch/torchtitan#4117: a text of 4,096 tokens has the numbers of a long one.",
    "mistralai/Devstral-Small-2-24B-Instruct-2512": "Queries at position p are multiplied by "
    "1 + 0.1 ln(1 + floor(p / 8192)) besides (llama_4_scaling_beta), which temperature leaves out.",
}
TORCHTITAN = "pytorch/torchtitan#4215"
ZERO_BOUNDARY = {
    "source": "https://github.com/pytorch/torchtitan/blob/48cb7ae1ff62b91a4743e656fedae505db03e096/"
    "tests/unit_tests/test_rope.py",
    "rotary_dim": 128,
    "base": 10000.0,
    "trained_length": 64,
    "window": 2560,
    "rope_parameters": {"rope_type": "yarn", "factor": 40.0},
    "note": "The lower end of the ramp is clamped to pair 0, which is valid; the upper end is pair 17.",
}
Rope = dict[str, Any]
Numbers = tuple[list[float], float]


def published_functions() -> Callable[[Rope, Rope, int], Numbers]:
    """Return transformers' computation of a rope dict on a model, for a text of so many tokens, in float64."""
    text = Path(str(modeling_rope_utils.__file__)).read_text(encoding="utf-8")
    text = re.sub(r"\btorch\.float(32)?\b", "torch.float64", text).replace(".float()", ".double()")
    functions = execute(text, FUNCTIONS.values(), "modeling_rope_utils.py")

    def compute(model: Rope, rope: Rope, length: int) -> Numbers:
        config = SimpleNamespace(
            rope_parameters={"original_max_position_embeddings": model["trained_length"]} | rope,
            max_position_embeddings=rope.get("max_position_embeddings", model["trained_length"]),
            head_dim=model["rotary_dim"],
            hidden_size=model["rotary_dim"],
            num_attention_heads=1,
            standardize_rope_params=lambda: None,
        )
        inv_freq, scale = functions[FUNCTIONS[rope["rope_type"]]](config, "cpu", seq_len=length)
        return inv_freq.tolist(), float(scale)

    return compute


# The formula of each method, and the rope dict by which transformers computes it: of a model, parameters, and a length.
PLAIN: Rope = {"rope_type": "linear", "factor": 1.0}
METHODS: dict[str, tuple[str, Callable[[Rope, Rope, int], Rope]]] = {
    "rope": ("arXiv:2104.09864, section 3.4.2", lambda m, p, n: PLAIN),
    "pi": ("arXiv:2306.15595, section 3.2", lambda m, p, n: {"rope_type": "linear", **p}),
    "abf": ("arXiv:2309.16039, section 2.1", lambda m, p, n: PLAIN | {"rope_theta": p["base"]}),
    "ntk": (
        "jquesnelle/yarn@995db5b, scaled_rope/LlamaNTKScaledRotaryEmbedding.py",
        lambda m, p, n: PLAIN | {"rope_theta": m["base"] * p["factor"] ** (m["rotary_dim"] / (m["rotary_dim"] - 2))},
    ),
    "ntk_by_parts": (
        "arXiv:2309.00071, section 3.2",
        lambda m, p, n: {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 32.0, **p},
    ),
    "yarn": (
        "arXiv:2309.00071, section 3.4; jquesnelle/yarn@995db5b, scaled_rope/LlamaYaRNScaledRotaryEmbedding.py; "
        "truncate: openai/gpt-oss@7b58334; mscale: transformers, models/deepseek_v3/modeling_deepseek_v3.py",
        lambda m, p, n: {"rope_type": "yarn", **p},
    ),
    "llama3": (
        "meta-llama/llama-models@a9c89c4, models/llama3/model.py, apply_scaling",
        lambda m, p, n: {"rope_type": "llama3", **p},
    ),
    "longrope": ("microsoft/LongRoPE@c9e56aa, rope/longrope.py", lambda m, p, n: {"rope_type": "longrope", **p}),
    "dynamic_pi": (
        "jquesnelle/yarn@995db5b, scaled_rope/LlamaDynamicScaledRotaryEmbedding.py, ntk=False",
        lambda m, p, n: {"rope_type": "linear", "factor": max(1.0, n / m["trained_length"])},
    ),
    "dynamic_ntk": (
        "jquesnelle/yarn@995db5b, scaled_rope/LlamaDynamicScaledRotaryEmbedding.py, ntk=factor",
        lambda m, p, n: {"rope_type": "dynamic", **p},
    ),
    "dynamic_yarn": (
        "jquesnelle/yarn@995db5b, scaled_rope/LlamaDynamicYaRNScaledRotaryEmbedding.py",
        lambda m, p, n: {"rope_type": "yarn", "factor": n / m["trained_length"]} if n > m["trained_length"] else PLAIN,
    ),
}


def published_models() -> dict[str, Rope]:
    """Return what each config says of its rotation, in the names of the file."""
    entries = json.loads((ROOT / "tests" / "famous.json").read_text(encoding="utf-8"))
    models = {name: _model(name, entries[name]) for name in CONFIGS}
    return models | {TORCHTITAN: ZERO_BOUNDARY}


def _model(name: str, entry: Rope) -> Rope:
    text = entry["config"].get("text_config", entry["config"])
    _, kind, base, dim = entry["ropes"][-1]
    found = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope = {"rope_type": kind} | {key: found[key] for key in sorted(found.keys() - {"type", "rope_type"})}
    if kind == "longrope":  # it has no factor: transformers divides these two
        rope |= {"max_position_embeddings": text["max_position_embeddings"]}
    model = {"source": entry["source"], "rotary_dim": dim, "base": float(base)}
    model |= {"trained_length": entry["trained"], "window": entry["window"]}
    score = 1.0
    if text["model_type"] in LATENT:
        score = modeling_deepseek_v3.yarn_get_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return model | {"rope_parameters": rope, "score": score, "note": NOTES.get(name)}


def asked_of(model: Rope) -> Iterator[tuple[str, Rope, int, bool]]:
    """Yield each method, its parameters, a text's length in tokens, and True where it is the config's own."""
    rope, trained = model["rope_parameters"], model["trained_length"]
    own = NAMES.get(rope["rope_type"], rope["rope_type"])
    factor = rope.get("factor", rope.get("max_position_embeddings", trained) / trained)
    given = {key: rope[key] for key in PARAMETERS & rope.keys()} | ({} if own == "rope" else {"factor": factor})
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # one of them alone, or 0, says nothing
        given |= {"mscale": rope["mscale"], "mscale_all_dim": rope["mscale_all_dim"]}
    for length in dict.fromkeys((trained, model["window"])):
        yield own, dict(sorted(given.items())), length, True
    target = int(FACTOR * trained)
    extended: Rope = {"factor": FACTOR}
    yield "rope", {}, trained, False
    for name in ("pi", "ntk", "ntk_by_parts", "yarn"):
        yield name, extended, target, False
    yield "abf", extended | {"base": FACTOR * model["base"]}, target, False
    yield "yarn", extended | {"truncate": False}, target, False
    yield "llama3", extended | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, target, False
    for name in ("dynamic_pi", "dynamic_ntk", "dynamic_yarn"):
        for length in (trained, 2 * trained, target):
            yield name, extended, length, False


def _own(model: Rope) -> Rope:
    rope: Rope = model["rope_parameters"]
    return rope if rope["rope_type"] in FUNCTIONS else PLAIN


def contents() -> dict[str, Any]:
    """Return the file's parts by name."""
    compute, models = published_functions(), published_models()
    lists: dict[tuple[float, ...], int] = {}
    cases = []
    for name, model in models.items():
        for method, parameters, length, own in asked_of(model):
            rope = _own(model) if own else METHODS[method][1](model, parameters, length)
            inv_freq, scale = compute(model, {"rope_theta": model["base"]} | rope, length)
            case = {"config": name, "published": own, "method": method, "parameters": parameters, "length": length}
            case |= {
                "target_length": model["window"] if own else int(parameters.get("factor", 1) * model["trained_length"])
            }
            case |= {
                "attention_scale": scale,
                "temperature": 1 / (scale**2 * (model.get("score", 1.0) if own else 1.0)),
            }
            cases.append(case | {"inv_freq": lists.setdefault(tuple(inv_freq), len(lists))})
    code = "https://github.com/huggingface/transformers/blob/v{}/src/transformers/modeling_rope_utils.py"
    return {
        "version": VERSION,
        "fields": "docs/evidence/golden.md",
        "computed_by": {
            "code": code.format(transformers.__version__),
            "sha256": hashlib.sha256(Path(str(modeling_rope_utils.__file__)).read_bytes()).hexdigest(),
            "command": "python scripts/golden_numbers.py",
        },
        "methods": {name: formula for name, (formula, _) in METHODS.items()},
        "configs": {name: {k: v for k, v in model.items() if k != "score" and v} for name, model in models.items()},
        "cases": cases,
        "inv_freq": [list(numbers) for numbers in lists],
    }


def _lines(part: Any) -> str:
    """Return JSON with a line for each member of a long part."""
    if isinstance(part, list):
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in part) + "\n]"
    if isinstance(part, dict):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in part.items()) + "\n}"
    return json.dumps(part)


if __name__ == "__main__":
    members = ",\n".join(f"{json.dumps(name)}: {_lines(part)}" for name, part in contents().items())
    FILE.write_text(f"{{\n{members}\n}}\n", encoding="utf-8")
    print(f"Wrote {FILE.relative_to(ROOT)}")
