"""Read a GGUF file, and write a copy with other metadata that is otherwise the same.

The ``gguf`` package reads the file, as a memory map. The copy is not built anew from what was read: the bytes of every
other key and tensor are taken over as they lie in the file, so that no type, order or rounding can get lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ctxext.errors import CheckpointError, require_package
from ctxext.files import Progress, copy_counted, lfs_advice, refuse_existing, whole_file

SCALING_TENSORS = ("rope_freqs", "rope_factors")
# Magic and version, which the copy shares; then the numbers of tensors and keys.
SAME_HEAD = 8

Value = str | int | float
_ONE_AT_A_TIME = threading.RLock()


class GGUFFile:
    """A GGUF file that was opened for reading. Its weights are looked at only when they are copied.

    Raises:
        CheckpointError: a file that does not exist, is not GGUF, is cut short or is one of several; or the package that
            reads it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        require_package("gguf", "demo", f"Reading {path} needs", CheckpointError)
        if not path.is_file():
            raise CheckpointError(f"There is no file {path}.")
        try:
            self._reader = _reader_class()(path)
        except (
            ValueError,
            LookupError,
            OSError,
            RecursionError,
            struct.error,
        ) as error:  # short files: the second or last
            raise CheckpointError(f"{path} cannot be read as GGUF: {error}.{lfs_advice(path)}") from error
        if (parts := self.number("split.count", 1)) > 1:
            raise CheckpointError(
                f"{self.path} is part {self.number('split.no', 0) + 1} of the {parts} files of a model. Put them "
                f"together first: llama-gguf-split --merge FIRST OUT.gguf."
            )

    @contextlib.contextmanager
    def read_by_transformers(self) -> Iterator[None]:
        """Give transformers what was read of this file, where it would read the whole of it again.

        Nor does it make the table of the names of tensors again for each module of the model.
        """
        import gguf

        def reader(path: Any, *mode: Any) -> Any:
            return self._reader if Path(path) == self.path else opened(path, *mode)

        with _ONE_AT_A_TIME:  # two threads would put back each other's reader
            opened, names = gguf.GGUFReader, gguf.get_tensor_name_map
            setattr(gguf, "GGUFReader", reader)  # noqa: B010 - to mypy a class is not a variable
            gguf.get_tensor_name_map = functools.cache(names)
            try:
                yield
            finally:
                setattr(gguf, "GGUFReader", opened)  # noqa: B010
                gguf.get_tensor_name_map = names

    @property
    def keys(self) -> list[str]:
        """The names of its keys."""
        return [name for name in self._reader.fields if not name.startswith("GGUF.")]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key.

        Raises:
            CheckpointError: the value is text in an encoding that the format does not have.
        """
        entry = self._reader.fields.get(key)
        try:
            return default if entry is None else entry.contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} cannot be read as GGUF: {key} is no text ({error}).") from error

    def number(self, key: str, default: int | float) -> int | float:
        """Return the number under a key, or ``default`` where the file lacks the key.

        Raises:
            CheckpointError: the value is not a number.
        """
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{self.path} says {key}={value!r}, which should be a number. Convert the checkpoint anew."
            )
        return value

    @property
    def tensors(self) -> list[str]:
        """The names of its tensors."""
        return [tensor.name for tensor in self._reader.tensors]

    def tensor(self, name: str) -> Float[np.ndarray, " n"] | None:
        """Return a tensor of one dimension in float32; None if the file has no tensor of this name.

        Raises:
            CheckpointError: the tensor is of another kind.
        """
        entry = self._tensor(name)
        if entry is None:
            return None
        if entry.data.dtype != np.float32 or entry.data.ndim != 1:
            raise CheckpointError(
                f"{name} in {self.path} should be a list of float32 numbers; found {entry.tensor_type.name} of shape "
                f"{entry.shape.tolist()}. Convert the checkpoint anew."
            )
        return np.array(entry.data)

    def _tensor(self, name: str) -> Any:
        return next((tensor for tensor in self._reader.tensors if tensor.name == name), None)

    def copy(
        self,
        out: Path,
        *,
        keys: Mapping[str, Value],
        drop: Callable[[str], bool],
        tensor: tuple[str, Float[np.ndarray, " n"]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a copy with other keys and at most one other tensor; the copy appears when it is whole, or not at all.

        Args:
            keys: values by key, which replace the file's or are added.
            drop: Function that returns True for a key to leave out, unless it is among ``keys``.
            tensor: a name and float32 numbers, which replace as many or are added; None to keep all tensors.

        Raises:
            CheckpointError: ``out`` is in the way or cannot be written; nothing is left behind.
        """
        refuse_existing(out)
        if self._reader.byte_order != "I":
            raise CheckpointError(f"{self.path} has the opposite byte order to this machine. Copy it on another.")
        start = int(self._reader.data_offset)
        size = self.path.stat().st_size - start
        info, data, offset = (b"", b"", 0) if tensor is None else self._placed(*tensor, size)
        head = self._head(keys, drop, info)
        try:
            with whole_file(out) as half, self.path.open("rb") as reading, half.open("wb") as writing:
                writing.write(head.ljust(self._padded(len(head)), b"\0"))
                begin = writing.tell()
                reading.seek(start)
                copy_counted(reading, writing, size, progress)
                writing.seek(begin + offset)
                writing.write(data)
                writing.truncate(begin + self._padded(max(size, offset + len(data))))
                writing.flush()
                os.fsync(writing.fileno())
                refuse_existing(out)  # made meanwhile, and a rename would replace it
        except OSError as error:
            raise CheckpointError(
                f"Could not write {out}: {error.strerror or error}. Nothing was left behind; {self.path} is unchanged."
            ) from error

    def _placed(self, name: str, numbers: Float[np.ndarray, " n"], size: int) -> tuple[bytes, bytes, int]:
        """Return the description of a new tensor, its bytes, and their offset in (or after) ``size`` bytes of data."""
        data, place = numbers.astype("<f4").tobytes(), self._tensor(name)
        if place is None:
            from gguf import GGMLQuantizationType

            offset = self._padded(size)
            info = struct.pack("<IQIQ", 1, len(numbers), GGMLQuantizationType.F32, offset)
            return _text(name) + info, data, offset
        if place.n_bytes != len(data):
            raise CheckpointError(
                f"{name} in {self.path} has {place.n_bytes} bytes, where {len(data)} are to be: it is of another model."
            )
        return b"", data, int(place.data_offset) - int(self._reader.data_offset)

    def _head(self, keys: Mapping[str, Value], drop: Callable[[str], bool], info: bytes) -> bytes:
        """Build all that lies before the data: counts, keys and descriptions of tensors."""
        kept = {
            entry.name: _packed(entry.name, keys[entry.name]) if entry.name in keys else _bytes_of(entry)
            for entry in (self._reader.fields[name] for name in self.keys)
            if entry.name in keys or not drop(entry.name)
        }
        packed = kept | {name: _packed(name, value) for name, value in keys.items() if name not in kept}
        infos = [_bytes_of(entry.field) for entry in self._reader.tensors] + ([info] if info else [])
        counts = struct.pack("<QQ", len(infos), len(packed))
        return b"".join((self._reader.data[:SAME_HEAD].tobytes(), counts, *packed.values(), *infos))

    def _padded(self, size: int) -> int:
        alignment = int(self._reader.alignment)
        return -(-size // alignment) * alignment


@functools.cache
def _reader_class() -> Any:
    """Return gguf's reader; a list is walked over at once, and one of texts (a vocabulary) is only counted.

    By themselves, four reads for each token of a vocabulary take seconds.
    """
    from gguf import GGUFReader, GGUFValueType

    class ListReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
            start = int(orig_offs)
            kind = GGUFValueType(self._get(start, np.uint32)[0]) if raw_type == GGUFValueType.ARRAY else None
            if kind in (None, GGUFValueType.ARRAY) or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            count, end, types = int(self._get(start + 4, np.uint64)[0]), start + 12, [GGUFValueType.ARRAY, kind]
            if number := self.gguf_scalar_to_np.get(kind):
                values = np.asarray(self._get(end, number, count)).reshape(-1, 1)
                if len(values) < count:
                    raise IndexError(f"a list of {count} numbers ends after {len(values)}")
                return 12 + values.nbytes, [self.data[start:end], *values], list(range(1, count + 1)), types
            data: Any = self.data.data
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
            return end - start, [self.data[start:end], self.data[:0]], [1] * count, types

    return ListReader


def _bytes_of(entry: Any) -> bytes:
    """Return the bytes of a key, or of the description of a tensor, as they lie in the file."""
    return b"".join(part.tobytes() for part in entry.parts)


def _packed(name: str, value: Value) -> bytes:
    """Pack a key in the form of the file: its name, its type, its value."""
    from gguf import GGUFValueType

    if isinstance(value, str):
        return _text(name) + struct.pack("<I", GGUFValueType.STRING) + _text(value)
    kind, form = (GGUFValueType.UINT32, "I") if isinstance(value, int) else (GGUFValueType.FLOAT32, "f")
    return _text(name) + struct.pack(f"<I{form}", kind, value)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def scaling_in_gguf(path: Path) -> tuple[str, ...]:
    """Name the metadata and tensors in a GGUF file that scale rope.

    Raises:
        CheckpointError: if the file is not GGUF, or the package that reads it is missing.
    """
    file = GGUFFile(path)
    keys = [f"{key}={file.get(key)}" for key in file.keys if ".rope.scaling." in key]
    return (*keys, *(name for name in file.tensors if name.startswith(SCALING_TENSORS)))
