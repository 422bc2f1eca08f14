"""Examples of the pages are run: those of docs/guides/troubleshooting.md end in an error, others print something."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

import ctxext
from ctxext.errors import CtxextError
from tests._models import byte_model, tiny
from tests._programs import command
from tests._tokenizer import make_tokenizer

# Code, and what it prints: a block of Python or of shell with a block of text behind it.
EXAMPLE = re.compile(r"^```(python|bash)\n(.*?)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "model": byte_model,
    "gpt2": lambda: tiny("gpt2"),
    "mistral": lambda: tiny("mistral", sliding_window=32),
}


def _error_of_python(code: str) -> str:
    known = {name: make() for name, make in MODELS.items() if re.search(rf"\b{name}\b", code)}
    known |= {"ctxext": ctxext, "AutoModelForCausalLM": AutoModelForCausalLM}
    try:
        exec(compile(code, "troubleshooting.md", "exec", dont_inherit=True), known)
    except (CtxextError, KeyError) as error:
        origin = "" if isinstance(error, KeyError) else f"{type(error).__module__}."
        return f"{origin}{type(error).__name__}: {error}"
    raise AssertionError(f"This example raises no error:\n{code}")


def _error_of_command(line: str) -> str:
    result = command(*shlex.split(line, comments=True)[1:])
    assert result.exit_code == 1, f"This example ends in no error: {line}"
    return result.stderr


KINDS: dict[str, Callable[[str], str]] = {"python": _error_of_python, "bash": _error_of_command}


def error_of(kind: str, code: str) -> str:
    """The error of an example, wrapped; it runs in a folder with a checkpoint, ``llama``, and a text, ``note.txt``."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        byte_model().save_pretrained("llama")
        make_tokenizer(bos=False).save_pretrained("llama")
        Path("note.txt").write_text("A short note. " * 100, encoding="utf-8")
        message = KINDS[kind](code)
    return textwrap.fill(" ".join(message.split()), 118, break_long_words=False, break_on_hyphens=False) + "\n"


def with_errors(text: str) -> str:
    """A page whose examples are each followed by the error that they end in today."""

    def current(example: re.Match[str]) -> str:
        kind, code, printed = example.groups()
        return example[0].removesuffix(f"{printed}```") + error_of(kind, code) + "```"

    return EXAMPLE.sub(current, text)


# A block with its output beneath it, and under an output that no script makes, its date and machine.
SHOWN = re.compile(
    r"^```(python|bash)\n(.*?)^```\n(?:\n```output\n(.*?)^```\n(\n\*Recorded on \d{4}-\d\d-\d\d, [^*]+\*\n)?)?",
    re.DOTALL | re.MULTILINE,
)
# Blocks that are not run where they stand, by a pattern of what is in them.
NOT_RUN = {
    r"^(make|pip|python -m venv) ": "it installs",
    r"^ctxext (choose|eval)": "it takes half an hour",
    r"^ctxext (ask|export runs)|^accelerate launch|^python recipes/finetune": "it takes minutes",
    r"^ctxext serve|^from openai": "a server runs until it is stopped",
    r"sentence_transformers|sentence-transformers|SentenceTransformer": "embedding models are on the hub",
    r"^from (trl|peft) |ctxext\.training\.reference": "it goes on with a run of yours",
}


def reason_not_to_run(code: str) -> str | None:
    """Why a block is not run; None where it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, code, re.MULTILINE)), None)


def printed_by(code: str, kind: str, known: dict[str, object]) -> str:
    """What a block prints on standard output, without network, in the current folder."""
    with contextlib.redirect_stdout(said := io.StringIO()):
        if kind == "python":
            exec(compile(code, "page", "exec", dont_inherit=True), known)
        for line in code.splitlines() if kind == "bash" else ():
            done = command(*shlex.split(line, comments=True)[1:], code=0)
            print(done.stdout, end="")
    return said.getvalue()
