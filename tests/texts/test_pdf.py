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


def pdf(*pages: str) -> bytes:
    """A file of pages, each with one line of Helvetica, or none."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    numbers = []
    for page in pages:
        drawn = f"BT /F 12 Tf 20 100 Td ({page}) Tj ET".encode() if page else b""
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn))
        content = len(objects)
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Resources<</Font<</F 3 0 R>>>>/Contents %d 0 R>>"
            % content
        )
        numbers.append(len(objects))
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects[1] = b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages))
    file, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(file))
        file += b"%d 0 obj%s endobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        file
        + b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(places) + 1, table)
        + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(places) + 1, len(file))
    )


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
