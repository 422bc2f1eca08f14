"""GGUF files are read as the package reads them."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest

from ctxext.checkpoints.gguf_file import GGUFFile
from ctxext.errors import CheckpointError
from tests._gguf import write_gguf
from tests._models import tiny


def test_a_gguf_file_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    path = write_gguf(tiny(vocab_size=64), tmp_path / "plain.gguf")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.tensors == [tensor.name for tensor in theirs.tensors]
    assert ours.keys == [name for name in theirs.fields if not name.startswith("GGUF.")]
    for key in ours.keys:
        wanted = theirs.fields[key].contents()
        texts = isinstance(wanted, list) and isinstance(wanted[0], str)
        assert ours.get(key) == ([""] * len(wanted) if texts else wanted), key


@pytest.mark.parametrize("kept", range(5, 3000, 311))
def test_a_gguf_file_that_ends_too_soon(kept: int, tmp_path: Path) -> None:
    """In the middle of a key, of a number, of a list of numbers or of texts."""
    path = write_gguf(tiny(vocab_size=64), tmp_path / "plain.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        GGUFFile(path)


@pytest.mark.parametrize("count", [2**63 + 1, 2**64 - 1, 10**6])
@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
def test_a_gguf_file_that_counts_more_than_it_holds(key: str, count: int, tmp_path: Path) -> None:
    path = write_gguf(tiny(vocab_size=64), tmp_path / "plain.gguf")
    data = bytearray(path.read_bytes())
    place = data.index(key.encode()) + len(key) + 8  # behind its type and that of its items
    assert struct.unpack_from("<Q", data, place)[0] == 64
    struct.pack_into("<Q", data, place, count)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        GGUFFile(path)
