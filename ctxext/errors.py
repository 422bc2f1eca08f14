"""Every error that ctxext raises on purpose.

    CtxextError
    ├── UnknownNameError (LookupError)         a method, backend or parameter that does not exist
    ├── InvalidParameterError (ValueError)     a value outside its valid range, or two that contradict
    ├── IncompatibleError (ValueError)         this method cannot be right on this model; the reason is named
    ├── PatchStateError (RuntimeError)         patched twice, unpatch without patch, already extended
    ├── VerificationError (RuntimeError)       the patched model does not compute what the method says
    ├── CheckpointError (ValueError)           a checkpoint directory that is missing, broken or in the way
    ├── BackendUnavailableError (RuntimeError) a named attention backend cannot serve this call
    └── ResultsError (RuntimeError)            measured results that are another run's, damaged, or cannot be written

A message names the object, the value and the way out. One warning, LeftOutWarning, names files that are not read.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
import reprlib
from collections.abc import Collection, Iterable

from ctxext.version import INSTALL, PLACE

MOST_SHOWN = 80
# Names of methods in transformers (its rope types) and in papers, as ``_squeezed`` returns them, with ctxext's name.
NAMED_ELSEWHERE = {
    "linear": "pi",
    "linearscaling": "pi",
    "interpolation": "pi",
    "positioninterpolation": "pi",
    "positionalinterpolation": "pi",
    "dynamic": "dynamic_ntk",
    "dynamicscaling": "dynamic_ntk",
    "dynamiclinear": "dynamic_pi",
    "ntkaware": "ntk",
    "ntkawarescaled": "ntk",
    "su": "longrope",
    "ropetheta": "abf",
    "adjustedbasefrequency": "abf",
    "dca": "dual_chunk",
    "dualchunkattention": "dual_chunk",
    "streamingllm": "streaming",
    "attentionsinks": "streaming",
}
UNEXTENDED = ("default", "none", "plain", "null")  # transformers' name of rotation as it is, and what users try
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_SHOWN


def shown(value: object) -> str:
    """Return a value as a message shows it, cut short where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python writes out no more than 4,300 digits
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"
    return _SHORT.repr(value)


def printable(name: str) -> str:
    """Return a name in one line of characters that every terminal and file can show, others replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


class CtxextError(Exception):
    """Root of all errors that ctxext raises on purpose."""


class UnknownNameError(CtxextError, LookupError):
    """A name that does not exist; the message suggests the nearest one."""

    @classmethod
    def of(cls, kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
        """Build the message ``Unknown <kind> '<name>'. Did you mean ...? Known: ...``."""
        names = sorted(known)
        asked = _squeezed(str(name)[:MOST_SHOWN])
        if kind == "method" and asked in UNEXTENDED:
            return cls(f"Method {shown(name)} is rotation as it is, which extends nothing; a larger base is 'abf'.")
        by_word = {_squeezed(known_name): known_name for known_name in names}
        meant = by_word.get(asked) or by_word.get(_squeezed(NAMED_ELSEWHERE.get(asked, "")))
        if meant:
            return cls(f"Unknown {kind} {shown(name)}. Did you mean {meant!r}?")
        close = difflib.get_close_matches(asked, by_word, n=1)
        hint = f" Did you mean {by_word[close[0]]!r}?" if close else ""
        return cls(f"Unknown {kind} {shown(name)}.{hint} Known: {', '.join(names)}.")


def refuse_unknown(kind: str, names: Iterable[str] | None, known: Collection[str]) -> None:
    """Raise ``UnknownNameError`` for the first of some names of a kind that is not known."""
    for name in names or ():
        if name not in known:
            raise UnknownNameError.of(kind, name, known)


def _squeezed(name: str) -> str:
    """Return a name in small letters, without the signs between its words."""
    return re.sub("[-_ .]", "", name.lower())


class InvalidParameterError(CtxextError, ValueError):
    """A parameter outside its valid range, or two parameters that contradict each other."""


class IncompatibleError(CtxextError, ValueError):
    """The method cannot be correct on this model."""


class PatchStateError(CtxextError, RuntimeError):
    """The model is in the wrong state for this verb."""


class VerificationError(CtxextError, RuntimeError):
    """The live model, or its reloaded twin, disagrees with the method's mathematics."""


class CheckpointError(CtxextError, ValueError):
    """A checkpoint or adapter directory cannot be read or written as asked."""


class BackendUnavailableError(CtxextError, RuntimeError):
    """A named attention backend is not installed or cannot serve the call."""


class ResultsError(CtxextError, RuntimeError):
    """Results on disk belong to another run, are damaged, or cannot be written."""


class LeftOutWarning(UserWarning):
    """A folder of texts holds files that are not read; the message says how many, and why."""


def no_reach(method: str) -> InvalidParameterError:
    """Return the error of a method that is given neither a factor nor a target."""
    return InvalidParameterError(
        f"Method {method!r} needs to know how far to reach. Give factor (--factor), which is target_length / "
        f"trained_length, or target_length (--target) in tokens."
    )


def install_line(extra: str) -> str:
    """Return the command that installs one of ctxext's extras, and where."""
    return f"`{INSTALL.format(extra)}`{PLACE}"


def unwritable(error: BaseException) -> str:
    """Return a sentence about a cache that an error is about, and that cannot be written; empty if there is none."""
    places = {name: value.rstrip("/") for name, value in os.environ.items() if re.search("HOME|CACHE|TMP", name)}
    told = [name for name, place in places.items() if os.path.isabs(place) and place in str(error)]
    for name in sorted(told, key=lambda name: -len(places[name])):
        if not os.access(places[name], os.W_OK):
            setting = "HF_HOME" if name == "HOME" else name
            return f" {name}={places[name]} cannot be written. Set {setting} to a folder that can."
    return ""


def require_package(package: str, extra: str, who: str, error: type[CtxextError] = InvalidParameterError) -> None:
    """Raise ``error``, with the command that installs it, if a package of one of ctxext's extras is missing."""
    if importlib.util.find_spec(package) is None:
        raise error(f"{who} the package {package}, which is not installed. Run {install_line(extra)}.")
