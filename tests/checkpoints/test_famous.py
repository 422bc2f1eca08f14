"""Every verb, walked over the config.json of famous checkpoints as they are published.

What is expected was written by hand from the fields of the configs, not taken from what the code says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import Result

import ctxext
from ctxext.checkpoints.inspect import inspect_checkpoint, rope_of_checkpoint
from ctxext.errors import PatchStateError
from ctxext.methods import METHODS, known_methods
from ctxext.runtimes import RUNTIMES
from ctxext.spec import RopeSpec
from tests._famous import PUBLISHED, able, famous_checkpoint, famous_model


class Meant(NamedTuple):
    """What a published config means: tokens that the weights know, and the rotation before any scaling."""

    window: int
    rotary_dim: int
    base: float
    layer_type: str | None = None


def meant(*names: str) -> dict[str, Meant]:
    """The meaning of each config, as ``famous.json`` has it from the documentation."""
    found = {name: PUBLISHED[name] for name in names}
    return {
        name: Meant(entry.window, rope.rotary_dim, rope.base, rope.layer_type)
        for name, entry in found.items()
        for rope in entry.ropes
    }


PLAIN = meant(
    "meta-llama/Llama-2-7b-hf",
    "a form like decapoda-research/llama-7b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "codellama/CodeLlama-34b-Instruct-hf",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "google/gemma-2-9b",
    "google/gemma-3-1b-pt",
    "microsoft/Phi-3-mini-4k-instruct",
    "a form like moonshotai/Moonlight-16B-A3B",
    "patrickfleith/smollm3-sft",
    "unsloth/SmolLM2-360M",
    "allenai/OLMo-2-1124-7B-Instruct",
    "tiiuae/falcon-40b",
    "stabilityai/stablelm-3b-4e1t",
    "ContextualAI/archangel_sft-kto_pythia1-4b",
    "unsloth/c4ai-command-r-08-2024",
    "a copy of zai-org/GLM-4-9B-0414, saved by transformers 5",
)
# Trained with a scaling, or extended by their authors: the window is what the scaling reaches.
SCALED = meant(
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2",
    "lmsys/vicuna-7b-v1.5-16k",
    "NousResearch/Yarn-Llama-2-7b-64k",
    "Qwen/Qwen2.5-7B-Instruct with its documented YaRN",
    "google/gemma-3-4b-it",
    "microsoft/Phi-3-mini-128k-instruct",
    "microsoft/Phi-4-mini-instruct",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-20b",
    "allenai/Olmo-3.1-32B-Instruct",
    "openbmb/MiniCPM3-4B",
)
BLOOM = "mrm8488/bloom-560m-finetuned-common_gen"
ALIBI = {BLOOM: 2048, "mosaicml/mpt-7b": 2048, "a form like tiiuae/falcon-rw-1b": 2048}
# Whose every attention layer has a window, so that one must say what is to become of it.
WINDOWED = {"mistralai/Mistral-7B-v0.1", "microsoft/Phi-3-mini-4k-instruct"}
# Nothing that ctxext extends: learned positions, relative buckets, none at all, tables in the code, windows only.
ELSEWHERE = {
    "a form like openai-community/gpt2",
    "facebook/opt-125m",
    "google-bert/bert-base-uncased",
    "google-t5/t5-small",
    "a form like ai21labs/Jamba-v0.1",
    "EleutherAI/gpt-j-6b",
}
# Rotary positions only in layers that have a window: every rotary method can only harm.
NO_REACH = {"huihui-ai/c4ai-command-r7b-12-2024-abliterated", "meta-llama/Llama-4-Scout-17B-16E-Instruct"}
# Not causal language models by name: pictures beside text, and an encoder.
OTHER_KINDS = {"Qwen/Qwen2-VL-7B-Instruct", "llava-hf/llava-1.5-7b-hf", "unsloth/ModernBERT-base"}
# Read only with the code that the checkpoint brings along.
OWN_CODE = {"moonshotai/Kimi-K2-Instruct", "zai-org/glm-4-9b"}
# Written for transformers 4.40; transformers 5 takes the rope type "su" for "longrope" and misses its trained length.
OUTDATED = {"a form like microsoft/Phi-3-mini-128k-instruct of April 2024"}
NATIVE = sorted({*PLAIN, *SCALED, *ALIBI, *ELSEWHERE, *NO_REACH, *OTHER_KINDS})
# One of each structure: what walks through all verbs, weights included.
KINDS = (
    "meta-llama/Llama-2-7b-hf",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "google/gemma-3-1b-pt",
    "a form like moonshotai/Moonlight-16B-A3B",
    "ContextualAI/archangel_sft-kto_pythia1-4b",
)
ROTARY = ("yarn", "pi", "ntk", "dynamic_ntk", "llama3", "longrope")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint directory with random weights, made once, to the letter of what is published."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("famous") / "model"
            famous_checkpoint(name, made[name], weights=name in NATIVE)
        return made[name]

    return of


@pytest.mark.parametrize("name", able(NATIVE))
def test_a_model_of_each_builds(name: str) -> None:
    assert sum(weight.numel() for weight in famous_model(name, device="meta").parameters()) < 7e6


@pytest.mark.parametrize("name", able(PLAIN))
def test_a_plain_config_is_read_as_it_is_meant(name: str, place: Callable[[str], Path]) -> None:
    found = rope_of_checkpoint(place(name))
    assert (found.trained_length, found.rotary_dim, found.base) == PLAIN[name][:3]


@pytest.mark.slow
@pytest.mark.parametrize("name", able(KINDS))
def test_inspect_says_which_methods_extend_it(name: str, place: Callable[[str], Path]) -> None:
    found, known = inspect_checkpoint(place(name)), PLAIN[name]
    assert found.extended is None
    assert (found.trained_length, found.longest) == (known.window, known.window)
    assert [(one.rotary_dim, one.base, one.layer_type) for one in found.positions] == [known[1:]]
    assert found.window_caps == (name in WINDOWED)
    verdicts = {verdict.method: verdict for verdict in found.verdicts}
    assert verdicts.keys() == known_methods().keys()
    assert {verdicts[method].target_length for method in ROTARY} == {4 * known.window}


@pytest.mark.parametrize("name", able(SCALED))
def test_inspect_reads_the_window_of_a_scaling(
    name: str, place: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The window is read before.
    monkeypatch.setattr("ctxext.checkpoints.inspect.known_methods", lambda: {"yarn": METHODS["yarn"]})
    found = inspect_checkpoint(place(name))
    assert found.extended is not None
    assert [(one.rotary_dim, one.base, one.layer_type) for one in found.positions] == [SCALED[name][1:]]
    assert found.exports is not None


@pytest.mark.parametrize("name", ALIBI)
def test_inspect_knows_alibi(name: str, place: Callable[[str], Path]) -> None:
    found = inspect_checkpoint(place(name))
    assert (found.trained_length, found.extended, found.positions) == (ALIBI[name], None, ())
    extending = {verdict.method for verdict in found.verdicts if verdict.refused is None}
    assert extending == {"alibi", "pi", "dynamic_pi"}


@pytest.mark.slow
@pytest.mark.parametrize("name", able(PLAIN))
def test_patch_reaches_what_it_says(name: str) -> None:
    """On a model without data: what the config says afterwards, and what unpatch leaves; all methods in turn."""
    known, model = PLAIN[name], famous_model(name, device="meta")
    before = model.config.to_dict()
    choice = "lift" if name in WINDOWED else None
    turn = list(PLAIN).index(name) % len(ROTARY)
    for chosen in ROTARY if name in KINDS else {"yarn", ROTARY[turn]}:
        method = METHODS[chosen].example(RopeSpec(known.rotary_dim, known.base, known.window))
        ctxext.patch(model, method, sliding_window=choice)
        described = ctxext.describe(model)
        assert (described.trained_length, described.target_length) == (known.window, 4 * known.window)
        text = model.config.get_text_config(decoder=True)
        rope = text.rope_parameters if known.layer_type is None else text.rope_parameters[known.layer_type]
        base = known.base * 4 ** (known.rotary_dim / (known.rotary_dim - 2)) if chosen == "ntk" else known.base
        assert rope["rope_theta"] == pytest.approx(base)
        # Stock code measures the stretch of its dynamic type from this field.
        assert text.max_position_embeddings == (1 if rope["rope_type"] == "dynamic" else 4) * known.window
        if rope["rope_type"] in ("yarn", "llama3", "longrope"):
            assert rope["original_max_position_embeddings"] == known.window
        ctxext.unpatch(model)
        assert model.config.to_dict() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *ALIBI])
def test_patch_on_disk_export_and_load(
    name: str, place: Callable[[str], Path], tmp_path: Path, cli: Callable[..., Result]
) -> None:
    source, extended = place(name), tmp_path / "extended"
    window = PLAIN[name].window if name in PLAIN else ALIBI[name]
    choice = ("--sliding-window", "lift") if name in WINDOWED else ()
    method = "yarn" if name in PLAIN else "alibi"
    result = cli("patch", source, extended, "--method", method, "--factor", 4, *choice)
    assert result.exit_code == 0, result.output
    assert f"{window} -> {4 * window} tokens" in result.output
    for target in RUNTIMES:
        exported = cli("export", extended, "--to", target)
        if target in ("vllm", "llama.cpp") and (method == "yarn" or name == BLOOM):
            assert exported.exit_code == 0, exported.stderr
        said = exported.stdout if exported.exit_code == 0 else exported.stderr
        assert (str(4 * window) if exported.exit_code == 0 else "ctxext serve") in said
    model = ctxext.load(extended)
    assert ctxext.describe(model).target_length == 4 * window
    if method == "yarn" and type(model.config) in AutoModelForCausalLM._model_mapping:
        _stock_computes_the_same(model, extended)


def _stock_computes_the_same(model: Any, extended: Path) -> None:
    stock = type(model).from_pretrained(extended).eval()
    inputs = torch.randint(10, 250, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (one.eval()(inputs, use_cache=False).logits for one in (model, stock))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", able(SCALED))
def test_what_is_scaled_is_extended_from_its_window(name: str) -> None:
    """The window is named and must be confirmed; the length before the scaling is never taken for it.

    Nothing is asked about sliding windows: that of Phi-3 (128k) and Phi-4-mini is as wide as this extension.
    """
    known, model = SCALED[name], famous_model(name, device="meta")
    with pytest.raises(PatchStateError, match=rf"trained_length={known.window}\b"):
        ctxext.patch(model, "yarn", factor=2)
    ctxext.patch(model, "yarn", factor=2, trained_length=known.window)
    described = ctxext.describe(model)
    assert (described.trained_length, described.target_length) == (known.window, 2 * known.window)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ELSEWHERE | NO_REACH | OTHER_KINDS | OWN_CODE | OUTDATED))
def test_what_cannot_be_extended_is_refused_with_a_sentence(
    name: str,
    place: Callable[[str], Path],
    tmp_path: Path,
    cli: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctxext.checkpoints.inspect.known_methods", lambda: {"yarn": METHODS["yarn"]})
    extension = ("--method", "yarn", "--factor", 4)
    planned = [] if name in ELSEWHERE | NO_REACH else [("plan", place(name), "--length", 256)]
    for arguments in (
        ("inspect", place(name)),
        ("patch", place(name), tmp_path / "extended", *extension),
        ("export", place(name), "--to", "vllm", *extension),
        *planned,
    ):
        result = cli(*arguments)
        assert result.exit_code == 0 or "Error: " in result.output
        if arguments[0] in ("patch", "export"):
            assert (result.exit_code == 0) == (name in OTHER_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS[1:4], BLOOM, "openai/gpt-oss-20b"])
def test_plan_counts_every_one(name: str, place: Callable[[str], Path]) -> None:
    """The weights are counted to the byte, and a longer context takes more."""
    from ctxext.checkpoints.source import read_any_config
    from ctxext.planning.plan import plan_serving

    plan = plan_serving(read_any_config(place(name)), dtype=torch.bfloat16)
    short, long = plan.at(256), plan.at(1024)
    model = famous_model(name, device="meta")
    assert short.weights == 2 * sum(weight.numel() for weight in model.parameters())
    assert long.total > short.total > short.weights
