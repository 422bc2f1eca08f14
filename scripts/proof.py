"""What every proof of a runtime shares: tiny models that were extended, and how far log-probabilities are apart."""

from __future__ import annotations

import copy
import json
import math
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import ctxext
from ctxext.checkpoints.export import export
from ctxext.errors import CtxextError, IncompatibleError
from ctxext.methods import METHODS, Method, known_methods
from ctxext.runtimes.base import is_close
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


Served = Callable[[Path, tuple[str, ...], list[int]], torch.Tensor]


def measure(
    to: str, served: Served, out: Path, *, ways: Sequence[str], shapes: Sequence[str], only: str, ran: str
) -> None:
    """Go every way of every method that a file does not hold yet, and write it after each.

    Args:
        to: the runtime, as ``export`` takes it.
        served: log-probabilities of all tokens but the first, by the runtime: of a checkpoint, the flags of an export,
            and the tokens.
        out: the JSON file.
        ways: "extended": the extended checkpoint; "original": flags for the original one.
        shapes: model types.
        only: methods, separated by commas; empty for all.
        ran: the runtime's version.

    Raises:
        SystemExit: ``export`` calls something exact that is not.
    """
    versions = {
        "ran": ran,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "machine": platform.machine(),
    }
    kept = json.loads(out.read_text()) if out.exists() else {"proofs": []}
    found = [Proof(**proof) for proof in kept["proofs"]]
    have = {(proof.shape, proof.method) for proof in found}
    for shape in shapes:
        for name, method in methods_for(shape).items():
            if (shape, name) in have or (only and name not in only.split(",")):
                continue
            with tempfile.TemporaryDirectory() as folder:
                new = _proofs(to, served, ways, shape, name, method, Path(folder))
            for proof in new:
                print(shape, name, proof.way, proof.exact, proof.error, proof.matters, flush=True)
            found += new
            out.parent.mkdir(parents=True, exist_ok=True)
            written = {"versions": versions, "proofs": [asdict(proof) for proof in found]}
            out.write_text(json.dumps(written, indent=1) + "\n")
    wrong = [proof for proof in found if proof.exact and not proof.right]
    if wrong:
        raise SystemExit("\n".join(["Called exact and not:", *map(str, wrong)]))


def _proofs(
    to: str, served: Served, ways: Sequence[str], shape: str, name: str, method: Method, folder: Path
) -> list[Proof]:
    """Go every way of one method, as far as ``export`` lets one."""
    plain, tokens = tiny_of(shape), some_tokens()
    model = ctxext.patch(tiny_of(shape), method, trained_length=TRAINED_LENGTH)
    wanted = log_probabilities(model, tokens)
    other = ctxext.patch(tiny_of(shape), "pi", factor=FACTOR) if shape == "bloom" else plain
    matters, found = distance(wanted, log_probabilities(other, tokens)), []
    plain.save_pretrained(folder / "plain")
    ctxext.save(model, folder / "long")
    for way in ways:
        what: dict[str, Any] = {"shape": shape, "method": name, "way": way}
        try:
            made = (
                export(folder / "long", to=to)
                if way == "extended"
                else export(folder / "plain", to=to, method=method, trained_length=TRAINED_LENGTH)
            )
        except IncompatibleError as error:
            found.append(Proof(**what, exact=None, said=str(error).split(". ")[0][:200]))
            continue
        error = distance(served(folder / ("long" if way == "extended" else "plain"), made.flags, tokens), wanted)
        said = " ".join(made.notes)[:200]
        found.append(Proof(**what, exact=made.exact, said=said, error=error, matters=matters))
    return found
