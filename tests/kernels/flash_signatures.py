"""Write tests/kernels/flash_attn.json: which arguments the functions of flash-attn 2, 3 and 4 take, by version.

    python -m tests.kernels.flash_signatures path/to/flash-attention     # a clone with its tags

Files are parsed and never imported; only the names of arguments are kept, once for all versions that agree.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

GOLDEN = Path(__file__).with_name("flash_attn.json")
FILES = {
    "flash": "flash_attn/flash_attn_interface.py",
    "flash3": "hopper/flash_attn_interface.py",
    "flash4": "flash_attn/cute/interface.py",
}
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "_flash_attn_backward")


def arguments(source: str) -> dict[str, dict[str, list[str]]]:
    """Of each function: the names that it takes in order, how many of them are needed, and those by keyword alone."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            names = [one.arg for one in node.args.args]
            needed = names[: len(names) - len(node.args.defaults)]
            found[node.name] = {"names": names, "needed": needed, "keywords": [a.arg for a in node.args.kwonlyargs]}
    return found


def main(repository: Annotated[Path, typer.Argument(help="Dao-AILab/flash-attention.")]) -> None:
    """Read them anew."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True)
        return done.stdout

    tags = git("tag", "--sort=creatordate").split()
    versions = {
        "flash": [tag for tag in tags if tag.startswith("v") and tag >= "v2.6.0"],  # the first with soft caps
        # No tags: every commit since it returns the log-sum-exp where it is asked to.
        "flash3": git("log", "--reverse", "--format=%h", "203b9b3d^..HEAD", "--", FILES["flash3"]).split(),
        "flash4": [tag for tag in tags if tag.startswith("fa4-")],
    }
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in FILES}
    for name, file in FILES.items():
        for version in [*versions[name], "HEAD"]:
            for function, signature in arguments(git("show", f"{version}:{file}")).items():
                same = [one for one in found[name].setdefault(function, []) if one["signature"] == signature]
                (same or found[name][function]).append({"signature": signature, "versions": []})
                (same or found[name][function][-1:])[0]["versions"].append(version)
    source = {"repository": "Dao-AILab/flash-attention", "files": FILES}
    source |= {"HEAD": git("rev-parse", "HEAD").strip(), "date": git("log", "-1", "--format=%cs").strip()}
    lines = json.dumps({"provenance": source, "functions": found}, indent=1)
    GOLDEN.write_text(re.sub(r"\n {5,}|\n {4}(?=[\]}])", " ", lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
