"""Write files whole or not at all, read them with checks, and follow no link out of its folder."""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeGuard

from ctxext.errors import CheckpointError

NAME_BYTES = 255  # the longest file name, on every file system in use
LFS = b"version https://git-lfs.github.com/spec/"  # first bytes of a pointer file, until Git LFS fetches the real one
CONFIGS = ("config.json", "adapter_config.json")
# Weights in a form that runs code when it is read, or that nothing here keeps in step with the new config.
OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".ot"})
CHUNK = 16 * 2**20
DAY = 24 * 60 * 60
Progress = Callable[[int, int], None]
StrPath = str | os.PathLike[str]
JsonObject = dict[str, Any]
LEVELS = 100  # of lists and objects within each other; programs that walk deeper ones end in a RecursionError


def hidden_beside(path: Path, ending: str) -> Path:
    """Return a hidden path beside ``path``: its name, cut to the length that file systems allow, and ``ending``."""
    room = max(0, NAME_BYTES - 2 - len(os.fsencode(ending)))
    return path.with_name(f".{os.fsencode(path.name)[:room].decode(errors='ignore')}.{ending}")


def refuse_existing(path: Path) -> None:
    """Raise ``CheckpointError`` if ``path`` exists, even as a broken link."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} already exists and is never overwritten. Give a new name, or remove it.")


def refuse_destination(place: str | Path) -> None:
    """Raise ``CheckpointError`` if a directory ``place`` exists or cannot be created."""
    path = Path(place)
    if len(os.fsencode(path.name)) > NAME_BYTES:
        raise CheckpointError(
            f"The name {path.name[:40]}... has {len(os.fsencode(path.name))} bytes, and file systems allow "
            f"{NAME_BYTES}. Give a shorter one."
        )
    refuse_existing(path)
    if not path.parent.is_dir():
        raise CheckpointError(f"{path} cannot be created: there is no directory {path.parent}.")
    refuse_read_only(path.parent)


def refuse_as_file(path: Path) -> None:
    """Raise ``CheckpointError`` if ``path`` is no file and none can be created there."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory. Name a file.")
    if not path.exists():
        refuse_destination(path)


def refuse_read_only(folder: Path) -> None:
    """Raise ``CheckpointError`` if nothing can be written to ``folder``, or to the nearest folder that exists above."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise CheckpointError(f"{folder} cannot be written: {nearest} is a file and no directory. Give another place.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written: you may not write to {nearest}. Give another place.")


def refuse_missing(place: str) -> None:
    """Raise ``CheckpointError`` if a checkpoint's path is a local one where nothing is; a name on the hub passes."""
    local = Path(place)
    if local.exists():
        return
    if place.startswith((".", "/", "~")) or place.count("/") > 1 or "\\" in place:
        raise CheckpointError(f"There is no checkpoint at {place}: no such directory.{nearest_name(local)}")
    if place.count("/") == 1 and local.parent.is_dir():
        raise CheckpointError(
            f"There is no directory {place}, though there is one {local.parent}.{nearest_name(local)} A checkpoint of "
            f"this name on the hub is fetched first: hf download {place} --local-dir {place}."
        )


def copy_counted(reading: BinaryIO, writing: BinaryIO, total: int, progress: Progress | None, done: int = 0) -> int:
    """Copy a file to its end, and tell the bytes that are done of a total; return them."""
    while chunk := reading.read(CHUNK):
        writing.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    return done


def lfs_advice(path: Path) -> str:
    """Return how to get a file of which Git LFS left a pointer only; nothing for any other file."""
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS)) == LFS
    return " It is a pointer of Git LFS: run `git lfs pull` where it was cloned." if is_pointer else ""


def refuse_no_config(folder: Path) -> None:
    """Raise ``CheckpointError`` for a directory that holds neither a config nor one GGUF file."""
    if not any((folder / name).is_file() for name in CONFIGS) and gguf_at(folder) is None:
        names = ", ".join(sorted(item.name for item in folder.iterdir())[:6]) if folder.is_dir() else ""
        raise CheckpointError(
            f"{folder} has no config.json (found: {names or 'nothing'}). Give a directory saved by save_pretrained."
        )


def is_weight(path: Path) -> bool:
    """Return whether a file holds weights that transformers reads; consolidated ones are of Mistral's own programs."""
    return path.suffix == ".safetensors" and not path.name.startswith((".", "consolidated"))


def refuse_no_weights(folder: Path) -> None:
    """Raise ``CheckpointError`` for the directory of a whole model without safetensors weights."""
    is_whole = [(folder / name).is_file() for name in CONFIGS] == [True, False]
    if is_whole and not any(map(is_weight, folder.iterdir())):
        for file in sorted(folder.glob("*.gguf")):
            raise CheckpointError(f"{folder} has its weights in a GGUF file, which is to be named itself: {file}.")
        others = ", ".join(sorted(item.name for item in folder.iterdir() if item.suffix in OTHER_WEIGHTS))
        raise CheckpointError(
            f"{folder} has no safetensors weights (found: {others or 'no weights at all'}); other formats can run code "
            f"when they are read. Download them, or convert a checkpoint that you trust: "
            f"AutoModelForCausalLM.from_pretrained(SRC, use_safetensors=False).save_pretrained(NEW)."
        )


def gguf_at(place: StrPath) -> Path | None:
    """Return the GGUF file that a path is, whatever its name, or holds alone; None for every other checkpoint."""
    path = Path(place)
    files = sorted(path.glob("*.gguf")) if not any((path / name).is_file() for name in CONFIGS) else []
    path = files[0] if len(files) == 1 else path
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if path.suffix == ".gguf" or file.read(4) == b"GGUF" else None


def nearest_name(path: Path) -> str:
    """Return a question whether another file of the same folder is meant; nothing where no name is close."""
    beside = sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.with_name(close[0])}?" if close else ""


def followed(path: Path, root: Path) -> Path:
    """Return the file or directory that ``path`` leads to, without any link in it.

    A folder from somebody else may hold links to files of the user who reads the folder, such as a private key.

    Args:
        path: place inside ``root``; any part of it below ``root`` may be a symbolic link.
        root: folder, or a link to one. Links may lead anywhere inside it, and from a snapshot in the hub's cache to
            the files in ``blobs`` beside the snapshots, where the cache keeps what it downloaded.

    Raises:
        CheckpointError: a link leads out of the folder, to nothing, or around in a circle.
    """
    within = root.resolve()
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        link = f" is a symbolic link to {os.readlink(path)}, which" if path.is_symlink() else ""
        raise CheckpointError(f"{path}{link} cannot be read: {error.strerror}. Remove it or restore it.") from error
    blobs = [place.parent.parent / "blobs" for place in (within, *within.parents) if place.parent.name == "snapshots"]
    if target.is_relative_to(within) or target.parent in blobs:
        return target
    raise CheckpointError(
        f"{path} is a symbolic link that leads out of {root}, to {target}, and is not followed. Remove it, or put the "
        f"file itself in its place."
    )


def files_below(folder: Path, root: Path) -> Iterator[Path]:
    """Yield every file below a folder in ``root``, sorted in each folder; links are followed as ``followed`` allows.

    Raises:
        CheckpointError: as for ``followed``, and for links that lead to one folder twice, which may never end.
    """
    yield from _files_below(folder, root, set())


def _files_below(folder: Path, root: Path, linked: set[Path]) -> Iterator[Path]:
    target = followed(folder, root)
    if folder.is_symlink():
        if target in linked or folder.parent.resolve().is_relative_to(target):
            raise CheckpointError(
                f"{folder} is a symbolic link to {target}, a folder that contains it or that another link leads to. "
                f"Remove it, or put the folder itself in its place."
            )
        linked.add(target)
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            followed(path, root)
        if path.is_dir():
            yield from _files_below(path, root, linked)
        else:
            yield path


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that half-written files are removed. The main thread only."""
    default = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not default:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside ``path``, with its suffix, that replaces ``path`` unless the block raises."""
    half = hidden_beside(path, f"{os.getpid()}-{threading.get_ident()}{path.suffix}")
    with ending_cleanly():
        try:
            yield half
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.safetensors)")
# A variant's name lies elsewhere in the name of an index than in the name of weights: model.fp16.safetensors.
INDEX = re.compile(r"(.+)(\.\w+)\.index(\.[^.]+)?\.json")


def weights_of(name: str) -> str:
    """Return the name that the weights of an index would have in one file; any other name as it is."""
    match = INDEX.fullmatch(name)
    return name if match is None else f"{match[1]}{match[3] or ''}{match[2]}"


@contextlib.contextmanager
def whole_files(directory: Path, last: Sequence[str]) -> Iterator[Path]:
    """Yield a hidden folder in ``directory``; its files move into ``directory`` unless the block raises.

    ``directory`` is created if it does not exist, and removed again if it is empty after an exception. Earlier weight
    files of the same stem, in other shards, are removed, and hidden folders that a kill left there more than a day ago.

    Args:
        last: names of files without which the others are not read. Old ones are removed first and new ones moved last,
            in this order: a kill leaves a directory that is refused, and not new weights under an old config.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    half = directory / f".{secrets.token_hex(4)}.partial"
    remove_left(directory)
    with ending_cleanly():
        try:
            half.mkdir()
            yield half
            _put_in_place(half, directory, last)
        finally:
            shutil.rmtree(half, ignore_errors=True)
            if is_new and not any(directory.iterdir()):
                directory.rmdir()


def remove_left(directory: Path, name: str = "") -> None:
    """Remove hidden folders that a kill left in a directory, for a file or folder of this name, more than a day ago."""
    for killed in directory.glob(f"{glob.escape(name and f'.{name}')}.{'[0-9a-f]' * 8}.partial"):
        if time.time() - killed.stat().st_mtime > DAY:  # other processes may be writing the recent ones
            shutil.rmtree(killed)


def _put_in_place(half: Path, directory: Path, last: Sequence[str]) -> None:
    files = [path for path in half.rglob("*") if path.is_file()]
    places = {folder: directory / folder.relative_to(half) for folder in sorted({path.parent for path in files})}
    for place in places.values():  # all of them before anything goes: a file may have the name of one
        place.mkdir(parents=True, exist_ok=True)
    for folder, place in places.items():
        written = {path.name for path in files if path.parent == folder}
        for name in reversed(last):
            if not written.isdisjoint(last):  # of several processes all but one may write a tokenizer only
                (place / name).unlink(missing_ok=True)
        old = [path.name for path in place.iterdir() if path.is_file()]
        for name in replaced_weights(old, written):
            (place / name).unlink()
    for path in sorted(files, key=lambda path: last.index(path.name) if path.name in last else -1):
        path.replace(directory / path.relative_to(half))


def replaced_weights(old: Iterable[str], written: set[str]) -> list[str]:
    """Return the names of old weight files, whole or in shards, that new files under other names replace."""
    stems = {SHARD.sub(r"\1\2", name) for name in written if name.endswith(".safetensors")}
    return [name for name in old if name not in written and SHARD.sub(r"\1\2", weights_of(name)) in stems]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a kill, meets the old one or the new one and never half of it.

    Raises:
        OSError: if the file cannot be written; the old file is unchanged.
    """
    with whole_file(path) as half, open(half, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: JsonObject) -> None:
    """Write a file whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON that may be anybody's.

    Raises:
        ValueError: for anything else, and for what nests too deep to be worked with.
    """
    too_deep = ValueError(f"it nests more than {LEVELS} levels")
    try:
        content = json.loads(text, **hooks)
    except RecursionError:
        raise too_deep from None
    level = [content]
    for _ in range(LEVELS + 1):  # beyond the last are words and numbers
        inner = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        level = [part for values in inner for part in values]
    if level:
        raise too_deep
    return content


def read_json(path: Path) -> JsonObject:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: if the file holds anything else.
    """
    content: JsonObject = read_json_as(path, dict, "a JSON object")
    return content


def read_json_as(path: Path, kind: type, expected: str) -> Any:
    """Read JSON of a kind from a file of a checkpoint; see ``read_json``.

    Raises:
        CheckpointError: if the file holds anything else.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise CheckpointError(f"{path} should hold {expected}; found {json.dumps(content)[:40]}.")
    return content


def is_choice(method: object) -> TypeGuard[str]:
    """Return whether ``method`` is the path of a ``choice.json`` (``ctxext choose``), which ``choice_in`` reads."""
    return isinstance(method, str) and method.endswith(".json")


def digest(content: str | bytes, digits: int = 12) -> str:
    """Return the first hexadecimal ``digits`` of the SHA-256 of some bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:digits]


def package_folders(package: str) -> list[Path]:
    """Return the folders of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
