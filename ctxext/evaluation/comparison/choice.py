"""Which methods a comparison tries, and what each is called in it."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from torch import nn

import ctxext
from ctxext.architectures import architecture_of
from ctxext.architectures.alibi import AlibiArchitecture
from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation._plots import label_of
from ctxext.methods import METHODS, BiasMethod, Method, RopeMethod
from ctxext.methods.base import parameter_of
from ctxext.spec import AlibiSpec, RopeSpec
from ctxext.surgery.wrappers import base_model

__all__ = ["TIMES", "chosen_methods", "ignores_factor", "label_for", "name_for"]

TIMES = "\N{MULTIPLICATION SIGN}"


def chosen_methods(model: nn.Module, wanted: Sequence[str | Method], factors: Sequence[float]) -> tuple[Method, ...]:
    """The methods to try, each at each factor; once, at the largest, where the factor changes nothing but the reach.

    Args:
        model: decides what an empty ``wanted`` means: every method for its kind of positions (rotary or ALiBi) that
            needs nothing but a factor. Replacing rotation by ALiBi needs training and has to be named.
        wanted: names, with parameters behind them where needed (``"yarn ramp=turns truncate=false"``), or objects,
            which bring their own factor.
        factors: each at least 1.

    Raises:
        UnknownNameError: an unknown method or parameter.
        InvalidParameterError: no factor, one out of range, or the same method twice.
    """
    if not factors and not any(isinstance(item, Method) for item in wanted):
        raise InvalidParameterError("Give at least one factor (target length over trained length).")
    found: list[Method] = []
    for item in wanted or _default_names(model):
        if isinstance(item, Method):
            found.append(item)
            continue
        name, parameters = _parsed(item)
        built = [ctxext.method(name, factor=factor, **parameters) for factor in sorted(set(factors))]
        found += built[-1:] if ignores_factor(built[-1]) else built
    if len(set(found)) != len(found):
        twice = next(method for method in found if found.count(method) > 1)
        raise InvalidParameterError(f"Give each method once; found {name_for(twice)!r} twice.")
    return tuple(found)


def _default_names(model: nn.Module) -> list[str]:
    kind = BiasMethod if isinstance(architecture_of(base_model(model)), AlibiArchitecture) else RopeMethod
    return [name for name, method in METHODS.items() if issubclass(method, kind) and not _required(method)]


def _required(method: type[Method]) -> list[str]:
    """Parameters without a default."""
    return [field.name for field in fields(method) if field.default is MISSING and field.default_factory is MISSING]


def ignores_factor(method: Method) -> bool:
    """Whether another factor would give the same positions at every length, asked on a made-up model."""
    if _required(type(method)):
        return False
    trained = 4096
    other = replace(method, factor=method.factor * 1.5)
    lengths = (trained, 2 * trained)
    if isinstance(method, RopeMethod) and isinstance(other, RopeMethod):
        rope = RopeSpec(rotary_dim=64, base=10000.0, trained_length=trained)
        pairs = [(method.frequencies(rope, length), other.frequencies(rope, length)) for length in lengths]
        return all(a.inv_freq.equal(b.inv_freq) and a.attention_scale == b.attention_scale for a, b in pairs)
    if isinstance(method, BiasMethod) and isinstance(other, BiasMethod):
        alibi = AlibiSpec(num_heads=8, trained_length=trained)
        return all(method.slopes(alibi, length).equal(other.slopes(alibi, length)) for length in lengths)
    return False


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """``name key=value ...`` as a shell would split it."""
    name, *rest = shlex.split(text) or [""]
    if name not in METHODS:
        raise UnknownNameError.of("method", name, METHODS)
    return name, dict(parameter_of(part) for part in rest)


def name_for(method: Method) -> str:
    """A name that no other method of a comparison has, such as ``yarn x2 ramp=turns``."""
    factor = "" if ignores_factor(method) else f" x{method.factor:g}"
    return f"{method.name}{factor}{''.join(f' {part}' for part in _own(method))}"


def label_for(method: Method) -> str:
    """The same as a reader wants it."""
    factor = "" if ignores_factor(method) else f" {TIMES}{method.factor:g}"
    own = _own(method)
    return f"{label_of(method.name)}{factor}" + (f" ({', '.join(own)})" if own else "")


def _own(method: Method) -> list[str]:
    """Parameters that are not at their default, the factor aside."""
    shown = []
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name != "factor" and (field.default is MISSING or value != field.default):
            shown.append(f"{field.name}={_short(value)}")
    return shown


def _short(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return f"<{len(value)} values, {hashlib.sha256(repr(value).encode()).hexdigest()[:6]}>"
