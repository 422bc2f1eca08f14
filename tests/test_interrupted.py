"""Ctrl-C while an extension is undone: a second ``unpatch`` finishes, and nothing of the extension is left."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

import ctxext
from ctxext.core import steps
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.laboratory.encodings import ENCODINGS
from ctxext.methods import METHODS
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.remap import RemapMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.spec import RopeSpec
from tests._models import logits, tiny, tokens
from tests.walk.tiny import TRAINED_LENGTH

ROPE = RopeSpec(rotary_dim=32, base=1e4, trained_length=TRAINED_LENGTH)
HEADS = RetrievalHeads(heads=(1,), factor=4.0)
TWO_SETS: dict[str, Any] = {"short_factor": (1.0,) * 16, "long_factor": (4.0,) * 16, "factor": 4.0}
CASES: list[tuple[str, Any]] = [
    ("llama", METHODS["yarn"](factor=4.0)),
    ("llama", METHODS["ntk"](factor=4.0)),
    ("llama", METHODS["dynamic_ntk"](factor=4.0, growth="request")),
    ("llama", LongRoPE(**TWO_SETS)),
    ("llama", METHODS["alibi"](factor=4.0)),
    ("llama", HEADS),
    *(("llama", kind.example(ROPE)) for kind in METHODS.values() if issubclass(kind, RemapMethod)),
    ("bloom", METHODS["pi"](factor=4.0)),
    ("gpt2", METHODS["stretch"](factor=4.0)),
    ("t5", METHODS["stretch_buckets"](factor=4.0)),
    ("llama", next(iter(ENCODINGS))),
]
SOME = [CASES[0], ("llama", METHODS["self_extend"].example(ROPE))]


HOME = str(Path(ctxext.__file__).parent)


class Interrupt(BaseException):
    """What Ctrl-C raises, wherever the program happens to be."""


@contextlib.contextmanager
def interrupted_at(call: int, since: str = "") -> Iterator[None]:
    """Raise ``Interrupt`` at this call of a function of ctxext, from 1.

    Args:
        call: Number of the call.
        since: Name of the function with which counting begins.
    """
    seen: list[int] = [] if since else [0]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not seen and code.co_name == since:
            seen.append(0)
        elif event == "call" and seen and code.co_filename.startswith(HOME):
            seen[0] += 1
            if seen[0] == call:
                sys.setprofile(None)
                raise Interrupt

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def was_interrupted(call: int, work: Callable[[], Any], since: str = "") -> bool:
    try:
        with interrupted_at(call, since):
            work()
    except Interrupt:
        return True
    except IncompatibleError:
        pass
    return False


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """All that an extension might leave: attributes and hooks of modules, the config, the settings of generate."""
    found: dict[str, Any] = {"config": model.config.to_dict(), "keys": list(model.state_dict())}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if not name.startswith("_") or "ctxext" in name}
        found[path] = sorted(own), {name: len(value) for name, value in vars(module).items() if name.endswith("hooks")}
        found[f"{path} buffers"] = {name: None if t is None else t.tolist() for name, t in module._buffers.items()}
    return found


def extend(model: Any, method: Any) -> Any:
    factor = 4.0 if isinstance(method, str) else None
    return ctxext.patch(model, method, factor=factor, trained_length=TRAINED_LENGTH)


def computed(model: Any) -> Tensor:
    more = {"decoder_input_ids": tokens(5)} if model.config.is_encoder_decoder else {}
    ids = tokens(TRAINED_LENGTH - 4)
    return logits(model, ids, attention_mask=torch.ones_like(ids), **more)


def with_adapter(model: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def prepared(case: tuple[str, Any], order: str) -> tuple[Any, Any]:
    """A model that was never extended, and one that is; with an adapter from before or from after the extension."""
    (model_type, method), adapted = case, with_adapter if order else lambda model: model
    before, after = (adapted, lambda model: model) if order == "adapter first" else (lambda model: model, adapted)
    return adapted(tiny(model_type)), after(extend(before(tiny(model_type)), method))


def assert_plain_again(model: Any, untouched: Any) -> None:
    assert traces(model) == traces(untouched)
    assert torch.equal(computed(model), computed(untouched))
    assert ctxext.describe(model).method is None


@pytest.mark.parametrize(
    ("case", "order"),
    [
        *(pytest.param(case, "", marks=pytest.mark.slow if case in SOME else pytest.mark.nightly) for case in CASES),
        pytest.param(CASES[0], "adapter first", marks=pytest.mark.nightly),
        pytest.param(CASES[0], "adapter later", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{getattr(value[1], 'name', value[1])}",
)
def test_unpatch_again_undoes_the_rest(case: tuple[str, Any], order: str) -> None:
    """After an interrupt at each of its calls."""
    untouched, extended = prepared(case, order)
    dtype = torch.get_default_dtype()
    for call in itertools.count(1):
        model = copy.deepcopy(extended)
        if not was_interrupted(call, lambda model=model: ctxext.unpatch(model)):
            break
        assert torch.get_default_dtype() == dtype
        with pytest.raises(PatchStateError, match=r"Call ctxext\.unpatch"):
            extend(model, case[1])
        assert ctxext.unpatch(model) is model
        assert_plain_again(model, untouched)
    assert call > 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [pytest.param(SOME[0], marks=pytest.mark.slow), pytest.param(SOME[1], marks=pytest.mark.nightly)],
    ids=lambda case: case[1].name,
)
def test_a_patch_that_failed_and_was_interrupted_while_it_undid_its_work(
    case: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched, method = tiny(case[0]), case[1]

    def refuse(*_: Any) -> None:
        raise IncompatibleError("no")

    monkeypatch.setattr("ctxext.core.steps._STEPS", [*steps.steps(), steps.Step(max(steps.Moment), refuse)])
    in_part = []
    for call in itertools.count(1, step=5):
        model = copy.deepcopy(untouched)
        if not was_interrupted(call, lambda model=model: extend(model, method), since="refuse"):
            break
        with contextlib.suppress(PatchStateError):  # it says so where there is nothing left to undo
            in_part.append(ctxext.unpatch(model))
        assert_plain_again(model, untouched)
    assert len(in_part) > 5


@pytest.mark.nightly
def test_the_end_of_a_block_of_patched_that_is_interrupted() -> None:
    model, untouched = tiny(), tiny()

    def use() -> None:
        with ctxext.patched(model, "yarn", factor=4.0):
            pass

    ends = 0
    for call in itertools.count(1, step=4):
        if not was_interrupted(call, use, since="unpatch"):
            break
        ctxext.unpatch(model)
        assert_plain_again(model, untouched)
        ends += 1
    assert ends > 3
