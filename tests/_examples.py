"""Examples that fail, in docs/guides/troubleshooting.md: each is run, and ends in the error that the page prints."""

from __future__ import annotations

import contextlib
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
