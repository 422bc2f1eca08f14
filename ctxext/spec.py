"""Facts about a model that methods start from, and the record of an extension. All frozen, none knows a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ctxext.errors import InvalidParameterError

PerPair = Float[Tensor, " half"]
PerHead = Float[Tensor, " heads"]


@dataclass(frozen=True)
class RopeSpec:
    """Facts about a rotary model that a RoPE method may use.

    Args:
        rotary_dim: number of head dimensions that rotate (not ``head_dim`` when rotary is partial). Even, at least 2.
        base: ``rope_theta``, dimensionless, above 1.
        trained_length: tokens that the unextended checkpoint was trained for, at least 1.
        inv_freq: radians per token that the weights were trained with, one per rotated pair, above 0; None for
            ``base^(-2i/d)``. Llama 3.1 and others were trained with scaled frequencies.
        attention_scale: factor on cos and sin in that training, above 0. The scale that a method returns multiplies
            this one.
    """

    rotary_dim: int
    base: float
    trained_length: int
    inv_freq: tuple[float, ...] | None = None
    attention_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise InvalidParameterError(f"rotary_dim must be even and at least 2, found {self.rotary_dim}.")
        if not self.base > 1.0:
            raise InvalidParameterError(f"base (rope_theta) must be above 1, found {self.base}.")
        if self.trained_length < 1:
            raise InvalidParameterError(f"trained_length must be at least 1 token, found {self.trained_length}.")
        if self.inv_freq is not None and len(self.inv_freq) != self.rotary_dim // 2:
            raise InvalidParameterError(
                f"inv_freq must have {self.rotary_dim // 2} numbers (rotary_dim / 2), found {len(self.inv_freq)}."
            )


LLAMA = RopeSpec(rotary_dim=128, base=10000.0, trained_length=4096)
"""Llama 2: the model that most rotary methods were published on, and that examples are made for."""


@dataclass(frozen=True)
class AlibiSpec:
    """Facts about an ALiBi model that a method may use.

    Args:
        num_heads: query heads, at least 1.
        trained_length: tokens that the checkpoint was trained for, at least 1.
        slopes: slopes that the checkpoint was trained with, one per head, positive; None for the ALiBi paper's series.
    """

    num_heads: int
    trained_length: int
    slopes: tuple[float, ...] | None = None


@dataclass(frozen=True)
class BucketSpec:
    """Facts about a model with buckets of relative distances that a method may use.

    Args:
        buckets: number of buckets, both directions together; at least 2.
        max_distance: tokens from which all distances share the last bucket.
        trained_length: tokens that the checkpoint was trained for, at least 1.
    """

    buckets: int
    max_distance: int
    trained_length: int


@dataclass(frozen=True, eq=False)
class Frequencies:
    """Result of a RoPE method: the frequencies and the scale of the rotation.

    Args:
        inv_freq: radians per token, float64, one entry per rotated pair of dimensions.
        attention_scale: multiplies cos *and* sin, so attention scores grow by its square. Dimensionless.
    """

    inv_freq: PerPair
    attention_scale: float = 1.0

    @property
    def temperature(self) -> float:
        """Divisor of the attention scores that has the effect of ``attention_scale`` (YaRN's t)."""
        return self.attention_scale**-2


PIECE = "Piece"  # begins the notes that say which keys a remapping reads where


@dataclass(frozen=True, kw_only=True)
class Description:
    """Report of ``ctxext.describe`` on a model; ``str()`` and ``repr()`` give it as text.

    Args:
        model_type: transformers' name of the architecture.
        method: ``Method.to_dict()`` of the extension, None where the model is not extended.
        trained_length: tokens that the unextended checkpoint was trained for, None where nothing says so.
        target_length: tokens that the model is meant for now.
        stored_as: Form in which the config expresses the extension.
        stock: True if a process without ctxext loads the same model.
        fingerprint: 12 hexadecimal digits of a hash of the frequencies.
        attention: attention backend that serves the model, and why others do not; empty where it keeps its own.
        notes: sentences that a user must know.
        edits: attributes of this model that ctxext changed; empty for a model loaded already extended.
        sides: For an encoder-decoder that is extended, each side's name and its own description. The lengths are then
            those of the text that is read (of the decoder, where the encoder is not extended), and ``method`` has each
            side's method under its name.
        verbose: True if the text also names the pieces, the backends passed over, and what was edited.
    """

    model_type: str
    method: dict[str, Any] | None
    trained_length: int | None
    target_length: int | None
    stored_as: str = ""
    stock: bool = True
    fingerprint: str = ""
    attention: str = ""
    notes: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    sides: tuple[tuple[str, Description], ...] = ()
    verbose: bool = field(default=False, compare=False)

    def __repr__(self) -> str:  # what an interactive session shows
        return str(self)

    def __str__(self) -> str:
        if self.method is None:
            reach = "its config names no length" if self.target_length is None else f"{self.target_length} tokens"
            lines = [f"{self.model_type}: not extended by ctxext, {reach}"]
            return "\n".join([*lines, *(f"  note         {note}" for note in self.notes)])
        loads = f"  loads with   {'plain transformers' if self.stock else 'ctxext.load only, in transformers'}"
        if self.sides:
            lines = [f"{self.model_type}: an encoder-decoder, {len(self.sides)} of its 2 sides extended"]
            lines += [f"{name}: {side}" for name, side in self.sides]
            lines += [f"{self.model_type} as a whole", loads]
        else:
            given = {key: value for key, value in self.method.items() if self.verbose or value is not None}
            parameters = ", ".join(f"{key}={_short(value)}" for key, value in given.items() if key != "method")
            lines = [
                f"{self.model_type} extended by {self.method['method']} ({parameters})",
                f"  length       {self.trained_length} -> {self.target_length} tokens",
                f"  stored as    {self.stored_as}",
                loads,
                f"  fingerprint  {self.fingerprint}",
            ]
        attention = self.attention if self.verbose else self.attention.partition(" (")[0]
        lines += [f"  attention    {attention}"] if attention else []
        lines += [f"  note         {note}" for note in self.notes if self.verbose or not note.startswith(PIECE)]
        lines += [f"  edited       {', '.join(self.edits)}"] if self.verbose and self.edits else []
        return "\n".join(lines)


def _short(value: object) -> str:
    return f"<{len(value)} values>" if isinstance(value, list) and len(value) > 4 else repr(value)


@dataclass(frozen=True, kw_only=True)
class ExtensionArguments:
    """The arguments of ``ctxext.patch``, whose docstring explains them, as the user wrote them.

    Nothing is checked here: each value is checked where it is used, with a sentence. An architecture gets them with the
    method itself, with the trained length that the user or else the config says (None where neither does), and with the
    scaling that is extended or replaced.
    """

    method: Any
    parameters: dict[str, Any] = field(default_factory=dict)
    factor: Any = None
    target_length: Any = None
    trained_length: Any = None
    sliding_window: Any = None
    scaling: Any = None
    attention: Any = None


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Record of the changes that an architecture made to a model; the journal can undo them.

    Args:
        stored_as: one line: how the config expresses the method.
        stock: True if a process without ctxext loads the same model.
        fingerprint: 12 hexadecimal digits of a hash of the frequencies at ``target_length``.
        notes: sentences that a user must know before relying on the model.
        sliding_window: the user's choice for a sliding window, see ``ctxext.patch``.
        scaling: Fate of a scaling that the checkpoint had, "extend" or "replace"; None where it had none.
        attention: the attention backend asked for, where the method needs one of ctxext's; else None.
        original: the config fields that were changed, as they were.
    """

    trained_length: int
    target_length: int
    stored_as: str
    stock: bool
    fingerprint: str
    notes: tuple[str, ...] = field(default=())
    sliding_window: str | None = None
    scaling: str | None = None
    attention: str | None = None
    original: dict[str, Any] = field(default_factory=dict)
