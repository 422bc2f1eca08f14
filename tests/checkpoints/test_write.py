"""Patching on disk: what is written, what stock transformers makes of it, and that failure leaves nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel, LlamaConfig, LlamaForCausalLM

import ctxext
from ctxext.checkpoints import write
from ctxext.checkpoints.write import patch_checkpoint, patch_with_draft
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError
from ctxext.files import DAY, write_whole
from ctxext.methods import METHODS
from ctxext.methods.yarn import YaRN
from ctxext.spec import RopeSpec
from tests._checkpoints import TRAINED, contents, rewrite
from tests._models import FOR_LLAMA, bert, byte_model, tiny
from tests._programs import ran
from tests.walk.check import Stock

SPEC = RopeSpec(rotary_dim=16, base=10000.0, trained_length=TRAINED)
TOKENS = torch.arange(TRAINED + 40)[None] % 128


@torch.no_grad()
def patched_logits(source: Path, method: ctxext.methods.Method) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    return ctxext.patch(model, method)(TOKENS, use_cache=False).logits


@pytest.mark.slow
def test_stock_transformers_loads_what_patching_in_place_gives(llama: Path, stock: Stock, tmp_path: Path) -> None:
    """In a process that never imports ctxext: the same logits, or a hard error, for every method."""
    save_file({"input_ids": TOKENS}, tmp_path / "tokens.safetensors")
    loaded = {}
    for name, kind in FOR_LLAMA.items():
        written = patch_checkpoint(llama, tmp_path / name, kind.example(SPEC))
        loaded[name] = written.description.stock
        answer = stock.logits(tmp_path / name, tmp_path / "tokens.safetensors")
        if loaded[name]:
            assert isinstance(answer, torch.Tensor), (name, answer)
            assert torch.equal(answer, patched_logits(llama, kind.example(SPEC))), name
        else:
            assert "ctxext" in str(answer), (name, answer)
    assert 8 <= sum(loaded.values()) < len(loaded)


def test_config_is_what_a_patched_model_saves(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "disk", "yarn", factor=4.0)
    model = ctxext.patch(AutoModelForCausalLM.from_pretrained(llama), "yarn", factor=4.0)
    model.save_pretrained(tmp_path / "memory")
    disk, memory = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("disk", "memory"))
    # For older readers: to be read on the disk, a guard in what a model saves.
    for old in ("rope_theta", "rope_scaling"):
        disk.pop(old)
        memory.pop(old, None)
    assert disk == memory


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("phi3", "self_extend"),
        ("phimoe", "rerope"),
        pytest.param("phi4_multimodal", "streaming", marks=pytest.mark.nightly),
    ],
)
def test_types_whose_rope_says_nothing_to_stock_code(model_type: str, method: str, tmp_path: Path) -> None:
    """Where no rope type keeps plain transformers out, another field does, and is read while weights are on disk."""
    model, plain, long = tiny(model_type), tmp_path / "plain", tmp_path / "long"
    model.save_pretrained(plain)
    extension = METHODS[method].example(SPEC)
    patch_checkpoint(plain, long, extension, trained_length=TRAINED)
    ctxext.patch(model, extension, trained_length=TRAINED)
    ids = torch.randint(5, 90, (1, TRAINED + 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ctxext.load(long)(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_weights_are_copied_and_source_stays(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", failing(OSError(errno.EOPNOTSUPP, "Operation not supported")))
    before = contents(llama)
    seen: list[tuple[int, int]] = []
    written = patch_checkpoint(llama, tmp_path / "long", "pi", factor=2.0, progress=lambda *step: seen.append(step))
    assert (written.linked, written.cloned, written.copied) == (0, 0, 1)
    assert seen[-1] == ((llama / "model.safetensors").stat().st_size,) * 2
    for path in llama.iterdir():
        assert not path.samefile(tmp_path / "long" / path.name)
    overwritten = tmp_path / "long/model.safetensors"
    with overwritten.open("r+b") as file:  # as safetensors before 0.8 saves over a file
        file.write(b"\0" * 16)
    assert contents(llama) == before
    assert (tmp_path / "long/generation_config.json").read_bytes() == before["generation_config.json"]
    assert os.listdir(tmp_path) == ["long"]


def test_weights_are_cloned_where_the_file_system_can(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def clone(writing: int, request: int, reading: int) -> int:
        asked.append(request)
        os.write(writing, os.pread(reading, os.fstat(reading).st_size, 0))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    written = patch_checkpoint(llama, tmp_path / "long", "pi", factor=2.0)
    assert (written.linked, written.cloned, written.copied) == (0, 1, 0)
    assert asked == [0x40049409]  # FICLONE of linux/fs.h: _IOW(0x94, 9, int)
    assert contents(tmp_path / "long")["model.safetensors"] == contents(llama)["model.safetensors"]


def test_weights_are_linked_only_when_asked(llama: Path, tmp_path: Path) -> None:
    written = patch_checkpoint(llama, tmp_path / "long", "pi", factor=2.0, link=True)
    assert (written.linked, written.cloned, written.copied) == (1, 0, 0)
    assert (tmp_path / "long/model.safetensors").samefile(llama / "model.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert not (tmp_path / "long" / name).samefile(llama / name)


def test_what_does_not_belong_stays_behind(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    files = ["optimizer.pt", "pytorch_model.bin", "pytorch_model.bin.index.fp16.json", "params.json"]
    files += ["consolidated.00.safetensors", ".gitattributes"]
    for name in files:
        (source / name).write_bytes(b"x")
    for place in ("checkpoint-5/config.json", "onnx/model.onnx", ".cache/huggingface/x", "chat/a.jinja"):
        (source / place).parent.mkdir(parents=True)
        (source / place).write_text("x")
    written = patch_checkpoint(source, tmp_path / "long", "pi", factor=2.0)
    assert set(contents(tmp_path / "long")) == set(contents(llama)) | {"chat/a.jinja", "README.md"}
    assert written.left_out == tuple(sorted([*files, ".cache/", "checkpoint-5/", "onnx/"]))


def failing(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


FULL = failing(OSError(errno.ENOSPC, "No space left on device"))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["link", "clone", "small file", "weights", "interrupt", "rename"])
def test_failure_in_the_middle_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = contents(llama)
    progress = {"weights": FULL, "interrupt": failing(KeyboardInterrupt())}.get(step)
    if progress is not None:
        monkeypatch.setattr(fcntl, "ioctl", failing(OSError(errno.EOPNOTSUPP, "Operation not supported")))
    failed = {"link": (os, "link"), "clone": (fcntl, "ioctl"), "small file": (shutil, "copyfile")}
    if step in failed | {"rename": ...}:
        monkeypatch.setattr(*failed.get(step, (Path, "rename")), FULL)
    expected: type[BaseException] = KeyboardInterrupt if step == "interrupt" else CheckpointError
    with pytest.raises(expected) as caught:
        patch_checkpoint(llama, tmp_path / "long", "pi", factor=2.0, link=step == "link", progress=progress)
    if expected is CheckpointError:
        assert "No space left" in str(caught.value)
        assert "Nothing was left behind" in str(caught.value)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    assert contents(llama) == before


def test_destination_that_appears_meanwhile_is_not_replaced(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = write._place_weights

    def slow(*arguments: Any) -> Any:
        (tmp_path / "long").mkdir()
        return real(*arguments)

    monkeypatch.setattr(write, "_place_weights", slow)
    with pytest.raises(CheckpointError, match="already exists"):
        patch_checkpoint(llama, tmp_path / "long", "pi", factor=2.0)
    assert os.listdir(tmp_path) == ["long"]
    assert os.listdir(tmp_path / "long") == []


# What lies where a copy is to be written, the name of the copy, and what is said.
PLACES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a file": (lambda place: place.write_text("mine"), "long", "already exists"),
    "a directory": (Path.mkdir, "long", "already exists"),
    "a dangling link": (lambda place: place.symlink_to("nowhere"), "long", "already exists"),
    "no parent": (lambda _: None, "missing/long", "no directory .*missing"),
    "a name that is too long": (lambda _: None, "x" * 256, "has 256 bytes, and file systems allow 255"),
}


@pytest.mark.parametrize("what", PLACES)
def test_a_place_that_cannot_be_written_is_refused(llama: Path, tmp_path: Path, what: str) -> None:
    make, name, message = PLACES[what]
    make(tmp_path / name)
    before = os.listdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        patch_checkpoint(llama, tmp_path / name, "pi", factor=2.0)
    assert os.listdir(tmp_path) == before


@pytest.mark.slow
def test_weights_that_are_written_anew_keep_their_dtype_and_what_lies_beside_them(tmp_path: Path) -> None:
    bert(BertModel).save_pretrained(tmp_path / "bert")
    rewrite(tmp_path / "bert" / "config.json", lambda config: config.update(dtype="float16"))
    save_file({"linear.weight": torch.ones(2, 2)}, tmp_path / "bert" / "colbert_linear.safetensors")
    written = patch_checkpoint(tmp_path / "bert", tmp_path / "long", "tile", factor=2)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("bert", "long"))
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], weight) for name, weight in before.items() if "position" not in name)
    assert (written.directory / "colbert_linear.safetensors").is_file()
    assert written.rewritten
    assert written.copied + written.cloned == 1


@pytest.mark.parametrize("form", ["whole", "shards"])
def test_weights_that_are_written_anew_follow_what_the_model_reads_and_no_copy_of_it(form: str, tmp_path: Path) -> None:
    source, size = tmp_path / "source", "20KB" if form == "shards" else "1GB"
    bert(BertModel).half().save_pretrained(source, max_shard_size=size)
    bert(BertModel).save_pretrained(source, variant="fp32", max_shard_size=size)
    name = max(path.name for path in source.glob("model*.safetensors") if "fp32" not in path.name)
    unread = {"encoder.layer.0.attention.self.rotary_emb.inv_freq": torch.ones(8)}  # as in early copies of LLaMA
    save_file(load_file(source / name) | unread, source / name, {"format": "pt"})
    written = patch_checkpoint(source, tmp_path / "long", "tile", factor=2)
    weights = [tensor for path in written.directory.glob("*.safetensors") for tensor in load_file(path).values()]
    assert {weight.dtype for weight in weights} == {torch.float16}
    assert any("fp32" in name for name in written.left_out)
    assert not [path.name for path in written.directory.iterdir() if "fp32" in path.name]


@pytest.mark.slow
def test_a_draft_follows_a_choice_and_a_method_object(llama: Path, tmp_path: Path) -> None:
    chosen = YaRN(factor=2.0, beta_fast=16.0)
    (tmp_path / "choice.json").write_text(said := json.dumps({"method": chosen.to_dict()}))
    for name, method in {"choice": str(tmp_path / "choice.json"), "object": chosen}.items():
        written = patch_with_draft(llama, tmp_path / name, method, draft=llama)
        assert written.draft is not None
        methods = written.draft.description.method, written.description.method
        assert methods == (json.loads(said)["method"],) * 2


def test_a_destination_inside_the_source_is_refused(llama: Path) -> None:
    before = contents(llama)
    with pytest.raises(CheckpointError, match="inside the checkpoint"):
        patch_checkpoint(llama, llama / "long", "pi", factor=2.0)
    assert contents(llama) == before


def put(name: str, content: str | bytes | dict[str, Any]) -> Callable[[Path], object]:
    """Write a file of a checkpoint; a dict is JSON."""
    data = json.dumps(content) if isinstance(content, dict) else content
    return lambda source: (source / name).write_bytes(data.encode() if isinstance(data, str) else data)


def changed(**fields: Any) -> Callable[[Path], object]:
    """Change fields of config.json."""
    return lambda source: put("config.json", json.loads((source / "config.json").read_text()) | fields)(source)


def moved(name: str, new: str) -> Callable[[Path], object]:
    return lambda source: (source / name).rename(source / new)


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Change the bytes of the weights."""
    return lambda source: put(WEIGHTS, change((source / WEIGHTS).read_bytes()))(source)


def lacking(source: Path) -> None:
    there = load_file(source / WEIGHTS)
    save_file({name: tensor for name, tensor in there.items() if ".1.mlp.up" not in name}, source / WEIGHTS)


def weight(change: Callable[[torch.Tensor], torch.Tensor], suffix: str = "") -> Callable[[Path], object]:
    """Change one weight, and add to its name."""

    def damage(source: Path) -> None:
        there = load_file(source / WEIGHTS)
        save_file(there | {UP + suffix: change(there.pop(UP)).contiguous()}, source / WEIGHTS, {"format": "pt"})

    return damage


def held_twice(*names: str) -> Callable[[Path], object]:
    """Put a tensor into two files, of which an index names the first."""

    def damage(source: Path) -> None:
        there = load_file(source / WEIGHTS)
        (source / WEIGHTS).unlink()
        save_file(there, source / names[0], {"format": "pt"})
        save_file({UP: torch.zeros_like(there[UP]), "own": torch.ones(1)}, source / names[1], {"format": "pt"})
        put(INDEX, {"weight_map": dict.fromkeys(there, names[0]) | {"own": names[1]}})(source)

    return damage


def one_of_two(source: Path) -> None:
    names = load_file((source / WEIGHTS).rename(source / FIRST)).keys()
    put(INDEX, {"weight_map": dict.fromkeys(names, FIRST)})(source)


def unnamed(source: Path) -> None:
    put(INDEX, {"weight_map": {}})(source)
    shutil.copy(source / WEIGHTS, source / "model-00002-of-00002.safetensors")


UP = "model.layers.0.mlp.up_proj.weight"
WEIGHTS, FIRST, INDEX = "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
SIZELESS = {"chunk_size": "abc"}
# What is done to a checkpoint, and what is said of it.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda source: (source / "config.json").unlink(), "has no config.json"),
    "nothing": (shutil.rmtree, r"has no config.json .found: nothing"),
    "not JSON": (put("config.json", "{"), "not valid JSON"),
    "no model type": (put("config.json", "{}"), "transformers cannot read the config of"),
    "no such dtype": (changed(dtype="float8"), "transformers cannot read the config of"),
    "chunks of no size": (changed(model_type="qwen2", dual_chunk_attention_config=SIZELESS), "chunk_size='abc'"),
    "a list": (put("config.json", "[]"), "should hold a JSON object"),
    "unknown model": (put("config.json", {"model_type": "lamma"}), "lamma"),
    "bad type": (changed(max_position_embeddings="many"), "max_position_embeddings"),
    "not a decoder": (put("config.json", {"model_type": "clip"}), "no causal language model"),
    "remote code": (changed(model_type="own", auto_map={"AutoConfig": "x.Y"}), "--trust-remote-code"),
    "adapter": (moved("config.json", "adapter_config.json"), "holds an adapter"),
    "no weights": (lambda source: (source / WEIGHTS).unlink(), "no safetensors weights .found: no weights at all"),
    "pickle": (moved(WEIGHTS, "pytorch_model.bin"), r"found: pytorch_model.bin.*use_safetensors=False"),
    "missing shard": (put(INDEX, {"weight_map": {"a": FIRST, "b": WEIGHTS}}), rf"names {FIRST}, not there"),
    "index of lists": (put(INDEX, {"weight_map": ["a"]}), "should map each tensor to its file under weight_map; found"),
    "absent tensor": (put(INDEX, {"weight_map": {"x": WEIGHTS}}), f"says that {WEIGHTS} holds x, which it does not"),
    "shard without index": (moved(WEIGHTS, FIRST), r"no index names it .found: no \*.safetensors.index.json"),
    "index that leaves a file out": (one_of_two, rf"names 1 of the 2 files .*{FIRST} is one of"),
    "shard that no index names": (unnamed, r"-00002.safetensors is one of .*found: model.safetensors.index.json"),
    "lacking tensors": (lacking, r"lack model.layers.1.mlp.up_proj.weight, which a LlamaForCausalLM needs"),
    "a weight transposed": (weight(torch.t), r"up_proj.weight has the shape \(64, 96\), and .* needs \(96, 64\)"),
    "a weight of three dimensions": (weight(lambda up: up[None]), r"has the shape \(1, 96, 64\)"),
    "a weight of whole numbers": (weight(torch.Tensor.int), "hold model.layers.0.mlp.up_proj.weight as whole numbers"),
    "a weight renamed": (weight(torch.clone, "X"), "lack model.layers.0.mlp.up_proj.weight"),
    "more tokens than rows": (changed(vocab_size=10**9), r"needs \(1000000000, 64\)"),
    "in two files": (held_twice(FIRST, "model-00002-of-00002.safetensors"), f"both {FIRST} and .* hold {UP}"),
    "whole beside shards": (held_twice("model-00001-of-00001.safetensors", WEIGHTS), f"-of-00001.* and {WEIGHTS} hold"),
    "a text part of a llama": (changed(text_config={"model_type": "llama"}), "a llama has no text_config or decoder"),
    "README of Latin letters": (put("README.md", b"---\na: b\n---\n\xe9"), "README.md cannot be read: 'utf-8' codec"),
    "empty weights": (weights(lambda whole: b""), "not a whole safetensors file"),
    "last byte": (weights(lambda whole: whole[:-1]), "unfinished download"),
    "header only": (weights(lambda whole: whole[: 8 + int.from_bytes(whole[:8], "little")]), "unfinished download"),
    "garbage": (weights(lambda whole: whole[:9] + b"x" * 191 + whole[200:]), "not a whole safetensors file"),
    "broken index": (put(INDEX, "{"), "not valid JSON"),
    "LFS pointer": (put(WEIGHTS, LFS), "Git LFS"),
    "truncated": (weights(lambda whole: whole[:100]), "unfinished download"),
    "tokenizer": (put("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
}


@pytest.mark.parametrize("last", ["2-of-2", "00002-of-000002"])
def test_shards_are_counted_however_they_are_numbered(llama: Path, tmp_path: Path, last: str) -> None:
    """As published: model-00163-of-000163 (DeepSeek-V3), model-61-of-61 (Kimi K2)."""
    source, total = shutil.copytree(llama, tmp_path / "a source"), last.partition("-of-")[2]
    tensors = list(load_file(source / WEIGHTS).items())
    (source / WEIGHTS).unlink()
    held = {f"model-1-of-{total}.safetensors": dict(tensors[:5]), f"model-2-of-{total}.safetensors": dict(tensors[5:])}
    for file, part in held.items():
        save_file(part, source / file, metadata={"format": "pt"})
    put(INDEX, {"metadata": {}, "weight_map": {key: file for file, part in held.items() for key in part}})(source)
    plain, extended = ctxext.load(llama, "yarn", factor=4), ctxext.load(source, "yarn", factor=4)
    assert all(torch.equal(weight, extended.state_dict()[name]) for name, weight in plain.state_dict().items())


# What only a copy has, and what takes more memory than a machine has when it is loaded.
NOT_LOADED = ("adapter", "more tokens than rows", "README of Latin letters", "tokenizer")


@pytest.mark.parametrize("what", BROKEN)
def test_bad_source_is_refused(llama: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a copy and by loading alike."""
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    source, (damage, message) = shutil.copytree(llama, tmp_path / "source"), BROKEN[what]
    damage(source)
    source.mkdir(exist_ok=True)
    before = contents(source)
    verbs = [lambda: patch_checkpoint(source, tmp_path / "long", "pi", factor=2.0)]
    verbs += [] if what in NOT_LOADED else [lambda: ctxext.load(source, "pi", factor=2)]
    for verb in verbs:
        with pytest.raises((CheckpointError, IncompatibleError), match=message):
            verb()
    assert os.listdir(tmp_path) == ["source"]
    assert contents(source) == before


@pytest.mark.nightly
def test_weights_that_lack_nothing_under_another_name_pass(llama: Path, tmp_path: Path) -> None:
    """Tied weights are stored once; old files hold what no model reads now; quantised ones have names of their own."""
    there = load_file(llama / "model.safetensors")
    tied = tmp_path / "tied"
    LlamaForCausalLM(LlamaConfig.from_pretrained(llama, tie_word_embeddings=True)).save_pretrained(tied)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    for name, kept in {
        "frequencies": there | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        "quantised": {n.replace("up_proj.weight", "up_proj.qweight"): tensor for n, tensor in there.items()},
    }.items():
        shutil.copytree(llama, tmp_path / name)
        put(f"{name}_config.json", {"bits": 4} if name == "quantised" else {})(tmp_path / name)
        save_file(kept, tmp_path / name / "model.safetensors")
    for name in ("tied", "frequencies", "quantised"):
        patch_checkpoint(tmp_path / name, tmp_path / f"{name}-long", "pi", factor=2.0)
    ctxext.load(tmp_path / "tied-long")
    there.pop("lm_head.weight")
    save_file(there | {"model.rotary_emb.inv_freq": torch.ones(8)}, tmp_path / "frequencies/model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack lm_head.weight"):
        patch_checkpoint(tmp_path / "frequencies", tmp_path / "never", "pi", factor=2.0)
    with pytest.raises(CheckpointError, match=r"lack lm_head.weight"):
        ctxext.load(tmp_path / "frequencies", "pi", factor=2)
    chosen = ctxext.load(tmp_path / "frequencies", "pi", factor=2, auto_class="AutoModelForSequenceClassification")
    assert type(chosen).__name__ == "LlamaForSequenceClassification", "a new head was asked for"


def test_a_name_on_the_hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(llama, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)

    def download(name: str, *, ignore_patterns: list[str]) -> str:
        assert {"*.bin", "consolidated*.safetensors"} <= {*ignore_patterns}
        if name != "org/name":
            raise FileNotFoundError("no such model there")
        return str(snapshot)

    monkeypatch.setattr("ctxext.checkpoints.source.snapshot_download", download)
    patch_checkpoint("org/name", tmp_path / "long", "yarn", factor=2.0)
    patch_checkpoint(llama, tmp_path / "local", "yarn", factor=2.0)
    found, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("long", "local"))
    assert found.config.rope_parameters == expected.config.rope_parameters
    assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in found.state_dict().items())
    assert not any(path.is_symlink() for path in (tmp_path / "long").iterdir())
    assert "base_model: org/name" in (tmp_path / "long" / "README.md").read_text()
    said = r"no directory org/other\. The hub did not give it either: no such model"
    with pytest.raises(CheckpointError, match=said):
        patch_checkpoint("org/other", tmp_path / "longer", "yarn", factor=2.0)


def test_source_that_is_not_there_or_not_a_directory(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for source, message in (
        (tmp_path / "none", "no such directory"),
        (llama / "model.safetensors", r"model\.safetensors is a file; give the directory that holds config"),
        (tmp_path / "a.gguf", r"a\.gguf"),
    ):
        with pytest.raises(CheckpointError, match=message):
            patch_checkpoint(source, tmp_path / "long", "pi", factor=2.0)
        with pytest.raises(CheckpointError, match=message):
            ctxext.load(source, "pi", factor=2)
    assert os.listdir(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize("given", [{"results": "It fell."}, {"chosen": {"by": "hand"}}, {"draft": "head"}])
def test_what_belongs_to_an_extension_is_refused_where_a_gguf_file_is_unpacked(given: Any, tmp_path: Path) -> None:
    """A report was left out of the plain copy in silence, and a draft was refused once the copy was written."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    verb: Any = patch_with_draft if "draft" in given else patch_checkpoint
    with pytest.raises(InvalidParameterError, match=rf"^{next(iter(given))}: .*a\.gguf.* method"):
        verb(tmp_path / "a.gguf", tmp_path / "plain", **given)
    assert os.listdir(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize("method", ["self_extend", "yarn"])
@pytest.mark.nightly
def test_a_gguf_file_becomes_a_checkpoint_that_loads(method: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs ctxext[demo]")
    from tests._gguf import write_gguf

    source = write_gguf(byte_model(), tmp_path / "tiny.gguf", quantised=("token_embd.weight",))
    before = source.read_bytes()
    written = patch_checkpoint(source, tmp_path / "long", method, factor=2.0, chosen={"by": "hand"})
    assert (written.unpacked, written.copied, source.read_bytes()) == (True, 0, before)
    loaded = ctxext.load(tmp_path / "long", dtype=torch.float32)
    assert (loaded.config.ctxext["method"]["method"], loaded.config.ctxext["chosen"]) == (method, {"by": "hand"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "long")
    assert (tokenizer("aab").input_ids, tokenizer.model_max_length >= 1024) == ([5], True)
    ids = torch.arange(2, 200)[None]
    direct = ctxext.load(source, method, factor=2.0, dtype=torch.bfloat16).float()
    assert torch.equal(loaded(ids).logits, direct(ids).logits)
    for destination, options, message in (("long", {}, "already exists"), ("other", {"link": True}, "written anew")):
        with pytest.raises((CheckpointError, InvalidParameterError), match=message):
            patch_checkpoint(source, tmp_path / destination, method, factor=2.0, **options)
    assert sorted(os.listdir(tmp_path)) == ["long", "tiny.gguf"]


TERMINATED = """
import fcntl, os, signal, sys
from ctxext.checkpoints.write import patch_checkpoint
def refuse(*_):
    raise OSError(95, "Operation not supported")
fcntl.ioctl = refuse
def step(*_):
    os.kill(os.getpid(), signal.SIGTERM)
patch_checkpoint(sys.argv[1], sys.argv[2], "pi", factor=2.0, progress=step)
"""


@pytest.mark.nightly
def test_a_terminated_copy_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    done = ran(["-c", TERMINATED, str(llama), str(tmp_path / "long")], tmp_path)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("length", [236, 255])
def test_long_names_are_written(llama: Path, tmp_path: Path, length: int) -> None:
    patch_checkpoint(llama, tmp_path / ("x" * length), "pi", factor=2.0)
    assert os.listdir(tmp_path) == ["x" * length]
    write_whole(tmp_path / ("é" * (length // 2)), "y")
    assert (tmp_path / ("é" * (length // 2))).read_text() == "y"


def test_what_a_kill_left_of_a_copy_is_removed_a_day_later(llama: Path, tmp_path: Path) -> None:
    """It may hold all the weights. A name may hold signs that mean something to glob."""
    ages = {".new[1].0a1b2c3d.partial": 2 * DAY, ".new[1].4e5f6a7b.partial": 60, ".new1.0a1b2c3d.partial": 2 * DAY}
    for name, age in ages.items():
        (tmp_path / name / "part").mkdir(parents=True)
        os.utime(tmp_path / name, times=(time.time() - age,) * 2)
    patch_checkpoint(llama, tmp_path / "new[1]", "pi", factor=2.0)
    assert sorted(os.listdir(tmp_path)) == [".new1.0a1b2c3d.partial", ".new[1].4e5f6a7b.partial", "new[1]"]
