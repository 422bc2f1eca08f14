"""What must hold for one method on one model type, checked from outside, through the public verbs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import ctxext
from ctxext.architectures import find_architecture
from ctxext.architectures.buckets import Buckets
from ctxext.errors import CtxextError, IncompatibleError, PatchStateError
from ctxext.methods import METHODS, Method, RopeMethod, TableMethod
from ctxext.spec import RopeSpec
from ctxext.surgery.probe import FAILURES, look
from ctxext.surgery.rebuild import rotaries
from ctxext.surgery.rotary import find_sites
from scripts.walk.stock import logits_of
from scripts.walk.tiny import TRAINED_LENGTH, VOCABULARY

__all__ = [
    "Finding",
    "State",
    "Stock",
    "check_method",
    "check_model",
    "inputs_for",
    "rotating_layers",
    "sees_future",
    "walked_methods",
]

FIRST_TOKEN = 40  # below are special tokens (images, audio, ends of text) in some vocabularies


@dataclass(frozen=True)
class Finding:
    """The outcome of one method on one model.

    Args:
        method: the method's name, with what was done about sliding windows.
        outcome: "right", "refused" (by a named reason), "wrong", or "unchecked" (accepted, and not to be run here).
        detail: how it is stored, or the reason, or what went wrong.
        stock: whether stock transformers loads it.
    """

    method: str
    outcome: str
    detail: str
    stock: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)


@dataclass
class Stock:
    """A long-lived process of stock transformers, fed over a pipe."""

    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Stock:
        script = Path(__file__).with_name("stock.py")
        command = [sys.executable, "-W", "ignore", str(script)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def logits(self, directory: Path, inputs: Path) -> Tensor | str:
        """The logits of a checkpoint, or what stock transformers says instead of loading it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"directory": str(directory), "inputs": str(inputs)}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The stock process died on {directory} with exit status {self.process.wait()}.")
        reply: dict[str, str] = json.loads(line)
        return reply["error"] if "error" in reply else load_file(directory / reply["logits"])["logits"].clone()


def walked_methods(names: list[str] | None = None) -> list[type[Method]]:
    """All discovered methods, or those named: those that change rotation and the retrofits that replace it."""
    chosen = [METHODS[name] for name in names or METHODS]
    return [cls for cls in chosen if issubclass(cls, RopeMethod) or not issubclass(cls, TableMethod)]


def inputs_for(model: PreTrainedModel) -> Tensor:
    """Random tokens, three times as many as the model was trained for where its positions allow that."""
    reads_further = any(True for _ in rotaries(model)) or isinstance(find_architecture(model), Buckets)
    length = 3 * TRAINED_LENGTH if reads_further else TRAINED_LENGTH
    generator = torch.Generator().manual_seed(0)
    return torch.randint(FIRST_TOKEN, VOCABULARY, (1, length), generator=generator)


def check_model(model: PreTrainedModel, methods: list[type[Method]], stock: Stock, folder: Path) -> list[Finding]:
    """Every method on one model; where the windows of all layers must be decided on, both decisions."""
    inputs = inputs_for(model)
    try:
        logits_of(model, inputs)
    except FAILURES as error:
        return [_refused_at_least(model, method, error) for method in methods]
    problem = _layers_problem(model, inputs)
    if problem:
        return [Finding("none", "wrong", problem)]
    save_file({"input_ids": inputs}, folder / "inputs.safetensors")
    problem = _plain_problem(model, inputs, stock, folder)
    if problem:
        return [Finding("none", "wrong", f"unpatched: {problem}")]
    findings = []
    before = State.of(model, inputs)
    bidirectional = sees_future(model, inputs, before.logits)
    arguments = _necessary_arguments(model)
    for method_class in methods:
        method = method_class.example(_spec(model))
        for more in arguments:
            findings.append(check_method(model, before, method, more, stock, folder, bidirectional))
    return findings


def _refused_at_least(model: PreTrainedModel, method_class: type[Method], error: Exception) -> Finding:
    """A model that does not read tokens alone cannot be checked, so nothing may be promised of it."""
    try:
        ctxext.patch(model, method_class.example(_spec(model)), **_necessary_arguments(model)[0])
    except CtxextError as refusal:
        return Finding(method_class.name, "refused", f"{type(refusal).__name__}: {refusal}")
    ctxext.unpatch(model)
    cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Finding(method_class.name, "unchecked", f"does not read tokens alone ({cause})")


def _layers_problem(model: PreTrainedModel, inputs: Tensor) -> str | None:
    """Whether the layers that ctxext sees rotate are those that do, by arithmetic with what is not a number."""
    paths = [path for path, module in rotaries(model) if _is_decoders(model, module)]
    if not paths:
        return None
    seen = look(model, paths)
    if seen.failure:
        return f"its layers could not be seen: {seen.failure}"
    found = rotating_layers(model, inputs, paths, seen.attending | seen.rotating)
    if found != seen.rotating:
        return f"layers that rotate: {sorted(found)} by arithmetic, {sorted(seen.rotating)} by ctxext"
    return None


def _is_decoders(model: PreTrainedModel, rotary: Any) -> bool:
    return not model.config.is_encoder_decoder and rotary.config is model.config.get_text_config(decoder=True)


def rotating_layers(model: PreTrainedModel, inputs: Tensor, paths: list[str], layers: frozenset[str]) -> set[str]:
    """Layers whose output is not a number when cos and sin are not, and their own input is.

    Args:
        model: any model.
        inputs: tokens that it reads.
        paths: its rotary modules.
        layers: some layers; all that stand beside them are watched.
    """
    found: set[str] = set()

    def spoil(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return torch.full_like(output, torch.nan)
        return tuple(torch.full_like(part, torch.nan) for part in output)

    def clean(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0].nan_to_num(), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"].nan_to_num()}

    def note(path: str) -> Any:
        def look_at(module: nn.Module, args: Any, output: Any) -> None:
            if (output if isinstance(output, Tensor) else output[0]).isnan().any():
                found.add(path)

        return look_at

    handles = [model.get_submodule(path).register_forward_hook(spoil) for path in paths]
    lists = {path.rpartition(".")[0] for path in layers}
    for path in [f"{name}.{item}" for name in lists for item, _ in model.get_submodule(name).named_children()]:
        layer = model.get_submodule(path)
        handles.append(layer.register_forward_pre_hook(clean, with_kwargs=True))
        handles.append(layer.register_forward_hook(note(path)))
    try:
        logits_of(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def sees_future(model: PreTrainedModel, inputs: Tensor, logits: Tensor) -> bool:
    """Whether a change of one token reaches what the model says of the tokens before it; ``logits`` are unchanged's."""
    other, at = inputs.clone(), 2 * inputs.shape[1] // 3
    other[0, at] = FIRST_TOKEN + (other[0, at] - FIRST_TOKEN + 1) % (VOCABULARY - FIRST_TOKEN)
    moved = (logits_of(model, other) - logits)[:, :at].abs().max()
    return bool(moved > 1e-4 * logits.abs().max())  # sums of other lengths (experts) round differently


def _plain_problem(model: PreTrainedModel, inputs: Tensor, stock: Stock, folder: Path) -> str | None:
    """Why the model itself cannot be compared with its reload (saving also fills in fields of the config)."""
    logits = logits_of(model, inputs)
    if not torch.isfinite(logits).all():
        return "the random model has no finite logits"
    model.save_pretrained(folder / "plain")
    found = stock.logits(folder / "plain", folder / "inputs.safetensors")
    return found if isinstance(found, str) else _prefixed("stock reload: ", _unequal(found, logits))


def _necessary_arguments(model: PreTrainedModel) -> list[dict[str, Any]]:
    """What ``patch`` asks to be told about this model: nothing, its trained length, its windows."""
    given: dict[str, Any] = {}
    method = "stretch_buckets" if isinstance(find_architecture(model), Buckets) else "pi"
    for _ in range(3):
        try:
            ctxext.unpatch(ctxext.patch(model, method, factor=4.0, **given))
        except PatchStateError:
            given["scaling"] = "extend"  # random weights are taken to know what their config says
        except IncompatibleError as error:
            if "Pass trained_length" in str(error):
                given["trained_length"] = TRAINED_LENGTH
                continue
            if "sliding_window='lift'" in str(error):
                return [given | {"sliding_window": choice} for choice in ("keep", "lift")]
            break
        except CtxextError:
            break
        else:
            break
    return [given]


def _spec(model: PreTrainedModel) -> RopeSpec:
    """What examples of methods are made for; any spec will do for a model that is refused anyway."""
    model.config.get_text_config(decoder=True)
    try:
        return find_sites(model, TRAINED_LENGTH)[0].spec
    except IncompatibleError:
        return RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)


@dataclass(frozen=True)
class State:
    """Everything that unpatching must bring back."""

    inputs: Tensor
    logits: Tensor
    config: dict[str, Any]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, inputs: Tensor) -> State:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return cls(inputs, logits_of(model, inputs), model.config.to_dict(), weights)

    def difference(self, model: PreTrainedModel) -> str | None:
        """What of it differs in ``model`` now."""
        now = State.of(model, self.inputs)
        if now.config != self.config:
            keys = [k for k in {*now.config, *self.config} if now.config.get(k) != self.config.get(k)]
            return f"config differs in {sorted(keys)}"
        if list(now.weights) != list(self.weights):
            return "state_dict has other keys"
        for name, value in self.weights.items():
            if not torch.equal(now.weights[name], value):
                return f"weight {name} differs"
        return _unequal(now.logits, self.logits)


def check_method(
    model: PreTrainedModel,
    before: State,
    method: Method,
    arguments: dict[str, Any],
    stock: Stock,
    folder: Path,
    bidirectional: bool,
) -> Finding:
    """Patch, save, reload with and without ctxext, unpatch; say what was found."""
    window = arguments.get("sliding_window")
    name = f"{method.name} ({window})" if window else method.name
    try:
        ctxext.patch(model, method, **arguments)
    except CtxextError as error:
        left = before.difference(model)
        if left:
            return Finding(name, "wrong", f"a refused patch left traces: {left} ({error})")
        return Finding(name, "refused", f"{type(error).__name__}: {error}")
    description = ctxext.describe(model)
    # A directory of its own: weights are memory-mapped, and a file must not change under a process that has it open.
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        where = Path(directory), folder / "inputs.safetensors"
        problem = _patched_problem(model, before, arguments, stock, *where, bidirectional)
    ctxext.unpatch(model)
    problem = problem or _prefixed("unpatch: ", before.difference(model))
    if problem:
        return Finding(name, "wrong", f"{problem} [{description.stored_as}]", description.stock)
    return Finding(name, "right", description.stored_as, description.stock)


def _patched_problem(
    model: PreTrainedModel,
    before: State,
    arguments: dict[str, Any],
    stock: Stock,
    directory: Path,
    inputs_file: Path,
    bidirectional: bool,
) -> str | None:
    inputs, is_stock = before.inputs, ctxext.describe(model).stock
    logits = logits_of(model, inputs)
    if not torch.isfinite(logits).all():
        return "the patched model has no finite logits"
    if sees_future(model, inputs, logits) is not bidirectional:
        return f"tokens {'no longer see' if bidirectional else 'now see'} those that come after them"
    if problem := _window_problem(model, before, arguments.get("sliding_window")):
        return problem
    beyond = (logits - before.logits)[:, TRAINED_LENGTH:].abs().max().item()
    if beyond < 1e-3:
        return f"patching hardly changed the logits beyond the trained length: {beyond:.3g}"
    model.save_pretrained(directory)
    found = stock.logits(directory, inputs_file)
    if isinstance(found, str) and is_stock:
        return f"stock transformers does not load it: {found}"
    if isinstance(found, Tensor) and not is_stock:
        return "stock transformers loads what only ctxext can express"
    if isinstance(found, Tensor) and (problem := _unequal(found, logits)):
        return f"stock reload: {problem}"
    loaded = ctxext.load(directory).eval()
    return _prefixed("ctxext.load: ", _unequal(logits_of(loaded, inputs), logits))


def _window_problem(model: PreTrainedModel, before: State, choice: str | None) -> str | None:
    """Whether windows that were to be lifted still hide the first token from the last one."""
    if choice != "lift":
        return None
    other = before.inputs.clone()
    other[0, 0] = FIRST_TOKEN + (other[0, 0] - FIRST_TOKEN + 1) % (VOCABULARY - FIRST_TOKEN)
    if torch.equal(logits_of(model, other)[:, -1], logits_of(model, before.inputs)[:, -1]):
        return "sliding_window='lift': the last token does not see the first one"
    return None


def _unequal(found: Tensor, expected: Tensor) -> str | None:
    if torch.equal(found, expected):
        return None
    return f"logits differ by up to {(found - expected).abs().max().item():.3g}"


def _prefixed(prefix: str, problem: str | None) -> str | None:
    return None if problem is None else prefix + problem
