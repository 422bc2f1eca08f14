"""Measure RULER's tasks, on one process or on many; the same as ``ctxext eval ruler``.

    python scripts/ruler.py CHECKPOINT --text book.txt -m yarn -f 4 -o ruler.json -o ruler.png
    accelerate launch --num_processes 8 scripts/ruler.py CHECKPOINT --text book.txt -m yarn -f 4 -o ruler.json

Several processes split the prompts among them and give the same result; they exchange it through the files beside the
first output, in a folder that all of them see.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.cli.eval.ruler import ruler
from ctxext.cli.options import run_script

if __name__ == "__main__":
    run_script(ruler)
