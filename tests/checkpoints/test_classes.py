"""Checkpoints with Python code of their own, which somebody allowed to run: whatever it does, a sentence comes back."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint
from ctxext.errors import CheckpointError
from tests._products import crossed

CONFIG = """
from transformers import PretrainedConfig
{top}

class OwnConfig(PretrainedConfig):
    model_type = "own_code"

    def __init__(self, hidden_size=8, vocab_size=16, max_position_embeddings=64, **other):
        {init}
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**other)
"""
MODEL = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_own import OwnConfig
{top}

class OwnModel(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        {init}
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **other):
        x = self.embed(input_ids)
        x = {forward}
        return CausalLMOutputWithPast(logits=self.head(x))
"""
PLAIN = ("", "pass", "self.mix(x)")


def checkpoint(
    place: Path, config: Sequence[str] = ("", "pass"), model: Sequence[str] = PLAIN, **fields: object
) -> Path:
    """Write a checkpoint with code of its own: lines at the top of each file, of ``__init__``, and of ``forward``."""
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    names = {"model_type": "own_code", "architectures": ["OwnModel"], "auto_map": auto_map}
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(names | fields))
    (place / "configuration_own.py").write_text(CONFIG.format(top=config[0], init=config[1]))
    (place / "modeling_own.py").write_text(MODEL.format(top=model[0], init=model[1], forward=model[2]))
    shapes = {"embed.weight": (16, 8), "mix.weight": (8, 8), "mix.bias": (8,)}
    shapes |= {"head.weight": (16, 8), "head.bias": (16,)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, place / "model.safetensors")
    return place


# Lines at the top and in __init__, and what is said of them.
BROKEN = {
    "a name that is missing": ("", "self.norm = apex_norm(8)", r"NameError: name 'apex_norm' is not defined"),
    "a name that is missing at the top": ("Norm = apex_norm", "pass", r"NameError: name 'apex_norm' is not defined"),
    "a name that is bound too late": ("", "self.size = size; size = 8", r"UnboundLocalError: .*'size'"),
    "a syntax error": ("def (:", "pass", "SyntaxError: invalid syntax"),
    "an indentation error": ("if True:\nx = 1", "pass", "IndentationError: expected an indented block"),
    "an import of what is gone": ("from transformers.pytorch_utils import Gone", "pass", "cannot import name 'Gone'"),
    "an exit": ("", "raise SystemExit('needs a GPU')", "SystemExit: needs a GPU"),
    "a package's data that is missing": ("", "open('/no/such/file')", "No such file"),
    "an empty iterator": ("", "self.first = next(iter(()))", "StopIteration"),
    "a check of its own": ("", "assert config.hidden_size > 8, 'too small'", "AssertionError: too small"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what transformers copies of such code in the test's own folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("name", "where"), crossed(list(BROKEN), ["model", "config"]))
def test_code_that_cannot_be_run_is_a_refusal(name: str, where: str, tmp_path: Path) -> None:
    top, init, said = BROKEN[name]
    if where == "config":
        place = checkpoint(tmp_path / "own", config=(top, init.replace("config.", "")))
        said = said.rpartition(": ")[2]
    else:
        place = checkpoint(tmp_path / "own", model=(top, init, "self.mix(x)"))
    with pytest.raises(CheckpointError, match=said):
        inspect_checkpoint(place, trust_remote_code=True)
    with pytest.raises((CheckpointError, AssertionError), match=said.rpartition(": ")[2]):
        ctxext.load(place, "yarn", factor=2, trust_remote_code=True)


def test_a_cache_for_code_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path / "own")
    home = str(place / "config.json" / "home")  # below a file, where no folder can be
    monkeypatch.setenv("HF_HOME", home)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", f"{home}/modules")
    said = re.escape(f"HF_HOME={home} cannot be written. Set HF_HOME to a folder that can.")
    with pytest.raises(CheckpointError, match=said):
        inspect_checkpoint(place, trust_remote_code=True)


ROTATE = """
def rotate(x, theta=10000.0):
    t = torch.arange(x.shape[-2])[:, None] / theta ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat([a * t.cos() - b * t.sin(), a * t.sin() + b * t.cos()], -1)
"""
COMPLEX = """
class Rot(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)

    def forward(self, x):
        f = torch.outer(torch.arange(x.shape[-2]).float(), self.inv_freq)
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(f), f)
        return torch.view_as_real(turned).flatten(-2)
"""
BIAS = """
def bias(n):
    return -(torch.arange(n)[:, None] - torch.arange(n)).abs()  # by which far pos count less
"""
# The model's code, and why it has nothing to extend.
OWN_POSITIONS = {
    "a function": ((ROTATE, "pass", "self.mix(rotate(x))"), "positions are in code of its own"),
    "a module": ((COMPLEX, "self.turn = Rot()", "self.turn(x)"), r"rotates by code of its own \(turn: Rot\)"),
    "a bias": ((BIAS, "pass", "self.mix(bias(x.shape[1]).float() @ x)"), "positions are in code of its own"),
    "none": (("", "pass", "self.mix(x.cumsum(1))"), "it has no positions at all"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_POSITIONS)
def test_positions_in_code_of_its_own_are_not_called_none(name: str, tmp_path: Path) -> None:
    code, reason = OWN_POSITIONS[name]
    found = inspect_checkpoint(checkpoint(tmp_path / "own", model=code), trust_remote_code=True)
    assert re.search(reason, found.no_positions or "")
    assert [verdict.method for verdict in found.verdicts if verdict.refused is None] == []


def test_a_field_that_the_code_of_a_checkpoint_passes_over_is_no_news(tmp_path: Path) -> None:
    """That code is what its weights were trained with, and it runs already."""
    table = "self.wpe = nn.Embedding(config.max_position_embeddings, 8)"
    code = ("", table, "self.mix(x + self.wpe.weight[:x.shape[1]])")
    place = checkpoint(tmp_path / "own", model=code, rope_theta=10000.0)
    assert "trust_remote_code" not in (inspect_checkpoint(place, trust_remote_code=True).no_positions or "")
