"""Write tests/kernels/flash_attn.json: which arguments the functions of flash-attn 2, 3 and 4 take, at one commit.

    python -m tests.kernels.flash_signatures path/to/flash-attention     # a checkout, or a bare git directory

Files are parsed and never imported; only the names of arguments are kept.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Annotated

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

    found = {name: arguments(git("show", f"HEAD:{file}")) for name, file in FILES.items()}
    source = {"repository": "Dao-AILab/flash-attention", "commit": git("rev-parse", "HEAD").strip(), "files": FILES}
    GOLDEN.write_text(json.dumps({"provenance": source, "functions": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
