"""Measure perplexity, on one process or on many; the same as ``ctxext eval perplexity``.

    python scripts/perplexity.py CHECKPOINT --text book.txt -m yarn -f 4 -o loss.png
    accelerate launch --num_processes 8 scripts/perplexity.py CHECKPOINT --text books.parquet -m yarn -f 4 -o loss.json

Several processes split the documents (LongLoRA's protocol: the windows) among them and give the same numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.cli.eval.perplexity import perplexity
from ctxext.cli.options import run_script

if __name__ == "__main__":
    run_script(perplexity)
