"""The circumstances of a measurement, without which nobody can compare results."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import torch
import transformers
from torch import nn

from ctxext.core import patching
from ctxext.errors import InvalidParameterError
from ctxext.files import JsonObject
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.texts.corpus import Corpus
from ctxext.version import __version__


@dataclass(frozen=True, kw_only=True)
class ExtensionRecord:
    """One extension that was measured.

    Args:
        method: ``Method.to_dict()``, None for the model unextended.
        fingerprint: Hash of the frequencies, from ``ctxext.describe``; empty for the model unextended.
        attention: Name of the attention backend; empty where the extension does not change it.
    """

    method: JsonObject | None = None
    fingerprint: str = ""
    attention: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> ExtensionRecord:
        """Record how a model is extended now."""
        described = patching.describe(model)
        return cls(method=described.method, fingerprint=described.fingerprint, attention=described.attention)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Everything that decides a measured number, and the circumstances.

    Args:
        trained_length: Tokens that the checkpoint was trained for; None where its config does not tell.
        corpus_sha256: Hash of the tokens that were read; empty without a text.
        prefix: Special tokens in front of each text.
        seed: Seed of all random draws; None without any.
        date: UTC, ISO 8601, to the second.
    """

    checkpoint: str
    checkpoint_sha256: str
    trained_length: int | None = None
    documents: tuple[str, ...] = ()
    corpus_sha256: str = ""
    prefix: str = ""
    seed: int | None = None
    dtype: str = ""
    device: str = ""
    extensions: Mapping[str, ExtensionRecord] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    command: str = ""
    date: str = ""

    def to_dict(self) -> JsonObject:
        """Plain JSON values."""
        return asdict(self) | {"documents": list(self.documents)}


Kind = TypeVar("Kind", bound="Report")


class Report:
    """The result of a measurement, a frozen dataclass that is written to a JSON file and read again.

    A subclass says what its files are: ``TITLE`` in words, ``KIND`` as the field of that name (None where the files
    have none), and the number ``FORMAT``.
    """

    TITLE: ClassVar[str]
    KIND: ClassVar[str | None] = None
    FORMAT: ClassVar[int]

    def to_dict(self) -> JsonObject:
        """Plain JSON values."""
        report: Any = self
        nested = {item.name: getattr(self, item.name) for item in fields(report)}
        written = {name: part.to_dict() for name, part in nested.items() if isinstance(part, Report | Provenance)}
        return {**self._head(), **asdict(report), **written}

    @classmethod
    def from_dict(cls: type[Kind], saved: Mapping[str, Any]) -> Kind:
        """Build it from the values of ``to_dict``.

        Raises:
            InvalidParameterError: something else.
        """
        known: Any = cls
        head, missing = cls._head(), {item.name for item in fields(known)} - saved.keys()
        is_other = any(saved.get(name) != value for name, value in head.items())
        if is_other or missing:
            values = ", ".join(f"{name} {saved.get(name)!r}" for name in reversed(head))
            without = "" if is_other else f", without {', '.join(sorted(missing))}"
            raise InvalidParameterError(f"This is not {cls.TITLE} of format {cls.FORMAT}: found {values}{without}.")
        read: Kind = _from_fields(cls, saved)
        return read

    @classmethod
    def _head(cls) -> JsonObject:
        return {"format": cls.FORMAT} | ({} if cls.KIND is None else {"kind": cls.KIND})


def from_json(kind: Any, value: Any) -> Any:
    """Undo ``asdict`` and JSON: lists are tuples again and objects are dataclasses.

    Raises:
        InvalidParameterError: a field that is missing.
    """
    inner = get_args(kind)
    if get_origin(kind) is UnionType:  # X | None
        return None if value is None else from_json(inner[0], value)
    if get_origin(kind) is tuple:
        return tuple(from_json(inner[0], item) for item in value)
    if get_origin(kind) is Mapping:
        return {name: from_json(inner[1], item) for name, item in value.items()}
    if is_dataclass(kind):
        return _from_fields(kind, value)
    return value


def _from_fields(kind: Any, saved: Mapping[str, Any]) -> Any:
    types, known = get_type_hints(kind), {item.name for item in fields(kind)}
    missing = known - saved.keys()
    if missing and not hasattr(saved, "__missing__"):  # a line of a journal says itself what it lacks
        unknown = ", ".join(sorted(saved.keys() - known)) or "nothing"
        raise InvalidParameterError(
            f"This is not a {kind.__name__} of ctxext {__version__}: missing {', '.join(sorted(missing))}, unknown "
            f"{unknown}. Another version wrote it; measure again."
        )
    return kind(**{item.name: from_json(types[item.name], saved[item.name]) for item in fields(kind)})


def provenance_of(
    checkpoint: Checkpoint,
    corpus: Corpus | None = None,
    *,
    seed: int | None = None,
    trained_length: int | None = None,
) -> Provenance:
    """Collect the provenance of a measurement that is about to begin."""
    texts: dict[str, Any] = {}
    if corpus is not None:
        names = tuple(document.name for document in corpus.documents)
        texts = {"documents": names, "corpus_sha256": corpus.sha256, "prefix": corpus.prefix}
    base = checkpoint.subject.model
    return Provenance(
        checkpoint=checkpoint.name,
        checkpoint_sha256=checkpoint.sha256,
        trained_length=trained_length or patching.describe(checkpoint.model).trained_length,
        seed=seed,
        dtype=checkpoint.dtype_note or str(base.dtype).removeprefix("torch."),
        device=str(base.device),
        versions=versions(),
        machine=machine(base.device.type),
        command=command(),
        date=now(),
        **texts,
    )


def versions() -> dict[str, str]:
    """Return the versions of ctxext, torch, transformers and Python."""
    return {
        "ctxext": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def machine(device: str = "cpu") -> str:
    """Describe the processor that computes."""
    threads = torch.get_num_threads()
    cores = f"{os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}; {_processor()}, {cores}"
    return f"{_processor()}, {cores}"


def command(arguments: Sequence[str] | None = None) -> str:
    """Return the command line, as it could be typed again in the same folder."""
    program, *rest = sys.argv if arguments is None else arguments
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name  # of python -m ctxext
    typed = shlex.join([name, *rest])
    return typed.encode(errors="replace").decode()  # names of files may hold bytes that are not UTF-8


def git_state(directory: str | Path = ".") -> JsonObject | None:
    """Return the commit of a directory and whether tracked files differ from it; None outside of git."""

    def said(*words: str) -> str:
        git = ["git", "-C", str(directory), *words]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changes = said("rev-parse", "HEAD"), said("status", "--porcelain", "--untracked-files=no")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git here, no repository, or one without commits
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
