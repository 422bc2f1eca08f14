"""What must hold for one method on one model with a table of learned positions, checked through the public verbs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import ctxext
from ctxext.architectures import find_architecture
from ctxext.architectures.table import LearnedTable
from ctxext.errors import CtxextError
from ctxext.methods import METHODS, Method, TableMethod
from ctxext.surgery.probe import FAILURES
from scripts.walk.check import Finding, State, Stock, sees_future
from scripts.walk.stock import logits_of
from scripts.walk.tiny import VOCABULARY

__all__ = ["check_tables", "has_table", "table_methods"]

FACTOR = 2
EXACT = ("tile", "hierarchical")  # texts of up to the trained length are read as before, bit for bit


def has_table(model: PreTrainedModel) -> bool:
    """Whether ctxext finds learned positions in it."""
    return isinstance(find_architecture(model), LearnedTable)


def table_methods(names: list[str] | None = None) -> list[type[Method]]:
    """All methods that make rows of a table, or those of them that are named."""
    return [cls for name, cls in METHODS.items() if issubclass(cls, TableMethod) and (names is None or name in names)]


def check_tables(model: PreTrainedModel, methods: list[type[Method]], stock: Stock, folder: Path) -> list[Finding]:
    """Every method on one model."""
    trained = ctxext.describe(model).trained_length
    assert trained is not None
    short, long = _text(trained), _text(FACTOR * trained)
    try:
        logits_of(model, short)
    except FAILURES as error:
        return [_refused_at_least(model, method, error) for method in methods]
    for name, inputs in (("short", short), ("long", long)):
        save_file({"input_ids": inputs}, folder / f"{name}.safetensors")
    model.save_pretrained(folder / "plain")  # saving also fills in fields of the config
    found = stock.logits(folder / "plain", folder / "short.safetensors")
    before = State.of(model, short)
    if isinstance(found, str) or not torch.equal(found, before.logits):
        said = found if isinstance(found, str) else "a stock reload differs"
        return [Finding("none", "wrong", f"unpatched: {said}")]
    return [_check(model, before, long, method.of({"factor": FACTOR}), stock, folder) for method in methods]


def _text(length: int) -> Tensor:
    return torch.randint(40, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


def _refused_at_least(model: PreTrainedModel, method: type[Method], error: Exception) -> Finding:
    """A model that does not read tokens alone cannot be checked, so nothing may be promised of it."""
    try:
        ctxext.unpatch(ctxext.patch(model, method.of({"factor": FACTOR})))
    except CtxextError as refusal:
        return Finding(method.name, "refused", f"{type(refusal).__name__}: {refusal}")
    cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Finding(method.name, "unchecked", f"does not read tokens alone ({cause})")


def _check(model: PreTrainedModel, before: State, long: Tensor, method: Method, stock: Stock, folder: Path) -> Finding:
    bidirectional = sees_future(model, before.inputs, before.logits)
    try:
        ctxext.patch(model, method)
    except CtxextError as error:
        left = before.difference(model)
        if left:
            return Finding(method.name, "wrong", f"a refused patch left traces: {left} ({error})")
        return Finding(method.name, "refused", f"{type(error).__name__}: {error}")
    stored_as = ctxext.describe(model).stored_as
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        problem = _problem(model, before, long, method, stock, Path(directory), bidirectional)
    ctxext.unpatch(model)
    left = before.difference(model)
    problem = problem or (None if left is None else f"unpatch: {left}")
    return Finding(method.name, "right" if problem is None else "wrong", problem or stored_as, stock=True)


def _problem(
    model: PreTrainedModel,
    before: State,
    long: Tensor,
    method: Method,
    stock: Stock,
    directory: Path,
    bidirectional: bool,
) -> str | None:
    short = logits_of(model, before.inputs)
    if torch.equal(short, before.logits) is not (method.name in EXACT):
        return f"a text of the trained length is {'not ' if method.name in EXACT else ''}read exactly as before"
    logits = logits_of(model, long)
    if not torch.isfinite(logits).all():
        return "the patched model has no finite logits"
    if sees_future(model, long, logits) is not bidirectional:
        return f"tokens {'no longer see' if bidirectional else 'now see'} those that come after them"
    model.save_pretrained(directory)
    found = stock.logits(directory, directory.parent / "long.safetensors")
    if isinstance(found, str):
        return f"stock transformers does not load it: {found}"
    if not torch.equal(found, logits):
        return f"stock reload: logits differ by up to {(found - logits).abs().max().item():.3g}"
    loaded = ctxext.load(directory).eval()
    if not torch.equal(logits_of(loaded, long), logits):
        return "ctxext.load: other logits"
    return None
