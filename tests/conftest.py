"""What all tests share."""

from __future__ import annotations

import gc
import itertools
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import jaxtyping
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ctxext.checkpoints import load
from ctxext.core import patching
from ctxext.measuring.checkpoint import emulates_bf16
from ctxext.methods import base, known_methods
from ctxext.spec import RopeSpec
from tests._checkpoints import SHAPE, save
from tests._models import tiny
from tests._programs import ROOT, ran
from tests._tokenizer import BYTES, BYTES_AFTER_BOS
from tests.walk.check import Stock

# These check their own arguments, with errors that a user reads. The runtime checker would refuse them before that code
# runs, so it leaves the constructors and the verbs alone; all else stays checked.
for _cls in (*known_methods().values(), RopeSpec):
    _cls.__init__.__no_type_check__ = True
for _verb in (
    patching.patch,
    patching.unpatch,
    base.method,
    base.resolve,
    base._factor_for,
    load.load.__wrapped__,
):
    _verb.__no_type_check__ = True  # type: ignore[attr-defined]

# For all tests. Tiny models: more threads only wait for each other, and the order of a sum, so every bit of it, depends
# on their number, here as in the processes of one thread that load what was saved.
torch.set_num_threads(1)

# Which dtype is automatic depends on the processor. What tests see does not: here every product takes a second.
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr("time.perf_counter", itertools.count(0.0).__next__)
    assert not emulates_bf16()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the length from which a quick test is told about."""
    parser.addoption(
        "--tell-seconds", type=float, help="name the unmarked tests that take more processor time than this"
    )
    parser.addoption("--times", help="write the tests and the processor time of each test file to this JSON file")
    parser.addoption("--part", default="1/1", help="run one of several parts of the tests, as 3/8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of a slow test to the night: the first, the twenty-fifth and so on stay. Keep one part only.

    A test function falls into one part with all of its cases, whatever else the suite holds.
    """
    number, parts = map(int, config.getoption("--part").split("/"))
    items[:] = [item for item in items if crc32(item.nodeid.partition("[")[0].encode()) % parts == number - 1]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        test, bracket, _ = item.nodeid.partition("[")
        is_slow = item.get_closest_marker("slow") is not None and item.get_closest_marker("nightly") is None
        if bracket and is_slow:
            cases.setdefault(test, []).append(item)
    for same in cases.values():
        for number, item in enumerate(same):
            if number % 24:
                item.add_marker(pytest.mark.nightly)


BEGAN = pytest.StashKey[tuple[float, int]]()
TAKEN = "seconds of processor time"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Note when a test began: its fixtures count, those of its module where it is the first to ask for them."""
    if item.config.getoption("jaxtyping_packages", None):
        # Full products of the night call what tests of the day call, and would take half as long again if checked.
        jaxtyping.config.update("jaxtyping_disable", item.get_closest_marker("nightly") is not None)
    item.stash[BEGAN] = _processor_time(), len(sys.modules)
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note how long a test took: what its processes take counts, the first import of a large package does not."""
    yield
    began, modules = item.stash[BEGAN]
    if item.config.getoption("--times") or len(sys.modules) < modules + 20:
        item.user_properties.append((TAKEN, _processor_time() - began))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that may belong to another tier; none fails, since processors differ."""
    most = config.getoption("--tell-seconds")
    if config.getoption("--times"):
        write_times(terminalreporter, Path(config.getoption("--times")))
    if most is None:
        return
    taken = {
        report.nodeid: seconds
        for report in terminalreporter.getreports("passed")
        for name, seconds in report.user_properties
        if name == TAKEN and report.when == "call" and not {"slow", "nightly"} & report.keywords.keys()
    }
    slow = sorted((name for name, seconds in taken.items() if seconds > most), key=lambda name: -taken[name])
    for name in slow:
        terminalreporter.write_line(f"{taken[name]:.1f} s of processor time, unmarked: {name}")
    if slow:
        terminalreporter.write_line(
            f"{len(slow)} quick tests took over {most:g} s here. On an idle machine, mark them slow."
        )


def write_times(terminalreporter: pytest.TerminalReporter, file: Path) -> None:
    """Write ``{test file: [tests, seconds of processor time]}``, longest first."""
    times: dict[str, list[float]] = {}
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for seconds in [seconds for name, seconds in report.user_properties if name == TAKEN and report.when == "call"]:
            entry = times.setdefault(report.nodeid.partition("::")[0], [0, 0.0])
            entry[0], entry[1] = entry[0] + 1, entry[1] + seconds
    longest = sorted(times.items(), key=lambda entry: -entry[1][1])
    told = {name: [tests, round(seconds, 1)] for name, (tests, seconds) in longest}
    file.write_text(json.dumps(told, indent=1), encoding="utf-8")


def _processor_time() -> float:
    """Seconds of this process and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def pytest_collection_finish() -> None:
    """Let Python's collector pass by what was imported and collected: there are millions of objects, and all stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Llama checkpoint; read it only."""
    directory = tmp_path_factory.mktemp("plain")
    tiny().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of three families, trained for 256 tokens; read them only."""
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    gemma = SHAPE | {
        "head_dim": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return {
        "llama": save(LlamaForCausalLM(LlamaConfig(**SHAPE)), root / "llama"),
        "mistral": save(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=128)), root / "mistral"),
        "gemma3": save(Gemma3ForCausalLM(Gemma3TextConfig(**gemma)), root / "gemma3"),
    }


@pytest.fixture(scope="session")
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return BYTES


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    return BYTES_AFTER_BOS


@pytest.fixture(scope="session")
def stock() -> Iterator[Stock]:
    """A process that knows transformers and not ctxext."""
    with Stock() as process:
        yield process


@pytest.fixture
def _without_checker(request: pytest.FixtureRequest) -> None:
    """Run a test in a process of its own if the checker of shapes wraps classes, of which dynamo makes no graph."""
    if request.config.getoption("jaxtyping_packages", None):
        ran(["-m", "pytest", "--override-ini", "addopts=-q --strict-markers", request.node.nodeid], ROOT, code=0)
        pytest.skip("passed in a process without the checker of shapes")


@pytest.fixture
def _any_types(request: pytest.FixtureRequest) -> None:
    """Let a test pass arguments of other types than the annotated ones, as users do."""
    if request.config.getoption("jaxtyping_packages", None):
        jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def _for_compiling(_any_types: None) -> Iterator[None]:
    """The runtime checker of shapes wraps every function, and dynamo cannot trace what it does."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
