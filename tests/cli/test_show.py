"""``ctxext show``: one picture for each kind of method, its numbers for programs, and mistakes in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

import ctxext
from tests._checkpoints import TRAINED, save_with_tokenizer
from tests._models import bert as tiny_bert
from tests._models import byte_model
from tests._programs import command

SENTENCE = "a cat sat"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A random Llama that reads bytes."""
    return save_with_tokenizer(byte_model(), tmp_path_factory.mktemp("reader"), tokenizer)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with a table for 64 positions."""
    place = tmp_path_factory.mktemp("bert")
    tiny_bert().save_pretrained(place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["rope", "self_extend window=8", "alibi", "tile", "cope"])
def test_a_picture_of_each_kind(tmp_path: Path, asked: str) -> None:
    place = tmp_path / "picture.png"
    said = command("show", asked, "-f", 2, "-o", place, code=0)
    assert said.stdout.startswith(f"Wrote {place}\n")
    assert place.read_bytes().startswith(b"\x89PNG")
    assert place.stat().st_size > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_earlier_picture_is_not_replaced_silently(tmp_path: Path, more: tuple[str, ...]) -> None:
    place = tmp_path / "picture.png"
    place.write_bytes(b"mine")
    said = command("show", "yarn", "-f", 2, "-o", place, *more)
    assert f"Wrote {place}, in place of an earlier file\n" in (said.stderr if more else said.stdout)
    assert place.read_bytes() != b"mine"
    if more:
        json.loads(said.stdout)


def test_numbers_without_a_picture(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(command("show", "yarn", "--model", llama, "--json").stdout)
    assert (found["kind"], found["trained_length"], found["target_length"]) == ("rotation", TRAINED, 4 * TRAINED)
    assert len(found["turns"]) == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_table_of_a_checkpoint_and_its_extension(bert: Path, tmp_path: Path) -> None:
    found = json.loads(command("show", "pi", "--model", bert, "-f", 2, "--json", "-o", tmp_path / "a.png").stdout)
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert (found["kind"], found["trained_length"], found["target_length"]) == ("table", 64, 128)
    table = BertForMaskedLM.from_pretrained(bert).bert.embeddings.position_embeddings.weight.detach()
    torch.testing.assert_close(torch.tensor(found["rows"][::2]), table, rtol=1e-5, atol=1e-7)
    own = json.loads(command("show", "learned", "--model", bert, "--json").stdout)
    torch.testing.assert_close(torch.tensor(own["rows"]), table, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_attention_before_and_after(reader: Path, tmp_path: Path) -> None:
    """By eager attention of its own and by ctxext's; the first is compared with what transformers returns."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3, encoding="utf-8")
    given = ("--model", reader, "--text", tmp_path / "text.txt", "--length", 96, "--json")
    rotated, remapped = (json.loads(command("show", name, *given).stdout) for name in ("pi", "self_extend"))
    before, after = torch.tensor(rotated["before"]), torch.tensor(rotated["after"])
    assert before.shape == (2, 4, len(rotated["edges"]))
    torch.testing.assert_close(before.sum(-1), torch.ones(2, 4), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(remapped["before"]), before)
    torch.testing.assert_close(torch.tensor(remapped["after"]), before, rtol=1e-4, atol=1e-4)  # inside its window
    assert float((after - before).abs().max()) > 0.01
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reader)
    tokens = tokenizer((tmp_path / "text.txt").read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :96]
    model = byte_model()
    model.set_attn_implementation("eager")
    weights = torch.stack(model(tokens, output_attentions=True).attentions)[:, 0, :, -64:]
    at_itself = weights.diagonal(offset=32, dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(before[..., 0], at_itself.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_sentence_that_a_checkpoint_reads(reader: Path, tmp_path: Path) -> None:
    """Untrained on a plain checkpoint, and with the weights of one that was saved with the encoding."""
    plain = json.loads(command("show", "cope", "--model", reader, "--text", SENTENCE, "--layer", 1, "--json").stdout)
    assert (plain["kind"], plain["layer"], len(plain["tokens"])) == ("sentence", 1, len(SENTENCE))
    model = ctxext.patch(byte_model(), "cope", places=2)
    ctxext.save(model, tmp_path / "saved", tokenizer=PreTrainedTokenizerFast.from_pretrained(reader))
    saved = json.loads(command("show", "cope", "--model", tmp_path / "saved", "--text", SENTENCE, "--json").stdout)
    assert saved["method"]["places"] == 2
    assert max(value for head in saved["values"] for row in head for value in row if value is not None) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my text.txt", "a text"])
def test_a_file_with_spaces_in_its_name_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SENTENCE, encoding="utf-8")
    shown = json.loads(command("show", "cope", "--text", tmp_path / name, "--json", code=0).stdout)
    assert shown["tokens"] == SENTENCE.split()
    missing = "my/missing text.md"
    assert f"{missing}: there is no such file" in command("show", "cope", "--text", missing, "--json", code=1).stderr


@pytest.mark.parametrize("option", ["--length", "--trained-length"])
@pytest.mark.parametrize("value", ["0", "-1", "99999999999999"])
def test_no_tokens_are_not_taken_for_no_limit(option: str, value: str) -> None:
    shown = command("show", "cope", "--text", SENTENCE, option, value, "--json")
    assert shown.exit_code != 0
    assert "length" in shown.output
    assert "tokens" in shown.output or "range" in shown.output
