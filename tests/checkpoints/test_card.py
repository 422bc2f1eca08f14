"""Model cards: what ctxext writes into README.md, what it leaves alone, and what is uploaded."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]
from peft import LoraConfig, get_peft_model

import ctxext
from ctxext.checkpoints import save as saving
from ctxext.checkpoints.card import BEGIN, END
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, InvalidParameterError
from tests._checkpoints import contents, try_only
from tests._models import bert, logits, tokens
from tests._products import some
from tests._programs import command
from tests._tokenizer import make_tokenizer

MINE = """---
license: mit
tags:
- novels
model-index:
- name: what the hub rejects
---

# Mine

Before.

"""


def card(place: Path) -> ModelCard:
    return ModelCard.load(place / "README.md", ignore_metadata_errors=True)


def blocks(place: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", card(place).text, re.DOTALL | re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("method", some(["yarn", "self_extend"], "self_extend"))
def test_what_the_card_says_is_so(method: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code gives the saved model, and its commands are those of ``export``."""
    try_only(monkeypatch, method)
    model = ctxext.load(plain, method, factor=4)
    ctxext.save(model, tmp_path / "saved")
    patch_checkpoint(plain, tmp_path / "patched", method, factor=4.0)
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "saved", tmp_path / "patched"):
        (described,), (code,), (shell,) = (blocks(place, language) for language in ("text", "python", "bash"))
        assert described.splitlines()[1:] == str(inspect_checkpoint(place).description).splitlines()[1:]
        known: dict[str, Any] = {}
        exec(compile(code, "README.md", "exec", dont_inherit=True), known)
        assert torch.equal(logits(known["model"].eval(), tokens()), logits(model.eval(), tokens()))
        assert ("import ctxext" in code) == (method == "self_extend")
        first, *exports = shell.splitlines()
        assert first == f"ctxext serve {place.name}"
        made = ctxext.export(place.name, to="vllm")
        assert f"{made.command}  # {'vllm' if method == 'yarn' else made.notes[0]}" in exports
        module = "python -m vllm.entrypoints.openai.api_server --model"  # the plugin's release has no `vllm serve`
        assert made.command.startswith(f"{'vllm serve' if method == 'yarn' else module} {place.name} --max-model-len")
        assert len(exports) == (4 if method == "yarn" else 1)  # with ctxext's plugin
        assert card(place).data.tags == ["ctxext", method]
        assert card(place).data.library_name == (None if method == "yarn" else "ctxext")
        assert card(place).data.base_model is None  # a local path is none


def test_a_card_of_the_users_keeps_its_words_and_the_section_is_written_anew(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(MINE)
    ctxext.save(ctxext.load(plain, "self_extend", factor=2), tmp_path)
    assert card(tmp_path).text.strip().startswith("# Mine\n\nBefore.\n\n" + BEGIN)
    with (tmp_path / "README.md").open("a") as file:
        file.write("\nAfter.\n")
    model = ctxext.load(plain, "yarn", factor=4)
    for _ in range(2):
        ctxext.save(model, tmp_path)
        text = card(tmp_path).text
        assert text.count(BEGIN) == text.count(END) == 1
        assert text.strip().startswith("# Mine\n\nBefore.\n\n" + BEGIN)
        assert text.endswith(END + "\n\nAfter.\n")
        assert "self_extend" not in (tmp_path / "README.md").read_text()
        data = card(tmp_path).data
        assert (data.license, data.tags, data.library_name) == ("mit", ["novels", "ctxext", "yarn"], "transformers")
        assert "what the hub rejects" in (tmp_path / "README.md").read_text()


def test_the_card_of_the_source_comes_along_with_the_name_of_the_source(plain: Path, tmp_path: Path) -> None:
    source = shutil.copytree(plain, tmp_path / "models--someone--tiny-llama" / "snapshots" / "0123")
    (source / "README.md").write_text("---\nbase_model: someone/older\nlicense: mit\n---\nTheirs.\n")
    patch_checkpoint(source, tmp_path / "long", "yarn", factor=4.0)
    assert (source / "README.md").read_text().endswith("Theirs.\n")
    assert card(tmp_path / "long").text.strip().startswith("Theirs.")
    assert card(tmp_path / "long").data.base_model == "someone/tiny-llama"


def test_results_stand_in_the_card_without_their_pictures(plain: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("# Loss\n\n![a picture](figures/loss.png)\n\n## Below\n\n- 0.1 nats better\n")
    command("patch", plain, tmp_path / "long", "-m", "yarn", "-f", 4, "--results", report, code=0)
    assert "Measured:\n\n### Loss\n\n#### Below\n\n- 0.1 nats better\n\n" + END in card(tmp_path / "long").text
    command("patch", plain, tmp_path / "other", "-m", "yarn", "-f", 4, "--results", tmp_path / "reprot.md", code=2)
    assert not (tmp_path / "other").exists()


def test_an_adapter_and_an_encoder(plain: Path, tmp_path: Path) -> None:
    model = get_peft_model(ctxext.load(plain, "yarn", factor=4), LoraConfig(target_modules=["q_proj"]))
    ctxext.save(model, tmp_path / "adapter")
    assert 'ctxext.load("adapter")' in blocks(tmp_path / "adapter", "python")[-1]
    assert blocks(tmp_path / "adapter", "bash") == []
    assert card(tmp_path / "adapter").data.library_name == "ctxext"  # PEFT refuses it
    mine = "---\ntags:\n- novels\n- base_model:adapter:older\n---\nMine.\n"
    (tmp_path / "adapter" / "README.md").write_text(mine)  # whose tags PEFT replaces
    for _ in range(2):
        ctxext.save(model, tmp_path / "adapter")
    found = card(tmp_path / "adapter").data.tags
    assert (found[0], len({*found})) == ("novels", len(found))
    assert [tag for tag in found if "base_model" in tag] == [f"base_model:adapter:{plain}"]
    assert card(tmp_path / "adapter").text.strip().startswith("Mine.")
    ctxext.save(ctxext.patch(bert(), "tile", factor=2), tmp_path / "encoder")
    assert "BertForMaskedLM.from_pretrained" in blocks(tmp_path / "encoder", "python")[0]
    assert blocks(tmp_path / "encoder", "bash") == []


def test_a_module_beside_the_weights_makes_it_loadable_by_transformers(plain: Path, tmp_path: Path) -> None:
    ctxext.save(ctxext.load(plain, "self_extend", factor=4), tmp_path, remote_code=True)
    assert card(tmp_path).data.library_name is None
    assert "trust_remote_code=True" in blocks(tmp_path, "python")[0]


@pytest.mark.parametrize("adapted", [False, True])
def test_metadata_that_cannot_be_read_end_in_a_sentence(adapted: bool, plain: Path, tmp_path: Path) -> None:
    """Also where PEFT reads them before ctxext does."""
    (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\nMine.\n")
    before, model = contents(tmp_path), ctxext.load(plain, "yarn", factor=4)
    saved = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if adapted else model
    with pytest.raises(CheckpointError, match=r"metadata at the top of README\.md cannot be read"):
        ctxext.save(saved, tmp_path)
    assert contents(tmp_path) == before


class Hub:
    """A hub that keeps what is uploaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, readme: Path | None = None) -> None:
        self.files: set[str] = set()
        self.there: list[str] = [".gitattributes"]
        self.asked: dict[str, Any] = {}

        def create(api: HfApi, repo_id: str, **options: Any) -> Any:
            self.asked |= options | {"token": api.token}
            return type("Created", (), {"repo_id": repo_id})

        def upload(_: HfApi, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **options: Any) -> None:
            assert all((folder_path / name).is_file() for name in allow_patterns)
            self.files, self.asked = set(allow_patterns), self.asked | options | {"repo_id": repo_id}

        def download(repo_id: str, *_: Any, **__: Any) -> str:
            if readme is None or not repo_id.startswith("me/"):
                raise EntryNotFoundError("no card")
            return str(readme)

        monkeypatch.setattr(HfApi, "whoami", lambda _: {"name": "me"})
        monkeypatch.setattr(HfApi, "create_repo", create)
        monkeypatch.setattr(HfApi, "list_repo_files", lambda *_: self.there)
        monkeypatch.setattr(HfApi, "upload_folder", upload)
        monkeypatch.setattr(saving, "hf_hub_download", download)


def test_what_was_written_is_uploaded_and_nothing_else(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "readme").write_text("---\nlicense: mit\n---\nOn the hub.\n")
    hub = Hub(monkeypatch, tmp_path / "readme")
    place = tmp_path / "llama-long"
    place.mkdir()
    (place / "private.txt").write_text("mine")
    model = ctxext.load(plain, "yarn", factor=4)
    options = {"push_to_hub": True, "private": True, "commit_message": "Longer", "token": "a token"}
    ctxext.save(model, place, tokenizer=make_tokenizer(bos=True), **options)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= hub.files
    assert hub.files == set(contents(place)) - {"private.txt"}
    told = {"repo_id": "me/llama-long", "private": True, "commit_message": "Longer", "token": "a token"}
    assert told.items() <= hub.asked.items()
    assert card(place).text.strip().startswith("On the hub.")
    assert card(place).data.license == "mit"
    ctxext.save(model, place, push_to_hub=True, repo_id="llama-128k")
    assert hub.asked["repo_id"] == "me/llama-128k"
    assert '"me/llama-128k"' in card(place).text


@pytest.mark.parametrize("step", ["whoami", "hf_hub_download", "create_repo", "list_repo_files", "upload_folder"])
@pytest.mark.parametrize("kind", [OSError, HTTPError, LocalEntryNotFoundError])
def test_an_upload_that_fails_leaves_what_was_saved_and_replaces_no_card(
    step: str, kind: type[Exception], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a connection that fails, the second, which is no OSError; the third of a card that may be there."""
    hub = Hub(monkeypatch)
    place: Any = saving if step == "hf_hub_download" else HfApi
    monkeypatch.setattr(place, step, lambda *_, **__: (_ for _ in ()).throw(kind("no network")))
    with pytest.raises(CheckpointError, match=r"is saved, but was not uploaded to (me/)?long: no network"):
        ctxext.save(ctxext.load(plain, "yarn", factor=4), tmp_path / "long", push_to_hub=True)
    assert not hub.files
    assert ctxext.describe(ctxext.load(tmp_path / "long")).target_length == 256


ONE, SHARDS = ["model.safetensors"], [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "model.safetensors.index.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "size", "deleted"),
    [
        (ONE, "100KB", ONE),
        ([*SHARDS, INDEX, "model.fp16.safetensors"], "1GB", [*SHARDS, INDEX]),
        (["pytorch_model.bin", "tokenizer.json", "0_part/model.safetensors"], "100KB", None),
        (ONE, "1GB", None),
    ],
)
def test_weights_on_the_hub_that_would_be_read_instead_go(
    there: list[str], size: str, deleted: list[str] | None, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder: transformers reads one file of weights before those that an index names."""
    hub = Hub(monkeypatch)
    hub.there = there
    ctxext.save(ctxext.load(plain, "yarn", factor=4), tmp_path / "long", push_to_hub=True, max_shard_size=size)
    found = hub.asked["delete_patterns"]
    assert (found and sorted(found)) == (deleted and sorted(deleted))
    assert (len([name for name in hub.files if name.startswith("model-")]) > 1) == (size == "100KB")


@pytest.mark.slow
@pytest.mark.parametrize("other", ["adapter_config.json", "params.json", "model.safetensors"])
def test_what_programs_would_read_on_the_hub_instead_is_refused(
    other: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, model = Hub(monkeypatch), ctxext.load(plain, "yarn", factor=4)
    hub.there = [other, "config.json"]
    saved = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if other == "model.safetensors" else model
    with pytest.raises(CheckpointError, match=rf"long is saved, but was not uploaded: me/long holds {other}, which"):
        ctxext.save(saved, tmp_path / "long", push_to_hub=True)
    assert not hub.files
    assert ctxext.describe(ctxext.load(tmp_path / "long")).target_length == 256


@pytest.mark.parametrize("name", ["me/llama/long", "llama--long", ""])
def test_a_name_that_the_hub_does_not_take_is_refused_before_anything_is_written(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    with pytest.raises(InvalidParameterError, match=f"repo_id='{name}' is not a name on the hub: "):
        ctxext.save(ctxext.load(plain, "yarn", factor=4), tmp_path / "long", push_to_hub=True, repo_id=name)
    assert (hub.files, list(tmp_path.iterdir())) == (set(), [])
