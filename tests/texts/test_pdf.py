"""PDF files as texts: page after page, and what cannot be read in a sentence."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter

from ctxext.errors import InvalidParameterError, LeftOutWarning, install_line
from ctxext.texts import folders
from ctxext.texts.documents import Document, read_documents
from tests.texts._pdf import pdf


def encrypted(content: bytes) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(content)))
    writer.encrypt("secret", algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def test_the_text_of_all_pages(tmp_path: Path) -> None:
    (tmp_path / "paper.PDF").write_bytes(pdf("First page.", "Second page."))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(read_documents([tmp_path / "paper.PDF"])) == [Document("paper", "First page.\nSecond page.")]


def test_empty_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "paper.pdf"
    path.write_bytes(pdf("First page.", "", "", "Last page."))
    with pytest.warns(LeftOutWarning, match=r"paper\.pdf: 2 of 4 pages are read; left out: 2 without text\.$"):
        assert [document.text for document in read_documents([path])] == ["First page.\nLast page."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pdf("", ""), "holds no text in its 2 pages; a scan must go through OCR"),
        (encrypted(pdf("Secret.")), r"is encrypted\. Save a copy without a password"),
        (b"%PDF-1.4\n" + b"\0" * 99, "cannot be read"),
        (b"no PDF at all", "cannot be read"),
        (b"", "cannot be read"),
        (pdf("First page.").replace(b"/Pages 2 0 R", b"/Pages 9 0 R"), "cannot be read|holds no text"),
    ],
)
def test_bad_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "paper.pdf").write_bytes(content)
    with pytest.raises(InvalidParameterError, match=rf"^The PDF '.*paper\.pdf' .*({message})"):
        list(read_documents([tmp_path / "paper.pdf"]))
    (tmp_path / "notes.txt").write_text("words")
    with pytest.warns(LeftOutWarning, match=r"^Left out: The PDF '.*paper\.pdf'"):
        assert [document.text for document in read_documents([tmp_path])] == ["words"]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paper.pdf").write_bytes(pdf("First page."))
    (tmp_path / "notes.txt").write_text("words")
    assert [document.name for document in read_documents([tmp_path])] == ["notes", "paper.pdf"]
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidParameterError, match=f"takes the package pypdf.*{re.escape(install_line('pdf'))}"):
        list(read_documents([tmp_path / "paper.pdf"]))
    with pytest.warns(LeftOutWarning, match=re.escape(f"1 PDF, which takes {install_line('pdf')} (paper.pdf)")):
        assert [document.name for document in read_documents([tmp_path])] == ["notes"]
