"""What every proof of a runtime shares: tiny models that were extended, and how far log-probabilities are apart."""

from __future__ import annotations

import copy
import json
import math
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import transformers
from transformers import PreTrainedModel
from typer import Option

import ctxext
from ctxext.checkpoints.export import export
from ctxext.errors import CtxextError, IncompatibleError
from ctxext.methods import METHODS, Method, known_methods
from ctxext.runtimes.base import Export, is_close
from ctxext.spec import RopeSpec
from tests.walk.tiny import TRAINED_LENGTH, VOCABULARY, tiny_config, tiny_model

FACTOR = 4
TARGET = FACTOR * TRAINED_LENGTH
TOKENS = 150  # beyond the trained window, within the extended one
# Beside every method as it comes: numbers that are not the defaults of llama.cpp, so that what is not read shows.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn, betas 16 and 2": ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn, attention_factor 1.3": ("yarn", {"attention_factor": 1.3}),
    "yarn, truncate False": ("yarn", {"truncate": False}),
}

# Fields of tiny configs whose usual small values no published checkpoint has and llama.cpp or mlx-lm does not compute.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "mistral": {"sliding_window": None},
    "phi": {"intermediate_size": 512},
    "qwen3_moe": {"norm_topk_prob": True},
}


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What one way of serving one method gave.

    Args:
        shape: the model type.
        method: the method, or a variant of it.
        way: how it was reached, by the script's own names; "any" where all are refused alike.
        exact: whether ``export`` says that it is; None where it refuses.
        said: why it refuses, or its notes.
        error: nats from the patched model, at the worst of all tokens; None where nothing was run.
        matters: nats between the patched model and the plain one; with a model's own ALiBi, which is never plain,
            between its slopes and a quarter of them.
    """

    shape: str
    method: str
    way: str
    exact: bool | None
    said: str
    error: float | None = None
    matters: float | None = None

    @property
    def right(self) -> bool:
        """Whether the runtime computed what the patched model does."""
        return self.error is not None and self.matters is not None and is_close(self.error, self.matters)


def write_table(path: Path, versions: dict[str, str], types: dict[str, Any]) -> None:
    """Write what a runtime does with each model type, one type a line; those that say the least share the last line."""
    lines: dict[bool, list[str]] = {False: [], True: []}
    for name, said in sorted(types.items()):
        lines[list(said.values()) == [None]].append(f"{json.dumps(name)}: {json.dumps(said, sort_keys=True)}")
    body = ",\n".join([*lines[False], *filter(None, [", ".join(lines[True])])])
    path.write_text(f'{{"versions": {json.dumps(versions, sort_keys=True)}, "types": {{\n{body}\n}}}}\n')


def some_tokens() -> list[int]:
    """A text beyond the trained window; the same at every call."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, VOCABULARY - 1, (TOKENS,), generator=generator).tolist()


def tiny_of(model_type: str, longest: int = TRAINED_LENGTH) -> PreTrainedModel:
    """A random model of a type whose config says the length that it was made for."""
    model = tiny_model(tiny_config(model_type, **CHANGES.get(model_type, {})))
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "max_position_embeddings", None):
        text.max_position_embeddings = longest
    return model


def patched_as(model_type: str, form: tuple[str, dict[str, Any]]) -> PreTrainedModel:
    """One extended as its config can say it; where it asks what becomes of a window, the window is lifted."""
    method, parameters = form
    model = tiny_of(model_type)
    if method == "longrope":
        half = next((len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")), 1)
        factors = tuple(1 + 3 * index / max(half - 1, 1) for index in range(half))
        parameters = {"short_factor": factors, "long_factor": factors, **parameters}
    asked: dict[str, Any] = {"factor": float(FACTOR), "trained_length": TRAINED_LENGTH, **parameters}
    try:
        return ctxext.patch(model, method, **asked)
    except IncompatibleError as error:
        if "sliding_window='lift'" not in str(error) or "Leave it out" in str(error):
            raise
        return ctxext.patch(model, method, sliding_window="lift", **asked)


def all_methods(model: PreTrainedModel) -> dict[str, Method]:
    """Every method, and the variants, in numbers that suit a model."""
    half = next((len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")), 16)
    spec = RopeSpec(rotary_dim=2 * half, base=10000.0, trained_length=TRAINED_LENGTH)
    named = {name: kind.example(spec) for name, kind in known_methods().items()}
    for name, (method, parameters) in VARIANTS.items():
        named[name] = METHODS[method].from_dict({"factor": FACTOR, **parameters})
    return named


def methods_for(shape: str) -> dict[str, Method]:
    """Those of all methods that can be put on a shape."""
    model, found = tiny_of(shape), {}
    for name, method in all_methods(model).items():
        try:
            ctxext.patch(copy.deepcopy(model), method, trained_length=TRAINED_LENGTH)
        except CtxextError:
            continue  # not for this kind of model
        found[name] = method
    return found


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Of all tokens but the first, as transformers computes them."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, to two digits."""
    known = ~(one.isnan() | other.isnan())
    return float(f"{float((one - other)[known].abs().max()):.1e}") if bool(known.any()) else math.nan


class Bench:
    """A tiny model of one shape, and what a runtime computes of its extensions as ``export`` says.

    Args:
        shape: the model type.
        folder: where checkpoints are written.
    """

    to: ClassVar[str]
    """The runtime, as ``export`` takes it."""
    ways: ClassVar[tuple[str, ...]] = ("extended", "original")
    """"extended": the extended checkpoint; "original": flags for the original one."""

    def __init__(self, shape: str, folder: Path) -> None:
        self.shape, self.folder = shape, folder
        self.plain, self.tokens = tiny_of(shape), some_tokens()
        self.plain.save_pretrained(folder / "plain")

    def reach(self, method: Method, model: PreTrainedModel, way: str) -> tuple[Export, Path]:
        """Do what ``export`` says for one way, and return it with the file or checkpoint that its flags are for."""
        if way == "original":
            plain = self.folder / "plain"
            return export(plain, to=self.to, method=method, trained_length=TRAINED_LENGTH), plain
        ctxext.save(model, self.folder / "long")
        return export(self.folder / "long", to=self.to), self.folder / "long"

    def served(self, place: Path, flags: tuple[str, ...]) -> torch.Tensor:
        """Return what the runtime computes of the tokens."""
        raise NotImplementedError

    def expected(self, model: PreTrainedModel) -> torch.Tensor:
        """Return what transformers computes of the tokens."""
        return log_probabilities(model, self.tokens)

    def prove(self, name: str, method: Method) -> list[Proof]:
        """Go every way of one method, as far as ``export`` lets one."""
        model = ctxext.patch(tiny_of(self.shape), method, trained_length=TRAINED_LENGTH)
        wanted = self.expected(model)
        other = ctxext.patch(tiny_of(self.shape), "pi", factor=FACTOR) if self.shape == "bloom" else self.plain
        matters, proofs = distance(wanted, self.expected(other)), []
        for way in self.ways:
            what: dict[str, Any] = {"shape": self.shape, "method": name, "way": way}
            try:
                made, place = self.reach(method, model, way)
            except IncompatibleError as error:
                proofs.append(Proof(**what, exact=None, said=str(error)))
                continue
            if made.first or (made.in_file and way != "file"):
                proofs.append(Proof(**what, exact=None, said=made.notes[0]))
                continue
            error = distance(self.served(place, made.flags), wanted)
            proofs.append(Proof(**what, exact=made.exact, said=" ".join(made.notes), error=error, matters=matters))
        return proofs


Out = Annotated[Path, Option(help="The JSON file to write; what it holds already is not measured again.")]
Shapes = Annotated[str, Option(help="Model types, separated by commas; all if empty.")]
Only = Annotated[str, Option(help="Methods, separated by commas; all if empty.")]


def measure(make: Callable[[str, Path], Bench], out: Path, *, shapes: str, only: str, **ran: str) -> None:
    """Go every way of every method that a file does not hold yet, and write it after each method.

    Args:
        make: the bench of a shape in a folder.
        out: the JSON file.
        shapes: model types, separated by commas.
        only: methods, separated by commas; empty for all.
        ran: the versions of what ran.

    Raises:
        SystemExit: ``export`` calls something exact that is not.
    """
    versions = ran | {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "machine": platform.machine(),
    }
    kept = json.loads(out.read_text()) if out.exists() else {"proofs": []}
    proofs = [Proof(**proof) for proof in kept["proofs"]]
    have = {(proof.shape, proof.method) for proof in proofs}
    for shape in shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            bench = make(shape, Path(folder))
            for name, method in methods_for(shape).items():
                if (shape, name) in have or (only and name not in only.split(",")):
                    continue
                for proof in bench.prove(name, method):
                    print(shape, name, proof.way, proof.exact, proof.error, proof.matters, flush=True)
                    said = re.sub(r"\s+", " ", proof.said)
                    proofs.append(replace(proof, said=(said.split(". ")[0] if proof.exact is None else said)[:200]))
                out.parent.mkdir(parents=True, exist_ok=True)
                written = {"versions": versions, "proofs": [asdict(proof) for proof in proofs]}
                out.write_text(json.dumps(written, indent=1) + "\n")
    wrong = [proof for proof in proofs if proof.exact and not proof.right]
    if wrong:
        raise SystemExit("\n".join(["Called exact and not:", *map(str, wrong)]))
