"""Amounts and methods as users write them: bytes of memory, time or passes to take, a method with its parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ctxext.errors import InvalidParameterError, shown
from ctxext.files import parse_json

BYTES = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
LARGEST = 2**40  # of any number that a user gives, so that no product of two of them overflows
LEAST_PASSES = 4  # of a choice: one candidate reads a text, and three readings another


def parse_bytes(text: str) -> int:
    """Parse ``2GiB``, ``1.5 GB`` or ``800MiB`` into bytes.

    Raises:
        InvalidParameterError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|b)?b?\s*", text, flags=re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < LARGEST:
        raise InvalidParameterError(f"An amount of memory is written like 2GiB or 800MB; found {text!r}.")
    if not match[2]:
        raise InvalidParameterError(f"An amount of memory needs a unit, such as {match[1]}GiB; found {text!r}.")
    return int(float(match[1]) * BYTES[match[2].lower()])


class Budget(NamedTuple):
    """Seconds of computing, or passes over the whole target length, that a choice may take; without both, no limit."""

    seconds: float | None = None
    passes: float | None = None


def parse_budget(given: str | float | None) -> Budget:
    """Parse ``30min``, ``2h`` or ``90s``, or, so that it is the same on every machine, ``25 passes``.

    Raises:
        InvalidParameterError: anything else.
    """
    if given is None:
        return Budget()
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(given).lower())
    value, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if 0 < value < LARGEST and unit in ("pass", "passes"):
        if value < LEAST_PASSES:
            least = f"Any choice takes more than {LEAST_PASSES}; allow them (--budget)."
            raise InvalidParameterError(f"The budget is too small: it comes to {value:.1f} passes. {least}")
        return Budget(passes=value)
    if 0 < value < LARGEST and unit in SECONDS:
        return Budget(seconds=value * SECONDS[unit])
    raise InvalidParameterError(
        f"A budget is written like 30min, 2h or 90s, or in passes over the target length, like '25 passes'; found "
        f"{given!r}."
    )


def duration(seconds: float) -> str:
    """Write seconds in a unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Word(str):
    """Text of a parameter's value from a command line, which ``Parameter.checked`` converts."""


def method_said(text: str) -> tuple[str, dict[str, Word]]:
    """Parse ``name key=value ...``, split as a shell does, into a method's name and its parameters.

    Raises:
        InvalidParameterError: as ``parameters_said``, and for a quote that is not closed.
    """
    try:
        name, *rest = shlex.split(text) or [""]
    except ValueError as error:
        raise InvalidParameterError(f"The method {shown(text)} cannot be read: {str(error).lower()}.") from error
    return name, parameters_said(rest)


def parameters_said(texts: Iterable[str]) -> dict[str, Word]:
    """Parse several ``KEY=VALUE`` of a command line, see ``parameter_of``.

    Raises:
        InvalidParameterError: as ``parameter_of``, and if a parameter is given twice.
    """
    parameters: dict[str, Word] = {}
    for text in texts:
        name, value = parameter_of(text)
        if name in parameters:
            raise InvalidParameterError(f"{name} is given twice, as {parameters[name]} and as {value}. Give it once.")
        parameters[name] = value
    return parameters


def parameter_of(text: str) -> tuple[str, Word]:
    """Parse ``KEY=VALUE`` of a command line, or ``KEY=@FILE.json``, which takes the value from a file.

    Raises:
        InvalidParameterError: if the text has another form, or the file cannot be read or is not JSON.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise InvalidParameterError(f"--param must be KEY=VALUE, such as beta_fast=64; found {shown(text)}.")
    if value.startswith("@"):
        path = Path(value[1:])
        if not path.is_file():
            raise InvalidParameterError(f"--param {key}: there is no file {path}.")
        try:
            value = path.read_text(encoding="utf-8")
            parse_json(value)
        except OSError as error:
            raise InvalidParameterError(f"--param {key}: cannot read the file {path}: {error.strerror}.") from error
        except ValueError as error:
            raise InvalidParameterError(f"--param {key}: the file {path} is not JSON: {error}.") from error
    try:
        quoted = parse_json(value)
    except ValueError:
        quoted = None
    return key, Word(quoted if isinstance(quoted, str) else value)
