"""Drafts reach as far as what they draft for: heads in the checkpoint, a head or small model beside it, or a word."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, modeling_layers

import ctxext
from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import IncompatibleError
from ctxext.methods.yarn import YaRN
from ctxext.models.drafts import draft_heads
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.vllm import VLLM
from ctxext.serving.load import load_served
from tests._checkpoints import SHAPE, TRAINED, contents, rewrite, save, save_reader
from tests._models import TRAINED_LENGTH, tiny, tokens
from tests._programs import command
from tests.walk.tiny import tiny_config

# As DeepSeek-V3, GLM-4.5, Qwen3.5 and Qwen3-Next were published; the last has no field that counts its head.
HEADS: dict[str, tuple[int, dict[str, Any]]] = {
    "deepseek_v3": (1, {"num_nextn_predict_layers": 1}),
    "glm4_moe": (2, {"num_nextn_predict_layers": 2}),
    "qwen3_5_text": (1, {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}),
    "qwen3_next": (1, {}),
}


def test_heads_are_counted_by_whatever_names_them() -> None:
    assert draft_heads(AutoConfig.for_model("qwen3_5", text_config={"mtp_num_hidden_layers": 2})) == 2
    named = ({"use_mtp": True, "num_mtp_modules": 3}, {"mtp_x": 1}, {"mtp_x": 1, "num_mtp_layers": 0}, {"mtp_x": 0})
    assert [draft_heads(LlamaConfig(**SHAPE, **fields)) for fields in named] == [3, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_no_export_leaves_a_head_behind_without_a_word(name: str, tmp_path: Path) -> None:
    """Nor does vLLM get the flags that would: config.json holds the extension, and flags are the other way."""
    count, fields = HEADS[name]
    tiny_config(name, **fields).save_pretrained(place := tmp_path / "it's")
    said, given = f"MTP draft heads ({count}): ", {"factor": 4.0, "beta_fast": 30.0}
    exports = {to: ctxext.export(place, to=to, method="yarn", **given) for to in RUNTIMES if to != "mlx-lm"}
    for to, made in exports.items():
        assert f"{said}{RUNTIMES[to].drafts}" in made.notes
    made = exports["vllm"]
    serving = f"NEW --method yarn --factor 4.0 -p beta_fast=30.0 && vllm serve NEW --max-model-len {4 * TRAINED_LENGTH}"
    assert made.command == f"ctxext patch {shlex.quote(str(place))} {serving}"
    flags = f'Without drafts: vllm serve {shlex.quote(str(place))} --hf-overrides \'{{"rope_parameters": '
    assert made.notes[-1].startswith(f"{said}{VLLM.drafts_missed} {flags}")
    assert ctxext.export(place, to="vllm", method=YaRN(**given)).flags == made.flags
    for asked in ({"method": "yarn", "factor": 4.0}, {"method": YaRN(factor=4.0)}):
        shorter = ctxext.export(place, to="vllm", trained_length=32, **asked)
        assert "--trained-length 32 " in shorter.command
        assert shorter.command.endswith("&& vllm serve NEW --max-model-len 128")


@pytest.mark.parametrize(("method", "said"), [("yarn", VLLM.drafts), ("dynamic_ntk", VLLM.drafts_missed)])
def test_an_extended_checkpoint_says_what_its_heads_read(method: str, said: str) -> None:
    for heads in (0, 1):
        config = extended_config(LlamaConfig(**SHAPE, num_nextn_predict_layers=heads), method, factor=4.0)
        notes = [note for note in export_config(config, to="vllm").notes if "MTP" in note]
        assert notes == [f"MTP draft heads (1): {said}"] * heads


@pytest.mark.nightly
def test_patch_and_serve_name_the_heads(tmp_path: Path) -> None:
    save_reader(str(tmp_path / "plain"))
    rewrite(tmp_path / "plain" / "config.json", lambda config: config.update(num_nextn_predict_layers=1))
    printed = command("patch", tmp_path / "plain", tmp_path / "new", "-m", "yarn", "-f", 4).stdout
    assert "MTP draft heads (1): ctxext leaves them plain. A server extends them by config.json." in printed
    served = load_served(str(tmp_path / "new"))
    assert served.notes == ("MTP draft heads (1): ctxext serve does not draft with them; each pass gives one token.",)


def draft(folder: Path, length: int, *, base: float = 1e4, is_head: bool = False) -> Path:
    """A small model; or a head as EAGLE-3 stores it, of a class and tensors that transformers does not have."""
    rope = {"rope_type": "default", "rope_theta": base}
    shape = SHAPE | {"num_hidden_layers": 1, "max_position_embeddings": length, "rope_parameters": rope}
    save(LlamaForCausalLM(LlamaConfig(**shape)), folder)
    if is_head:
        rewrite(folder / "config.json", lambda config: config.update(architectures=["LlamaForCausalLMEagle3"]))
        stored = load_file(folder / "model.safetensors").items()
        head = {name.replace("model.layers.0", "midlayer"): weight for name, weight in stored if "embed" not in name}
        save_file(head | {"fc.weight": torch.zeros(64, 192)}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("length", "base"), [(TRAINED, 1e4), (TRAINED // 4, 1e4), (TRAINED // 2, 5e5)])
@pytest.mark.parametrize("is_head", [True, False])
@pytest.mark.nightly
def test_a_draft_reaches_as_far(llama: Path, tmp_path: Path, length: int, base: float, is_head: bool) -> None:
    before = contents(made := draft(tmp_path / "draft", length, base=base, is_head=is_head))
    options = ("-m", "yarn", "-f", 4, "-p", "beta_fast=30", "--draft", made, "--json")
    told = json.loads(command("patch", llama, tmp_path / "new", *options, code=0).stdout)
    after, config = contents(tmp_path / "new-draft"), json.loads((tmp_path / "new-draft/config.json").read_text())
    rope = {"factor": 4 * TRAINED / length, "original_max_position_embeddings": length, "beta_fast": 30.0}
    assert config["rope_parameters"] == rope | {"rope_type": "yarn", "rope_theta": base}
    assert config["max_position_embeddings"] == told["description"]["target_length"] == 4 * TRAINED
    assert (contents(made), after["model.safetensors"]) == (before, before["model.safetensors"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "reason"),
    [
        ("gpt2", "yarn", "has learned positions"),
        ("long", "yarn", "target_length=1024 is below the trained length"),
        ("head", "self_extend", "Servers run LlamaForCausalLMEagle3, and only ctxext computes this extension."),
    ],
)
def test_a_draft_that_cannot_follow(llama: Path, tmp_path: Path, kind: str, method: str, reason: str) -> None:
    """The target is complete; and nothing is written where the place of the draft is taken."""
    made = tmp_path / "draft"
    if kind == "gpt2":
        save(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64)), made)
    else:
        draft(made, 8 * TRAINED if kind == "long" else TRAINED, is_head=kind == "head")
    options = ("-m", method, "-f", 4, "--draft", made)
    ended = command("patch", llama, tmp_path / "new", *options)
    assert (ended.exit_code, reason in ended.stderr) == (1, True)
    assert f"{tmp_path / 'new'} was written, and no draft for it from {made}. " in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "new"]
    (tmp_path / "more-draft").mkdir()
    refused = command("patch", llama, tmp_path / "more", *options)
    assert (refused.exit_code, (tmp_path / "more").exists()) == (1, False)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_assisted_generation_is_greedy_decoding_across_the_border(method: str) -> None:
    """A draft that knows as much is always right where it is extended alike, and beyond the border only there."""
    text, greedy = tokens(50), {"do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
    target, passes = ctxext.patch(tiny(), method, factor=4), list[object]()
    wanted = target.generate(text, **greedy)
    target.register_forward_hook(lambda *_: passes.append(None))

    def taken(**how: Any) -> int:
        passes.clear()
        assert torch.equal(target.generate(text, **greedy, **how), wanted)
        return len(passes)

    assert taken(prompt_lookup_num_tokens=3) <= 60
    plain, alike = taken(assistant_model=tiny()), taken(assistant_model=ctxext.patch(tiny(), method, factor=4))
    assert alike < plain <= 60
    other = ctxext.patch(tiny(seed=1, max_position_embeddings=32), method, target_length=4 * TRAINED_LENGTH)
    assert taken(assistant_model=other) <= 60


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no draft heads")
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_generate_drafts_with_the_heads_of_the_checkpoint(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads them from the path in the config, of which an extension in memory makes a sentence."""
    read, place = list[str](), "somebody/a-model-with-heads"

    def heads_of(model: Any, **_: Any) -> Any:
        read.append(model.config.name_or_path)
        return modeling_layers.MtpModel(model, 1).eval()

    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", heads_of)
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model, prompt = tiny(kind, num_nextn_predict_layers=1), tokens(80)
    model.config._name_or_path = place
    with ctxext.patched(model, "yarn", factor=4.0):
        said = model.config.name_or_path
        expected = model.generate(prompt, **how)
        assert torch.equal(model.generate(prompt, use_mtp=True, **how), expected)
        assert model.config.name_or_path == said != place
        assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **how), expected)
    assert read == [place]
    for method, more in (("self_extend", {"window": 16}), ("dynamic_ntk", {"growth": "request"})):
        with ctxext.patched(model, method, factor=4.0, **more):
            with pytest.raises(IncompatibleError, match=f"^use_mtp=True: draft heads rotate .* '{method}' does not"):
                model.generate(prompt, use_mtp=True, **how)
            expected = model.generate(prompt, **how)
            assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **how), expected)
    assert "_get_candidate_generator" not in vars(model)
