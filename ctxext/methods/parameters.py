"""Check the parameters of methods against their annotations.

A method is a dataclass whose fields are annotated with ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``,
``tuple[int, ...]``, ``tuple[float, ...]``, or a union of these and ``None``; ``Annotated[int, Range(least=1)]`` sets
the range of a number. Every number has an upper bound, so that a typing error cannot fill the memory. A condition
between two parameters is checked by the method itself.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import re
import sys
import types
import typing
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from ctxext.errors import InvalidParameterError, shown
from ctxext.files import parse_json
from ctxext.quantities import Word

MOST = 10**6
"""Largest value of a parameter whose ``Range`` names no other."""

MOST_TOKENS = 10**9
"""Longest text, in tokens."""

MOST_BASE = 1e15
"""Largest base of a series of frequencies."""

MOST_ROWS = 2**24
"""Longest table of positions, in rows."""

YES, NO, NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"none", "null"}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of the numbers that a parameter takes.

    Args:
        least: smallest number.
        above: open lower end, instead of ``least``.
        most: largest number; None for ``MOST``.
        below: open upper end, instead of ``most``.
        step: whole number whose multiples the parameter may take.
        of: unit, for messages: "tokens".
    """

    least: int | float | None = None
    above: int | float | None = None
    most: int | float | None = None
    below: int | float | None = None
    step: int = 1
    of: str = ""

    def __str__(self) -> str:
        most = self.most if self.most is not None and self.most < MOST_TOKENS else None
        if self.least is not None and most is not None:
            return f" from {self.least:,} to {most:,}"
        ends = {"at least": self.least, "above": self.above, "below": self.below, "at most": most}
        text = " and ".join(f"{words} {end:,}" for words, end in ends.items() if end is not None)
        return f", {text}" if text else ""


Positive = Range(above=0)
WholeTokens = Range(least=1, most=MOST_TOKENS, of="tokens")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method.

    Args:
        name: name of the field.
        kinds: accepted types: ``bool``, ``int``, ``float`` or ``str``.
        choices: accepted strings, where ``str`` is not among the types.
        items: type of the numbers in a list; None where no list is accepted.
        optional: True if None is accepted.
        range: accepted numbers.
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
            TypeError: if the annotation is of no kind that can be checked.
        """
        range_ = Range()
        if typing.get_origin(annotation) is Annotated:
            annotation, *more = typing.get_args(annotation)
            range_ = next((extra for extra in more if isinstance(extra, Range)), range_)
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
            InvalidParameterError: if the annotation does not allow the value.
        """
        if isinstance(value, Word):
            value = self._read(value)
        if value is None and self.optional:
            return None
        if isinstance(value, bool) and bool in self.kinds:
            return value
        if isinstance(value, str) and (str in self.kinds or value in self.choices):
            return value
        if isinstance(value, list | tuple) and value and self.items is not None:
            return tuple(self._number(f"{self.name}[{at}]", item, self.items) for at, item in enumerate(value))
        if not self.kinds & {int, float}:
            require(False, self.name, value, str(self))
        return self._number(self.name, value, int if int in self.kinds else float)

    def _number(self, name: str, value: Any, kind: type) -> int | float:
        """Convert a value to a number of this type, and check its range."""
        is_right = is_number(value) and (kind is float or isinstance(value, numbers.Integral))
        number = (float(value) if kind is float else int(value)) if is_right else 0
        span = self.range
        is_inside = (
            (span.least is None or number >= span.least)
            and (span.above is None or number > span.above)
            and (span.below is None or number < span.below)
            and (span.step == 1 or number % span.step == 0)
        )
        if not is_right or not is_inside:
            require(False, name, value, str(self) if name == self.name else self._of_numbers(kind))
        most = MOST if span.most is None else span.most
        require(number <= most, name, value, f"at most {most:,}")
        return number

    def _read(self, text: str) -> Any:
        """Convert a word of a command line to a type that this parameter takes; return other words unchanged."""
        plain = text.strip().lower()
        if self.optional and plain in NONE:
            return None
        if bool in self.kinds and plain in YES | NO:
            return plain in YES
        if int in self.kinds and re.fullmatch(r"[+-]?\d{1,300}", plain):
            return int(plain)
        with contextlib.suppress(ValueError):
            if float in self.kinds and "_" not in plain:
                return float(plain)
            if self.items is not None and plain.startswith("["):
                return parse_json(text)
        return str(text)

    def __str__(self) -> str:
        """Return the accepted values in words, for messages."""
        choices = [repr(choice) for choice in self.choices]
        accepted = [" or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))] if choices else []
        accepted += [self._of_numbers(kind) for kind in (int, float) if kind in self.kinds]
        accepted += ["True or False"] if bool in self.kinds else []
        accepted += ["a name"] if str in self.kinds else []
        if self.items is not None:
            accepted.append(f"a list such as {EXAMPLES[self.items]}, each {self._of_numbers(self.items)}")
        accepted += ["None"] if self.optional else []
        return ", or ".join(accepted)

    def _of_numbers(self, kind: type) -> str:
        what = "finite number" if kind is float else "even number" if self.range.step == 2 else "whole number"
        article = "an" if what[0] == "e" else "a"
        return f"{article} {what}{f' of {self.range.of}' if self.range.of else ''}{self.range}"


EXAMPLES = {int: "[2, 4]", float: "[1.0, 1.5]"}


@functools.cache
def parameters_of(cls: type) -> dict[str, Parameter]:
    """Return the parameters of a method's class by name.

    Raises:
        TypeError: if an annotation is of no kind that can be checked.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: Parameter.of(field.name, hints[field.name]) for field in fields(cls)}


def require(condition: bool, parameter: str, value: object, expected: str) -> None:
    """Raise ``InvalidParameterError`` naming the parameter, the value found and the values expected."""
    if not condition:
        raise InvalidParameterError(f"{parameter} must be {expected}, found {shown(value)}.")


def is_number(value: object) -> bool:
    """Return whether ``value`` is a finite real number, NumPy's included (a bool or a numeric string is not)."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    size: Any = abs(value)  # whole numbers beyond floats are compared too
    return bool(size <= sys.float_info.max)


def checked_tokens(name: str, value: Any, least: int = 1) -> int:
    """Return a number of tokens; formulas divide by the logarithm of a trained length, whose ``least`` is 2.

    Raises:
        InvalidParameterError: unless it is a whole number from ``least`` to ``MOST_TOKENS``.
    """
    expected = f"a positive whole number of tokens{f', at least {least}' if least > 1 else ''}"
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(is_whole and int(value) >= least, name, value, expected)
    require(int(value) <= MOST_TOKENS, name, value, f"at most {MOST_TOKENS:,} tokens")
    return int(value)


def checked_rows(method: str, rows: int) -> int:
    """Return the length of a table of positions that a method is about to make.

    Raises:
        InvalidParameterError: if the length is above ``MOST_ROWS``.
    """
    if rows > MOST_ROWS:
        raise InvalidParameterError(
            f"Method {method!r} makes a table with a row for each position, at most {MOST_ROWS:,} of them, found a "
            f"target of {rows:,} tokens. Take a smaller factor."
        )
    return rows
