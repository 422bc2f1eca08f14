"""Write tests/golden/<name>.json: what the authors' own code computes, run from their repository.

    python scripts/make_golden.py yarn path/to/yarn          # a checkout, or a bare git directory

The pinned commit is read with git, so the state of the checkout does not matter. Only the named classes and functions
are executed, in a namespace of torch, numpy and math: nothing of theirs is installed, imported or copied.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
Case = dict[str, Any]
LLAMA_2 = {"rotary_dim": 128, "base": 10000.0, "trained_length": 4096}
LLAMA_3 = {"rotary_dim": 128, "base": 500000.0, "trained_length": 8192}
SMALL = {"rotary_dim": 20, "base": 10000.0, "trained_length": 64}
GPT_OSS = {"rotary_dim": 64, "base": 150000.0, "trained_length": 4096}


def case(rope: Case, parameters: Case, length: int, inv_freq: torch.Tensor, attention_scale: float) -> Case:
    """One reference value: these parameters on this model at this length give these numbers."""
    return {
        "rope": rope,
        "parameters": parameters,
        "length": length,
        "inv_freq": inv_freq.tolist(),
        "attention_scale": float(attention_scale),
    }


def pi(namespace: dict[str, Any]) -> Iterator[Case]:
    """Position Interpolation divides positions, so the frequency is read back from the angle of position 1."""
    for rope, factor in ((LLAMA_2, 4.0), (SMALL, 3.0)):
        module = namespace["LlamaLinearScaledRotaryEmbedding"](rope["rotary_dim"], 2, rope["base"], scale=factor)
        half = rope["rotary_dim"] // 2
        cos, sin = module.cos_cached[0, 0, 1, :half].double(), module.sin_cached[0, 0, 1, :half].double()
        yield case(rope, {"factor": factor}, 4 * rope["trained_length"], torch.atan2(sin, cos), 1.0)


def ntk(namespace: dict[str, Any]) -> Iterator[Case]:
    """``alpha`` is our factor."""
    for rope, factor in ((LLAMA_2, 4.0), (LLAMA_3, 2.0), (SMALL, 8.0)):
        module = namespace["LlamaNTKScaledRotaryEmbedding"](rope["rotary_dim"], 8, rope["base"], alpha=factor)
        yield case(rope, {"factor": factor}, 4 * rope["trained_length"], module.inv_freq, 1.0)


def dynamic_ntk(namespace: dict[str, Any]) -> Iterator[Case]:
    """``ntk`` is our factor; the frequencies are those after one forward of the given length."""
    for rope in (LLAMA_2, SMALL):
        for factor in (1.0, 2.0, 8.0):
            for length in (rope["trained_length"] // 2, rope["trained_length"], 2 * rope["trained_length"] + 3):
                cls = namespace["LlamaDynamicScaledRotaryEmbedding"]
                module = cls(rope["rotary_dim"], rope["trained_length"], rope["base"], ntk=factor)
                module(torch.zeros(1), seq_len=length)
                yield case(rope, {"factor": factor}, length, module.inv_freq, 1.0)


def yarn(namespace: dict[str, Any]) -> Iterator[Case]:
    """The class that the published checkpoints were made with (PoSE's class of this name blends wavelengths)."""
    for rope, factor, betas in (
        (LLAMA_2, 8.0, {}),
        (LLAMA_2, 32.0, {"beta_fast": 128.0, "beta_slow": 2.0}),
        (LLAMA_3, 4.0, {}),
        (SMALL, 4.0, {}),
    ):
        module = namespace["LlamaYaRNScaledRotaryEmbedding"](
            rope["rotary_dim"],
            max_position_embeddings=8,
            base=rope["base"],
            scale=factor,
            original_max_position_embeddings=rope["trained_length"],
            **betas,
        )
        yield case(rope, {"factor": factor} | betas, 4 * rope["trained_length"], module.inv_freq, module.mscale)


def yarn_pose(namespace: dict[str, Any]) -> Iterator[Case]:
    """The same constructor, blending wavelengths."""
    for item in yarn(namespace):
        yield item | {"parameters": item["parameters"] | {"blend": "wavelength"}}


def yarn_gpt_oss(namespace: dict[str, Any]) -> Iterator[Case]:
    """The ramp with ends that are not rounded."""
    for rope, factor in ((GPT_OSS, 32.0), (LLAMA_2, 8.0)):
        module = namespace["RotaryEmbedding"](
            rope["rotary_dim"], rope["base"], torch.float32, rope["trained_length"], scaling_factor=factor
        )
        concentration, inv_freq = module._compute_concentration_and_inv_freq()
        parameters = {"factor": factor, "truncate": False}
        yield case(rope, parameters, 4 * rope["trained_length"], inv_freq, concentration)


def dynamic_yarn(namespace: dict[str, Any]) -> Iterator[Case]:
    """The frequencies and the scale are those after one forward of the given length."""
    for rope in (LLAMA_2, SMALL):
        for length in (rope["trained_length"] // 2, rope["trained_length"], 2 * rope["trained_length"] + 3):
            module = namespace["LlamaDynamicYaRNScaledRotaryEmbedding"](
                rope["rotary_dim"],
                max_position_embeddings=rope["trained_length"],
                base=rope["base"],
                original_max_position_embeddings=rope["trained_length"],
            )
            module(torch.zeros(1), seq_len=length)
            yield case(rope, {"factor": 8.0}, length, module.inv_freq, module.mscale)


def longrope(namespace: dict[str, Any]) -> Iterator[Case]:
    """Their class holds one set of factors; ours takes it twice."""
    for rope, factor in ((LLAMA_2, 32.0), (SMALL, 4.0)):
        half = rope["rotary_dim"] // 2
        factors = [1.0 + (factor - 1.0) * (i / half) ** 2 for i in range(half)]
        module = namespace["LongRoPEScaledRotaryEmbedding"](
            rope["rotary_dim"],
            factors,
            max_position_embeddings=int(factor * rope["trained_length"]),
            original_max_position_embeddings=rope["trained_length"],
            base=rope["base"],
        )
        length = 4 * rope["trained_length"]
        parameters = {"factor": factor, "short_factor": factors, "long_factor": factors}
        yield case(rope, parameters, length, module._calc_inv_freq(length, "cpu"), module.mscale)


def llama3(namespace: dict[str, Any]) -> Iterator[Case]:
    """Their numbers are constants: factor 8, turns 1 and 4, 8192 tokens."""
    for dim in (128, 64):
        rope = LLAMA_3 | {"rotary_dim": dim}
        freqs = 1.0 / (rope["base"] ** (torch.arange(0, dim, 2).float() / dim))
        yield case(rope, {"factor": 8.0}, 4 * rope["trained_length"], namespace["apply_scaling"](freqs), 1.0)


def path(namespace: dict[str, Any]) -> Iterator[Case]:
    """Attention by accumulated transitions, with and without gates; tensors are ``[batch, seq, heads, ...]``."""
    namespace["rearrange"] = importlib.import_module("einops").rearrange
    for length, heads, kv_heads, gated in ((1, 2, 1, False), (7, 2, 2, False), (9, 4, 2, True)):
        torch.manual_seed(length)
        shapes = {"q": (heads, 4), "k": (kv_heads, 4), "v": (kv_heads, 4), "w": (kv_heads, 4)}
        given = {name: torch.randn(1, length, *shape) for name, shape in shapes.items()}
        given["w"] = torch.nn.functional.normalize(given["w"], dim=-1)
        given["beta"] = 2 * torch.rand(1, length, kv_heads)
        given["g"] = -torch.rand(1, length, heads) * gated
        out = namespace["naive_path_attn"](**given, scale=0.5, chunk_size=4)
        yield {name: x.tolist() for name, x in given.items()} | {"scale": 0.5, "out": out.tolist()}


def fox(namespace: dict[str, Any]) -> Iterator[Case]:
    """What the test of their kernel compares it with: attention written out, run here in float64 on a CPU.

    The statements from the comment "reference implementation" to the last gradient are theirs; the inputs are ours.
    """
    for seed, (queries, keys, seq_start) in enumerate([(6, 6, None), (4, 9, None), (8, 8, [3, 0])]):
        draw = torch.Generator().manual_seed(seed)
        shapes = {"q": (2, 2, queries, 4), "k": (2, 2, keys, 4), "v": (2, 2, keys, 4), "dout": (2, 2, queries, 4)}
        given = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
        logits = torch.empty(2, 2, keys, dtype=torch.float64).uniform_(-2, 5, generator=draw)
        given["log_fgate"] = torch.nn.functional.logsigmoid(logits)
        for name in ("q", "k", "v", "log_fgate"):
            given[name].requires_grad_()
        start = None if seq_start is None else torch.tensor(seq_start)
        found = namespace["reference"](given, M=queries, N=keys, seq_start=start, sm_scale=0.5)
        numbers = {name: part.detach().tolist() for name, part in (given | found).items()}
        yield {"scale": 0.5, "seq_start": seq_start} | numbers


def _fox_reference(tree: ast.Module) -> Callable[..., dict[str, torch.Tensor]]:
    """The reference inside their ``test_op`` as a function, its device and the dtypes that it casts to replaced."""
    test = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "test_op")
    named = [ast.unparse(node) for node in test.body]
    first = next(at for at, text in enumerate(named) if text.startswith("P_SEQ ="))
    last = next(at for at, text in enumerate(named) if text.startswith("ref_dlog_fgate"))
    text = "\n".join(named[first : last + 1]).replace("'cuda'", "'cpu'").replace(".float()", ".double()")

    def run(given: dict[str, torch.Tensor], **names: Any) -> dict[str, torch.Tensor]:
        space = {"torch": torch, "causal": True, "dtype": torch.float64} | given | names
        exec(text, space)
        return {
            "out": space["ref_out"],
            "dq": space["ref_dq"],
            "dk": space["ref_dk"],
            "dv": space["ref_dv"],
            "dlog_fgate": space["ref_dlog_fgate"],
        }

    return run


@dataclass(frozen=True)
class Source:
    """Where a golden file comes from: these definitions of this file at this commit."""

    repository: str
    commit: str
    file: str
    definitions: tuple[str, ...]
    run: Callable[[dict[str, Any]], Iterator[Case]]


YARN = ("jquesnelle/yarn", "995db5b575e75230b3384d658f8b944c9662f775")
RAMP = ("find_correction_dim", "find_correction_range", "linear_ramp_mask", "get_mscale")


def _from_yarn(cls: str, run: Callable[[dict[str, Any]], Iterator[Case]], *helpers: str) -> Source:
    return Source(*YARN, f"scaled_rope/{cls}.py", (*helpers, cls), run)


SOURCES = {
    "pi": _from_yarn("LlamaLinearScaledRotaryEmbedding", pi),
    "ntk": _from_yarn("LlamaNTKScaledRotaryEmbedding", ntk),
    "dynamic_ntk": _from_yarn("LlamaDynamicScaledRotaryEmbedding", dynamic_ntk),
    "yarn": _from_yarn("LlamaYaRNScaledRotaryEmbedding", yarn, *RAMP),
    "dynamic_yarn": _from_yarn("LlamaDynamicYaRNScaledRotaryEmbedding", dynamic_yarn, *RAMP),
    "yarn_pose": Source(
        "dwzhu-pku/PoSE",
        "a3d4ba8bd38e6615ba778d9a1061e380c8e69647",
        "src/my_modeling_llama.py",
        (*(f"_yarn_{helper}" for helper in RAMP), "LlamaYaRNScaledRotaryEmbedding"),
        yarn_pose,
    ),
    "yarn_gpt_oss": Source(
        "openai/gpt-oss",
        "7b583341fe16729127f6d5b94a7b09ccae97e1a1",
        "gpt_oss/torch/model.py",
        ("RotaryEmbedding",),
        yarn_gpt_oss,
    ),
    "longrope": Source(
        "microsoft/LongRoPE",
        "c9e56aa54007c328399677232a489feec446e4b8",
        "rope/longrope.py",
        ("LongRoPEScaledRotaryEmbedding",),
        longrope,
    ),
    "fox": Source(
        "zhixuan-lin/forgetting-transformer",
        "883f260c636e87971339749b0d8310004794a5cc",
        "src/forgetting_transformer/ops/forgetting_attention.py",
        ("test_op",),
        fox,
    ),
    "llama3": Source(
        "meta-llama/llama-models",
        "a9c89c471f793423afd4cc3ca8671d6e56fe64cb",
        "models/llama3/model.py",
        ("apply_scaling",),
        llama3,
    ),
    "path": Source(
        "fla-org/flash-linear-attention",
        "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89",
        "fla/ops/path_attn/naive.py",
        ("naive_path_attn",),
        path,
    ),
}


def git(folder: Path, *arguments: str) -> str:
    """Standard output of a git command."""
    return subprocess.run(("git", "-C", folder, *arguments), check=True, capture_output=True, text=True).stdout


def load(source: Source, checkout: Path) -> dict[str, Any]:
    """The named definitions of the pinned file, executed."""
    text, name = git(checkout, "show", f"{source.commit}:{source.file}"), f"{source.repository}@{source.commit[:7]}"
    namespace = execute(text, source.definitions, f"{name}:{source.file}")
    return {"reference": _fox_reference(ast.parse(text))} if source.run is fox else namespace


def execute(text: str, definitions: Collection[str], file: str) -> dict[str, Any]:
    """The named definitions of a file, executed in a namespace of torch, numpy and math."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(text).body if isinstance(node, kinds) and node.name in definitions]
    if missing := {*definitions} - {node.name for node in nodes}:
        sys.exit(f"{file} does not define {sorted(missing)}.")
    namespace: dict[str, Any] = {"torch": torch, "math": math, "np": np, "F": torch.nn.functional}
    exec(compile(ast.Module([*nodes], []), file, "exec", annotations.compiler_flag), namespace)
    return namespace


def main() -> None:
    """Write one golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("checkout", type=Path, help="checkout or bare git directory of the authors' repository")
    arguments = parser.parse_args()
    if changes := git(ROOT, "status", "--porcelain", "--", ".", ":!tests/golden"):
        sys.exit(f"Commit first: a golden file names the commit that made it, and this worktree has\n{changes}")
    source = SOURCES[arguments.name]
    provenance = {
        "repository": source.repository,
        "commit": source.commit,
        "file": source.file,
        "definitions": source.definitions,
        "command": f"python scripts/make_golden.py {arguments.name} <checkout of {source.repository}>",
        "made_at": git(ROOT, "rev-parse", "HEAD").strip(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
    }
    cases = ",\n    ".join(json.dumps(item, allow_nan=False) for item in source.run(load(source, arguments.checkout)))
    header = json.dumps(provenance, indent=2).replace("\n", "\n  ")
    target = ROOT / "tests" / "golden" / f"{arguments.name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(f'{{\n  "provenance": {header},\n  "cases": [\n    {cases}\n  ]\n}}\n', encoding="utf-8")
    print(f"Wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
