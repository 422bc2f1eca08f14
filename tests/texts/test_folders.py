"""A folder as text: source code and whatever else is UTF-8 is read, and what is not is said in one line."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from ctxext.errors import InvalidParameterError, LeftOutWarning, UnknownNameError
from ctxext.texts.documents import Document, read_documents, read_text
from ctxext.training.documents import TokenisedDocuments


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of code: what people wrote, what programs made of it, and what others wrote."""
    root = tmp_path / "project"
    texts = {"README.md": "Short.", "Makefile": "all:\n", "src/main.py": "print(1)\n", "src/main.md": "The program."}
    texts |= {"package.json": '{"name": "x", "description": "built by tsc"}', ".git/config": "[core]", ".env": "KEY=1"}
    texts |= {"tsconfig.json": '{\n  // compiled for node\n  "strict": true\n}', "src/deep/kernel.cu": "__global__\n"}
    texts |= {"node_modules/left-pad/index.js": "pad", "env/pyvenv.cfg": "home = /usr", "env/lib/x.py": "x"}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (root / "zeros.bin").write_bytes(b"a\0b")
    (root / "bundle.js").write_text("x" * (2**20 + 1))
    return root


READ = ["Makefile", "README", "package.json", "src/deep/kernel.cu", "src/main", "src/main.py", "tsconfig.json"]


@pytest.mark.parametrize("column", [None, "description"])
def test_source_files_are_read_and_the_rest_is_said(column: str | None, project: Path) -> None:
    with pytest.warns(LeftOutWarning) as caught:
        found = list(read_documents([project], column=column))
    names = sorted(document.name for document in found)
    if column is None:
        assert names == READ
        assert Document("src/main.py", "print(1)\n") in found
        assert Document("package.json", (project / "package.json").read_text()) in found
    else:  # it names what that file is read for
        assert Document("x", "built by tsc") in found
    assert len(caught) == 1
    assert str(caught[0].message) == (
        f"{project}: 7 of 15 files are read; left out: 2 hidden (.env, .git/config), 1 over 1 MiB (bundle.js), 2 in "
        f"env (env/lib/x.py, env/pyvenv.cfg), 2 not UTF-8 text (logo.png, zeros.bin), 1 in node_modules "
        f"(node_modules/left-pad/index.js)."
    )


def test_a_folder_of_which_all_is_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 2**21)  # a text may be long
    (tmp_path / "b.rst").write_text("b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [document.name for document in read_documents([tmp_path])] == ["a", "b"]


NO_TABLES = ['{"name": "x", "version": "1"}', '["a", "b"]', "[]", '"a string"', "// a comment\n{}"]
NO_TABLES += ['[\n  // a comment\n  {"text": "a"}\n]', '{"text": ["a", "b"]}']
TABLES = {'[{"text": "a"}, {"text": "b"}]': ["a", "b"], '{"text": "a"}\n{"text": "b"}\n': ["a", "b"]}
TABLES |= {'[\n {"text": "a"}\n]': ["a"], '\ufeff{"text": "a"}': ["a"]}


@pytest.mark.parametrize(("content", "documents"), [*((text, [text]) for text in NO_TABLES), *TABLES.items()])
@pytest.mark.parametrize("inside", [False, True], ids=["file", "folder"])
def test_json_that_is_no_table_is_text(content: str, documents: list[str], inside: bool, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content, encoding="utf-8")
    found = [document.text for document in read_documents([tmp_path if inside else tmp_path / "data.json"])]
    assert found == documents


def test_tables_without_a_column_of_text_stop_nothing_else(tmp_path: Path) -> None:
    """Alone they are refused by name, with the columns that they have."""
    (tmp_path / "numbers.csv").write_text("a,b,c\nx,y,1\n")
    with pytest.raises(InvalidParameterError, match=r"'numbers.csv' has no column 'text'.*Found: a, b, c"):
        list(read_documents([tmp_path]))
    with pytest.raises(UnknownNameError, match=r"column of row 0 of 'numbers.csv' 'd'"):
        list(read_documents([tmp_path], column="d"))
    (tmp_path / "book.txt").write_text("words")
    with pytest.warns(LeftOutWarning, match=r"1 without a column of text \(numbers\.csv\)"):
        assert [document.text for document in read_documents([tmp_path])] == ["words"]
    (tmp_path / "good.jsonl").write_text('{"text": "fine"}\n{"text": ')
    with pytest.raises(InvalidParameterError, match=r"Cannot read documents from 'good.jsonl'"):
        list(read_documents([tmp_path]))


def test_a_folder_without_any_text_says_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\xff\xd8")
    with pytest.raises(InvalidParameterError, match=r"holds no text.*0 of 1 files.*not UTF-8 text \(a\.png\)"):
        list(read_documents([tmp_path]))


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/id_rsa").write_text("SECRET")
    (tmp_path / "texts/a").mkdir(parents=True)
    (tmp_path / "texts/a/one.txt").write_text("one")
    links = {"key": "../keys/id_rsa", "key.txt": "../keys/id_rsa", "keys": "../keys", "root": "/", "up": ".."}
    links |= {"gone.txt": "nowhere", "loop": "loop"}
    links |= {"a/self": ".", "again": "a", "one.txt": "a/one.txt"}  # the same file again, and again
    for name, target in links.items():
        (tmp_path / "texts" / name).symlink_to(target)
    said = r"7 behind symbolic links that lead out of the folder or to nothing \(gone"
    with pytest.warns(LeftOutWarning, match=said):
        assert [document.text for document in read_documents([tmp_path / "texts"])] == ["one"]


ROW = '{"text": "rows"}\n'
SPLIT_FOLDERS = {
    "lines": {f"{name}.jsonl": ROW.replace("rows", name) for name in ("train", "test", "validation")},
    "shards": {f"data/{name}-00000-of-00001.jsonl": ROW.replace("rows", name) for name in ("train", "test")},
    "folders": {f"{name}/a.txt": name for name in ("train", "test")},
    "other words": {"my_train_1.csv": "text\ntrain\n", "my.dev.tsv": "text\ndev\n", "README.md": "about"},
}


@pytest.mark.parametrize("files", SPLIT_FOLDERS)
def test_files_named_after_splits_are_read_by_split(files: str, tmp_path: Path) -> None:
    for name, content in SPLIT_FOLDERS[files].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidParameterError, match=r"several splits; choose one, or give its files: --split \S*train"):
        list(read_documents([tmp_path]))
    with pytest.warns(LeftOutWarning, match=r"not of the split train \("):
        assert [document.text for document in read_documents([tmp_path], split="train")] == ["train"]
    with pytest.raises(UnknownNameError, match=r"Unknown split .*'trian'\. Did you mean 'train'"):
        list(read_documents([tmp_path], split="trian"))


def test_a_split_of_what_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in ("train.jsonl", "rows.jsonl", "book.txt"):
        (tmp_path / name).write_text(ROW)
    for name in ("train.py", "test.py", "dev-requirements.txt", "test.txt"):
        (tmp_path / "code" / name).write_text(name)
    assert [document.text for document in read_documents([tmp_path / "train.jsonl"], split="train")] == ["rows"]
    assert len(list(read_documents([tmp_path / "code"]))) == 4
    (tmp_path / "code/test.txt").unlink()
    (tmp_path / "code/dev-requirements.txt").unlink()
    for name in ("rows.jsonl", "book.txt", "code", "-"):
        with pytest.raises(InvalidParameterError, match="has no splits; leave out --split train"):
            list(read_documents([tmp_path / name if name != "-" else name], split="train"))


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl.gz", "a.csv", "a.parquet", "a.pdf", "a.py", "saved"])
@pytest.mark.parametrize("inside", [False, True], ids=["file", "folder"])
def test_a_pointer_of_git_lfs_is_no_text(name: str, inside: bool, tmp_path: Path) -> None:
    path = tmp_path / "texts" / name
    path.parent.mkdir()
    if name == "saved":
        path.mkdir()
        (path / "dataset_info.json").write_text("{}")
        path /= "data-00000-of-00001.arrow"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    (tmp_path / "texts/b.md").write_text("fine")
    source = tmp_path / "texts" / ("" if inside and name != "saved" else name)
    if inside and name == "a.py":
        with pytest.warns(LeftOutWarning, match="Git LFS.*`git lfs pull`"):
            assert [document.text for document in read_documents([source])] == ["fine"]
        return
    with pytest.raises(InvalidParameterError, match="Git LFS: run `git lfs pull`"):
        list(read_documents([source]))


def test_a_data_set_in_the_hub_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--a--b/snapshots/0123/data"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--a--b/blobs").mkdir()
    (tmp_path / "datasets--a--b/blobs/9f").write_text(json.dumps({"text": "row"}) + "\n")
    (snapshot / "train.jsonl").symlink_to("../../../blobs/9f")
    for place in (snapshot, snapshot.parent):
        assert [document.text for document in read_documents([place])] == ["row"]


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    """Reading a named pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("a")
    with pytest.warns(LeftOutWarning, match=r"1 not regular files \(pipe\.txt\)"):
        assert [document.text for document in read_documents([tmp_path])] == ["a"]


def test_a_pipe_is_refused_with_nothing_read_from_it() -> None:
    """``-t <(zcat book.gz)``: a look at the beginning, for a pointer of Git LFS, takes it out of the text."""
    reading, writing = os.pipe()
    os.write(writing, b"Once upon a time.")
    os.close(writing)
    pipe = Path(f"/dev/fd/{reading}")
    said = r"^The text '/dev/fd/\d+' is a pipe .* - for standard input\.$"
    for read in (lambda: list(read_documents([pipe])), lambda: read_text(pipe)):
        with pytest.raises(InvalidParameterError, match=said):
            read()
    assert os.read(reading, 100) == b"Once upon a time."
    os.close(reading)


def test_what_is_closed_to_the_user_is_left_out_and_a_closed_folder_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "closed.txt", "closed/b.txt", "closed.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    monkeypatch.setattr(os, "access", lambda path, _: "closed" not in Path(path).name)
    with pytest.warns(LeftOutWarning, match=r"left out: 3 closed to this user \(closed, closed\.json, closed\.txt\)"):
        assert [document.text for document in read_documents([tmp_path])] == ["a"]

    def closed(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(InvalidParameterError, match=r"^Cannot read documents from '.*': .*Permission denied"):
        list(read_documents([tmp_path]))


def test_training_reads_the_same_and_says_it_each_time(project: Path, tokenizer: object) -> None:
    """The second time the tokens come from the cache of `datasets`."""
    for _ in range(2):
        with pytest.warns(LeftOutWarning, match="7 of 15 files are read"):
            assert sorted(TokenisedDocuments.read([str(project)], tokenizer).names) == READ
    (project / ".git/config").write_text("changed, and not read")
    (project / "src/new.py").write_text("print(2)")
    with pytest.warns(LeftOutWarning, match="8 of 16 files are read"):
        assert "src/new.py" in TokenisedDocuments.read([str(project)], tokenizer).names
