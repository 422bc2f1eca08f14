"""Every config and every run that the guide makes of one: what it says, and two steps of it on a tiny model."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ctxext.training.settings import Settings, Stage, read_settings
from scripts.update_readme import header_of
from tests._models import tiny
from tests.texts._conversations import PLAIN, chat_tokenizer, write
from tests.training._recipe import CONFIGS, RECIPES, losses, recipe, words_of
from tests.walk.tiny import TRAINED_LENGTH

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": TRAINED_LENGTH}
LLAMA_3_1 = {"max_position_embeddings": 8 * TRAINED_LENGTH, "rope_parameters": LLAMA3}
# Checkpoint: tokens that it was trained for, its architecture, and what that is built with here.
CHECKPOINTS: dict[str | None, tuple[int, str, dict[str, Any]]] = {
    None: (8192, "llama", {"tie_word_embeddings": True}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (8192, "llama", {"tie_word_embeddings": True}),
    "meta-llama/Meta-Llama-3-8B": (8192, "llama", {}),
    "meta-llama/Llama-3.1-8B": (131072, "llama", LLAMA_3_1),
    "mistralai/Mistral-7B-v0.1": (8192, "mistral", {"sliding_window": 16}),
    "bigscience/bloom-560m": (2048, "bloom", {}),
    "bigscience/bloom-7b1": (2048, "bloom", {}),
    "Qwen/Qwen3-0.6B": (32768, "qwen3", {"tie_word_embeddings": True}),
    "google-bert/bert-base-uncased": (512, "bert", {"vocab_size": 258}),
}
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
# Runs of the guide: a config, and settings in place of some of its own.
GUIDE = (RECIPES.parent / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
OTHERS = re.findall(r"^\| .* \| `([\w.-]+\.yaml) ([^`]+)` \|$", GUIDE, re.MULTILINE)
RUNS = [(path, "") for path in CONFIGS] + [(RECIPES / "configs" / name, settings) for name, settings in OTHERS]


@pytest.fixture(scope="module")
def models(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """A tiny checkpoint for each real one, those of one architecture sharing it."""
    made: dict[str, Path] = {}
    found: dict[str | None, Path] = {}
    for name, (_, model_type, changes) in CHECKPOINTS.items():
        key = f"{model_type} {changes}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            tiny(model_type, **{"vocab_size": 257} | changes).save_pretrained(made[key])
            own = chat_tokenizer(PLAIN) if model_type == "qwen3" else copy.deepcopy(tokenizer)
            if model_type == "bert":
                own.add_special_tokens({"mask_token": "<mask>"})
            own.save_pretrained(made[key])
        found[name] = made[key]
    return found


def read(path: Path, others: str = "") -> Settings:
    return read_settings(path, ["--data.train", "books.parquet", *others.split()])


def test_there_are_configs_for_every_promise() -> None:
    assert len(CONFIGS) == 12
    assert len(OTHERS) == 9
    settings = [read(*run) for run in RUNS]
    assert {one.checkpoint for one in settings} == set(CHECKPOINTS)
    assert {one.extension.method for one in settings} >= {"yarn", "pi", "ntk", "abf", "llama3", "alibi", "nope"}
    assert {one.data.positions for one in settings} == {"consecutive", "pose", "packed"}
    assert {one.device for one in settings} == {"auto", "cuda"}
    assert any(one.stages for one in settings)
    assert any(one.quantisation for one in settings)
    assert any(one.table and one.data.masked for one in settings)
    for path, others in RUNS:
        assert others == "" or read(path, others) != read(path)


@every_config
def test_it_says_what_it_is(path: Path) -> None:
    settings, text = read(path), path.read_text(encoding="utf-8")
    assert f"recipes/configs/{path.name}" in text
    assert settings.output == f"runs/{path.stem}"
    trained, _, _ = CHECKPOINTS[settings.checkpoint]
    assert settings.extension.factor is not None
    reach = re.search(r"-(\d+)k-", path.name)
    assert reach is not None
    assert settings.extension.factor * trained == int(reach[1]) * 1024
    if settings.extension.method == "nope":  # it has no distances to learn, and is trained at its old length
        assert settings.data.length == trained
    else:
        assert settings.data.length == int(reach[1]) * 1024 or settings.data.positions == "pose"
    assert settings.extension.method in path.name
    header = header_of(path)
    assert list(header) == ["Hardware", "Memory", "Time", "Expected"]
    for key in ("Memory", "Time", "Expected"):
        assert re.search(r"\((measured|estimated)", header[key]), key
    assert ("GPU" in header["Hardware"] or "H100" in header["Hardware"]) == (settings.device == "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("path", "others"), RUNS, ids=[f"{path.stem} {others}" for path, others in RUNS])
def test_it_trains_two_steps(path: Path, others: str, models: dict[Any, Path], corpus: Path, tmp_path: Path) -> None:
    """All is as in the config but what makes it large, or needs a GPU."""
    real = read(path, others)
    small: dict[str, Any] = {"checkpoint": models[real.checkpoint], "output": tmp_path / "run", "stages": "[]"}
    small |= {"data.train": corpus, "data.length": 32, "data.shortest": "null"}
    small |= {"device": "cpu", "dtype": "fp32", "quantisation": "null", "memory.offload": "false"}
    small |= {"training.steps": 2, "training.warmup": 0, "training.accumulation": 1}
    if real.extension.trained_length is not None:
        small["extension.trained_length"] = LLAMA_3_1["max_position_embeddings"]
    if real.memory.mlp_tile is not None:
        small["memory.mlp_tile"] = 8
    if path.stem.endswith("chats"):
        turns = [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "zzz"}]
        small["data.train"] = write(tmp_path / "chats.jsonl", *8 * [{"messages": turns}])
    words = others.split()
    kept = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0].removeprefix("--") not in small]
    settings = read_settings(path, words_of(small, *(word for pair in kept for word in pair)))
    stages = [Stage(**stage.model_dump() | {"steps": 1, "length": 24}) for stage in real.stages]
    recipe.finetune(settings.model_copy(update={"stages": stages}))
    found = losses(tmp_path / "run")
    assert list(found) == [1, 2]
    assert all(map(math.isfinite, found.values()))
