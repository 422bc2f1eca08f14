"""What ``import ctxext`` brings, and that it registers all the same in whatever order programs import."""

from __future__ import annotations

from pathlib import Path

import pytest

import ctxext
from tests._models import RECENT, tiny
from tests._products import some
from tests._programs import ran

ORDERS = {
    "ctxext first": "import ctxext, sys; assert 'torch' not in sys.modules; import transformers",
    "transformers first": "import transformers; transformers.PreTrainedModel; import ctxext",
    "the table again": "import ctxext, importlib, transformers.modeling_rope_utils as table; importlib.reload(table)",
    "two threads": "import ctxext, importlib\nfrom threading import Thread\n"
    "names = ['transformers.modeling_utils', 'ctxext.core.patching', 'transformers.models.llama.modeling_llama'] * 2\n"
    "threads = [Thread(target=importlib.import_module, args=[name]) for name in names]\n"
    "[thread.start() for thread in threads]; [thread.join() for thread in threads]",
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose frequencies plain transformers cannot compute."""
    place = tmp_path_factory.mktemp("extended")
    ctxext.patch(tiny(), "dynamic_yarn", factor=4).save_pretrained(place)
    return place


@pytest.mark.nightly
@pytest.mark.parametrize("order", some(ORDERS, "two threads"))
def test_whoever_imports_both_is_told_how_to_read_a_checkpoint(order: str, extended: Path, tmp_path: Path) -> None:
    """Whatever is imported first, on whichever thread."""
    program = f"""
{ORDERS[order]}
import pickle
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
for name, function in ROPE_INIT_FUNCTIONS.items():
    assert pickle.loads(pickle.dumps(function)) is not None, name
try:
    AutoModelForCausalLM.from_pretrained({str(extended)!r})
except ValueError as error:
    assert "Load it with ctxext.load(path)" in str(error), error
else:
    raise SystemExit("loaded without a word")
import ctxext
assert ctxext.describe(ctxext.load({str(extended)!r})).method["method"] == "dynamic_yarn"
"""
    done = ran(["-c", program], tmp_path, code=0)
    assert "Missing validation function" not in done.stderr


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'pathc'; it has ask, choose, describe, errors"):
        ctxext.pathc  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'ctxext\.training' has no attribute 'Callback'"):
        ctxext.training.Callback  # noqa: B018
    assert ctxext.methods()["yarn"] is ctxext.methods.YaRN


@pytest.mark.nightly
def test_import_brings_no_engine_and_takes_little_more_than_transformers(tmp_path: Path) -> None:
    """Engines, trainers and plots wait until they are asked for, also where they are installed; nothing is printed.

    It adds little to what any program with a model imports: transformers' models and its generation. One
    process imports both, one after the other, so that a busy machine slows both alike.
    """
    program = (
        "import sys, time, ctxext; "
        "assert not {'torch', 'transformers', 'peft', 'ctxext.core.patching'} & sys.modules.keys(); "
        "began = time.process_time(); import transformers.modeling_utils, "
        "transformers.generation.utils; theirs = time.process_time() - began; import ctxext.core.patching; "
        "print(theirs, time.process_time() - began - theirs); "
        "from transformers import LlamaConfig, LlamaForCausalLM; "
        "small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2); "
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **small)); "
        "ctxext.patch(model, 'yarn', factor=4); "
        "print(*sys.modules); "
        "ctxext.patch(ctxext.unpatch(model), 'fire'); "
        "print(*sys.modules); "
        "training = ctxext.training; "
        "assert [getattr(training, name).__name__ for name in training.__all__] == training.__all__; "
        "assert set(training.__all__) <= set(dir(training)); "
        "assert dir(ctxext) == sorted(ctxext.__all__)"
    )
    done = ran(["-c", program], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    seconds, *said = done.stdout.splitlines()
    theirs, ours = map(float, seconds.split())
    assert ours < theirs / 6, f"transformers' models take {theirs:.2f} s of processor time, ctxext {ours:.2f} s on top"
    assert len(said) == 2
    modules = set(said[0].split())
    of_the_laboratory = {name for name in said[1].split() if name.startswith("ctxext.laboratory.")}
    assert {name.split(".")[2] for name in of_the_laboratory} == {"encodings", "scores", "near_far"}, "and no pictures"
    assert {"ctxext.core.patching", "transformers.modeling_utils"} <= modules
    later = {"deepspeed", "peft", "datasets", "matplotlib", "bitsandbytes", "typer", "transformers.trainer"}
    later |= {f"ctxext.{room}" for room in ("evaluation", "training", "cli", "laboratory")}
    if RECENT:  # older generation imports scikit-learn where it is installed, which imports pandas and pyarrow
        later |= {"pyarrow"}
    assert modules & later == set()
