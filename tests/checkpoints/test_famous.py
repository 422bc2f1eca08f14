"""The config.json of famous checkpoints as they are published: what each means, and every verb walked over it.

Lengths are held against the documentation of each, frequencies against the published formulas; neither is taken from
what the code says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import ctxext
from ctxext.checkpoints.inspect import Inspection, inspect_checkpoint
from ctxext.checkpoints.source import read_any_config
from ctxext.checkpoints.write import patch_checkpoint
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import METHODS, known_methods
from ctxext.models.refusals import lost_fields
from ctxext.planning.plan import plan_serving, reach_of
from ctxext.runtimes import RUNTIMES
from ctxext.runtimes.base import Export
from ctxext.spec import RopeSpec
from scripts import golden_numbers
from tests._checkpoints import try_only
from tests._famous import PUBLISHED, Rope, able, famous_checkpoint, famous_config, famous_model
from tests._formulas import Spectrum, spectrum
from tests._models import RECENT
from tests._products import some
from tests._programs import command

# Read only with the code that the checkpoint brings along, or by no transformers 5 any more.
REFUSED = {name for name, entry in PUBLISHED.items() if entry.method in ("own code", "outdated")}
# Written before its config class had parts: transformers 5 loses the length, and how much of a head turns.
LOST = {"zai-org/GLM-4.1V-9B-Thinking"}
NATIVE = [name for name in PUBLISHED if name not in REFUSED | LOST]
KINDS = ("linear", "dynamic", "dynamic with alpha", "yarn", "longrope", "llama3")
SCALED = {name for name in NATIVE if PUBLISHED[name].method in KINDS}
# Rotary positions only in layers that have a window: an extension has nothing to do there.
NO_REACH = {
    *("meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    *("LGAI-EXAONE/EXAONE-4.0-32B", "huihui-ai/c4ai-command-r7b-12-2024-abliterated"),
}
# DeepSeek's own code multiplies nothing by the temperature of YaRN; transformers says so beside its config class.
UNTEMPERED = {"deepseek-ai/DeepSeek-V4-Flash"}
# transformers 5.24 takes the set for short texts at every length here, and ctxext refuses to extend it.
SHORT_ALONE = {"microsoft/Phi-3.5-MoE-instruct"}
# Learned positions, relative buckets, none at all, tables in the code: nothing for YaRN to extend.
ELSEWHERE = {name for name in NATIVE if not PUBLISHED[name].ropes and PUBLISHED[name].method != "alibi"}
ALIBI = [name for name in NATIVE if PUBLISHED[name].method == "alibi"]
BLOOM = "mrm8488/bloom-560m-finetuned-common_gen"
# Whose every attention layer has a window, so that one must say what is to become of it.
WINDOWED = {"mistralai/Mistral-7B-v0.1", "microsoft/Phi-3-mini-4k-instruct"}
# Not causal language models by name: pictures beside text, and an encoder.
OTHER_KINDS = {"Qwen/Qwen2-VL-7B-Instruct", "llava-hf/llava-1.5-7b-hf", "unsloth/ModernBERT-base"}
# One of each structure: what walks through all verbs, weights included.
STRUCTURES = (
    *("meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "google/gemma-3-1b-pt"),
    *("a form like moonshotai/Moonlight-16B-A3B", "ContextualAI/archangel_sft-kto_pythia1-4b"),
)
ROTARY = ("yarn", "pi", "ntk", "dynamic_ntk", "llama3", "longrope")
# Trained with a scaling, one of each form: extended by the call that their users write.
TRAINED_SCALED = (
    *("meta-llama/Llama-3.2-1B", "openai/gpt-oss-20b", "Qwen/Qwen2.5-7B-Instruct with its documented YaRN"),
    *("lmsys/vicuna-7b-v1.5-16k", "NousResearch/Yarn-Llama-2-7b-64k", "microsoft/Phi-3-mini-128k-instruct"),
    *("microsoft/Phi-4-mini-instruct", "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3"),
    *("allenai/Olmo-3.1-32B-Instruct", "google/gemma-3-4b-it"),
)
# Whose documentation names a length that no field of their config says.
UNSAID = {"BAAI/bge-reranker-v2-m3", "google-t5/t5-small"}
SERVERS = ("vllm", "llama.cpp")
Inspect = Callable[[str], Inspection]


@pytest.fixture(scope="session")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Inspect:
    """What ``ctxext inspect`` says of a published config, without trying the methods; kept."""
    kept: dict[str, Inspection] = {}

    def of(name: str) -> Inspection:
        if name not in kept:
            place = famous_checkpoint(name, tmp_path_factory.mktemp("published") / "model")
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("ctxext.checkpoints.inspect.known_methods", lambda: {})
                patched.setattr("ctxext.checkpoints.export.RUNTIMES", {name: RUNTIMES[name] for name in SERVERS})
                kept[name] = inspect_checkpoint(place)
        return kept[name]

    return of


def test_at_least_sixty_are_the_published_file() -> None:
    sourced = [name for name, entry in PUBLISHED.items() if entry.source is not None]
    assert len(sourced) >= 60
    assert {name for name in PUBLISHED if name.startswith("a form like ")} == PUBLISHED.keys() - set(sourced)
    assert all(entry.documented for entry in PUBLISHED.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", able(NATIVE))
def test_its_lengths_are_those_of_its_documentation(name: str, inspected: Inspect) -> None:
    found, entry = inspected(name), PUBLISHED[name]
    assert found.trained_length == (None if entry.asked else entry.window)
    assert (found.extended is not None) == (name in SCALED)
    if found.extended is not None and entry.method in ("yarn", "llama3", "longrope"):
        assert f"original_max_position_embeddings={entry.trained}" in found.extended


@pytest.mark.parametrize("name", able(NATIVE, SCALED | NO_REACH | SHORT_ALONE | {*STRUCTURES}))
def test_its_rotation_is_read(name: str, inspected: Inspect) -> None:
    found = [Rope(one.layer_type, one.rope_type, one.base, one.rotary_dim) for one in inspected(name).positions]
    assert found == ([] if name in NO_REACH | SHORT_ALONE else list(PUBLISHED[name].ropes))


@pytest.mark.parametrize("name", able(sorted(SCALED)))
def test_what_servers_are_told(name: str, inspected: Inspect) -> None:
    """Where an export is exact, its flags say the documented length, the base, and the config's own numbers."""
    entry, exports = PUBLISHED[name], inspected(name).exports
    assert exports is not None
    assert exports.keys() == set(SERVERS)
    for target, told in exports.items():
        if isinstance(told, Export) and told.exact:
            flags = told.by_flag
            served = int(flags["--max-model-len" if target == "vllm" else "-c"])
            if entry.asked:
                assert served >= entry.window
                assert any(str(entry.window) in note for note in told.notes) or served == entry.window
            else:
                assert served == entry.window
            if target == "llama.cpp":
                _check_llama_cpp(flags, name)
            elif "--hf-overrides" in flags:
                assert json.loads(flags["--hf-overrides"]).get("max_position_embeddings") == served


def _check_llama_cpp(flags: dict[str, str], name: str) -> None:
    entry, scaling = PUBLISHED[name], raw_rope(famous_config(name), PUBLISHED[name].ropes[-1])
    assert float(flags["--rope-freq-base"]) == entry.ropes[-1].base
    if entry.method in ("linear", "yarn"):
        assert flags["--rope-scaling"] == entry.method
        assert float(flags["--rope-scale"]) == scaling["factor"]
    if entry.method == "yarn":
        assert int(flags["--yarn-orig-ctx"]) == entry.trained
        assert float(flags["--yarn-beta-fast"]) == scaling.get("beta_fast", 32)
        assert float(flags["--yarn-beta-slow"]) == scaling.get("beta_slow", 1)


# Frequencies


def raw_rope(config: dict[str, Any], rope: Rope) -> dict[str, Any]:
    """The rope dict of config.json, with the fields that stand beside it; empty where it has none."""
    text = config.get("text_config", config)
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = found.get(rope.layer_type, found)
    beside = {"max_position_embeddings", "original_max_position_embeddings"}
    return {field: text[field] for field in beside if field in text} | found


def expected(name: str, rope: Rope, length: int) -> Spectrum:
    said = raw_rope(famous_config(name), rope) | {"rope_type": rope.rope_type, "rope_theta": rope.base}
    return spectrum(said | ({"attention_factor": 1.0} if name in UNTEMPERED else {}), rope.rotary_dim, length)


def rotary_in(model: PreTrainedModel) -> Any:
    """The rotary module of the text part."""
    own = (model.config.get_text_config(decoder=True), model.config)
    rotaries = (module for path, module in model.named_modules() if path.endswith("rotary_emb"))
    return next(module for module in rotaries if getattr(module, "config", None) in own)


def rotary_of(name: str) -> nn.Module:
    """The rotary module of the text part, as stock transformers builds it."""
    found = rotary_in(famous_model(name, device="meta"))
    rotary: nn.Module = type(found)(found.config)
    return rotary


def computed(rotary: nn.Module, rope: Rope, length: int) -> Spectrum:
    """What a rotary module does in a text of ``length`` tokens."""
    if rope.rope_type == "longrope":  # it chooses among its sets while it computes
        cos, sin = (one[0].double() for one in rotary(torch.zeros(1), torch.tensor([[0, 1, length - 1]])))
        return Spectrum(torch.atan2(sin[1], cos[1])[: rope.rotary_dim // 2], float(cos[0, 0]))
    prefix = "" if rope.layer_type is None else f"{rope.layer_type}_"
    return Spectrum(getattr(rotary, f"{prefix}inv_freq").double(), getattr(rotary, f"{prefix}attention_scaling"))


@pytest.mark.parametrize("name", able(name for name in NATIVE if PUBLISHED[name].ropes))
def test_its_frequencies_are_those_of_the_formula(name: str) -> None:
    entry, rotary = PUBLISHED[name], rotary_of(name)
    for rope in entry.ropes:
        for length in (entry.trained, entry.window):
            found, want = computed(rotary, rope, length), expected(name, rope, length)
            if name in SHORT_ALONE:
                want = expected(name, rope, entry.trained)
            torch.testing.assert_close(found.inv_freq, want.inv_freq, rtol=4e-6, atol=0)
            assert found.scale == pytest.approx(want.scale, rel=1e-6)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_stock_code_cannot_read_is_refused_by_name(name: str, inspected: Inspect) -> None:
    with pytest.raises(CtxextError, match=r"trust_remote_code|no class|cannot read"):
        inspected(name)


@pytest.mark.parametrize("name", able(sorted(LOST)))
def test_a_length_that_stock_code_loses_is_refused_naming_both(name: str, inspected: Inspect, tmp_path: Path) -> None:
    place = famous_checkpoint(name, tmp_path / "model")
    said = rf"max_position_embeddings={PUBLISHED[name].window} \(built: \d+\), which transformers ignores"
    with pytest.raises(CheckpointError, match=said):
        patch_checkpoint(place, tmp_path / "extended", "yarn", factor=2)
    with pytest.raises(CheckpointError, match=said):
        inspected(name)


@pytest.mark.parametrize("name", able(sorted(SHORT_ALONE)))
def test_what_stock_code_turns_otherwise_is_not_extended(name: str, inspected: Inspect, tmp_path: Path) -> None:
    place, window = famous_checkpoint(name, tmp_path / "model"), PUBLISHED[name].window
    with pytest.raises(CtxextError, match="does not rotate by the frequencies in its buffers"):
        patch_checkpoint(place, tmp_path / "extended", "yarn", factor=2, trained_length=window, sliding_window="lift")
    assert inspected(name).no_positions is not None


@pytest.mark.parametrize("name", able(["tencent/Hunyuan-7B-Instruct"]))
def test_hunyuan_is_extended_from_the_base_that_alpha_gives(name: str) -> None:
    entry, model = PUBLISHED[name], famous_model(name)
    ctxext.patch(model, "pi", factor=2, trained_length=entry.window)
    (rotary,) = (module for path, module in model.named_modules() if path.endswith("rotary_emb"))
    want = expected(name, entry.ropes[0], entry.window).inv_freq / 2
    cos, sin = rotary(torch.zeros(1), torch.tensor([[0, 1, 2 * entry.window - 1]]))
    found = torch.atan2(sin[0, 1].double(), cos[0, 1].double())[: len(want)]
    torch.testing.assert_close(found, want, rtol=4e-6, atol=0)
    assert "alpha" not in model.config.rope_parameters
    ctxext.patch(ctxext.unpatch(model), "pi", factor=2, scaling="extend")
    torch.testing.assert_close(rotary.inv_freq.double(), want, rtol=4e-6, atol=0)
    with pytest.raises(IncompatibleError, match=r"nothing is left to extend.*scaling='extend'"):
        ctxext.patch(ctxext.unpatch(model), "pi", factor=2, scaling="replace")


@pytest.mark.parametrize("name", able(sorted({*NATIVE, *LOST} - UNSAID)))
def test_planning_reads_the_same_length_and_transformers_loses_no_field(name: str) -> None:
    raw = famous_config(name)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    if name not in LOST:
        assert reach_of(config) == (None if PUBLISHED[name].asked else PUBLISHED[name].window)
    lost = {"zai-org/GLM-4.1V-9B-Thinking"} | ({"MiniMaxAI/MiniMax-M2.5"} if not RECENT else set())
    assert bool(lost_fields(raw, config)) == (name in lost)


# Every verb


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint directory to the letter of what is published, with random weights where they are read; kept."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            weights = name in {*STRUCTURES, *ALIBI, *OTHER_KINDS, "openai/gpt-oss-20b"}
            made[name] = famous_checkpoint(name, tmp_path_factory.mktemp("famous") / "model", weights=weights)
        return made[name]

    return of


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(STRUCTURES, "google/gemma-3-1b-pt"))
def test_inspect_says_which_methods_extend_it(name: str, place: Callable[[str], Path]) -> None:
    found, window = inspect_checkpoint(place(name)), PUBLISHED[name].window
    assert (found.extended, found.longest, found.window_caps) == (None, window, name in WINDOWED)
    verdicts = {verdict.method: verdict for verdict in found.verdicts}
    assert verdicts.keys() == known_methods().keys()
    assert {verdicts[method].target_length for method in ROTARY} == {4 * window}


@pytest.mark.parametrize("name", ALIBI)
def test_inspect_knows_alibi(name: str, place: Callable[[str], Path]) -> None:
    extending = {verdict.method for verdict in inspect_checkpoint(place(name)).verdicts if verdict.refused is None}
    assert extending == {"alibi", "pi", "dynamic_pi"}


@pytest.mark.slow
@pytest.mark.parametrize("name", able(STRUCTURES))
def test_patch_reaches_what_it_says(name: str) -> None:
    """On a model without data: what the config says afterwards, and what unpatch leaves; all methods in turn."""
    window, (known,), model = PUBLISHED[name].window, PUBLISHED[name].ropes, famous_model(name, device="meta")
    before = model.config.to_dict()
    choice, spec = "lift" if name in WINDOWED else None, RopeSpec(known.rotary_dim, known.base, window)
    for chosen in ROTARY:
        ctxext.patch(model, METHODS[chosen].example(spec), sliding_window=choice)
        described = ctxext.describe(model)
        assert (described.trained_length, described.target_length) == (window, 4 * window)
        text = model.config.get_text_config(decoder=True)
        rope = text.rope_parameters if known.layer_type is None else text.rope_parameters[known.layer_type]
        base = known.base * 4 ** (known.rotary_dim / (known.rotary_dim - 2)) if chosen == "ntk" else known.base
        assert rope["rope_theta"] == pytest.approx(base)
        # Stock code measures the stretch of its dynamic type from this field.
        assert text.max_position_embeddings == (1 if rope["rope_type"] == "dynamic" else 4) * window
        if rope["rope_type"] in ("yarn", "llama3", "longrope"):
            assert rope["original_max_position_embeddings"] == window
        ctxext.unpatch(model)
        assert model.config.to_dict() == before


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*STRUCTURES, *ALIBI])
def test_patch_on_disk_export_and_load(name: str, place: Callable[[str], Path], tmp_path: Path) -> None:
    source, extended, window = place(name), tmp_path / "extended", PUBLISHED[name].window
    choice = ("--sliding-window", "lift") if name in WINDOWED else ()
    method = "alibi" if name in ALIBI else "yarn"
    result = command("patch", source, extended, "--method", method, "--factor", 4, *choice)
    assert result.exit_code == 0, result.output
    assert f"{window} -> {4 * window} tokens" in result.output
    for target in RUNTIMES:
        exported = command("export", extended, "--to", target)
        if target in ("vllm", "llama.cpp") and (method == "yarn" or name == BLOOM):
            assert exported.exit_code == 0, exported.stderr
        said = exported.stdout if exported.exit_code == 0 else exported.stderr
        assert (str(4 * window) if exported.exit_code == 0 else "ctxext serve") in said
    model = ctxext.load(extended)
    assert ctxext.describe(model).target_length == 4 * window
    if method == "yarn" and type(model.config) in AutoModelForCausalLM._model_mapping:
        stock = type(model).from_pretrained(extended).eval()
        inputs = torch.randint(10, 250, (1, 48), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours, theirs = (one.eval()(inputs, use_cache=False).logits for one in (model, stock))
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", able(sorted({*ELSEWHERE, *NO_REACH, *OTHER_KINDS, *REFUSED})))
def test_what_cannot_be_extended_is_refused_with_a_sentence(
    name: str, place: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_only(monkeypatch, "yarn")
    extension = ("--method", "yarn", "--factor", 4)
    planned = [] if name in ELSEWHERE | NO_REACH else [("plan", place(name), "--length", 256)]
    for arguments in (
        ("inspect", place(name)),
        ("patch", place(name), tmp_path / "extended", *extension),
        ("export", place(name), "--to", "vllm", *extension),
        *planned,
    ):
        result = command(*arguments)
        assert result.exit_code == 0 or "Error: " in result.output
        if arguments[0] in ("patch", "export"):
            assert (result.exit_code == 0) == (name in OTHER_KINDS), result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRUCTURES[1:4], BLOOM, "openai/gpt-oss-20b"])
def test_plan_counts_every_one(name: str, place: Callable[[str], Path]) -> None:
    """The weights are counted to the byte, and a longer context takes more."""
    plan = plan_serving(read_any_config(place(name)), dtype=torch.bfloat16)
    short, long = plan.at(256), plan.at(1024)
    model = famous_model(name, device="meta")
    assert short.weights == 2 * sum(weight.numel() for weight in model.parameters())
    assert long.total > short.total > short.weights


# Trained with a scaling


def angles_per_token(model: PreTrainedModel, length: int) -> Tensor:
    """Radians per token of every pair in a text of ``length`` tokens."""
    owner = rotary_in(model)
    kind = "full_attention" if isinstance(owner.rope_type, dict) else None
    arguments = {} if kind is None else {"layer_type": kind}
    owner(torch.zeros(1), torch.tensor([[0, length - 1]]), **arguments)  # longrope takes its set for long texts now
    found: Tensor = getattr(owner, "inv_freq" if kind is None else f"{kind}_inv_freq").double()
    return found


@pytest.mark.parametrize("name", able(TRAINED_SCALED))
def test_twice_the_window_that_it_reads(name: str) -> None:
    """Fast pairs keep the frequency that the weights know and slow ones get half of it; no temperature is lost."""
    window = PUBLISHED[name].window
    model = famous_model(name)
    known = angles_per_token(model, window)
    ctxext.patch(model, "yarn", factor=2, trained_length=window)
    ratio = angles_per_token(model, 2 * window) / known
    turns = window * known / (2 * math.pi)
    assert bool((ratio < 1 + 1e-6).all())
    assert bool((ratio > 0.5 - 1e-6).all())
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratio[turns > 64], torch.ones_like(ratio[turns > 64]), rtol=1e-5, atol=0)
    assert int((turns > 64).sum()) > 0
    found = ctxext.describe(model)
    assert (found.trained_length, found.target_length, found.stock) == (window, 2 * window, True)


@pytest.mark.parametrize("name", TRAINED_SCALED)
def test_neither_a_guess_nor_a_smaller_window(name: str) -> None:
    window, original = PUBLISHED[name].window, PUBLISHED[name].trained
    model = famous_model(name, device="meta")
    said = rf"If its weights were trained with that scaling.*trained_length={window}\b"
    with pytest.raises(PatchStateError, match=said):
        ctxext.patch(model, "yarn", factor=2)
    if PUBLISHED[name].method != "linear":  # which states no length before it
        with pytest.raises(InvalidParameterError, match="that this checkpoint reads already"):
            ctxext.patch(model, "pi", factor=0.5 * window / original, scaling="replace")


def temperature(model: nn.Module) -> float:
    """What stock code multiplies the scores of the first attention layer by, beside 1 / sqrt(head_dim)."""
    attention = next(module for module in model.modules() if hasattr(module, "qk_nope_head_dim"))
    return float(attention.scaling * math.sqrt(attention.qk_nope_head_dim + attention.qk_rope_head_dim))


@pytest.mark.parametrize("name", able(golden_numbers.CONFIGS))
def test_the_numbers_for_other_projects_are_those_of_stock_models(name: str) -> None:
    golden = json.loads(golden_numbers.FILE.read_text(encoding="utf-8"))
    rotary, rope = rotary_of(name), PUBLISHED[name].ropes[-1]
    own = [case for case in golden["cases"] if case["config"] == name and case["published"]]
    assert own
    for case in own:
        found, want = computed(rotary, rope, case["length"]), golden["inv_freq"][case["inv_freq"]]
        assert found.inv_freq.tolist() == pytest.approx(want, rel=4e-6, abs=0)
        assert found.scale == pytest.approx(case["attention_scale"], rel=1e-6)
        if name.startswith("deepseek-ai/"):
            assert 1 / temperature(famous_model(name, device="meta")) == pytest.approx(case["temperature"], rel=1e-12)


def test_deepseek_keeps_the_temperature_it_was_trained_with() -> None:
    model = famous_model("deepseek-ai/DeepSeek-V3", device="meta")
    trained = temperature(model)
    assert trained == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    ctxext.patch(model, "yarn", factor=2, trained_length=163840)
    assert temperature(model) == pytest.approx(trained * (0.1 * math.log(2) + 1) ** 2, rel=1e-6)
