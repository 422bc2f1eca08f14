"""The contract of a method: pure mathematics on numbers, and at the same time its own saved form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.methods.parameters import Range, parameters_of
from ctxext.spec import AlibiSpec, BucketSpec, Frequencies, RopeSpec

# What ``TableMethod.rows`` returns.
Rows = tuple[Int[Tensor, "target mixed"], Float[Tensor, "target mixed"]]

# Not typing.Self: the runtime shape checker of the tests decorates functions one by one and cannot resolve it.
SomeMethod = TypeVar("SomeMethod", bound="Method")


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to let a model read further than it was trained for.

    A method is a frozen dataclass of plain numbers, strings and tuples of numbers: ``to_dict`` is what a
    checkpoint stores and ``from_dict`` rebuilds an equal object. It never sees a model, a config or a device. What a
    field's annotation says is checked when the object is made, see ``ctxext.methods.parameters``.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    needs_training: ClassVar[bool] = False
    """Whether it breaks every model until that is trained with it, so that nobody should meet it unasked."""

    factor: Annotated[float, Range(least=1)] = 1.0

    def __post_init__(self) -> None:
        for name, parameter in parameters_of(type(self)).items():
            # 4 and 4.0 are one method: saved alike, and stock transformers warns about an integer attention_factor. A
            # list and a tuple are one too, and equal methods hash alike.
            object.__setattr__(self, name, parameter.checked(getattr(self, name)))

    @property
    def dynamic(self) -> bool:
        """Whether the result depends on the current length, so that a KV cache must be handled with care."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "regime" in vars(cls):  # nothing would call it
            raise TypeError(f"{cls.__name__}.regime: this method is called fitted_length now. Rename it.")

    @property
    def is_table(self) -> bool:
        """Whether one set of frequencies, or of slopes, is all there is to it, so that a config can hold it whole."""
        return not self.dynamic

    @property
    def says_target(self) -> bool:
        """Whether it was told how far to read by something else than ``factor``."""
        return False

    def fitted_length(self, trained_length: int, length: int) -> int:
        """The length that positions of ``length`` tokens are fitted to; a cache stays right while this is the same."""
        return max(length, trained_length) if self.dynamic else trained_length

    def target_length(self, trained_length: int) -> int:
        """Tokens that the extended model is meant for."""
        return math.floor(trained_length * self.factor + 1e-6)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form: ``{"method": name, **parameters}``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"method": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls: type[SomeMethod], data: dict[str, Any]) -> SomeMethod:
        """Rebuild a method from ``to_dict``'s form.

        Raises:
            UnknownNameError: for a parameter that the method does not have.
        """
        parameters = {key: value for key, value in data.items() if key != "method"}
        return cls.of(parameters)

    @classmethod
    def of(cls: type[SomeMethod], parameters: dict[str, Any]) -> SomeMethod:
        """Build a method from parameters by name.

        Raises:
            UnknownNameError: for a parameter that the method does not have.
            InvalidParameterError: without one that it has no default for, or for a value outside its range.
        """
        known = {field.name for field in fields(cls)}
        for key in parameters:
            if key not in known:
                raise UnknownNameError.of(f"parameter of method {cls.name!r}", key, known)
        needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in needed if name not in parameters]
        if missing:
            raise InvalidParameterError(
                f"Method {cls.name!r} needs {' and '.join(missing)}, one number per rotated pair of dimensions, which "
                f"have no default. Give {missing[0]}=[...] in Python, and {missing[0]}=@FILE.json on a command line: "
                f'with --param, or behind the name where methods are named so, "{cls.name} {missing[0]}=@FILE.json".'
            )
        return cls(**parameters)

    @classmethod
    def example(cls: type[SomeMethod], rope: RopeSpec) -> SomeMethod:
        """A typical instance for ``rope``; feeds the contract tests and the tables."""
        return cls(factor=4.0)


@dataclass(frozen=True, kw_only=True)
class RopeMethod(Method):
    """A method that changes the rotary frequencies of a model."""

    @abstractmethod
    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        """Frequencies in float64 for a sequence of ``length`` tokens (only dynamic methods look at it)."""

    @abstractmethod
    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        """Stock transformers form, complete with ``rope_type`` and ``rope_theta``; None if there is none."""

    def for_latent_attention(self) -> RopeMethod:
        """The form for models that rotate a part of each head only and scale whole scores instead (DeepSeek)."""
        return self


@dataclass(frozen=True, kw_only=True)
class BiasMethod(Method):
    """A method whose positions are a score term that depends on head and distance: ALiBi and its kin."""

    @property
    def splits_heads(self) -> bool:
        """Whether, where tokens see both ways, the first half of the heads looks back and the other half ahead."""
        return False

    @abstractmethod
    def slopes(self, alibi: AlibiSpec, length: int) -> Float[Tensor, " heads"]:
        """Positive slopes in float64; the score of a key at distance ``n`` falls by ``slope * n``."""


@dataclass(frozen=True, kw_only=True)
class BucketMethod(Method):
    """A method for models that learned one score per bucket of distances, small buckets near and large ones far: T5.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: what attention scores, those of the buckets in them, are divided by. Above 0, at most 1.
    """

    temperature: Annotated[float, Range(above=0, most=1)] = 1.0

    @abstractmethod
    def max_distance(self, spec: BucketSpec) -> int:
        """Tokens from which all distances shall share the last bucket."""


@dataclass(frozen=True, kw_only=True)
class TableMethod(Method):
    """A method that makes a longer table of positions out of the one that a model has learned, row by row."""

    @abstractmethod
    def rows(self, trained: int, target: int) -> Rows:
        """Which of the trained rows each new row mixes, and how much of each, in float64.

        Rows that stand for no position (padding) are not counted. At most 3 rows are mixed into one; a row that counts
        for 0 is not mixed in.

        Args:
            trained: rows that the model has learned, at least 1.
            target: rows to make, at least ``trained``.

        Raises:
            InvalidParameterError: if the parameters do not fit the trained length, or do not reach the target.
        """


@dataclass(frozen=True, kw_only=True)
class GrowingMethod(Method):
    """A method that stretches a sequence beyond the trained window by as much as it needs.

    Args:
        growth: "exact" follows every token, as the papers do, and a cache must be recomputed at every step beyond the
            window; "doubling" rounds the length up to trained_length times a power of two, so that this is rare.
    """

    growth: Literal["exact", "doubling"] = "exact"

    @property
    def dynamic(self) -> bool:
        return True

    @property
    def is_table(self) -> bool:
        """Whether one set of frequencies, or of slopes, is all there is to it, so that a config can hold it whole."""
        return not self.dynamic

    @property
    def says_target(self) -> bool:
        """Whether it was told how far to read by something else than ``factor``."""
        return False

    def fitted_length(self, trained_length: int, length: int) -> int:
        if length <= trained_length:
            return trained_length
        if self.growth == "exact":
            return length
        return int(trained_length * 2 ** math.ceil(math.log2(length / trained_length)))
