"""What every encoding promises on a live model. A new file in ``ctxext/methods`` gets all of this for nothing.

What most files would break is in every run: a cache, saving, undoing, the future unseen. The rest is marked nightly.

That it computes what its paper says is the business of its own test file: ``tests._encodings.check_score``.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

import ctxext
from ctxext.checkpoints.inspect import MethodCheck, inspect_checkpoint
from ctxext.errors import CheckpointError, IncompatibleError
from ctxext.kernels import Layout, named
from ctxext.laboratory.scores import PairScore
from ctxext.methods import known_methods
from ctxext.methods.encoding import ENCODING, Encoding, EncodingMethod, EncodingSpec
from tests._encodings import SPEC, attended, carried_by, pairs_of
from tests._models import logits, tiny, tokens
from tests._products import some
from tests.kernels.cases import Largest
from tests.walk.check import State
from tests.walk.tiny import TRAINED_LENGTH, tiny_config, tiny_model

ENCODINGS = {name: cls for name, cls in known_methods().items() if issubclass(cls, EncodingMethod)}
LENGTH = TRAINED_LENGTH + 20


def form_of(cls: type[EncodingMethod]) -> str:
    """Where an encoding is added, and to scores in which form."""
    encoding, q = cls().build(SPEC), torch.randn(1, SPEC.num_heads, 5, SPEC.head_dim)
    pairs = pairs_of(q, q[:, : SPEC.num_kv_heads], Layout.causal(1, 5), carried_by(encoding, 1, 5, SPEC.hidden_size))
    score = encoding.score(pairs)
    return score.form(torch.float32) if isinstance(score, PairScore) else cls.form


OF_EACH_FORM = {form_of(cls): name for name, cls in ENCODINGS.items()}.values()
every_encoding = pytest.mark.parametrize("name", ENCODINGS)


@functools.cache
def _patched(name: str) -> PreTrainedModel:
    return extended(name, tiny())


def extended(name: str, model: PreTrainedModel | None = None, **how: Any) -> PreTrainedModel:
    """A tiny Llama with an encoding none of whose weights is what it begins with."""
    if model is None and not how:
        return copy.deepcopy(_patched(name))  # to patch one takes longer than most of what is asked of it
    model = tiny() if model is None else model
    torch.manual_seed(0)
    ctxext.patch(model, name, factor=4.0, **how)
    for module in modules_of(model):
        for weight in module.parameters():
            weight.data += 0.3 * torch.rand_like(weight)
    return model


def modules_of(model: nn.Module) -> list[Encoding]:
    return [module for module in model.modules() if isinstance(module, Encoding)]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def require_one_pass(model: PreTrainedModel, cache: str, slots: int, lengths: list[int]) -> None:
    ids, parts = tokens(LENGTH), []
    past = StaticCache(config=model.config, max_cache_len=slots) if cache == "static" else None
    with torch.no_grad():
        for part in ids.split(lengths, 1):
            out = model(part, past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
    close(torch.cat(parts, 1), logits(model, ids))


def test_there_are_encodings_of_every_form() -> None:
    assert {form_of(cls) for cls in ENCODINGS.values()} == {"input", "columns", "places", "rows", "attention"}
    assert {cls.shared for cls in ENCODINGS.values()} == {True, False}
    assert {cls.carries for cls in ENCODINGS.values()} == {True, False}


@pytest.mark.parametrize("name", some(ENCODINGS, *OF_EACH_FORM))
def test_is_as_it_says(name: str) -> None:
    """Its form, how many modules it has, and that it is never met unasked."""
    model, cls = extended(name), ENCODINGS[name]
    assert cls.needs_training
    assert len(modules_of(model)) == (1 if cls.shared else model.config.num_hidden_layers)
    encoding = modules_of(model)[0]
    q, k = (torch.randn(1, heads, 5, 32) for heads in (4, model.config.num_key_value_heads))
    carried = carried_by(encoding, 1, 5, model.config.hidden_size)
    assert (carried is not None) == cls.carries
    score = encoding.score(pairs_of(q, k, Layout.causal(1, 5), carried))
    added = encoding.added(torch.arange(5)[None])
    assert (score is None) == (cls.form == "input")
    assert (added is None) == (cls.form != "input")
    if score is not None:
        told, ours = ({id(weight) for weight in some} for some in (score.weights, encoding.parameters()))
        assert (told <= ours | {id(carried)} and id(carried) in told) if cls.carries else told == ours
    said = str(ctxext.describe(model))
    assert "Train the model before use" in said
    assert "sdpa" in said


@pytest.mark.slow
@every_encoding
def test_says_something_and_sees_no_future(name: str) -> None:
    model, ids = extended(name), tokens(LENGTH)
    later = ids.clone()
    later[0, 50] = 40 + (int(ids[0, 50]) - 39) % 88
    before = logits(model, ids)
    without = logits(ctxext.patch(tiny(), "nope", factor=4.0), ids)
    assert (before - without).norm() > 0.01 * without.norm()
    assert torch.equal(before[:, :50], logits(model, later)[:, :50])
    assert not torch.equal(before[:, 50], logits(model, later)[:, 50])


@every_encoding
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.nightly)])
def test_cached_decoding_is_one_forward(name: str, cache: str) -> None:
    require_one_pass(extended(name), cache, LENGTH + 9, [40, 30, *[1] * (LENGTH - 70)])


@pytest.mark.nightly
@every_encoding
def test_a_row_does_not_depend_on_padding_or_on_what_it_is_packed_with(name: str) -> None:
    model, ids = extended(name), tokens(LENGTH)
    short = ids[:, :30]
    alone = logits(model, short)
    batch = torch.cat([ids[:, :42], torch.cat([ids[:, 50:62], short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :12] = 0
    padded = logits(model, batch, attention_mask=mask)
    close(padded[1:, 12:], alone)
    close(padded[:1], logits(model, ids[:, :42]))
    places = torch.cat([torch.arange(20), torch.arange(30)])[None]
    packed = logits(model, torch.cat([ids[:, 60:80], short], 1), position_ids=places)
    close(packed[:, 20:], alone)
    with torch.no_grad():
        given = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        together = model.generate(batch, attention_mask=mask, **given)[1, -5:]
        assert torch.equal(together, model.generate(short, **given)[0, -5:])


@pytest.mark.slow
@pytest.mark.parametrize("name", some(ENCODINGS, *OF_EACH_FORM))
def test_unpatch_is_bit_for_bit(name: str) -> None:
    model = tiny()
    before, keys = State.of(model, tokens(LENGTH)), list(model.state_dict())
    extended(name, model)
    added = [key for key in model.state_dict() if key not in keys]
    assert [key for key in added if f"{ENCODING}." not in key] == []
    assert len(added) == sum(len(list(module.parameters())) for module in modules_of(model))
    ctxext.unpatch(model)
    assert before.difference(model) is None


@pytest.mark.nightly
def test_survives_saving_where_a_tower_that_rotates_stands_before_the_text(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("glmasr"))
    ctxext.patch(model, "fire", trained_length=16, factor=2.0)
    towers = [name for name in model.state_dict() if ENCODING in name and "language_model" not in name]
    assert not towers, "the encoding is the text's"
    ctxext.save(model, tmp_path)
    again = ctxext.load(tmp_path)
    assert again.state_dict().keys() == model.state_dict().keys()
    weights = model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in again.state_dict().items())


@pytest.mark.slow
@every_encoding
def test_survives_saving_and_stock_code_refuses_it(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, ids = tiny(), tokens(LENGTH)
    before = logits(plain, ids)
    model = extended(name, plain)
    expected = logits(model, ids)
    ctxext.save(model, tmp_path)
    logging.getLogger("transformers").propagate = True
    torch.manual_seed(9)
    with caplog.at_level(logging.WARNING):
        again = ctxext.load(tmp_path)
    assert [record.getMessage() for record in caplog.records if ENCODING in record.getMessage()] == []
    assert type(again) is type(model)
    assert torch.equal(logits(again, ids), expected)
    assert again.state_dict().keys() == model.state_dict().keys()
    ctxext.unpatch(again)
    assert torch.equal(logits(again, ids), before)
    assert again.state_dict().keys() == tiny().state_dict().keys()
    with pytest.raises(CheckpointError, match=r"no rotary positions any more.*ctxext\.load"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.nightly
@every_encoding
def test_a_model_without_data_gets_one_without_data(name: str) -> None:
    with torch.device("meta"):
        model = type(tiny())(tiny().config)
    ctxext.patch(model, name, factor=4.0)
    assert all(weight.is_meta for weight in model.parameters())


@pytest.mark.nightly
@every_encoding
def test_learns_with_all_its_weights(name: str) -> None:
    """30 steps, and gradient checkpointing gives the gradients that are got without it."""
    model, ids = extended(name), tokens(48, rows=2)
    model.train()
    gradients = []
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_disable()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for step in range(30):
        loss = model(ids, labels=ids).loss
        loss.backward()
        if step == 0:
            assert all(weight.grad.any() for module in modules_of(model) for weight in module.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.nightly
@every_encoding
def test_a_long_text_is_never_all_paired(name: str) -> None:
    """Forward and backward: the largest tensor has fewer numbers than a quarter of one head's pairs.

    What is written out for some queries at a time: at 8,192 tokens, without data. What torch's kernels serve: with
    data, since without any they are spelled out.
    """
    cls = ENCODINGS[name]
    device, length = ("meta", 8192) if form_of(cls) == "rows" else ("cpu", 2048)
    spec = EncodingSpec(hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=16, num_layers=2, trained_length=length)
    with torch.device(device), Largest() as seen:
        encoding = cls().build(spec)
        q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
        layout = Layout.causal(1, length)
        encoding.added(layout.query_positions)
        pairs = pairs_of(q, k, layout, carried_by(encoding, 1, length, 16))
        score = encoding.score(pairs)
        out = named("sdpa")(q, k, v, layout, scale=0.25) if score is None else attended("sdpa", score, q, k, v, layout)
        out.sum().backward()
    assert 0 < seen.numbers < length * length / 4


@pytest.mark.slow
def test_what_needs_the_whole_text_takes_no_sliding_window() -> None:
    """A cache of the last tokens would drop what it reads; without a window the same model is served."""
    with pytest.raises(IncompatibleError, match="needs all tokens before a query, and a sliding window of 32"):
        ctxext.patch(tiny("mistral", sliding_window=32), "path", factor=4.0, sliding_window="keep")
    ctxext.patch(tiny("mistral", sliding_window=32), "path", factor=4.0, sliding_window="lift")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["sinusoidal", "learned", "fire", "fox", "t5_bias"])
def test_a_cache_of_a_window_counts_positions_from_the_start_of_the_text(name: str, cache: str) -> None:
    """Vectors of positions, and functions of them, differ where the cache holds the last tokens alone."""
    model = extended(name, tiny("mistral", sliding_window=16), sliding_window="keep")
    require_one_pass(model, cache, LENGTH, [10, 30, 12, *[1] * (LENGTH - 52)])


@pytest.mark.parametrize("name", ["sinusoidal", "t5_bias", "fox"])
def test_a_model_that_was_turned_round_after_the_patch_is_refused(name: str) -> None:
    model = extended(name)
    model.config.is_causal = False
    with pytest.raises(IncompatibleError, match=r"knows the past alone.*config\.is_causal back to True"):
        logits(model, tokens(9))
    model.config.is_causal = True
    logits(model, tokens(9))
    with pytest.raises(IncompatibleError, match="knows the past alone"):
        logits(model, tokens(9), is_causal=False)


@pytest.mark.nightly
@every_encoding
def test_begins_alike_from_the_same_seed(name: str) -> None:
    def made(seed: int) -> list[Tensor]:
        model = tiny()
        torch.manual_seed(seed)
        ctxext.patch(model, name, factor=4.0)
        return [weight for module in modules_of(model) for weight in module.parameters()]

    once, again, other = made(1), made(1), made(2)
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))
    draws = any(not torch.equal(weight, weight.flatten()[0].expand(weight.shape)) for weight in once)
    assert draws == any(not torch.equal(x, y) for x, y in zip(once, other, strict=True))


DROPPED_IN = '''
"""A score that falls by a learned number for each doubling of the distance."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ctxext.laboratory.scores import ByDistance, PairScore
from ctxext.methods.encoding import Encoding, EncodingForm, EncodingMethod, EncodingSpec, Pairs


@dataclass(frozen=True, kw_only=True)
class Doublings(EncodingMethod):
    """Lower each score by a learned number for each doubling of the distance.

    Pick it to see that a file is enough. What is lost: nothing. The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.

    Source: arXiv:0000.00000.
    """

    name: ClassVar[str] = "doublings"
    summary: ClassVar[str] = "a learned number for each doubling of the distance"
    source: ClassVar[str] = "arXiv:0000.00000"
    form: ClassVar[EncodingForm] = "scores"

    def build(self, spec: EncodingSpec) -> Encoding:
        return _Rates(spec.num_heads)


class _Rates(Encoding):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(heads))

    def score(self, pairs: Pairs) -> PairScore:
        return ByDistance(pairs, partial(_fallen, pairs.like_scores(self.rates)), (self.rates,), 4)


def _fallen(rates: Tensor, distances: Tensor) -> Tensor:
    return -rates.view(-1, *[1] * distances.ndim) * torch.log2(1 + distances.to(rates.dtype))
'''

ASKED_OF_IT = """
import sys

import pytest

where = "tests/attention/test_encodings.py"
code = pytest.main(["-p", "no:cacheprovider", "-n0", where, "-k", "doublings and (is_one or stock or future)"])

# Not before pytest, which checks the types of what is imported after it.
import ctxext
from ctxext import registry
from scripts.update_readme import described_methods, made

assert ctxext.methods()["doublings"].__module__ == "ctxext.laboratory.encodings.doublings"
told = described_methods()["doublings"]
assert (told["group"], told["what it does"][:33]) == ("scores", "a learned number for each doubling"[:33])

listed, lines = next(made())
listed.write_text(lines)
registry.listed.cache_clear()

from typer.testing import CliRunner

from ctxext.cli.app import app
from ctxext.laboratory.subjects import subjects

assert "doublings" in subjects(), "ctxext lab"
shown = CliRunner().invoke(app, ["show", "doublings", "--json"])
assert '"bias"' in shown.output, shown.output
sys.exit(code)
"""


@pytest.mark.nightly
def test_a_file_is_enough(tmp_path: Path) -> None:
    """Dropped into the folder of encodings and listed, it is documented, drawn, trained, and held to this."""
    root = Path(__file__).parents[2]
    for part in ("ctxext", "scripts", "tests"):
        kept = shutil.ignore_patterns("__pycache__", "golden", "evaluation" if part == "tests" else "")
        shutil.copytree(root / part, tmp_path / part, ignore=kept)
    for part in ("recipes", "docs", "pyproject.toml", "README.md"):
        (tmp_path / part).symlink_to(root / part)
    (tmp_path / "ctxext" / "laboratory" / "encodings" / "doublings.py").write_text(DROPPED_IN)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    how: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    ran = subprocess.run([sys.executable, "-c", ASKED_OF_IT], **how)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert re.search(r"^4 passed", ran.stdout, re.MULTILINE), ran.stdout[-3000:]


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, MethodCheck]]:
    """What is said of every method, although of those of one form a single one is tried."""
    found = {}
    for kind in ("llama", "gemma2"):
        folder = tmp_path_factory.mktemp(kind)
        tiny(kind).config.save_pretrained(folder)
        found[kind] = {one.method: one for one in inspect_checkpoint(folder).verdicts}
    return found


@pytest.mark.nightly
@every_encoding
def test_inspect_says_what_patching_does(name: str, inspected: dict[str, dict[str, MethodCheck]]) -> None:
    found = inspected["llama"][name]
    said = ctxext.describe(ctxext.patch(tiny(), name, factor=found.factor))
    about = {"target_length": said.target_length, "stored_as": said.stored_as, "stock": said.stock}
    about["needs_training"] = known_methods()[name].needs_training
    assert found == MethodCheck(method=name, factor=found.factor, **about)
    with pytest.raises(IncompatibleError) as refusal:
        ctxext.patch(tiny("gemma2"), name, factor=found.factor)
    assert inspected["gemma2"][name].refused == str(refusal.value)


@pytest.mark.slow
def test_an_offloaded_model_is_refused_or_computes_the_same(tmp_path: Path) -> None:
    """Hooks bring the weights of a module when it is called; those of an encoding are read without that."""
    for name in ENCODINGS:
        model = extended(name)
        offloaded, has_weights = tiny(), any([*module.state_dict()] for module in modules_of(model))
        cpu_offload(offloaded, execution_device=torch.device("cpu"))
        plain = logits(offloaded, tokens(LENGTH))
        model.save_pretrained(tmp_path / name)
        load = functools.partial(ctxext.load, tmp_path / name, device_map={"": "disk"}, offload_folder=tmp_path)
        if has_weights:
            for extend in (functools.partial(ctxext.patch, offloaded, name, factor=4.0), load):
                with pytest.raises(IncompatibleError, match=f"is offloaded, which the weights of '{name}' cannot be"):
                    extend()
            assert torch.equal(logits(offloaded, tokens(LENGTH)), plain)
        else:
            expected = logits(model, tokens(LENGTH))
            for same in (ctxext.patch(offloaded, name, factor=4.0), load()):
                assert torch.equal(logits(same, tokens(LENGTH)), expected)


class Packed(nn.Module):
    """A linear layer whose weights have 8 bits: whole numbers as of bitsandbytes, or DeepSeek's float8 with a scale."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        scale = linear.weight.abs().max().float() / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(dtype), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale) if dtype.is_floating_point else scale

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype) * self.weight_scale_inv.to(states.dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", some(ENCODINGS, "fox", "t5_bias"))
def test_quantised_layers_get_an_encoding_in_the_dtype_of_the_rest(name: str, dtype: torch.dtype) -> None:
    """Whole numbers tell no dtype to compute in, float8 is none, and a scale has another."""
    model = tiny().bfloat16()
    for layer in model.model.layers:
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, part, Packed(getattr(layer.self_attn, part), dtype))
    ctxext.patch(model, name, factor=4.0)
    assert {weight.dtype for module in modules_of(model) for weight in module.parameters()} <= {torch.bfloat16}
    assert logits(model, tokens(LENGTH)).isfinite().all()
