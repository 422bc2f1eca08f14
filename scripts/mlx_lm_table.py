"""Find out what mlx-lm does with every rotary model type: write tiny checkpoints and let it run them.

For each causal language model type that both mlx-lm and the installed transformers have, and each rope type that a
config may say: a tiny random float32 model is extended and saved as ``ctxext.save`` and ``ctxext patch`` save it, and
mlx-lm loads it and reads a text beyond the trained window. Its log-probabilities are compared with those of the patched
model. What comes out is ``ctxext/runtimes/mlx_lm.json``, which ``export`` reads; nothing in it is written by hand.

    pip install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
    python -m scripts.mlx_lm_table

On a Linux CPU; what Apple's GPUs compute with the same numbers was not looked at.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
import transformers
import typer
from transformers import PreTrainedModel
from transformers.utils import logging

import ctxext
from ctxext.checkpoints.export import read_extended
from ctxext.errors import CtxextError
from ctxext.models.windows import window_of
from ctxext.runtimes.mlx_lm import TABLE, form_of
from scripts.proof import TARGET, distance, log_probabilities, patched_as, some_tokens, tiny_of, write_table
from tests.walk.tiny import model_types

# Numbers that are not mlx-lm's defaults, so that a parameter that is not read shows.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("ntk", {}),
    "linear": ("pi", {}),
    "dynamic": ("dynamic_ntk", {}),
    "yarn": ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn_attention": ("yarn", {"attention_factor": 1.3}),
    "yarn_truncate": ("yarn", {"truncate": False}),
    "llama3": ("llama3", {}),
    "longrope": ("longrope", {}),
    "longrope_attention": ("longrope", {"attention_factor": 1.3}),
}
# What it raises on a config or on weights that it does not know.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def served(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, by mlx-lm."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    logits = load_model(checkpoint)[0](mx.array([tokens]))[0, :-1].astype(mx.float32)
    found = torch.tensor(logits.tolist()).log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def _line(model_type: str) -> dict[str, Any] | None:
    """Everything about one type; None where mlx-lm has no class for it, or transformers lacks a package for its own."""
    from mlx_lm.utils import MODEL_REMAPPING

    name = MODEL_REMAPPING.get(model_type, model_type)
    try:
        importlib.import_module(f"mlx_lm.models.{name}")
    except (ModuleNotFoundError, SystemExit):  # where another package is missing, its modules end the process
        return None
    try:
        plain = tiny_of(model_type, TARGET)
    except ImportError:  # of images
        return None
    return {
        "class": f"mlx_lm/models/{name}.py",
        "window": window_of(plain.config.get_text_config(decoder=True)),
        "noise": _tried(plain, lambda place: plain.save_pretrained(place)),
        "forms": dict(_form(model_type, form, plain) for form in FORMS),
    }


def _tried(model: PreTrainedModel, save: Callable[[Path], None]) -> float | str:
    """How far mlx-lm is from a model that was saved, in nats; or what it says."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "saved"
        save(place)
        try:
            found = distance(served(place, some_tokens()), log_probabilities(model, some_tokens()))
        except REFUSALS as error:
            return _said(error)
    return found if found == found else "its output is not a number"


def _said(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:100].strip()


def _form(model_type: str, form: str, plain: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """Under the name of what the config says, which is not what was asked for where a type says it in other words."""
    try:
        model = patched_as(model_type, FORMS[form])
        stored = form_of(read_extended(model.config))
    except CtxextError as error:
        return form, {"refused": _said(error)}
    if stored in FORMS and stored != form:
        return form, {"refused": f"stored as {stored}"}
    tokens = some_tokens()
    matters = distance(log_probabilities(model, tokens), log_probabilities(plain, tokens))
    return stored, {"matters": matters, "error": _tried(model, lambda place: ctxext.save(model, place))}


def main(only: Annotated[str, typer.Option(help="Types to run anew, separated by commas.")] = "") -> None:
    """Run every type that these versions have not run yet; an interrupted run goes on."""
    logging.disable_progress_bar()
    versions = {
        "mlx_lm": metadata.version("mlx-lm"),
        "mlx": metadata.version("mlx"),
        "transformers": transformers.__version__,
    }
    kept = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    lines: dict[str, Any] = kept["types"] if kept.get("versions") == versions else {}
    for name in only.split(",") if only else [name for name in model_types("causal") if name not in lines]:
        line = _line(name)
        if line is not None:
            lines[name] = line
            write_table(TABLE, versions, lines)
            print(name, line["noise"], {form: one.get("error") for form, one in line["forms"].items()}, file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
