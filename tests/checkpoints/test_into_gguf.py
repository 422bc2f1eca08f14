"""An extension in a copy of a GGUF file: the divisors, all else byte for byte, refusals, and a real llama.cpp."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

import ctxext
from ctxext import files
from ctxext.checkpoints.export import export
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, InvalidParameterError
from ctxext.methods import METHODS, Method
from tests._checkpoints import SHAPE, TRAINED
from tests._gguf import HALF, PLAIN, scaled_by, write_gguf
from tests._models import tiny

TARGET = 4 * TRAINED
DIVISORS = "rope_freqs.weight"
PI: dict[str, Any] = {"to": "llama.cpp", "method": "pi", "factor": 4.0}
FACTORS = [1.0, 1.03, 1.1, 1.7, 2.0, 3.1, 4.4, 5.0]
SETS, SEARCHED = {"short_factor": FACTORS, "long_factor": FACTORS}, PLAIN / np.array(FACTORS)
# What the extension writes, and takes away.
OWN = ("llama.context_length", "llama.rope.scaling.")


def llama3(factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    return scaled_by("llama3", factor, low_freq_factor=low, high_freq_factor=high)


# Method, its parameters, and the frequencies and scale that it stands for, in float64.
EXTENSIONS: dict[str, tuple[dict[str, Any], np.ndarray, float]] = {
    "pi": ({"factor": 4.0}, PLAIN / 4, 1.0),
    "ntk": ({"factor": 4.0}, (10000.0 * 4 ** (16 / 14)) ** (-np.arange(HALF) / HALF), 1.0),
    "abf": ({"factor": 4.0, "base": 5e5}, 5e5 ** (-np.arange(HALF) / HALF), 1.0),
    "yarn": ({"factor": 4.0}, scaled_by("yarn", 4.0), 0.1 * math.log(4) + 1),
    "llama3": ({"factor": 4.0}, llama3(4.0), 1.0),
    "ntk_by_parts": ({"factor": 4.0}, llama3(4.0, 1.0, 32.0), 1.0),
    "longrope": ({"factor": 4.0, "attention_factor": 1.07} | SETS, SEARCHED, 1.07),
    "table": ({"factor": 4.0, "inv_freq": SEARCHED.tolist(), "attention_scale": 0.9}, SEARCHED, 0.9),
    "nope": ({"factor": 4.0}, np.zeros(HALF), 1.0),
}


@pytest.fixture(scope="module")
def model(llama: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(llama)


@pytest.fixture(scope="module")
def plain_gguf(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the unextended checkpoint, two of its tensors quantised; read it only."""
    quantised = ("token_embd.weight", "blk.1.attn_output.weight")
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "in.gguf", quantised=quantised)


def raw_keys(path: Path) -> dict[str, bytes]:
    fields = gguf.GGUFReader(path).fields.items()
    return {key: b"".join(part.tobytes() for part in one.parts) for key, one in fields if not key.startswith("GGUF.")}


def raw_tensors(path: Path) -> dict[str, tuple[Any, ...]]:
    tensors = gguf.GGUFReader(path).tensors
    return {one.name: (one.tensor_type, one.shape.tolist(), one.data.tobytes()) for one in tensors}


def same_but_for_the_extension(one: Path, other: Path) -> bool:
    keys = [{key: raw for key, raw in raw_keys(path).items() if not key.startswith(OWN)} for path in (one, other)]
    tensors = [{key: raw for key, raw in raw_tensors(path).items() if key != DIVISORS} for path in (one, other)]
    assert list(keys[0]) == list(keys[1]), "in the same order"
    assert len(keys[0]) > 15
    assert len(tensors[0]) == 3 + 9 * 2
    return keys[0] == keys[1] and tensors[0] == tensors[1]


def value(path: Path, key: str) -> Any:
    found = gguf.GGUFReader(path).fields.get(key)
    return None if found is None else found.contents()


def divisors(path: Path) -> np.ndarray:
    (found,) = (one for one in gguf.GGUFReader(path).tensors if one.name == DIVISORS)
    assert found.tensor_type == gguf.GGMLQuantizationType.F32
    return np.array(found.data, dtype=np.float64)


def same_divisors(path: Path, inv_freq: np.ndarray, base: float = 10000.0) -> bool:
    """Equal to those of a float64 reference, up to the rounding of a float32 chain of a few operations."""
    with np.errstate(divide="ignore"):
        wanted = np.minimum(base ** (-np.arange(HALF) / HALF) / inv_freq, 1e30)
    return bool(np.allclose(divisors(path), wanted, rtol=8 * np.finfo(np.float32).eps, atol=0))


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTENSIONS)
def test_divisors_of_a_method_and_all_else_as_it_was(llama: Path, plain_gguf: Path, tmp_path: Path, name: str) -> None:
    parameters, inv_freq, scale = EXTENSIONS[name]
    out = tmp_path / "out.gguf"
    made = export(llama, to="llama.cpp", method=METHODS[name].from_dict(parameters), gguf=(plain_gguf, out))
    assert same_divisors(out, inv_freq)
    assert name != "yarn" or (divisors(out)[0], divisors(out)[-1]) == (1.0, 4.0), "what is not slowed keeps its bits"
    assert value(out, "llama.rope.scaling.attn_factor") == pytest.approx(scale, rel=1e-7)
    assert value(out, "llama.rope.scaling.type") == "none"
    assert value(out, "llama.context_length") == TARGET
    assert same_but_for_the_extension(plain_gguf, out)
    assert (made.flags, made.exact, made.in_file, made.file) == (("-c", str(TARGET)), True, True, str(out))
    assert any("--context-shift" in note for note in made.notes) == (scale != 1)
    assert [item.name for item in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_alignment_is_kept(
    model: LlamaForCausalLM, llama: Path, tmp_path: Path, alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", 1000)  # copied in many pieces
    source = write_gguf(model, tmp_path / "in.gguf", alignment=alignment)
    last = max(gguf.GGUFReader(source).tensors, key=lambda tensor: tensor.data_offset)
    os.truncate(source, last.data_offset + last.n_bytes)  # files without padding after the last tensor exist
    seen: list[tuple[int, int]] = []
    export(llama, **PI, gguf=(source, tmp_path / "out.gguf"), progress=lambda *step: seen.append(step))
    assert same_but_for_the_extension(source, tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.alignment == alignment
    assert all(tensor.data_offset % alignment == 0 for tensor in reader.tensors)
    assert (tmp_path / "out.gguf").stat().st_size % alignment == 0
    assert seen == sorted(seen)
    assert len(seen) > 100
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("converted", ["original", "extended"])
def test_a_file_of_the_extended_checkpoint_serves_as_well(
    model: LlamaForCausalLM, llama: Path, tmp_path: Path, converted: str
) -> None:
    """Its scaling is replaced and its base is the one that is divided."""
    patch_checkpoint(llama, tmp_path / "long", "ntk", factor=4.0)
    base = float(LlamaConfig.from_pretrained(tmp_path / "long").rope_parameters["rope_theta"])
    keys = {"rope__freq_base": base, "context_length": TARGET} if converted == "extended" else {}
    source = write_gguf(model, tmp_path / "in.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0, **keys)
    made = export(tmp_path / "long", to="llama.cpp", gguf=(source, tmp_path / "out.gguf"))
    assert made.exact
    written = base if converted == "extended" else 10000.0
    assert same_divisors(tmp_path / "out.gguf", EXTENSIONS["ntk"][1], written)
    assert value(tmp_path / "out.gguf", "llama.rope.freq_base") == pytest.approx(written)
    assert value(tmp_path / "out.gguf", "llama.rope.scaling.factor") is None
    assert value(tmp_path / "out.gguf", "llama.rope.scaling.type") == "none"


def test_keys_that_may_be_left_out(model: LlamaForCausalLM, llama: Path, tmp_path: Path) -> None:
    missing = ("rope.dimension_count", "rope.freq_base")
    source = write_gguf(model, tmp_path / "in.gguf", leave_out=missing)
    export(llama, **PI, gguf=(source, tmp_path / "out.gguf"))
    assert same_divisors(tmp_path / "out.gguf", PLAIN / 4)


LLAMA31 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": TRAINED}
LLAMA31 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(place: Path) -> tuple[Path, LlamaForCausalLM]:
    """A checkpoint like Llama 3.1: trained with divisors of its own, for 8 times as many tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | {"max_position_embeddings": 8 * TRAINED}), rope_parameters=LLAMA31))
    model.save_pretrained(place)
    return place, model


def test_divisors_that_a_checkpoint_was_trained_with_are_replaced(tmp_path: Path) -> None:
    """By all that divides its base: what it was trained with, and the extension."""
    place, model = scaled(tmp_path / "llama31")
    trained = llama3(8.0)
    source = write_gguf(model, tmp_path / "in.gguf", rope_freqs=(PLAIN / trained).astype(np.float32))
    arguments: dict[str, Any] = {"method": "pi", "factor": 2.0, "scaling": "extend"}
    made = export(place, to="llama.cpp", gguf=(source, tmp_path / "out.gguf"), **arguments)
    assert same_divisors(tmp_path / "out.gguf", trained / 2)
    assert made.flags == ("-c", str(16 * TRAINED))
    assert same_but_for_the_extension(source, tmp_path / "out.gguf")
    assert source.stat().st_size < (tmp_path / "out.gguf").stat().st_size < source.stat().st_size + 200, "in its place"
    export(place, to="llama.cpp", gguf=(source, tmp_path / "as-published.gguf"))
    assert same_divisors(tmp_path / "as-published.gguf", trained)


# --- a GGUF file alone, and a model in memory ------------------------------------------------------------------------


def test_a_method_and_a_gguf_file_are_enough(plain_gguf: Path, tmp_path: Path) -> None:
    made = export(plain_gguf, to="llama.cpp", method="yarn", factor=4.0, gguf=(plain_gguf, tmp_path / "out.gguf"))
    assert same_divisors(tmp_path / "out.gguf", scaled_by("yarn", 4.0))
    assert made.exact
    assert made.command.startswith(f"llama-server -m {tmp_path / 'out.gguf'} ")
    (alone := tmp_path / "alone").mkdir()
    shutil.copyfile(plain_gguf, alone / "model.gguf")
    again = export(alone, to="llama.cpp", method="yarn", factor=4.0, gguf=(plain_gguf, tmp_path / "again.gguf"))
    assert again.command.startswith(f"llama-server -m {tmp_path / 'again.gguf'} ")
    with pytest.raises(CheckpointError, match=r"give a method and --gguf .* OUT\.gguf"):
        export(plain_gguf, to="llama.cpp", gguf=(plain_gguf, tmp_path / "other.gguf"))
    with pytest.raises(CheckpointError, match="scales its positions already"):
        export(tmp_path / "out.gguf", **PI, gguf=(tmp_path / "out.gguf", tmp_path / "other.gguf"))


@pytest.mark.slow
def test_a_model_in_memory(llama: Path, plain_gguf: Path, tmp_path: Path) -> None:
    patched = ctxext.load(llama, "pi", factor=4.0)
    assert export(patched, to="llama.cpp", gguf=(plain_gguf, tmp_path / "out.gguf")).exact
    assert same_divisors(tmp_path / "out.gguf", PLAIN / 4)


@pytest.mark.slow
def test_without_a_file_llama_cpp_is_said_to_load_it_this_way(llama: Path) -> None:
    """The same verdict as with one; of what flags say, the flags stay the answer."""
    for name, (parameters, _, _) in EXTENSIONS.items():
        made = export(llama, to="llama.cpp", method=METHODS[name].from_dict(parameters))
        assert made.exact, name
        assert any("--gguf IN.gguf OUT.gguf" in note for note in made.notes) == (name in BY_FILE), name
        assert ("with a GGUF file that ctxext export --gguf writes" in made.told) == made.in_file == (name in BY_FILE)
        assert made.file is None


# What no flag says on a GGUF file of the original.
BY_FILE = ("llama3", "ntk_by_parts", "longrope", "table")


def test_two_sets_of_factors_are_not_exact(llama: Path, plain_gguf: Path, tmp_path: Path) -> None:
    two = METHODS["longrope"].from_dict({"factor": 4.0, "short_factor": [1.0] * HALF, "long_factor": FACTORS})
    made = export(llama, to="llama.cpp", method=two, gguf=(plain_gguf, tmp_path / "out.gguf"))
    assert same_divisors(tmp_path / "out.gguf", SEARCHED)
    assert not made.exact
    assert any("for short texts too" in note for note in made.notes)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_count": 3}, r"says llama\.block_count=3, and by the checkpoint's config it is 2"),
        ({"embedding_length": 32}, r"embedding_length=32.* is 64"),
        ({"attention__head_count": 8}, r"head_count=8.* is 4"),
        ({"rope__dimension_count": 8}, r"dimension_count=8.* is 16"),
        ({"rope__freq_base": 1e6}, r"freq_base=1000000\.0.* is 10000"),
        ({"context_length": 999}, rf"context_length=999.* is {TRAINED} or {TARGET}"),
        ({"leave_out": ("block_count",)}, "block_count=None"),
        ({"architecture": "qwen2"}, r"general\.architecture=qwen2.* is llama"),
        ({"split__count": 3}, "is part 1 of the 3 files"),
        ({"rope__freq_base": "10000"}, r"llama\.rope\.freq_base='10000', which should be a number"),
        ({"split__count": "two"}, r"split\.count='two', which should be a number"),
        ({"rope_freqs": np.full(HALF, 3.0, dtype=np.float32)}, "trained with other positions"),
        ({"rope_freqs": np.ones(HALF + 1, dtype=np.float32)}, "with 9 divisors"),
        ({"rope_freqs": np.ones(HALF, dtype=np.float16)}, "should be a list of float32 numbers; found F16"),
    ],
    ids=lambda keys: next(iter(keys)) if isinstance(keys, dict) else "",
)
def test_a_file_of_another_model(
    model: LlamaForCausalLM, llama: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    source = write_gguf(model, tmp_path / "in.gguf", **keys)
    with pytest.raises(CheckpointError, match=message):
        export(llama, **PI, gguf=(source, tmp_path / "out.gguf"))
    assert [item.name for item in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("llama", "dynamic_ntk", "no dynamic scaling"),
        *(("llama", method, f"cannot run '{method}'") for method in ("dynamic_yarn", "self_extend", "alibi")),
        ("qwen2", "llama3", "of this qwen2 cannot hold the extension"),
        ("gemma3", "llama3", "of this gemma3_text cannot hold the extension"),
    ],
)
def test_what_is_no_list_of_divisors_or_is_not_loaded_as_one(
    checkpoints: dict[str, Path], plain_gguf: Path, tmp_path: Path, name: str, method: str, message: str
) -> None:
    Qwen2Config(**SHAPE).save_pretrained(tmp_path / "qwen2")
    place = checkpoints.get(name, tmp_path / "qwen2")
    with pytest.raises(IncompatibleError, match=message):
        export(place, to="llama.cpp", method=method, factor=2.0, gguf=(plain_gguf, tmp_path / "out.gguf"))
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
def test_a_window_that_llama_cpp_has_not(checkpoints: dict[str, Path], plain_gguf: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"to": "llama.cpp", "method": "yarn", "factor": 4.0}
    place = checkpoints["mistral"]
    kept = export(place, sliding_window="keep", gguf=(plain_gguf, tmp_path / "kept.gguf"), **arguments)
    assert not kept.exact
    assert any("no sliding window" in note for note in kept.notes)
    lifted = export(place, sliding_window="lift", gguf=(plain_gguf, tmp_path / "lifted.gguf"), **arguments)
    assert lifted.exact, lifted.notes


@pytest.mark.slow
def test_files_that_cannot_be_read_or_written(llama: Path, plain_gguf: Path, tmp_path: Path) -> None:
    out, broken, cut = (tmp_path / name for name in ("out.gguf", "broken.gguf", "cut.gguf"))
    broken.write_bytes(b"GGUF")
    cut.write_bytes(plain_gguf.read_bytes()[:-5000])
    absent, damaged = (tmp_path / "none.gguf", tmp_path), (broken, cut, llama / "config.json")
    said = dict.fromkeys(absent, "There is no file") | dict.fromkeys(damaged, "cannot be read as GGUF")
    for source, message in said.items():
        with pytest.raises(CheckpointError, match=message):
            export(llama, gguf=(source, out), **PI)
    before = plain_gguf.read_bytes()
    for place in (plain_gguf, broken, tmp_path):
        with pytest.raises(CheckpointError, match="already exists and is never overwritten"):
            export(llama, gguf=(plain_gguf, place), **PI)
    with pytest.raises(CheckpointError, match=r"Could not write .*No such file"):
        export(llama, gguf=(plain_gguf, tmp_path / "missing" / "out.gguf"), **PI)
    assert plain_gguf.read_bytes() == before
    assert broken.read_bytes() == b"GGUF"
    assert not out.exists()
    with pytest.raises(InvalidParameterError, match=r"for llama\.cpp, and not for vllm"):
        export(llama, **PI | {"to": "vllm"}, gguf=(plain_gguf, out))


def test_text_that_is_no_utf8(llama: Path, plain_gguf: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "in.gguf"
    content = plain_gguf.read_bytes()
    place = content.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    assert content[place : place + 5] == b"llama"
    damaged.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    with pytest.raises(CheckpointError, match=r"in\.gguf cannot be read as GGUF: general\.architecture .*utf-8"):
        export(llama, **PI, gguf=(damaged, tmp_path / "out.gguf"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, os.strerror(28))], ids=["ctrl-c", "disk full"])
def test_an_interrupted_copy_leaves_nothing(
    llama: Path, plain_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(files, "CHUNK", 1000)

    def stop(done: int, total: int) -> None:
        assert list(tmp_path.iterdir()), "it is being written"
        if done > total / 2:
            raise error

    with pytest.raises((KeyboardInterrupt, CtxextError)) as raised:
        export(llama, **PI, gguf=(plain_gguf, tmp_path / "out.gguf"), progress=stop)
    if isinstance(error, OSError):
        assert "No space left on device. Nothing was left behind" in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_file_made_meanwhile_is_not_replaced(llama: Path, plain_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(CheckpointError, match="never overwritten"):
        export(llama, **PI, gguf=(plain_gguf, out), progress=lambda *_: out.write_text("mine"))
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("out.gguf", "mine")]


# --- a real llama.cpp -------------------------------------------------------------------------------------------------

# No spectrum that any formula has: neither ascending nor kept at either end.
WILD = [1.3, 0.8, 2.0, 1.0, 5.0, 3.3, 4.1, 7.9, 2.2, 6.0, 1.1, 4.0, 9.0, 3.0, 8.0, 4.4]


SEEN_BY_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "longrope": {"short_factor": WILD, "long_factor": WILD, "attention_factor": 1.3},
    "longrope softer": {"short_factor": WILD, "long_factor": WILD, "attention_factor": 0.7},
    **{"yarn": {"truncate": False}, "ntk": {}, "llama3": {}, "nope": {"sharpening": 0.2}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEEN_BY_LLAMA_CPP)
def test_a_real_llama_cpp_computes_what_the_patched_model_does(tmp_path: Path, name: str) -> None:
    model, method = tiny(), METHODS[name.partition(" ")[0]]
    source = write_gguf(model, tmp_path / "in.gguf")
    compare_with_llama_cpp(model, source, method.from_dict({"factor": 4.0} | SEEN_BY_LLAMA_CPP[name]))


@pytest.mark.nightly
def test_a_real_llama_cpp_computes_an_extension_of_divisors_that_were_there(tmp_path: Path) -> None:
    model = tiny(rope_parameters=LLAMA31 | {"original_max_position_embeddings": 64}, max_position_embeddings=128)
    plain = 10000.0 ** (-np.arange(16) / 16)
    trained = model.model.rotary_emb.inv_freq.double().numpy()
    source = write_gguf(model, tmp_path / "in.gguf", rope_freqs=(plain / trained).astype(np.float32))
    compare_with_llama_cpp(model, source, METHODS["yarn"].from_dict({"factor": 2.0}), scaling="extend")


def compare_with_llama_cpp(model: LlamaForCausalLM, source: Path, method: Method, **choices: Any) -> None:
    """Log-probabilities beyond the trained window, from the file alone: no flag but the length."""
    pytest.importorskip("xllamacpp", reason="a llama.cpp for CPUs: pip install xllamacpp==2026.10.11549")
    from scripts.llama_cpp_table import expected, served
    from scripts.proof import TOKENS, distance
    from tests.walk.tiny import VOCABULARY

    ids = torch.randint(5, VOCABULARY - 1, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    plain = expected(model, ids)
    ctxext.patch(model, method, **choices)
    made = export(model, to="llama.cpp", gguf=(source, source.with_name("out.gguf")))
    wanted = expected(model, ids)
    found = served(source.with_name("out.gguf"), made.flags, ids)
    matters, error = distance(plain, wanted), distance(found, wanted)
    print(f"{method.name}: {error:g} nats from the patched model, which is {matters:g} from the plain one")
    assert matters > 0.5
    assert error < 1e-4 * matters
