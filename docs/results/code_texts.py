"""Write long texts of source code, one an installed Python package, to a parquet file for the studies of this folder.

    python docs/results/code_texts.py transformers/generation pip/_internal -o code.parquet

A text joins the .py files of a folder of site-packages in the order of their paths, tests left out, each under a line
with its path. The packages' versions are those installed, so a study names them.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as parquet
from typer import Argument, BadParameter, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxext.cli.options import run_script

SHORTEST_FILE = 400
"""Characters below which a file, such as an empty __init__.py, is left out."""


def text_of(folder: Path, root: Path, most: int) -> str:
    """Return the joined files of a folder, at most ``most`` characters."""
    parts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        if "tests" in path.parts or len(source) < SHORTEST_FILE:
            continue
        parts.append(f"# File: {path.relative_to(root).as_posix()}\n\n{source}\n\n")
        size += len(parts[-1])
        if size >= most:
            break
    return "".join(parts)[:most]


def main(
    packages: Annotated[list[str], Argument(help="folders below site-packages, such as transformers/generation")],
    output: Annotated[Path, Option("--output", "-o", help="the parquet file")],
    characters: Annotated[int, Option(min=1, help="characters of a text, at most")] = 260_000,
) -> None:
    """Write one row (name, text) a package."""
    root = Path(sysconfig.get_paths()["purelib"])
    missing = [package for package in packages if not (root / package).is_dir()]
    if missing:
        raise BadParameter(f"not installed here: {', '.join(missing)}")
    rows = [{"name": package, "text": text_of(root / package, root, characters)} for package in packages]
    parquet.write_table(pa.Table.from_pylist(rows), output)
    for row in rows:
        print(f"{row['name']}: {len(row['text']):,} characters")


if __name__ == "__main__":
    run_script(main)
