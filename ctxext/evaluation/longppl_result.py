"""What a LongPPL measurement found, as frozen numbers: to JSON and back, and to rows for a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.key_tokens import KeyTokens
from ctxext.evaluation.perplexity import PairedDifference
from ctxext.evaluation.provenance import Provenance
from ctxext.evaluation.truncation import is_reference

__all__ = ["LongPplReading", "LongPplResult", "LongPplScore"]

# Format 1 held readings against the last tokens of the whole trained window alone.
FORMAT = 2
DIFFERENCES = ("versus_truncation", "versus_truncation_all")


@dataclass(frozen=True, kw_only=True)
class LongPplScore:
    """One reading at one length.

    Args:
        length: tokens that the model may see; for the best truncation those of the longest.
        key_loss: mean over the key tokens, nats.
        all_loss: mean over all tokens that could have been key tokens, nats.
        versus_truncation: over the key tokens, the loss minus that of the truncation that is best on them.
        versus_truncation_all: the same over all tokens, with the truncation that is best on those.
        window: of the best truncation: the tokens that it sees on the key tokens.
        window_all: the same on all tokens.
    """

    length: int
    key_loss: float
    all_loss: float
    versus_truncation: PairedDifference | None = None
    versus_truncation_all: PairedDifference | None = None
    window: int | None = None
    window_all: int | None = None

    @property
    def longppl(self) -> float:
        """Perplexity over the key tokens."""
        return math.exp(self.key_loss)

    @property
    def perplexity(self) -> float:
        """Perplexity over all tokens at the same place."""
        return math.exp(self.all_loss)


@dataclass(frozen=True, kw_only=True)
class LongPplReading:
    """One way to read the texts.

    Args:
        name: of a reference: ``unpatched``, ``truncated 2048`` for the last 2,048 tokens, ``truncated`` for the best of
            such; ``as saved``; or the method with its factor.
        label: the same, as a reader wants it.
        scores: one per length.
        seconds: of all lengths.
    """

    name: str
    label: str
    scores: tuple[LongPplScore, ...]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LongPplResult:
    """A whole measurement.

    Args:
        keys: the key tokens, and how they were found.
        readings: the references, then the extensions.
        provenance: what was measured, on what, with what.
    """

    keys: KeyTokens
    readings: tuple[LongPplReading, ...]
    provenance: Provenance

    def find(self, name: str) -> LongPplReading:
        """The reading of one name."""
        return next(reading for reading in self.readings if reading.name == name)

    @property
    def extensions(self) -> tuple[LongPplReading, ...]:
        """The readings without the references."""
        return tuple(reading for reading in self.readings if not is_reference(reading.name))

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per reading and length, for CSV."""
        return [
            {
                "checkpoint": self.provenance.checkpoint,
                "reading": reading.name,
                "length": score.length,
                "key_tokens": self.keys.tokens,
                "key_loss": score.key_loss,
                "longppl": score.longppl,
                "perplexity": score.perplexity,
                "versus_truncation": _value(score.versus_truncation, "mean"),
                "versus_truncation_se": _value(score.versus_truncation, "standard_error"),
                "versus_truncation_all": _value(score.versus_truncation_all, "mean"),
                "versus_truncation_all_se": _value(score.versus_truncation_all, "standard_error"),
                "window": score.window,
                "window_all": score.window_all,
            }
            for reading in self.readings
            for score in reading.scores
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        own = {"format": FORMAT, "kind": "longppl", "keys": self.keys.to_dict()}
        return own | {"readings": [asdict(one) for one in self.readings], "provenance": self.provenance.to_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LongPplResult:
        """From what ``to_dict`` made.

        Raises:
            InvalidParameterError: something else.
        """
        names = {item.name for item in fields(cls)}
        if (saved.get("format"), saved.get("kind")) != (FORMAT, "longppl") or not names <= saved.keys():
            raise InvalidParameterError(
                f"This is not a LongPPL result of format {FORMAT}: found kind {saved.get('kind')!r}, format "
                f"{saved.get('format')!r}. Results of format 1 hold readings against the last tokens of the whole "
                f"trained window alone, not against the best truncation: measure again."
            )
        readings = tuple(
            LongPplReading(**{**one, "scores": tuple(_score(score) for score in one["scores"])})
            for one in saved["readings"]
        )
        return cls(
            keys=KeyTokens.from_dict(saved["keys"]),
            readings=readings,
            provenance=Provenance.from_dict(saved["provenance"]),
        )


def _score(saved: Mapping[str, Any]) -> LongPplScore:
    differences = {name: None if saved[name] is None else PairedDifference(**saved[name]) for name in DIFFERENCES}
    return LongPplScore(**{**saved, **differences})


def _value(difference: PairedDifference | None, name: str) -> float | None:
    return None if difference is None else getattr(difference, name)
