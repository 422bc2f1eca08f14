"""Every way to hold activations gives the same gradients, and holds what it says."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ctxext
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import known_methods
from ctxext.methods.base import BiasMethod, RopeMethod
from ctxext.methods.encoding import EncodingMethod
from ctxext.methods.remap import RemapMethod
from ctxext.spec import RopeSpec
from ctxext.training import Memory, return_freed_memory
from ctxext.training.memory import layers_of
from tests._models import tiny, tokens
from tests._products import crossed, some
from tests.walk.tiny import TRAINED_LENGTH

LENGTH = 60
SPEC = RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)
KINDS = (RopeMethod, BiasMethod, RemapMethod, EncodingMethod)
ON_LLAMA = [name for name, cls in known_methods().items() if issubclass(cls, KINDS)]
WAYS = [Memory(), Memory(save_attention=True), Memory(mlp_tile=16)]
WAYS += [Memory(loss_chunk=None, checkpointing=False, mlp_tile=7)]
WAYS += [Memory(loss_chunk=9, save_attention=True, mlp_tile=11)]


class Seen(TorchDispatchMode):
    """Counts operations and notes the widest activation of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        if isinstance(result, Tensor) and result.ndim == 3 and result.shape[1] == LENGTH:
            self.widest = max(self.widest, result.shape[2])
        return result

    @property
    def attentions(self) -> int:
        return self.calls["aten::_scaled_dot_product_flash_attention_for_cpu"]


def gradients(model: Any, seen: Seen | None = None, *, length: int = LENGTH) -> dict[str, Tensor]:
    model.train().zero_grad()
    ids = tokens(length, rows=2)
    with seen or Seen():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def lora() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(tiny(), config)


@pytest.mark.slow
@pytest.mark.parametrize("memory", some(WAYS, *WAYS[::2]))
@pytest.mark.parametrize(
    "build", [tiny, lora, lambda: ctxext.patch(tiny("bloom"), "alibi", factor=4), lambda: tiny("falcon", alibi=False)]
)
def test_the_same_gradients(build: Any, memory: Memory) -> None:
    model = build()
    expected = gradients(model)
    with memory.apply(model):
        found = gradients(model)
    assert found.keys() == expected.keys()
    scale = max(float(g.norm()) for g in expected.values())
    assert all(float((found[name] - g).norm()) < 3e-6 * scale for name, g in expected.items())
    again = gradients(model)
    assert all(torch.equal(again[name], g) for name, g in expected.items()), "not undone"


@pytest.mark.parametrize(("memory", "times"), [(Memory(), 2), (Memory(save_attention=True), 1)])
def test_attention_is_computed_again_or_kept(memory: Memory, times: int) -> None:
    model, seen = tiny(), Seen()
    with memory.apply(model):
        gradients(model, seen)
    assert seen.attentions == times * model.config.num_hidden_layers
    assert seen.calls["aten::silu"] == 2 * model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "name"), crossed([torch.float32, torch.bfloat16], ON_LLAMA))
def test_every_method_may_keep_its_attention(name: str, dtype: torch.dtype) -> None:
    """What was kept is given back in the backward pass: whoever computes with it must leave it as it was."""
    model = tiny().to(dtype)
    ctxext.patch(model, known_methods()[name].example(SPEC), trained_length=TRAINED_LENGTH)
    expected = gradients(model, length=TRAINED_LENGTH + 40)
    with Memory(loss_chunk=None, save_attention=True).apply(model):
        found = gradients(model, length=TRAINED_LENGTH + 40)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_tiles_are_all_there_is_of_an_mlp() -> None:
    model, whole, tiled = tiny(), Seen(), Seen()
    gradients(model, whole)
    with Memory(mlp_tile=20).apply(model):
        gradients(model, tiled)
    assert whole.widest == model.config.intermediate_size
    assert tiled.widest == model.config.hidden_size
    assert model.config.vocab_size <= model.config.hidden_size < model.config.intermediate_size


def test_tiles_of_several_rows_pass_through_gpt2s_layers() -> None:
    model = tiny("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    expected = gradients(model)
    with Memory(mlp_tile=20).apply(model):
        found = gradients(model)
    assert all(torch.allclose(found[name], gradient, atol=1e-5) for name, gradient in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "llava", "git", "phi4_multimodal"])
def test_towers_for_pictures_and_sound_are_no_layers_of_a_text(kind: str) -> None:
    model: Any = tiny(kind)
    layers = layers_of(model)
    assert len(layers) == Subject.of(model).text.num_hidden_layers < len(layers_of(model, towers=True))
    called = Counter[Any]()
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: called.update([module]))
    model(input_ids=tokens(8))
    assert called == Counter(layers)
    if kind != "git":  # whose layers have no MLP in one module
        Memory(loss_chunk=None, checkpointing=False, mlp_tile=4).apply(model).close()


def test_refused_and_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameterError, match="offload requires checkpointing=True"):
        Memory(checkpointing=False, offload=True)
    mixtral, gpt_oss, tiled = tiny("mixtral"), tiny("gpt_oss"), Memory(mlp_tile=16)
    for model, memory, said in (
        (mixtral, Memory(offload=True), "this model is on the CPU, where they are already"),
        (mixtral, tiled, r"MixtralDecoderLayer of MixtralForCausalLM has no plain MLP to tile \(found Mixtral"),
        (gpt_oss, tiled, r"has no plain MLP to tile \(found GptOss"),  # GptOssMLP, of experts
    ):
        with pytest.raises(IncompatibleError, match=said):
            memory.apply(model)
        assert "forward" not in vars(model)
        assert not model.is_gradient_checkpointing
    model = tiny()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    older = lambda gradient_checkpointing_kwargs: None  # noqa: E731
    monkeypatch.setattr(model, "activation_checkpointing_enable", older, raising=False)
    with pytest.raises(IncompatibleError, match=r"offload is done by transformers 5\.17 or newer"):
        Memory(offload=True).apply(model)
    monkeypatch.undo()
    with Memory().apply(model), pytest.raises(PatchStateError, match="in chunks already"):
        Memory().apply(model)


@pytest.mark.usefixtures("_any_types")
@pytest.mark.parametrize("given", ["1024", 1024.0, True, -1, 0, [1024]])
@pytest.mark.parametrize("name", ["loss_chunk", "mlp_tile"])
def test_a_number_of_tokens_that_is_none_is_refused(name: str, given: Any) -> None:
    """True was a chunk of one token; others ended in errors of Python's and torch's, some in the first step."""
    with pytest.raises(InvalidParameterError, match=f"^{name} must be a positive whole number of tokens, found "):
        Memory(**{name: given})


@pytest.mark.usefixtures("_any_types")
def test_numbers_of_numpy() -> None:
    memory = Memory(loss_chunk=np.int64(9), mlp_tile=np.int64(7))
    assert memory == Memory(loss_chunk=9, mlp_tile=7)
    expected = gradients(model := tiny())
    with memory.apply(model):
        found = gradients(model)
    assert all(torch.allclose(found[name], gradient, atol=1e-5) for name, gradient in expected.items())
    for above in ("1", 2.5, 0, None):
        with pytest.raises(InvalidParameterError, match=r"^above must be 1 to 33554432 bytes"):
            return_freed_memory(above=above)


PROGRAM = """
import os
from pathlib import Path
import torch
from ctxext.training import return_freed_memory

def resident():  # MiB of its own: a child reads the pages of libraries anew, many at a time
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) // 1024

holes = [torch.ones(2**12) for _ in range(4096)]  # that importing left are filled, so that none takes a small one
for change in (False, True):
    if (child := os.fork()) == 0:
        before, took_effect, small = resident(), change and return_freed_memory(), []
        for _ in range(8):
            blocks = []
            for _ in range(5):  # 5 MiB each, in front of a small one that lives on
                blocks.append(torch.ones(5 * 2**18))
                small.append(torch.ones(2**12))
            del blocks
        print(took_effect, resident() - before, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_freed_memory_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    environment["PYTHONPATH"] = str(Path(ctxext.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    _, before, took_effect, after = done.stdout.split()
    assert took_effect == "True"
    assert int(after) < 15 < 20 <= int(before)  # MiB that stay resident, of 200
    with pytest.raises(InvalidParameterError, match=r"above must be 1 to 33554432 bytes .*, found 33554433"):
        return_freed_memory(above=2**25 + 1)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "33554432")
    assert not return_freed_memory(), "the user's word counts"
