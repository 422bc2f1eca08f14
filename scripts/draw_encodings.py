"""Draw the pictures of docs/concepts/ by the `ctxext show` commands that stand under them.

    python scripts/draw_encodings.py               # all of them, some minutes
    python scripts/draw_encodings.py fox path      # those of these pages

Each command runs as it is printed, in docs/concepts/. Then the picture is given a palette of 256 colours and the width
at which GitHub shows it, so that all of them together stay small.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from typer.main import get_command

from ctxext.cli.app import app

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "concepts"
WIDTH = 1100
COLOURS = 256


def commands(page: Path) -> dict[str, list[str]]:
    """The arguments of ``ctxext`` that draw each picture of a page, by its file name.

    A command that names no file is left to the reader: it needs a checkpoint.
    """
    lines = re.findall(r"^ctxext (show .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    split = [shlex.split(line, comments=True) for line in lines]
    return {words[words.index("-o") + 1]: words for words in split if "-o" in words}


def shrink(picture: Path) -> None:
    """Give a picture a palette and at most ``WIDTH`` pixels a row."""
    with Image.open(picture) as found:
        image = found.convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    # Of Pillow's ways to choose a palette, this one keeps the few pixels of thin lines in their colours.
    reduced = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    reduced.save(picture, optimize=True)


def main(pages: Annotated[list[str] | None, typer.Argument(help="names of pages, without .md; all")] = None) -> None:
    """Draw the pictures of docs/concepts/."""
    os.chdir(FOLDER)
    for page in sorted(FOLDER.glob("*.md")):
        if pages and page.stem not in pages:
            continue
        for name, words in commands(page).items():
            get_command(app).main(words, standalone_mode=False)
            shrink(FOLDER / name)


if __name__ == "__main__":
    typer.run(main)
