"""examples/: the notebooks are what the scripts give, the table names them all; nightly each runs on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from transformers import BertModel, PreTrainedModel

from tests._checkpoints import save_with_tokenizer
from tests._models import bert, byte_model
from tests._programs import ROOT, ran
from tests._tokenizer import make_letters, make_tokenizer

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
# What each prints at its end, on any model.
PRINTS = {
    "choose": r"llama extended by \w+ ",
    "document_question": r"whole, extended +[\d,]+ tokens: '",
    "embedding": r"read up to (256|2048) tokens: [-\d.]+ [-\d.]+",
    "lora": r"vllm\S* .*runs/merged",
    "patch_and_generate": r"llama extended by self_extend .*factor=2",
    "serve_and_query": r"completion_tokens=\d+",
}


def test_there_are_six_short_ones_and_the_table_names_each() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", table, re.MULTILINE)) == sorted(PRINTS)
    assert [path.stem for path in SCRIPTS] == sorted(PRINTS)
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == PRINTS.keys()
    assert all(len(script.read_text(encoding="utf-8").splitlines()) < 70 for script in SCRIPTS)


@each
def test_a_notebook_is_what_its_script_gives(script: Path) -> None:
    made, kept = jupytext.read(script), nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (made, kept)]
    assert cells[0] == cells[1], "run make notebooks"
    assert len(cells[0]) >= 5


@each
def test_a_notebook_keeps_what_it_printed_and_one_picture(script: Path) -> None:
    kept = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    outputs = [output for cell in kept.cells for output in cell.get("outputs", ())]
    assert re.search(PRINTS[script.stem], "".join(output.get("text", "") for output in outputs)), "run make notebooks"
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 1
    assert not re.search(r"/(tmp|home|root|work)/|warn", str([output.get("text") for output in outputs]), re.IGNORECASE)


@pytest.fixture
def place(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a tiny model that MODEL names."""
    model: PreTrainedModel = byte_model()
    tokenizer = make_tokenizer(bos=False)
    if script.stem == "serve_and_query":
        tokenizer = make_letters()  # what a random model writes is text there
    if script.stem == "embedding":
        model = bert(BertModel, max_position_embeddings=64)
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        tokenizer.model_max_length = 64
    monkeypatch.setenv("MODEL", str(save_with_tokenizer(model, tmp_path / "model", tokenizer)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.nightly
@each
def test_a_script_runs(script: Path, place: Path) -> None:
    done = ran([str(script)], place, code=0)
    assert re.search(PRINTS[script.stem], done.stdout), done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("script", [ROOT / "examples" / "patch_and_generate.py"], ids=["patch_and_generate"])
def test_a_notebook_runs(script: Path, place: Path) -> None:
    """One: the cells of each are its script, as a test above says."""
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(place)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert re.search(PRINTS[script.stem], printed), printed
