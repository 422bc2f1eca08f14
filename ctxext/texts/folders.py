"""A folder of texts, a repository of code too: which of its files are read, and which are left out and why."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ctxext.errors import CheckpointError, install_line
from ctxext.files import followed, lfs_advice
from ctxext.texts.pdf import is_pdf

# Read however long they are; any other file is read where it holds UTF-8 text of at most SOURCE_BYTES.
TEXTS = (".txt", ".text", ".md", ".rst")
SOURCE_BYTES = 2**20
# What other people wrote, and what programs made of it. Hidden folders (.git, .venv) are left out besides.
FOREIGN = frozenset(
    {"node_modules", "bower_components", "site-packages", "vendor", "third_party", "__pycache__", "CVS"}
)
ENVIRONMENT = "pyvenv.cfg"  # lies in every virtual environment, whatever it is called
HIDDEN, NO_TEXT, LONG = "hidden", "not UTF-8 text", f"over {SOURCE_BYTES // 2**20} MiB"
NO_READER = f"PDF, which takes {install_line('pdf')}"
POINTER = "pointers of Git LFS, which `git lfs pull` turns into files"
OUTSIDE, SPECIAL = "behind symbolic links that lead out of the folder or to nothing", "not regular files"
CLOSED = "closed to this user"
# How data sets name the files of their splits: train.jsonl, test/one.txt, data/train_sft-00000-of-00002.parquet.
SPLIT_FILE = re.compile(r"(?i)(.+?)(-\d{5}-of-\d{5})?\.(txt|parquet|jsonl?|ndjson|csv|tsv)(\.(gz|zst|bz2|xz))?")
SPLITS = {"train": "train(ing)?", "validation": "val(id(ation)?)?|dev", "test": "test(ing)?|eval(uation)?"}
NAMED = 3  # files of a kind that a sentence names


@dataclass
class Folder:
    """The files of a folder, sorted into those to read and those left out.

    Args:
        left_out: Paths inside the folder of files that are left out, by the reason.
    """

    path: Path
    files: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, reason: str, *paths: Path) -> None:
        """Note files that are not read."""
        names = [path.relative_to(self.path).as_posix() for path in paths]
        self.left_out.setdefault(reason, []).extend(names)

    def __str__(self) -> str:
        """Say how many files are read, how many are not, and why; empty where all are read."""
        total = sum(map(len, self.left_out.values()))
        if not total:
            return ""
        reasons = ", ".join(f"{len(names):,} {reason} ({_few(names)})" for reason, names in self.left_out.items())
        return f"{self.path}: {len(self.files):,} of {len(self.files) + total:,} files are read; left out: {reasons}."


def is_text(path: Path) -> bool:
    """Return whether a file is plain text by its name."""
    return path.suffix.lower() in TEXTS


def split_named(path: Path) -> str | None:
    """Return the split that a table or ``.txt`` file of a data set is named after; None where it is not."""
    file = SPLIT_FILE.fullmatch(path.name)
    if file is None or file[2]:
        return file and file[1]
    for place in (path.name, path.as_posix()):
        for split, words in SPLITS.items():
            if re.search(rf"(?i)(?<![a-z])({words})(?![a-z])", place):
                return split
    return None


def _few(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def read_folder(path: Path, is_table: Callable[[Path], bool]) -> Folder:
    """Sort the files of a folder, and of the folders in it, into files with text and the rest.

    A file that links lead to as well is read once. Links are followed inside the folder, and in the hub's cache to
    files of the cache; see ``ctxext.files.followed``.
    """
    folder, read = Folder(path), set[Path]()

    def walk(place: Path) -> None:
        for entry in sorted(place.iterdir()):
            if entry.name.startswith("."):
                folder.leave_out(HIDDEN, *_below(entry))
            elif entry.is_symlink() and not _leads_inside(entry, path):
                folder.leave_out(OUTSIDE, entry)
            elif not os.access(entry, os.R_OK | os.X_OK * entry.is_dir()):
                folder.leave_out(CLOSED, entry)
            elif entry.is_dir():
                if entry.name in FOREIGN or (entry / ENVIRONMENT).is_file():
                    folder.leave_out(f"in {entry.name}", *_below(entry))
                elif not entry.is_symlink():  # what a link inside the folder leads to is met without it
                    walk(entry)
            elif not entry.is_file():
                folder.leave_out(SPECIAL, entry)
            elif (file := entry.resolve()) not in read:
                reason = None if is_table(entry) else _why_no_text(entry)
                if reason is None:
                    read.add(file)
                    folder.files.append(entry)
                else:
                    folder.leave_out(reason, entry)

    walk(path)
    return folder


def _leads_inside(link: Path, folder: Path) -> bool:
    try:
        followed(link, folder)
    except CheckpointError:
        return False
    return True


def _below(path: Path) -> list[Path]:
    """Return all files below a folder, without following links; the path itself where it is none."""
    if path.is_symlink() or not path.is_dir():
        return [path]
    return sorted(Path(place) / name for place, _, files in os.walk(path) for name in files)


def _why_no_text(path: Path) -> str | None:
    """Return why a file is left out; None where it is read. Files with an ending of texts are read, or refused."""
    if is_text(path):
        return None
    if is_pdf(path):
        return None if importlib.util.find_spec("pypdf") else NO_READER
    if path.stat().st_size > SOURCE_BYTES:
        return LONG
    if lfs_advice(path):
        return POINTER
    content = path.read_bytes()
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return NO_TEXT
    return NO_TEXT if b"\0" in content else None
