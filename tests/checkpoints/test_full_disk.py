"""A checkpoint takes its place whole: a disk that is full while it is written leaves what was there before."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import ctxext
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError
from ctxext.training.checkpoints import saving
from tests._checkpoints import contents
from tests._gguf import write_gguf
from tests._models import byte_model, logits, tiny, tokens
from tests._tokenizer import BYTES, make_tokenizer


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes: the write that would do it fails, in Python and in Rust alike."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def whole() -> PreTrainedModel:
    return ctxext.patch(tiny(), "yarn", factor=4)


def encoding() -> PreTrainedModel:
    return ctxext.patch(tiny(), "fox", factor=4)


def lora() -> PreTrainedModel:
    return get_peft_model(whole(), LoraConfig(target_modules=["q_proj", "v_proj"], r=8))


@cache
def long_tokenizer() -> PreTrainedTokenizerFast:
    """One whose file is larger than that of the weights."""
    tokenizer = make_tokenizer(bos=True)
    tokenizer.add_tokens([f"<{number}>" for number in range(20_000)])
    return tokenizer


# Bytes that hold no file at all; the config and no weights; the weights and no tokenizer.
ROOMS = [0, 6_000, 2_000_000]
Build = Callable[[], PreTrainedModel]


@pytest.mark.slow
@pytest.mark.parametrize("size", ROOMS)
@pytest.mark.parametrize("build", [whole, encoding, lora])
def test_a_full_disk_leaves_no_half_of_a_checkpoint(build: Build, size: int, tmp_path: Path) -> None:
    model, tokenizer = build(), long_tokenizer()
    # A tokenizer is written by the package tokenizers, which raises no class but Exception itself.
    ours = (CheckpointError, rf"Could not save to {tmp_path}/new: .*too large")
    expected = ours if size < ROOMS[2] else (Exception, "too large")
    with room_for(size), pytest.raises(expected[0], match=expected[1]):
        ctxext.save(model, tmp_path / "new", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", ROOMS)
@pytest.mark.parametrize("build", [whole, lora])
def test_a_full_disk_leaves_what_was_there(build: Build, size: int, tmp_path: Path) -> None:
    ctxext.save(build(), tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    before, other = contents(tmp_path), build()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    expected = (CheckpointError, "What lay there before is as it was") if size < ROOMS[2] else (Exception, "too large")
    with room_for(size), pytest.raises(expected[0], match=expected[1]):
        ctxext.save(other, tmp_path, tokenizer=long_tokenizer())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("build", [whole, lora])
def test_a_kill_leaves_what_was_there(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctxext.save(build(), tmp_path)
    before = contents(tmp_path)

    def killed(*_: object, **__: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", killed)
    with pytest.raises(SystemExit):
        ctxext.save(build(), tmp_path, tokenizer=make_tokenizer(bos=True))
    assert contents(tmp_path) == before


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "then"), [("100KB", "1GB"), ("1GB", "100KB"), ("100KB", "300KB")])
def test_weights_of_an_earlier_save_are_not_left_beside_the_new_ones(first: str, then: str, tmp_path: Path) -> None:
    """transformers reads model.safetensors before any shards, also an old one."""
    old = ctxext.patch(tiny(seed=1), "yarn", factor=4)
    ctxext.save(old, tmp_path / "model", max_shard_size=first)
    (tmp_path / "model/notes.md").write_text("mine")
    model = whole()
    ctxext.save(model, tmp_path / "model", max_shard_size=then)
    ctxext.save(model, tmp_path / "fresh" / "model", max_shard_size=then)
    assert contents(tmp_path / "model") == contents(tmp_path / "fresh" / "model") | {"notes.md": b"mine"}
    assert torch.equal(logits(ctxext.load(tmp_path / "model"), tokens()), logits(model, tokens()))


@pytest.mark.nightly
def test_saving_over_the_checkpoint_that_it_was_loaded_from(tmp_path: Path) -> None:
    """Its weights may still be mapped into memory from there."""
    ctxext.save(whole(), tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    model = ctxext.load(tmp_path / "link")
    expected = logits(model, tokens())
    ctxext.save(model, tmp_path / "link")
    assert torch.equal(logits(ctxext.load(tmp_path / "model"), tokens()), expected)
    assert (tmp_path / "link").is_symlink()


def test_an_adapter_beside_its_base_leaves_that_config(tmp_path: Path) -> None:
    """Some trainers write the config of the base beside an adapter; a model card of the user's gets PEFT's part."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    ctxext.save(lora(), tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert "Mine." in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_patched_copy_whose_weights_are_written_anew(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path / "source")
    before = contents(tmp_path / "source")
    with room_for(20_000), pytest.raises(CheckpointError, match=r"Could not write .*too large.*Nothing was left"):
        patch_checkpoint(tmp_path / "source", tmp_path / "copy", "stretch", factor=2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert contents(tmp_path / "source") == before


def test_a_run_says_where_it_can_go_on(tmp_path: Path) -> None:
    """Both where transformers writes itself, and where ctxext does."""
    model = whole()
    for write in (model.save_pretrained, partial(ctxext.save, model)):
        said = pytest.raises(CheckpointError, match=r"Saving failed: .*too large.*start again")
        with room_for(6_000), said, saving(tmp_path):
            write(tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"^Nothing lies here\.$"), saving(tmp_path):
        raise CheckpointError("Nothing lies here.")


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_of_a_text_that_was_read(tmp_path: Path) -> None:
    model = ctxext.patch(byte_model(), "yarn", factor=2)
    for size in (0, 4_000):
        said = rf"could not be written to {tmp_path}/novel: .*too large.*\. Make room"
        with room_for(size), pytest.raises(CheckpointError, match=said):
            ctxext.read(model, BYTES, "The ship came in. " * 10, keep=tmp_path / "novel", max_new_tokens=4)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_gguf_file_that_is_unpacked_as_it_is(tmp_path: Path) -> None:
    file = write_gguf(tiny(), tmp_path / "tiny.gguf")
    with room_for(100_000), pytest.raises(CheckpointError, match=r"Could not write .*too large.*Nothing was left"):
        patch_checkpoint(file, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == [file]
