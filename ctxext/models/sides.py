"""Encoder-decoders whose sides rotate, with a config each: every side is extended as the model that it is."""

from __future__ import annotations

from ctxext.core.patching import extend_positions
from ctxext.core.saved import saved_sides
from ctxext.core.steps import ExtendedPart, Moment, Step, Work, register
from ctxext.core.subject import SIDES
from ctxext.errors import IncompatibleError
from ctxext.spec import ExtensionArguments


def _extend_sides(work: Work) -> None:
    """Extend each side that the arguments name; arguments without names hold for both."""
    subject, arguments = work.subject, work.arguments
    if isinstance(arguments, ExtensionArguments):
        arguments = dict.fromkeys(SIDES, arguments)
    before = saved_sides(work.saved or {})
    if before:
        work.edits.delete(subject.config, "ctxext")
    for name in (name for name in SIDES if name in subject.sides and name in arguments):
        side = Work(subject.sides[name], arguments[name], work.edits, before.get(name), name)
        extend_positions(side)
        work.sides[name] = ExtendedPart(side.subject, side.method, side.extension)


def _refuse_growing(work: Work) -> None:
    """Refuse a dynamic method for a decoder."""
    if work.method.dynamic:
        raise IncompatibleError(
            f"Method {work.method.name!r} follows the length of the text, and the cache of an encoder-decoder's "
            f"decoder cannot be recomputed when that changes. Give a method of fixed positions, such as yarn."
        )


register(Step(Moment.PARTS, _extend_sides, applies=lambda work: work.subject.sides))
register(Step(Moment.METHOD, _refuse_growing, applies=lambda work: work.side == "decoder"))
