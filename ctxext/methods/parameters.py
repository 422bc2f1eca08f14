"""What each parameter of a method may be, read off its annotation, and checked in this one place.

A method is a dataclass whose fields are annotated with ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``,
``tuple[int, ...]``, ``tuple[float, ...]``, or a union of them and ``None``; ``Annotated[int, Range(least=1)]`` says
which numbers are in range. Every number has an upper bound, so that no mistyped one fills the memory. What one
parameter demands of another is for the method itself to check.
"""

from __future__ import annotations

import functools
import json
import numbers
import re
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from ctxext.errors import InvalidParameterError, shown

MOST = 10**6
"""The largest number that a parameter may be where its ``Range`` names no other."""

MOST_TOKENS = 10**9
"""The longest text, in tokens, that anything here is asked about."""

MOST_BASE = 1e15
"""The largest base of a series of frequencies."""

MOST_ROWS = 2**24
"""The longest table of positions that is made."""

YES, NO, NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"none", "null"}


class Word(str):
    """The value of a parameter as somebody typed it on a command line: the parameter reads it as what it takes."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Which numbers a parameter may be.

    Args:
        least: the smallest.
        above: what it must be larger than, in the place of ``least``.
        most: the largest; None for ``MOST``.
        below: what it must be smaller than, in the place of ``most``.
        step: of which whole number it must be a multiple.
        of: what it counts, for messages: "tokens".
    """

    least: int | float | None = None
    above: int | float | None = None
    most: int | float | None = None
    below: int | float | None = None
    step: int = 1
    of: str = ""

    def holds(self, number: int | float) -> bool:
        """Whether a number is inside, its upper end aside."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (self.step == 1 or number % self.step == 0)
        )

    @property
    def largest(self) -> int | float:
        """The largest number inside."""
        return MOST if self.most is None else self.most

    def __str__(self) -> str:
        most = self.most if self.most is not None and self.most < MOST_TOKENS else None
        if self.least is not None and most is not None:
            return f" from {self.least:,} to {most:,}"
        ends = [
            "" if self.least is None else f"at least {self.least:,}",
            "" if self.above is None else f"above {self.above:,}",
            "" if self.below is None else f"below {self.below:,}",
            "" if most is None else f"at most {most:,}",
        ]
        said = " and ".join(end for end in ends if end)
        return f", {said}" if said else ""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        name: of the field.
        kinds: what it may be: ``bool``, ``int``, ``float`` or ``str``.
        choices: the strings that it may be, in the place of any.
        items: of which kind the numbers of a list are; None where it may be no list.
        optional: whether it may be None.
        range: which numbers.
    """

    name: str
    kinds: frozenset[type]
    choices: tuple[str, ...]
    items: type | None
    optional: bool
    range: Range

    @classmethod
    def of(cls, name: str, annotation: Any) -> Parameter:
        """Read an annotation.

        Raises:
            TypeError: for one that means nothing here.
        """
        range_ = Range()
        if typing.get_origin(annotation) is Annotated:
            annotation, *more = typing.get_args(annotation)
            range_ = next((one for one in more if isinstance(one, Range)), range_)
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        kinds: set[type] = set()
        choices: tuple[str, ...] = ()
        items: type | None = None
        members = typing.get_args(annotation) if is_union else (annotation,)
        for member in members:
            if member in (bool, int, float, str):
                kinds.add(member)
            elif typing.get_origin(member) is Literal:
                choices += typing.get_args(member)
            elif typing.get_origin(member) is tuple and typing.get_args(member) in ((int, ...), (float, ...)):
                items = typing.get_args(member)[0]
            elif member is not type(None):
                raise TypeError(
                    f"The parameter {name} is annotated with {member!r}, which cannot be checked. Take bool, int, "
                    f"float, str, Literal, tuple[int, ...], tuple[float, ...], or a union of them and None."
                )
        return cls(name, frozenset(kinds), choices, items, type(None) in members, range_)

    def checked(self, value: object) -> Any:
        """Return a value as the method keeps it: 4 for a float is 4.0, and a list is a tuple.

        Raises:
            InvalidParameterError: for anything else than the annotation says.
        """
        if isinstance(value, Word):
            value = self._read(value)
        if value is None and self.optional:
            return None
        if isinstance(value, bool):
            require(bool in self.kinds, self.name, value, str(self))
            return value
        if isinstance(value, str):
            require(str in self.kinds or value in self.choices, self.name, value, str(self))
            return value
        if isinstance(value, list | tuple) and self.items is not None:
            require(len(value) > 0, self.name, value, str(self))
            return tuple(self._number(f"{self.name}[{at}]", one, self.items) for at, one in enumerate(value))
        kind = next((kind for kind in (int, float) if kind in self.kinds), None)
        require(kind is not None, self.name, value, str(self))
        assert kind is not None
        return self._number(self.name, value, kind)

    def _number(self, name: str, value: Any, kind: type) -> int | float:
        """A number of this kind inside the range."""
        expected = str(self) if name == self.name else self._of_numbers(kind)
        is_right = is_number(value) and (kind is float or isinstance(value, numbers.Integral))
        require(is_right, name, value, expected)
        found = float(value) if kind is float else int(value)
        require(self.range.holds(found), name, value, expected)
        require(found <= self.range.largest, name, value, f"at most {self.range.largest:,}")
        return found

    def _read(self, text: str) -> Any:
        """What a word of a command line says to this parameter; the word where it says nothing to it."""
        plain = text.strip().lower()
        if self.optional and plain in NONE:
            return None
        if bool in self.kinds and plain in YES | NO:
            return plain in YES
        if int in self.kinds and re.fullmatch(r"[+-]?\d{1,300}", plain):
            return int(plain)
        if float in self.kinds and "_" not in plain:
            try:
                return float(plain)
            except ValueError:
                return str(text)
        if self.items is not None and plain.startswith("["):
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                return str(text)
        return str(text)

    def __str__(self) -> str:
        """What is expected, for messages."""
        choices = [repr(choice) for choice in self.choices]
        said = [" or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))] if choices else []
        said += [self._of_numbers(kind) for kind in (int, float) if kind in self.kinds]
        said += ["True or False"] if bool in self.kinds else []
        said += ["a name"] if str in self.kinds else []
        if self.items is not None:
            said.append(f"a list such as {EXAMPLES[self.items]}, each {self._of_numbers(self.items)}")
        said += ["None"] if self.optional else []
        return ", or ".join(said)

    def _of_numbers(self, kind: type) -> str:
        what = "finite number" if kind is float else "even number" if self.range.step == 2 else "whole number"
        article = "an" if what[0] == "e" else "a"
        return f"{article} {what}{f' of {self.range.of}' if self.range.of else ''}{self.range}"


EXAMPLES = {int: "[2, 4]", float: "[1.0, 1.5]"}


@functools.cache
def parameters_of(cls: type) -> dict[str, Parameter]:
    """Every parameter of a method's class by name.

    Raises:
        TypeError: if one is annotated with something that cannot be checked.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: Parameter.of(field.name, hints[field.name]) for field in fields(cls)}


def require(condition: bool, parameter: str, value: object, expected: str) -> None:
    """Raise ``InvalidParameterError`` naming the parameter, the value found and what is expected."""
    if not condition:
        raise InvalidParameterError(f"{parameter} must be {expected}, found {shown(value)}.")


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite real number, NumPy's included (a bool or a numeric string is not)."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    size: Any = abs(value)  # whole numbers beyond floats are compared too
    return bool(size <= sys.float_info.max)


def checked_tokens(name: str, value: object) -> int:
    """Return a number of tokens.

    Raises:
        InvalidParameterError: unless it is a whole number from 1 to ``MOST_TOKENS``.
    """
    expected = "a positive whole number of tokens"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be {expected}, found {shown(value)}.")
    found = int(value)
    require(found >= 1, name, value, expected)
    require(found <= MOST_TOKENS, name, value, f"at most {MOST_TOKENS:,} tokens")
    return found


def checked_rows(method: str, rows: int) -> int:
    """Return the length of a table of positions that a method is about to make.

    Raises:
        InvalidParameterError: if it is above ``MOST_ROWS``.
    """
    if rows > MOST_ROWS:
        raise InvalidParameterError(
            f"Method {method!r} makes a table with a row for each position, at most {MOST_ROWS:,} of them, found a "
            f"target of {rows:,} tokens. Take a smaller factor."
        )
    return rows


def parameters_said(texts: Iterable[str]) -> dict[str, Word]:
    """Read what ``parameter_of`` reads, several times.

    Raises:
        InvalidParameterError: as ``parameter_of``, and for a parameter that is given twice.
    """
    found: dict[str, Word] = {}
    for text in texts:
        name, value = parameter_of(text)
        if name in found:
            raise InvalidParameterError(f"{name} is given twice, as {found[name]} and as {value}. Give it once.")
        found[name] = value
    return found


def parameter_of(text: str) -> tuple[str, Word]:
    """``KEY=VALUE`` of a command line, whose value the parameter reads; ``KEY=@FILE.json`` for what a file holds.

    Raises:
        InvalidParameterError: for anything else, and a file that cannot be read or is not JSON.
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
            json.loads(value)
        except OSError as error:
            raise InvalidParameterError(f"--param {key}: cannot read the file {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(f"--param {key}: the file {path} is not JSON: {error}.") from error
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    return key, Word(found if isinstance(found, str) else value)
