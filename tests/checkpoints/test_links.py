"""Symbolic links in a checkpoint directory: followed inside it and into the hub cache's own blobs, nowhere else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ctxext
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError
from tests._checkpoints import contents

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint of somebody else's, in a folder beside the user's own secrets."""
    (tmp_path / "home/keys").mkdir(parents=True)
    (tmp_path / "home/keys/id_rsa").write_text(SECRET)
    return shutil.copytree(llama, tmp_path / "home/source")


# Files that a link leads out of a checkpoint: where the link lies, and what it says.
OUT = {
    "to a directory": ("docs", "../keys"),
    "to a file": ("README.md", "../keys/id_rsa"),
    "in a folder": ("docs/deep/key", "../../../keys/id_rsa"),
    "a directory in a folder": ("docs/keys", "../../keys"),
    "to the root": ("docs", "/"),
    "to a folder whose name begins with the checkpoint's": ("key", "../source-of-mine/key"),
    "of weights": ("model.safetensors", "../keys/model.safetensors"),
    "of the config": ("config.json", "../keys/config.json"),
    "of the tokenizer, which is read and written": ("tokenizer_config.json", "../keys/tokenizer_config.json"),
    "through a link inside": ("first", "second"),
    "like a cache, whose blobs are a link itself": ("snapshots/key", "../../blobs/id_rsa"),
}


def linked(source: Path, case: str) -> Path:
    """Put a link into the checkpoint; a file that lies there moves to where the link leads."""
    name, target = OUT[case]
    for folder in ("source-of-mine", "keys"):
        (source.parent / folder).mkdir(exist_ok=True)
    (source.parent / "source-of-mine/key").write_text(SECRET)
    (source.parent / "blobs").symlink_to("keys")
    if case == "through a link inside":
        (source / "second").symlink_to("../keys/id_rsa")
    place = source / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rename(source / target)
    place.symlink_to(target)
    return place


@pytest.mark.parametrize("case", OUT)
def test_a_link_that_leads_out_is_refused_by_name(case: str, source: Path, tmp_path: Path) -> None:
    name = linked(source, case)
    with pytest.raises(CheckpointError) as caught:
        patch_checkpoint(source, tmp_path / "copy", "yarn", factor=2.0)
    assert str(name) in str(caught.value)
    assert "is a symbolic link that leads out of" in str(caught.value)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("target", [".", "..", "docs/again", "../source", "gone"])
def test_a_loop_of_links_and_a_link_to_nothing_end_in_an_error(target: str, source: Path, tmp_path: Path) -> None:
    (source / "docs").mkdir()
    (source / "docs/again").symlink_to(source / target if target == "docs/again" else target)
    said = "symbolic link to gone, which cannot be read" if target == "gone" else "symbolic link"
    with pytest.raises(CheckpointError, match=rf"docs/again.* {said}"):
        patch_checkpoint(source, tmp_path / "copy", "yarn", factor=2.0)


def test_links_inside_the_checkpoint_become_what_they_lead_to(source: Path, tmp_path: Path) -> None:
    (source / "assets/more").mkdir(parents=True)
    (source / "assets/more/a.txt").write_text("a")
    (source / "docs").symlink_to("assets")
    (source / "b.txt").symlink_to("assets/../assets/more/a.txt")
    (source / "checkpoint-5").mkdir()
    shutil.copyfile(source / "config.json", source / "checkpoint-5/config.json")
    (source / "latest").symlink_to("checkpoint-5")
    written = patch_checkpoint(source, tmp_path / "copy", "yarn", factor=2.0)
    copied = contents(tmp_path / "copy")
    assert [copied[name] for name in ("b.txt", "docs/more/a.txt", "assets/more/a.txt")] == [b"a"] * 3
    assert not any(path.is_symlink() for path in (tmp_path / "copy").rglob("*"))
    assert written.left_out == ("checkpoint-5/", "latest/")


def test_what_stays_behind_is_not_followed(source: Path, tmp_path: Path) -> None:
    (source / ".git").symlink_to("../keys")
    (source / "runs.bin").symlink_to("../keys/id_rsa")
    (source / "checkpoint-5").mkdir()
    (source / "checkpoint-5/config.json").symlink_to("../../keys/id_rsa")
    written = patch_checkpoint(source, tmp_path / "copy", "yarn", factor=2.0)
    assert set(written.left_out) == {".git/", "checkpoint-5/", "runs.bin"}


def test_a_checkpoint_that_is_a_link_itself(source: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(source)
    patch_checkpoint(tmp_path / "name", tmp_path / "copy", "yarn", factor=2.0)
    assert (tmp_path / "copy/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("link", [False, True])
def test_the_hub_cache_is_followed_into_its_own_blobs(link: bool, llama: Path, tmp_path: Path) -> None:
    """Its snapshots hold links to what was downloaded, those in folders too."""
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots/0123"
    for folder in (cache / "blobs", snapshot / "chat"):
        folder.mkdir(parents=True)
    for number, path in enumerate(llama.iterdir()):
        shutil.copyfile(path, cache / f"blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (cache / "blobs/last").write_text("x")
    (snapshot / "chat/a.jinja").symlink_to("../../../blobs/last")
    patch_checkpoint(snapshot, tmp_path / "copy", "yarn", factor=2.0, link=link)
    assert not (tmp_path / "copy/model.safetensors").is_symlink()
    assert (tmp_path / "copy/model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()
    assert (tmp_path / "copy/chat/a.jinja").read_text() == "x"
    (tmp_path / "key").write_text(SECRET)
    (cache / "blobs/key").symlink_to("../../key")
    (snapshot / "key").symlink_to("../../blobs/key")
    with pytest.raises(CheckpointError, match="leads out of"):
        patch_checkpoint(snapshot, tmp_path / "again", "yarn", factor=2.0)


def test_a_link_that_is_replaced_meanwhile_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctxext.checkpoints import write

    (source / "a.txt").write_text("a")
    (source / "b.txt").symlink_to("a.txt")
    read = write.read_any_config

    def replacing(*arguments: object, **options: object) -> object:
        if os.readlink(source / "b.txt") == "a.txt":
            (source / "b.txt").unlink()
            (source / "b.txt").symlink_to("../keys/id_rsa")
        return read(*arguments, **options)

    monkeypatch.setattr(write, "read_any_config", replacing)
    with pytest.raises(CheckpointError, match=r"b\.txt is a symbolic link that leads out"):
        patch_checkpoint(source, tmp_path / "copy", "yarn", factor=2.0)
    assert sorted(os.listdir(tmp_path)) == ["home"]


@pytest.mark.slow
def test_loading_follows_weights_on_another_disk(source: Path) -> None:
    """It reads tensors into a model, as transformers does, and copies nothing; it does not look into other folders."""
    linked(source, "of weights")
    (source / "docs").symlink_to("/")
    assert ctxext.describe(ctxext.load(source, "yarn", factor=2)).method["method"] == "yarn"
