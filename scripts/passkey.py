"""Ask for passkeys at every length and depth, on one process or on many; the same as ``ctxext eval passkey``.

    python scripts/passkey.py CHECKPOINT -m yarn -f 4 -o passkey.json -o passkey.png
    accelerate launch --num_processes 8 scripts/passkey.py CHECKPOINT -m yarn -f 4 -o passkey.json -o passkey.png

Several processes split the prompts among them and give the same result; they exchange it through the files beside the
first output, in a folder that all of them see.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ctxext.cli.eval.passkey import passkey
from ctxext.cli.options import run_script

if __name__ == "__main__":
    run_script(passkey)
