"""The tables of docs/guides/runtimes.md: from what was measured, from ``export``, and from what others were read to do.

What ``READERS`` says of programs that read ``config.json`` by themselves was read at the places that the page names.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError
from ctxext.methods import METHODS, Method, RopeMethod, TableMethod, known_methods
from ctxext.runtimes import mlx_lm
from ctxext.runtimes.base import is_close, read_table, runs
from ctxext.spec import RopeSpec
from scripts import llama_cpp_proof, mlx_lm_proof, vllm_proof
from scripts.llama_cpp_proof import SHAPES
from scripts.proof import VARIANTS

TRAINED = 2048
SPEC = RopeSpec(rotary_dim=16, base=10000.0, trained_length=TRAINED)
SHORT = {"extended": "extended", "original": "flags", "file": "file"}


def llama_cpp_markdown() -> str:
    """For each method, the ways in which a real llama.cpp computed what the patched model does, and how closely."""
    stored = json.loads(llama_cpp_proof.RESULTS.read_text())
    made = stored["versions"]
    return _measured(stored, SHAPES, f"{made['ran']}, the converter of {made['converter']}")


def vllm_markdown() -> str:
    """The same for a real vLLM."""
    stored = json.loads(vllm_proof.RESULTS.read_text())
    return _measured(stored, vllm_proof.SHAPES, stored["versions"]["ran"])


def mlx_lm_markdown() -> str:
    """The same for a real mlx-lm."""
    stored = json.loads(mlx_lm_proof.RESULTS.read_text())
    types = read_table(mlx_lm.TABLE)["types"]
    run = {name: line["forms"] for name, line in types.items() if runs(line)}
    alone = [name for name, forms in run.items() if _wrong(forms) and _right(forms) == {"default"}]
    deaf = [name for name, forms in run.items() if _wrong(forms) and not _right(forms)]
    said = (
        f"Of {len(types)} model types that mlx-lm shares with transformers, tiny models of {len(run)} compute there "
        f"what they do here, with an extension or without. **{len(alone)} of these read the base and nothing else, and "
        f"would run any other extension as the unextended model, without a word**: {_list(alone)}. On them `ntk` and "
        f"`abf` are exact, and `export` refuses all else. {_list(deaf)} compute no extension rightly. Models of the "
        f"other {len(types) - len(run)} do not load, or differ without any extension, and are called not proven."
    )
    return f"{_measured(stored, mlx_lm_proof.SHAPES, stored['versions']['ran'])}\n\n{said}"


def _right(forms: dict[str, Any]) -> set[str]:
    return {name for name, one in forms.items() if "error" in one and is_close(one["error"], one["matters"])}


def _wrong(forms: dict[str, Any]) -> set[str]:
    """Those that run, with other positions."""
    return {name for name, one in forms.items() if isinstance(one.get("error"), float)} - _right(forms)


def _measured(stored: dict[str, Any], shapes: tuple[str, ...], by: str) -> str:
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for proof in stored["proofs"]:
        cells.setdefault((proof["method"], proof["shape"]), []).append(proof)
    names = list(
        dict.fromkeys(name for name, shape in cells if any(p["exact"] is not None for p in cells[name, shape]))
    )
    lines = [f"| method | {' | '.join(shapes)} |", f"|---|{'---|' * len(shapes)}"]
    lines += [
        f"| {_code(name)} | {' | '.join(_ways(cells.get((name, shape))) for shape in shapes)} |" for name in names
    ]
    made = stored["versions"]
    libraries = f"transformers {made['transformers']}, torch {made['torch']}"
    return "\n".join([*lines, "", f"Measured on {made['date']} with {by}, {libraries}."])


def _ways(proofs: list[dict[str, Any]] | None) -> str:
    if proofs is None:
        return "not a method for it"
    exact = [proof for proof in proofs if proof["exact"]]
    told = [proof for proof in proofs if proof["exact"] is False]
    right = exact or [proof for proof in told if is_close(proof["error"], proof["matters"])]
    if not right:
        return f"not exact ({min(proof['error'] for proof in told):.1g})" if told else "refused"
    ways = f"{', '.join(SHORT[proof['way']] for proof in right)} ({max(proof['error'] for proof in right):.1g})"
    return ways if exact else f"long texts: {ways}"


def _code(name: str) -> str:
    method, _, rest = name.partition(", ")
    return f"`{method}`" + (f" ({rest})" if rest else "")


@functools.cache
def by_formula_markdown() -> str:
    """For each method, what other programs make of a Llama that ctxext extended."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}
    plain = LlamaConfig(**shape, max_position_embeddings=TRAINED)
    tables = [name for name, method in _methods().items() if isinstance(method, TableMethod)]
    lines = [
        f"| method | vLLM | SGLang | mlx-lm | {' | '.join(READERS)} |",
        f"|---|---|---|---|{'---|' * len(READERS)}",
    ]
    for name, method in _methods().items():
        if not isinstance(method, RopeMethod):
            continue
        config = extended_config(plain, method)
        if config.rope_parameters["rope_type"].startswith("ctxext"):
            continue
        told = [_exported(config, to) for to in ("vllm", "sglang", "mlx-lm")]
        read = [rule(dict(config.rope_parameters)) for rule in READERS.values()]
        lines.append(f"| {_code(name)} | {' | '.join([*told, *read])} |")
    rest = "On a rotary model all others are saved under a rope type that each of these programs refuses by itself."
    more = "Longer tables of positions are in the weights, which any of them reads that knows the model"
    return "\n".join([*lines, "", f"{rest} {more}: {_list(tables)}."])


def _list(names: list[str]) -> str:
    return ", ".join(map(_code, names))


def _methods() -> dict[str, Method]:
    named = {name: kind.example(SPEC) for name, kind in known_methods().items()}
    return named | {name: METHODS[kind].from_dict({"factor": 4.0, **given}) for name, (kind, given) in VARIANTS.items()}


def _exported(config: Any, to: str) -> str:
    try:
        made = export_config(config, to=to)
    except IncompatibleError:
        return "refused"
    told = "flags" if any(flag.startswith(("--hf", "--json")) for flag in made.flags) else "config"
    return f"exact ({told})" if made.exact else f"nearly ({told})"


def _own_scale(rope: dict[str, Any]) -> bool:
    usual = 0.1 * math.log(rope.get("factor", 1.0)) + 1
    return abs(rope.get("attention_factor", usual) - usual) > 1e-6


def _tgi(rope: dict[str, Any]) -> str:
    kind = rope["rope_type"]
    betas = (rope.get("beta_fast", 32), rope.get("beta_slow", 1)) != (32, 1)
    if kind == "longrope":
        return "stops"
    if kind == "linear" or (kind == "yarn" and (betas or _own_scale(rope) or rope.get("truncate") is False)):
        return "**wrong**"
    return "nearly" if kind == "dynamic" else "exact"


def _turbomind(rope: dict[str, Any]) -> str:
    """YaRN's ramp is of the extended length in place of the original one."""
    said = {"longrope": "stops", "yarn": "**wrong**", "dynamic": "nearly"}
    return said.get(rope["rope_type"], "exact")


def _lmdeploy_pytorch(rope: dict[str, Any]) -> str:
    if rope["rope_type"] == "longrope":
        return "**wrong**" if "attention_factor" in rope else "nearly"
    return "nearly" if rope["rope_type"] == "dynamic" else "exact"


def _tensorrt_llm(rope: dict[str, Any]) -> str:
    kind = rope["rope_type"]
    if kind == "dynamic" or (kind == "yarn" and (_own_scale(rope) or rope.get("truncate") is False)):
        return "**wrong**"
    if kind == "longrope":
        return "**wrong**" if "attention_factor" in rope else "nearly"
    return "exact"


READERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "lmdeploy, TurboMind": _turbomind,
    "lmdeploy, PyTorch": _lmdeploy_pytorch,
    "TensorRT-LLM": _tensorrt_llm,
    "TGI": _tgi,
}
