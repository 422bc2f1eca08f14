"""The word lists that RULER takes its words from: those of the package wonderwords."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ctxext.errors import require_package

__all__ = ["Words", "words"]


@dataclass(frozen=True)
class Words:
    """Sorted lists of English words, each word once."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]

    @functools.cached_property
    def all(self) -> tuple[str, ...]:
        """All three lists as one, each word once."""
        return tuple(sorted({*self.nouns, *self.adjectives, *self.verbs}))


@functools.cache
def words() -> Words:
    """Read the lists.

    Raises:
        InvalidParameterError: wonderwords is not installed.
    """
    require_package("wonderwords", "eval", "RULER takes its words from")
    from wonderwords import Defaults, RandomWord

    lists = (Defaults.NOUNS, Defaults.ADJECTIVES, Defaults.VERBS)
    return Words(*(tuple(RandomWord(enhanced_prefixes=False, words=each).filter()) for each in lists))
