"""Keep a method from sharpening attention a second time, on models that sharpen it by position themselves.

Ministral 3 and Mistral 4 multiply the query at position p by ``1 + beta ln(1 + floor(p / original length))``, which
grows through an extension as the temperatures of methods do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ctxext.core.scaling import rope_dicts
from ctxext.core.steps import ExtendedPart, Moment, Step, Work, register, register_description
from ctxext.errors import IncompatibleError
from ctxext.methods.dynamic_yarn import DynamicYaRN
from ctxext.methods.remap import RemapMethod
from ctxext.spec import Description

BETA = "llama_4_scaling_beta"


def _beta_of(text: Any) -> float:
    """Return the growth of a model's own temperature with the logarithm of the position; 0 without one."""
    return max((float(rope.get(BETA) or 0) for _, rope in rope_dicts(text)), default=0.0)


def _sharpen_once(work: Work) -> None:
    """Leave the temperature to the model where a method would only add its default, and refuse any other."""
    method = work.method
    if (isinstance(method, RemapMethod) and method.temperature != "none") or isinstance(method, DynamicYaRN):
        way = "dynamic_ntk" if isinstance(method, DynamicYaRN) else "temperature='none'"
        raise IncompatibleError(
            f"Method {method.name!r} sharpens attention as texts grow, and this {work.subject.kind} does so itself "
            f"({BETA}={_beta_of(work.subject.text):g}). Take {way}: both together would sharpen twice."
        )
    if getattr(method, "attention_factor", 1.0) is None and getattr(method, "mscale", None) is None:
        work.method = replace(method, attention_factor=1.0)  # type: ignore[call-arg]


def _name_temperature(part: ExtendedPart, description: Description) -> Description:
    """Name the temperature of the model, which is the only one by position."""
    if not (beta := _beta_of(part.subject.text)):
        return description
    note = f"The model sharpens its queries by position itself ({BETA}={beta:g}), so the method's default adds nothing."
    return replace(description, notes=(*description.notes, note))


register(Step(Moment.METHOD, _sharpen_once, applies=lambda work: _beta_of(work.subject.text) and not work.is_restored))
register_description(_name_temperature)
