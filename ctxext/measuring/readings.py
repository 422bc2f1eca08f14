"""Readings of a checkpoint: as it is, truncated, as it was saved, and extended by methods."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import nn

from ctxext.checkpoints.carried import already_extended, choices
from ctxext.core import patching
from ctxext.core.architecture import architecture_of, trained_length_of
from ctxext.core.patching import patched_state
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, UnknownNameError
from ctxext.files import JsonObject, digest
from ctxext.measuring.checkpoint import Checkpoint
from ctxext.measuring.forward import follows_length, last_position
from ctxext.measuring.labels import label_of
from ctxext.measuring.loss import Window
from ctxext.measuring.provenance import versions
from ctxext.measuring.selection import selection_windows
from ctxext.measuring.truncation import (
    AS_SAVED,
    SELECTED,
    TRUNCATED,
    UNPATCHED,
    is_reference,
    tail_windows,
    window_name,
    window_of,
    windows_of,
)
from ctxext.methods import (
    METHODS,
    BiasMethod,
    Method,
    RopeMethod,
    choice_in,
    is_choice,
    known_methods,
    method_class,
    saved_class,
)
from ctxext.methods.parameters import checked_tokens
from ctxext.methods.remap import RemapMethod
from ctxext.quantities import method_said
from ctxext.spec import AlibiSpec, Description, RopeSpec
from ctxext.texts.corpus import TokenisedDocument


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read a text.

    Args:
        name: unique in a comparison: ``unpatched``; ``truncated 2048`` for the last 2,048 tokens and ``truncated`` for
            the best of such; or a method with its factor, such as ``yarn x2``.
        method: ``Method.to_dict()``; None for the references.
        reach: Tokens that it is meant for; None for the references of a checkpoint that is not extended.
        most: Tokens that it can read; None where nothing ends there.
        dynamic: True where positions follow the length of the text, so that every length needs a separate pass.
        any_factor: True where the factor changes only the reach, so that one factor represents all.
        fingerprint: 12 hexadecimal digits of a hash of the frequencies.
        attention: Name of the attention backend; empty where the extension does not change it.
    """

    name: str
    label: str
    method: JsonObject | None = None
    factor: float = 1.0
    reach: int | None = None
    most: int | None = None
    dynamic: bool = False
    any_factor: bool = False
    fingerprint: str = ""
    attention: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_reference(self) -> bool:
        """True where the checkpoint is read as it is; such references are measured at every length."""
        return is_reference(self.name)

    @property
    def identity(self) -> list[Any]:
        """JSON values that tell its losses from other readings' losses; see ``Readings.key``."""
        return [self.name, self.method, self.fingerprint]

    @property
    def window(self) -> int | None:
        """Tokens that a truncation sees; None for the best truncation, and for other readings."""
        return window_of(self.name)

    @property
    def is_candidate(self) -> bool:
        """True for an extension, which may win: every method, and a checkpoint that was saved extended."""
        return self.reach is not None

    def meant_for(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths up to its reach, or up to the last one that a reference can read."""
        most = self.most if self.is_reference else self.reach
        return tuple(length for length in lengths if most is None or length <= most)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A method that cannot be right on this model, and why."""

    label: str
    reason: str


def known_trained_length(subject: Subject, given: int | None = None) -> int:
    """Return the number of tokens that a checkpoint was trained for: as given, or from its config.

    Raises:
        InvalidParameterError: the config does not tell, or ``given`` is not a number of tokens.
    """
    if given is not None:
        return checked_tokens("trained_length", given, least=2)
    known = trained_length_of(subject)
    if known is None:
        raise InvalidParameterError(
            "The checkpoint's config does not say for how many tokens it was trained; give --trained-length."
        )
    return known


def check_reference(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    """See that a checkpoint can read the references of another, which was made from it.

    Raises:
        InvalidParameterError: it is extended itself, or has another tokenizer.
    """
    if already_extended(reference.subject.config):
        raise InvalidParameterError(f"The reference {reference.name} is extended itself; give the original checkpoint.")
    if reference.tokenizer.get_vocab() != checkpoint.tokenizer.get_vocab():
        raise InvalidParameterError(
            f"The reference {reference.name} has another tokenizer than {checkpoint.name}, so that it would read other "
            f"tokens: their losses and answers cannot be compared."
        )


class Readings:
    """A loaded checkpoint and the readings that can be applied to its model, one at a time, in place.

    A checkpoint that was saved extended is read as saved by the references, and its extension taken off for the
    methods and put on again.

    Args:
        checkpoint: not patched in this process (``ctxext.load`` may have restored an extension).
        trained_length: tokens that the checkpoint was trained for; None where its config says so.
        windows: Windows of the truncations, in tokens; None for ``windows_of`` the trained length.
        select: True for a reading of chosen chunks among the references.

    Raises:
        InvalidParameterError: nothing says for how many tokens the checkpoint was trained.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        trained_length: int | None = None,
        sliding_window: str | None = None,
        windows: Sequence[int] | None = None,
        select: bool = False,
    ) -> None:
        self.checkpoint, self.select = checkpoint, select
        self.model = checkpoint.model
        self.extended = already_extended(checkpoint.subject.config)
        self.sliding_window = sliding_window
        self.trained_length = known_trained_length(checkpoint.subject, trained_length)
        self.windows = windows_of(self.trained_length) if windows is None else tuple(windows)
        self._given = self.trained_length if self.extended else trained_length

    @property
    def most(self) -> int | None:
        """The tokens that the model, as it is now, has positions for; None for any number."""
        return last_position(self.checkpoint.subject)

    @cached_property
    def setting(self) -> JsonObject:
        """The dependencies of every measured number, except the reading and the tokens, as JSON values.

        Read it before a method is applied: a method may change the attention, which is part of the reading.
        """
        parameter = next(self.model.parameters())
        model: Any = self.model
        return {
            "checkpoint": self.checkpoint.sha256,
            "dtype": str(parameter.dtype),
            "device": parameter.device.type,
            "attention": getattr(model.config, "_attn_implementation", None),
            "sliding_window": self.sliding_window,
            "versions": {name: version for name, version in versions().items() if name != "python"},
        }

    def key(self, reading: Sequence[Any], **asked: Any) -> str:
        """Hash everything that the numbers of one reading depend on, to 16 hexadecimal digits.

        Args:
            reading: JSON values that tell it from other readings.
            **asked: JSON values that tell the tokens and the task.
        """
        depends = {"setting": self.setting, "trained_length": self.trained_length, "reading": list(reading), **asked}
        return digest(json.dumps(depends, sort_keys=True), 16)

    @contextlib.contextmanager
    def applied(self, reading: Reading) -> Iterator[None]:
        """Apply a reading to the model, inside a ``with``."""
        if reading.is_reference or reading.method is None or reading.name == AS_SAVED:
            yield
            return
        with self._patched(saved_class(reading.method["method"]).from_dict(reading.method)):
            yield

    def find(
        self, methods: Sequence[Method], *, progress: Callable[[int, int], None] = lambda *_: None
    ) -> tuple[tuple[Reading, ...], tuple[Refusal, ...]]:
        """Try every method on the model to learn which apply and what they do.

        Returns:
            The references, then the methods that apply; and the refused methods, with the reason.
        """
        readings = list(self._references())
        refused: dict[str, list[str]] = {}  # many methods are often refused for one reason
        for done, method in enumerate(methods):
            progress(done, len(methods))
            try:
                with self._patched(method):
                    readings.append(_reading(method, patching.describe(self.model)))
            except CtxextError as error:
                refused.setdefault(str(error), []).append(label_for(method))
        progress(len(methods), len(methods))
        return tuple(readings), tuple(Refusal(label=", ".join(who), reason=why) for why, who in refused.items())

    def extensions(self, methods: Sequence[Method]) -> tuple[Reading, list[Reading]]:
        """Try methods, which must all apply; return the checkpoint's reading and the readings of the methods.

        Raises:
            IncompatibleError: a method that cannot be right on this model.
        """
        (plain, *others), refusals = self.find(methods)
        if refusals:
            raise IncompatibleError(f"{refusals[0].label}: {refusals[0].reason}")
        return plain, [reading for reading in others if not reading.is_reference]

    def _references(self) -> tuple[Reading, ...]:
        description = patching.describe(self.model)
        how = f" ({description.method['method']} {TIMES}{description.method['factor']:g})" if description.method else ""
        plain = Reading(
            name=UNPATCHED,
            label=f"as saved{how}" if self.extended else label_of(UNPATCHED),
            method=description.method,
            reach=description.target_length if self.extended else None,
            most=self.most,
            fingerprint=description.fingerprint,
            dynamic=follows_length(self.checkpoint.subject),
            notes=(f"the checkpoint is extended already: {self.extended}",) if self.extended else (),
        )
        names = [*map(window_name, self.windows), *[SELECTED] * self.select, TRUNCATED]
        return plain, *(Reading(name=name, label=label_of(name)) for name in names)

    @contextlib.contextmanager
    def _patched(self, method: Method) -> Iterator[None]:
        subject = self.checkpoint.subject
        base, state = subject.model, patched_state(subject.model)
        if state is not None:
            trained = architecture_of(subject).replaced_weights(subject)  # which may have been trained since
            patching.unpatch(self.model)
        try:
            with patching.patched(self.model, method, trained_length=self._given, sliding_window=self.sliding_window):
                yield
        finally:
            if state is not None:
                patching.patch(self.model, state.method, **choices(state.saved_form()))
                if (again := patched_state(base)) is not None:
                    again.edits.replace_weights(base, trained)


def _reading(method: Method, description: Description) -> Reading:
    return Reading(
        name=name_for(method),
        label=label_for(method),
        method=method.to_dict(),
        factor=method.factor,
        reach=description.target_length,
        dynamic=method.dynamic,
        any_factor=ignores_factor(method),
        fingerprint=description.fingerprint,
        attention=description.attention,
        notes=description.notes,
    )


TIMES = "\N{MULTIPLICATION SIGN}"


def chosen_methods(
    subject: Subject, wanted: Sequence[str | Method], factors: Sequence[float], trained_length: int | None = None
) -> tuple[Method, ...]:
    """Return the methods to try, each at each factor; once, at the largest, if the factor changes only the reach.

    Args:
        subject: decides what an empty ``wanted`` means: every method for its kind of positions (rotary or ALiBi) that
            needs nothing but a factor. Replacing rotation by ALiBi needs training and has to be named.
        wanted: names, with parameters where needed (``"yarn ramp=turns truncate=false"``), which may hold a
            factor; or objects and files of ``ctxext choose`` (``choice.json``), which bring a factor.

    Raises:
        UnknownNameError: an unknown method or parameter.
        InvalidParameterError: no factor, one out of range, a method twice, or a choice for another trained length.
    """
    if not factors and not any(isinstance(item, Method) for item in wanted):
        raise InvalidParameterError("Give at least one factor (target length over trained length).")
    methods: list[Method] = []
    if not wanted:
        names = architecture_of(subject).method_names()
        wanted = [name for name in names if not (METHODS[name].needs_training or METHODS[name].required())]
    for item in wanted:
        if isinstance(item, Method) or is_choice(item):
            own = {"method": item} if isinstance(item, Method) else choice_in(item, trained_length=trained_length)
            methods.append(own["method"])
            continue
        built = list(dict.fromkeys(named_method(item, factor) for factor in sorted(set(factors))))
        methods += built[-1:] if ignores_factor(built[-1]) else built
    names = list(map(name_for, methods))
    for name in names:
        if names.count(name) > 1:
            raise InvalidParameterError(f"Give each method once; found {name!r} twice.")
    return tuple(methods)


def ignores_factor(method: Method) -> bool:
    """Return whether another factor would give the same positions at every length, tried on a made-up model."""
    if method.required():
        return False
    trained = 4096
    rope = RopeSpec(rotary_dim=64, base=10000.0, trained_length=trained)
    alibi = AlibiSpec(num_heads=8, trained_length=trained)

    def positions(of: Method, length: int) -> object:
        if isinstance(of, RemapMethod):
            return of.pieces(rope, of.target_length(trained))
        if isinstance(of, RopeMethod):
            frequencies = of.frequencies(rope, length)
            return frequencies.inv_freq.tolist(), frequencies.attention_scale
        return (of.slopes(alibi, length).tolist(), 1.0) if isinstance(of, BiasMethod) else None

    other = replace(method, factor=method.factor * 1.5)
    try:
        pairs = [(positions(method, length), positions(other, length)) for length in (trained, 2 * trained)]
    except InvalidParameterError:  # one of them does not fit so short a window, or reaches its target no more
        return False
    return all(before is not None and before == another for before, another in pairs)


def named_method(text: str, factor: float) -> Method:
    """Parse ``name key=value ...``, split as a shell does, into a method; a factor in it goes first.

    Raises:
        UnknownNameError: an unknown method or parameter.
        InvalidParameterError: a value out of range.
    """
    name, parameters = method_said(text)
    kind = method_class(name)
    if kind is None:
        raise UnknownNameError.of("method", name, known_methods())
    return kind.of({"factor": factor, **parameters})


def name_for(method: Method) -> str:
    """Return a name that no other method of a comparison has, such as ``yarn x2 ramp=turns``."""
    factor = "" if ignores_factor(method) else f" x{method.factor:g}"
    return f"{method.name}{factor}{''.join(f' {part}' for part in _own(method))}"


def label_for(method: Method) -> str:
    """Return a method's name with its factor and parameters, as tables show it."""
    factor = "" if ignores_factor(method) else f" {TIMES}{method.factor:g}"
    parameters = _own(method)
    return f"{label_of(method.name)}{factor}" + (f" ({', '.join(parameters)})" if parameters else "")


def _own(method: Method) -> list[str]:
    """Parameters that are not at their default, the factor aside."""
    shown = []
    for item in fields(method):
        value = getattr(method, item.name)
        if item.name != "factor" and (item.default is MISSING or value != item.default):
            shown.append(f"{item.name}={_short(value)}")
    return shown


def _short(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return f"<{len(value)} values, {digest(repr(value), 6)}>"


@dataclass(frozen=True, eq=False)
class Reader:
    """A reading of one model, and the lengths to measure it at.

    Args:
        lengths: tokens, increasing.
        apply: puts the model into the state of the reading, inside a ``with``; None for ``Readings.applied``.
    """

    reading: Reading
    readings: Readings
    lengths: tuple[int, ...]
    apply: Callable[[], contextlib.AbstractContextManager[Any]] | None = field(default=None, kw_only=True)

    @property
    def window(self) -> int | None:
        """Tokens that it is shown at most, the last ones; None where it is shown everything."""
        return self.readings.trained_length if self.reading.name == TRUNCATED else self.reading.window

    @property
    def model(self) -> nn.Module:
        """The model, which is this reader's while ``applied``."""
        return self.readings.model

    def beyond(self, text: TokenisedDocument, positions: int) -> Sequence[Window]:
        """Lay out the passes in which a short reading scores a text from the trained length up to ``positions``."""
        trained, prefix = self.readings.trained_length, text.prefix
        if self.window is None:
            return selection_windows(text.input_ids, window=trained, start=trained, positions=positions, prefix=prefix)
        return tail_windows(self.window, start=trained, positions=positions, prefix=prefix)

    def applied(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the model in the state of the reading inside a ``with``."""
        return self.readings.applied(self.reading) if self.apply is None else self.apply()
