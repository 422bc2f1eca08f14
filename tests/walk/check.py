"""What must hold for one method on one model type, checked from outside, through the public verbs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import ctxext
from ctxext.core.rebuild import FAILURES
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, PatchStateError
from ctxext.methods import Method, TableMethod, known_methods
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.models import find_architecture
from ctxext.models.alibi import AlibiArchitecture
from ctxext.models.buckets import Buckets
from ctxext.probe.layers import look
from ctxext.rotary.sites import find_sites
from ctxext.spec import RopeSpec
from tests.walk.kinds import group_of, groups_for
from tests.walk.stock import logits_of, output_of
from tests.walk.tiny import TRAINED_LENGTH, VOCABULARY

FIRST_TOKEN = 40  # below are special tokens (images, audio, ends of text) in some vocabularies
# Largest difference of logits, whose size is about 10, where the model's own code computes ALiBi by another kernel: in
# float32 either is off by 3e-5. Slopes that are wrong by a hundredth move them by far more.
OTHER_KERNEL = 1e-4
FACTOR = 2.0  # of tables: their longest text is read to its end, so it is kept short
# What ``describe`` says of short texts.
KEPT, MOVED = "are read exactly as before", "Positions of short texts change too"


@dataclass(frozen=True)
class Finding:
    """The outcome of one method on one model."""

    method: str  # its name, with the side it was given to and what was done about sliding windows
    outcome: str  # "right", "refused" (by a named reason), "wrong", or "unchecked" (accepted, and not to be run here)
    detail: str  # how it is stored, or the reason, or what went wrong
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


@dataclass(frozen=True)
class Case:
    """A model that is to be checked, as it was before any patch."""

    model: PreTrainedModel
    before: State  # with a text that it could read then
    long: Tensor  # a text beyond its trained length, which it must read once it is extended
    trained: int
    read: Tensor | None  # what it said of the long text before; None where it could not read that
    sees: tuple[bool, ...]  # whether tokens see those after them, of the decoder and of the encoder
    stock: Stock
    folder: Path  # for checkpoints; the long text lies there
    rounding: float = 0.0  # by how much logits of stock code may differ from those of ctxext

    @property
    def is_bounded(self) -> bool:
        """Whether a text of the trained length is all that the model could read before."""
        return self.before.inputs.shape != self.long.shape


def walked_methods(names: list[str] | None = None) -> list[type[Method]]:
    """All discovered methods, or those named."""
    return [known_methods()[name] for name in names or known_methods()]


def text_of_length(length: int) -> Tensor:
    """Random tokens."""
    return torch.randint(FIRST_TOKEN, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


def check_model(
    model: PreTrainedModel, methods: list[type[Method]], stock: Stock, folder: Path, kind: str | None = None
) -> list[Finding]:
    """Every method on one model; where the windows of all layers must be decided on, both decisions.

    Of groups of methods that are not for its ``kind`` of positions, one method is tried, and the others only if that is
    not refused. Left out, every method is checked.
    """
    case: Case | list[Finding] | Exception = _case_of(model, stock, folder)
    if isinstance(case, list):
        return case
    findings: list[Finding] = []
    spec, arguments = _spec(model), _necessary_arguments(model)
    skipped: set[str] = set()
    for method_class in methods:
        group = group_of(method_class, kind or "")
        if group in skipped:
            continue
        method = _example(method_class, spec, not isinstance(case, Exception) and case.is_bounded)
        for more in arguments:
            if isinstance(case, Exception):
                findings.append(_refused_at_least(model, method, more, case))
            else:
                findings.append(check_method(case, method, more))
        if kind is not None and group not in groups_for(kind) and findings[-1].outcome == "refused":
            skipped.add(group)
    return findings


def _case_of(model: PreTrainedModel, stock: Stock, folder: Path) -> Case | list[Finding] | Exception:
    """The model as it is, or what is wrong with it already, or the error of one that does not read tokens alone."""
    long, short = text_of_length(3 * TRAINED_LENGTH), text_of_length(3 * TRAINED_LENGTH)
    trained, architecture = TRAINED_LENGTH, find_architecture(Subject.of(model))
    logits = _read(model, short)
    if architecture is None or architecture.replaces_weights(Subject.of(model)) or logits is None:
        said = ctxext.describe(model).trained_length
        trained = said if said and said > 0 else TRAINED_LENGTH  # XLNet's config says -1
        short, long = text_of_length(trained), text_of_length(int(FACTOR * trained))
        try:
            logits = logits_of(model, short)
        except FAILURES as error:
            return error
    if problem := _layers_problem(model, short):
        return [Finding("none", "wrong", problem)]
    for name, inputs in (("short", short), ("long", long)):
        save_file({"input_ids": inputs}, folder / f"{name}.safetensors")
    if problem := _plain_problem(model, short, stock, folder):
        if architecture is None:  # there is nothing to patch, and nothing to compare afterwards
            return RuntimeError(problem)
        return [Finding("none", "unchecked", f"the unextended model is not loaded as it was saved ({problem})")]
    read = logits if long.shape == short.shape else _read(model, long)
    rounding = 0.0
    if isinstance(architecture, AlibiArchitecture):
        read, rounding = None, OTHER_KERNEL  # its own ALiBi is what it read before, computed otherwise
    before = State.of(model, short)
    return Case(model, before, long, trained, read, sees_ahead(model, short), stock, folder, rounding)


def _read(model: PreTrainedModel, inputs: Tensor) -> Tensor | None:
    """The logits of a text; beyond its trained length some fail (fixed sinusoids in CTRL, slopes in MPT)."""
    try:
        return logits_of(model, inputs)
    except FAILURES:
        return None


def _example(method_class: type[Method], spec: RopeSpec, is_bounded: bool) -> Method:
    if is_bounded and issubclass(method_class, TableMethod):
        return method_class.of({"factor": FACTOR})
    method = method_class.example(spec)
    if isinstance(method, RetrievalHeads):
        return replace(method, heads=None)  # the model's own: the example's may lie in a layer with a window
    return method


def _refused_at_least(model: PreTrainedModel, method: Method, more: dict[str, Any], error: Exception) -> Finding:
    """A model that does not read tokens alone cannot be checked, so nothing may be promised of it."""
    name = _name(method, more)
    try:
        ctxext.patch(model, method, **more)
    except CtxextError as refusal:
        return Finding(name, "refused", f"{type(refusal).__name__}: {refusal}")
    ctxext.unpatch(model)
    cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Finding(name, "unchecked", f"does not read tokens alone ({cause})")


def _name(method: Method, more: dict[str, Any]) -> str:
    """A method as it is listed, with what was done about windows."""
    return f"{method.name} ({more['sliding_window']})" if "sliding_window" in more else method.name


def _layers_problem(model: PreTrainedModel, inputs: Tensor) -> str | None:
    """Whether the layers that ctxext sees rotate are those that do, by arithmetic with what is not a number."""
    paths = [path for path, module in Subject(model).rotaries if is_decoders(model, module)]
    if not paths:
        return None
    seen = look(model, paths)
    if seen.failure:
        return f"its layers could not be seen: {seen.failure}"
    found = rotating_layers(model, inputs, paths, seen.attending | seen.rotating)
    if found != seen.rotating:
        return f"layers that rotate: {sorted(found)} by arithmetic, {sorted(seen.rotating)} by ctxext"
    return None


def is_decoders(model: PreTrainedModel, rotary: Any) -> bool:
    """Whether a rotary module follows the config of the text, or a changed copy of it, and no encoder is beside."""
    text = model.config.get_text_config(decoder=True)
    return not model.config.is_encoder_decoder and type(rotary.config) is type(text)


def rotating_layers(model: PreTrainedModel, inputs: Tensor, paths: list[str], layers: frozenset[str]) -> set[str]:
    """Layers whose output is not a number when cos and sin are not, and their own input is.

    ``paths`` are those of its rotary modules; all that stand beside ``layers`` are watched.
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


def sees_ahead(model: PreTrainedModel, inputs: Tensor) -> tuple[bool, ...]:
    """Whether a change of one token reaches what the model says of the tokens before it.

    Of an encoder-decoder, whether a token of the decoder's text does, and whether one of the encoder's does in what the
    encoder says.
    """
    other, at = inputs.clone(), 2 * inputs.shape[1] // 3
    other[0, at] = FIRST_TOKEN + (other[0, at] - FIRST_TOKEN + 1) % (VOCABULARY - FIRST_TOKEN)
    if not model.config.is_encoder_decoder:
        return (_moved(logits_of(model, inputs), logits_of(model, other), at),)
    plain, written, read = (output_of(model, *texts) for texts in ((inputs,), (inputs, other), (other, inputs)))
    found = [_moved(plain.logits, written.logits, at)]
    if (states := plain.get("encoder_last_hidden_state")) is not None and states.shape[1] == inputs.shape[1]:
        found.append(_moved(states, read.encoder_last_hidden_state, at))
    return tuple(found)


def _moved(plain: Tensor, other: Tensor, at: int) -> bool:
    # Sums of other lengths (experts) round differently.
    return bool((other - plain)[:, :at].abs().max() > 1e-4 * plain.abs().max())


def _plain_problem(model: PreTrainedModel, inputs: Tensor, stock: Stock, folder: Path) -> str | None:
    """Why the model itself cannot be compared with its reload (saving also fills in fields of the config)."""
    logits = logits_of(model, inputs)
    if not torch.isfinite(logits).all():
        return "the random model has no finite logits"
    model.save_pretrained(folder / "plain")
    found = stock.logits(folder / "plain", folder / "short.safetensors")
    return found if isinstance(found, str) else _prefixed("stock reload: ", _unequal(found, logits))


def _necessary_arguments(model: PreTrainedModel) -> list[dict[str, Any]]:
    """What ``patch`` asks to be told about this model: nothing, its trained length, its windows."""
    given: dict[str, Any] = {}
    method = "stretch_buckets" if isinstance(find_architecture(Subject.of(model)), Buckets) else "pi"
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
        subject = Subject.of(model)
        found = find_architecture(subject)
        if hasattr(found, "spec") and not isinstance(found, AlibiArchitecture):
            spec: RopeSpec = found.spec(subject)
            return spec
        return find_sites(next(iter(subject.sides.values()), subject), TRAINED_LENGTH)[0].spec
    except IncompatibleError:
        return RopeSpec(rotary_dim=32, base=10000.0, trained_length=TRAINED_LENGTH)


def check_method(case: Case, method: Method, more: dict[str, Any]) -> Finding:
    """Patch, save, reload with and without ctxext, unpatch; say what was found."""
    model, name = case.model, _name(method, more)
    try:
        ctxext.patch(model, method, **more)
    except CtxextError as error:
        left = case.before.difference(model)
        if left:
            return Finding(name, "wrong", f"a refused patch left traces: {left} ({error})")
        return Finding(name, "refused", f"{type(error).__name__}: {error}")
    description = ctxext.describe(model)
    # A directory of its own: weights are memory-mapped, and a file must not change under a process that has it open.
    with tempfile.TemporaryDirectory(dir=case.folder) as directory:
        problem = _patched_problem(case, more, Path(directory))
    ctxext.unpatch(model)
    problem = problem or _prefixed("unpatch: ", case.before.difference(model))
    if problem:
        return Finding(name, "wrong", f"{problem} [{description.stored_as}]", description.stock)
    return Finding(name, "right", description.stored_as, description.stock)


def _patched_problem(case: Case, more: dict[str, Any], directory: Path) -> str | None:
    model, description = case.model, ctxext.describe(case.model)
    logits = logits_of(model, case.long)
    if not torch.isfinite(logits).all():
        return "the patched model has no finite logits"
    now = sees_ahead(model, case.before.inputs)
    if now != case.sees:
        return f"tokens {'no longer see' if sum(now) < sum(case.sees) else 'now see'} those that come after them"
    if problem := _window_problem(case, more.get("sliding_window")):
        return problem
    if problem := _effect_problem(case, logits):
        return problem
    model.save_pretrained(directory)
    found = case.stock.logits(directory, case.folder / "long.safetensors")
    if isinstance(found, str) and description.stock:
        return f"stock transformers does not load it: {found}"
    if isinstance(found, Tensor) and not description.stock:
        return "stock transformers loads what only ctxext can express"
    if isinstance(found, Tensor) and (problem := _unequal(found, logits, case.rounding)):
        return f"stock reload: {problem}"
    loaded = ctxext.load(directory).eval()
    return _prefixed("ctxext.load: ", _unequal(logits_of(loaded, case.long), logits))


def _effect_problem(case: Case, logits: Tensor) -> str | None:
    """Whether long texts are read otherwise, and short ones as before where that is promised."""
    if case.read is not None:
        beyond = (logits - case.read)[:, case.trained :].abs().max().item()
        if beyond < 1e-3:
            return f"patching hardly changed the logits beyond the trained length: {beyond:.3g}"
    if not case.is_bounded:
        return None
    is_kept = torch.equal(logits_of(case.model, case.before.inputs), case.before.logits)
    notes = " ".join(ctxext.describe(case.model).notes)
    if KEPT in notes and not is_kept:
        return "a text of the trained length is promised to be read as before, and is not"
    if MOVED in notes and is_kept:
        return "a text of the trained length is read as before, though it is said to be read otherwise"
    return None


def _window_problem(case: Case, choice: str | None) -> str | None:
    """Whether windows that were to be lifted still hide every far token from the last one.

    Two are tried: the first, which alone a method sees that drops the middle of a text, and one that lies two trained
    lengths before the last (more than all layers of a tiny model hand on through their windows), since an encoding
    that forgets rounds the first away.
    """
    if choice != "lift":
        return None
    last = logits_of(case.model, case.long)[:, -1]
    for place in (0, max(0, case.long.shape[1] - 1 - 2 * case.trained)):
        other = case.long.clone()
        other[0, place] = FIRST_TOKEN + (other[0, place] - FIRST_TOKEN + 1) % (VOCABULARY - FIRST_TOKEN)
        if not torch.equal(logits_of(case.model, other)[:, -1], last):
            return None
    return "sliding_window='lift': the last token sees neither the first one nor one two trained lengths before"


def _unequal(found: Tensor, expected: Tensor, rounding: float = 0.0) -> str | None:
    apart = (found - expected).abs().max().item()
    return f"logits differ by up to {apart:.3g}" if not apart <= rounding else None


def _prefixed(prefix: str, problem: str | None) -> str | None:
    return None if problem is None else prefix + problem
