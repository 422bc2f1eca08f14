"""Compare all methods on one checkpoint and a text, on one process or on many; the same as ``ctxext eval compare``.

    python scripts/compare.py CHECKPOINT --text book.txt -o report
    accelerate launch --num_processes 8 scripts/compare.py CHECKPOINT --text books.parquet -f 2 -f 4 -o report

Several processes split the cells among them and give the same numbers; the folder has to be one that all of them see.
A launcher that kills all processes when one fails loses at most the cells in progress: run the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.cli.eval.compare import compare
from ctxext.cli.options import run_script

if __name__ == "__main__":
    run_script(compare)
