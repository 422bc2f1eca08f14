"""The contract of a method, pure mathematics on numbers and at the same time its own saved form; and their registry."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from ctxext import registry
from ctxext.errors import CheckpointError, InvalidParameterError, UnknownNameError, no_reach
from ctxext.files import JsonObject, is_choice, parse_json
from ctxext.methods.formulas import as_longrope
from ctxext.methods.parameters import Range, checked_tokens, parameters_of, require
from ctxext.spec import AlibiSpec, BucketSpec, ExtensionArguments, Frequencies, PerHead, RopeSpec
from ctxext.version import __version__

# What ``TableMethod.rows`` returns.
Rows = tuple[Int[Tensor, "target mixed"], Float[Tensor, "target mixed"]]

# Not typing.Self: the runtime shape checker of the tests decorates functions one by one and cannot resolve it.
SomeMethod = TypeVar("SomeMethod", bound="Method")


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to give a model a longer context than it was trained for.

    A method is a frozen dataclass of plain numbers, strings and tuples of numbers: a checkpoint stores ``to_dict``, and
    ``from_dict`` rebuilds an equal object. A method never sees a model, a config or a device. Values are checked
    against the annotations of the fields when the object is made, see ``ctxext.methods.parameters``.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    needs_training: ClassVar[bool] = False
    """True if every model is broken until it is trained with the method, so that no command may suggest the method."""
    later: ClassVar[tuple[str, ...]] = ()
    """Parameters that are younger than the method. ``to_dict`` leaves them out while they are None, since results that
    were kept before are found by the hash of that form."""

    factor: Annotated[float, Range(least=1)] = 1.0

    def __post_init__(self) -> None:
        for name, parameter in parameters_of(type(self)).items():
            # 4 and 4.0 make equal methods: the saved form is the same, and transformers warns about an integer
            # attention_factor. So do a list and a tuple; a tuple can be hashed.
            object.__setattr__(self, name, parameter.checked(getattr(self, name)))

    @property
    def dynamic(self) -> bool:
        """True if frequencies depend on the current length, so that cached keys may have to be rotated again."""
        return False

    @property
    def is_table(self) -> bool:
        """True if one set of frequencies, or of slopes, defines the method, so that a config can hold it whole."""
        return not self.dynamic

    @property
    def says_target(self) -> bool:
        """True if a parameter other than ``factor`` sets the target length."""
        return False

    @classmethod
    def reads_weights(cls, parameters: Mapping[str, Any]) -> bool:
        """Return whether a method with these parameters reads the weights of its model before positions change."""
        return False

    def fitted_length(self, trained_length: int, length: int) -> int:
        """Return the length that positions of ``length`` tokens are fitted to; while it is the same, a cache holds."""
        return max(length, trained_length) if self.dynamic else trained_length

    def target_length(self, trained_length: int) -> int:
        """Return the number of tokens that the extended model is meant for."""
        return math.floor(trained_length * self.factor + 1e-6)

    def to_dict(self) -> JsonObject:
        """Return the JSON form: ``{"method": name, **parameters}``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: value for name, value in values.items() if value is not None or name not in self.later}
        return {"method": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def parameters(self) -> JsonObject:
        """Return the parameters that were given, in JSON form, besides the factor."""
        given = self.to_dict().items()
        return {name: value for name, value in given if value is not None and name not in ("method", "factor")}

    @classmethod
    def from_dict(cls: type[SomeMethod], data: JsonObject) -> SomeMethod:
        """Rebuild a method from ``to_dict``'s form.

        Raises:
            UnknownNameError: for a parameter that the method does not have.
        """
        parameters = {key: value for key, value in data.items() if key != "method"}
        return cls.of(parameters)

    @classmethod
    def of(cls: type[SomeMethod], parameters: JsonObject) -> SomeMethod:
        """Build a method from parameters by name.

        Raises:
            UnknownNameError: for a parameter that the method does not have.
            InvalidParameterError: if a parameter without a default is missing, or a value is outside its range.
        """
        for key in parameters:
            if key not in parameters_of(cls):
                raise UnknownNameError.of(f"{cls.name} parameter", key, parameters_of(cls))
        missing = [name for name in cls.required() if name not in parameters]
        if missing:
            raise InvalidParameterError(
                f"Method {cls.name!r} needs {' and '.join(missing)}, one number per rotated pair of dimensions, which "
                f"have no default. Give {missing[0]}=[...] in Python, and {missing[0]}=@FILE.json on a command line: "
                f'with --param, or behind the name where methods are named so, "{cls.name} {missing[0]}=@FILE.json".'
            )
        return cls(**parameters)

    @classmethod
    def required(cls) -> list[str]:
        """Return the parameters without a default."""
        return [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]

    @classmethod
    def example(cls: type[SomeMethod], rope: RopeSpec) -> SomeMethod:
        """Build a typical instance for ``rope``, for the contract tests and the tables."""
        return cls(factor=4.0)


@dataclass(frozen=True, kw_only=True)
class RopeMethod(Method):
    """A method that changes the rotary frequencies of a model."""

    @abstractmethod
    def frequencies(self, rope: RopeSpec, length: int) -> Frequencies:
        """Compute the frequencies in float64 for a sequence of ``length`` tokens (only dynamic methods use it)."""

    def rope_parameters(self, rope: RopeSpec) -> JsonObject | None:
        """Return the ``rope_parameters`` that plain transformers reads as this method; None if it cannot."""
        return None

    def as_longrope(self, rope: RopeSpec) -> JsonObject:
        """Return the ``rope_parameters`` that hold the frequencies themselves."""
        return as_longrope(rope, self.frequencies(rope, rope.trained_length), self.factor)

    def fits(self, rope: RopeSpec) -> bool:
        """Return whether there are frequencies for this rotation: some methods demand slow pairs, or a long window."""
        try:
            self.frequencies(rope, rope.trained_length)
        except InvalidParameterError:
            return False
        return True

    def for_latent_attention(self) -> RopeMethod:
        """Return the form for models that rotate only a part of each head and scale whole scores (DeepSeek)."""
        return self


@dataclass(frozen=True, kw_only=True)
class BiasMethod(Method):
    """A method whose positions are a score term that depends on head and distance: ALiBi and its kin."""

    @property
    def splits_heads(self) -> bool:
        """True if, in an encoder, the first half of the heads looks back and the other half looks ahead."""
        return False

    @abstractmethod
    def slopes(self, alibi: AlibiSpec, length: int) -> PerHead:
        """Compute positive slopes in float64; the score of a key at distance ``n`` falls by ``slope * n``."""


@dataclass(frozen=True, kw_only=True)
class BucketMethod(Method):
    """A method for models that learned one score per bucket of distances, small buckets near and large ones far: T5.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1.
        temperature: divisor of the attention scores, the buckets' scores included. Above 0, at most 1.
    """

    temperature: Annotated[float, Range(above=0, most=1)] = 1.0

    @abstractmethod
    def max_distance(self, spec: BucketSpec) -> int:
        """Return the distance in tokens from which all distances share the last bucket."""


@dataclass(frozen=True, kw_only=True)
class TableMethod(Method):
    """A method that builds a longer table of positions from the one that a model has learned, row by row."""

    @abstractmethod
    def rows(self, trained: int, target: int) -> Rows:
        """Return the indices of the trained rows that each new row mixes, and their weights in float64.

        Rows of no position (padding) are not counted. A new row mixes at most 3 trained rows; a row of weight 0 is left
        out of the mixture.

        Args:
            trained: number of rows that the model has learned, at least 1.
            target: number of rows to make, at least ``trained``.

        Raises:
            InvalidParameterError: if the parameters do not fit the trained length, or do not reach the target.
        """


@dataclass(frozen=True, kw_only=True)
class GrowingMethod(Method):
    """A method that stretches a text beyond the trained window by as much as its length needs.

    Args:
        growth: "exact" follows every token, as the papers do, and a cache must be recomputed at every step beyond the
            window; "doubling" rounds the length up to trained_length times a power of two, so that a cache is rarely
            recomputed; "request" is "exact" with the length that a whole call of ``generate`` can reach, for each row
            its prompt and ``max_new_tokens``, so that decoding recomputes nothing.
    """

    growth: Literal["exact", "doubling", "request"] = "exact"

    @property
    def dynamic(self) -> bool:
        return True

    def fitted_length(self, trained_length: int, length: int) -> int:
        if length <= trained_length:
            return trained_length
        if self.growth != "doubling":
            return length
        return int(trained_length * 2 ** math.ceil(math.log2(length / trained_length)))


METHODS: MutableMapping[str, type[Method]] = registry.Registry(sys.modules["ctxext.methods"], Method)
"""Methods that extend a checkpoint, by name."""
ENCODINGS: dict[str, type[Method]] = {}
"""Encodings that a model is trained with, by name; the room that holds them fills it before the first look at it."""


def known_methods() -> dict[str, type[Method]]:
    """Return ``METHODS`` and ``ENCODINGS`` by name."""
    registry.fill("encodings")
    return dict(sorted({**ENCODINGS, **METHODS}.items()))


def method_class(name: object) -> type[Method] | None:
    """Return the method of this name, None if there is none."""
    if not isinstance(name, str):  # of a file that was damaged
        return None
    return METHODS[name] if name in METHODS else known_methods().get(name)


def saved_class(name: object) -> type[Method]:
    """Return the class of a method that a checkpoint was extended by.

    Raises:
        CheckpointError: if no method of this name is known in this process.
    """
    kind = method_class(name)
    if kind is not None:
        return kind
    raise CheckpointError(
        f"The extension method {name!r} is unknown to ctxext {__version__} in this process. If it is a class of your "
        f"own, import it and register it first: ctxext.methods.METHODS[{name!r}] = YourClass. Otherwise it belongs to "
        f"another version of ctxext. Install the one that the checkpoint's config names under ctxext.versions."
    )


def choice_in(path: str | Path, **given: Any) -> JsonObject:
    """Read arguments of ``ctxext.patch`` from a file that ``ctxext choose -o choice.json`` wrote, where it has them.

    Raises:
        InvalidParameterError: if the file cannot be read, holds no method, or another value than one that is given.
        CheckpointError: if the method is unknown in this process.
    """
    try:
        choice = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"Cannot read the method in {str(path)!r}: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidParameterError(f"{path} is not JSON, so there is no method in it: {error}.") from error
    saved = choice.get("method") if isinstance(choice, dict) else None
    if not isinstance(saved, dict) or "method" not in saved:
        raise InvalidParameterError(
            f"{path} holds no method. A file that `ctxext choose ... -o choice.json` writes does, under 'method'."
        )
    about = choice["provenance"] if isinstance(choice.get("provenance"), dict) else {}
    held = {name: about[name] for name in ("trained_length", "sliding_window") if about.get(name) is not None}
    for name, value in held.items():
        if given.get(name) not in (None, value):
            raise InvalidParameterError(
                f"{path} was chosen with {name}={value}, found {given[name]!r}. Give the same "
                f"(--{name.replace('_', '-')}), or the method by its name."
            )
    return {"method": saved_class(saved["method"]).from_dict(saved)} | held


def with_choice(given: ExtensionArguments) -> ExtensionArguments:
    """Replace the path of a ``choice.json`` in arguments by what it holds, as ``choice_in`` does."""
    return replace(given, **choice_in(given.method, **vars(given))) if is_choice(given.method) else given


def method(name: str, *, factor: float | None = None, **parameters: Any) -> Method:
    """Build a method from its name, for configs and command lines.

    Args:
        name: one of ``ctxext.methods()``.
        factor: target_length / trained_length, at least 1; by default the method's own.
        **parameters: the method's own parameters.

    Raises:
        UnknownNameError: for an unknown method or parameter, with a suggestion.
        InvalidParameterError: for a value outside its range, and for "auto", which has to be measured.
    """
    if name == "auto" and name not in METHODS:
        raise InvalidParameterError(
            "No formula knows which method suits a model, so there is no method 'auto': measure it on your own texts. "
            "Run `ctxext choose CHECKPOINT -t mine.txt --target TOKENS`, or call ctxext.choose(model, tokenizer, "
            "texts=[...], target_length=TOKENS) and patch with its method."
        )
    kind = method_class(name)
    if kind is None:
        raise UnknownNameError.of("method", name, known_methods())
    return kind.of(parameters if factor is None else parameters | {"factor": factor})


def resolve(
    chosen: str | Method,
    factor: float | None,
    target_length: int | None,
    trained_length: int | None,
    parameters: JsonObject,
) -> Method:
    """Turn what the user wrote into one method object, or say which two things contradict each other."""
    if isinstance(chosen, Method):
        given = {"factor": factor, "target_length": target_length, **parameters}
        extra = [key for key, value in given.items() if value is not None]
        if extra:
            raise InvalidParameterError(
                f"A method object already holds its parameters; give {', '.join(extra)} to {type(chosen).__name__}(...)"
                f" instead, or pass the method by name."
            )
        return chosen
    require(isinstance(chosen, str), "method", chosen, "a name or a ctxext method object")
    if target_length is not None:
        factor = _factor_for(target_length, trained_length, factor)
    built = method(chosen, factor=factor, **parameters)
    if target_length is not None and abs(built.target_length(trained_length or 1) - target_length) > 1:
        raise InvalidParameterError(
            f"target_length={target_length:,} and the parameters of {chosen} contradict each other: these mean "
            f"{built.target_length(trained_length or 1):,} tokens. Leave one of them out."
        )
    if factor is None and isinstance(built, RopeMethod | TableMethod) and not built.says_target:
        raise no_reach(chosen)
    return built


def _factor_for(target_length: int, trained_length: int | None, factor: float | None) -> float:
    target_length = checked_tokens("target_length", target_length)
    if factor is not None:
        parameters_of(Method)["factor"].checked(factor)
    if trained_length is None:
        raise InvalidParameterError(
            "target_length needs the trained length here. Pass trained_length (--trained-length)."
        )
    implied = target_length / trained_length
    if factor is not None and abs(factor * trained_length - target_length) > 1:
        raise InvalidParameterError(
            f"factor={factor} and target_length={target_length} contradict each other: the checkpoint was trained for "
            f"{trained_length} tokens, so target_length means factor={implied:g}. Give one of them."
        )
    if implied < 1:
        raise InvalidParameterError(
            f"target_length={target_length} is below the trained length of {trained_length} tokens; there is nothing "
            f"to extend."
        )
    return implied if factor is None else factor
