"""The text of a PDF file, page after page."""

from __future__ import annotations

import warnings
from pathlib import Path

from ctxext.errors import InvalidParameterError, LeftOutWarning, require_package


def is_pdf(path: Path) -> bool:
    """Return whether a file's ending says that it is a PDF."""
    return path.suffix.lower() == ".pdf"


def pdf_text(path: Path) -> str:
    """Read the text of a PDF file; a ``LeftOutWarning`` says how many pages hold none.

    Raises:
        InvalidParameterError: no pypdf, a file that is damaged or encrypted, or no page with text.
    """
    require_package("pypdf", "pdf", f"To read {str(path)!r} takes")
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    try:
        pages = [page.extract_text().strip() for page in PdfReader(path).pages]
    except (FileNotDecryptedError, DependencyError) as error:
        raise InvalidParameterError(
            f"The PDF {str(path)!r} is encrypted. Save a copy without a password, such as by `qpdf --decrypt`."
        ) from error
    # In a damaged file pypdf does not always raise a PyPdfError.
    except (PyPdfError, OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise InvalidParameterError(f"The PDF {str(path)!r} cannot be read: {error}.") from error
    written = [page for page in pages if page]
    if not written:
        raise InvalidParameterError(
            f"The PDF {str(path)!r} holds no text in its {len(pages)} pages; a scan must go through OCR first, such as "
            f"by `ocrmypdf`."
        )
    if len(written) < len(pages):
        empty = len(pages) - len(written)
        said = f"{path}: {len(written):,} of {len(pages):,} pages are read; left out: {empty:,} without text."
        warnings.warn(said, LeftOutWarning, stacklevel=2)
    return "\n".join(written)
