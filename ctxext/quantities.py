"""Amounts as users write them: bytes of memory, and the time or the passes that a choice may take."""

from __future__ import annotations

import re
from typing import NamedTuple

from ctxext.errors import InvalidParameterError

BYTES = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Parse ``2GiB``, ``1.5 GB`` or ``800MiB`` into bytes.

    Raises:
        InvalidParameterError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|b)?b?\s*", text, flags=re.IGNORECASE)
    if match is None or not float(match[1]):
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
    if value and unit in ("pass", "passes"):
        return Budget(passes=value)
    if value and unit in SECONDS:
        return Budget(seconds=value * SECONDS[unit])
    raise InvalidParameterError(
        f"A budget is written like 30min, 2h or 90s, or in passes over the target length, like '25 passes'; found "
        f"{given!r}."
    )
