"""The baseline that a longer context has to beat: the best of several truncations.

Without a longer context, the model reads the last tokens of the text and the rest is dropped. How many of the last ones
is a choice, and the whole trained window is not always the best one: a small model may predict better from fewer. So
every quarter of the trained window is measured, beyond the trained window, on the same tokens; inside it nothing is
dropped.

**The best window** is chosen for each comparison, on the very tokens that are compared (a stretch of positions, or
everything beyond the window), by the mean loss over all of them: the mean that is then compared. No user could choose
so well without the tokens to come. So the baseline is, if anything, too good: an extension that beats it beats
each of the windows. Where the extension loses, being the best of several may be luck, so a loss must be larger to
count (``PairedDifference.baselines``).

**The context of a token** in a window is between three quarters and all of the window: a pass scores a quarter of a
window (see ``truncated_loss``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ctxext.measuring.loss import Window, truncation_windows
from ctxext.measuring.statistics import mean_loss

# Names of readings: the model as it is, the best of the windows, and chosen chunks (ctxext.measuring.selection), which
# are the references; and a checkpoint that was saved extended, read as it is.
UNPATCHED, TRUNCATED, SELECTED, AS_SAVED = "unpatched", "truncated", "selected", "as saved"
QUARTERS = 4
# Nobody truncates to fewer tokens; and a window has to hold the special tokens in front too.
LEAST = 8


def windows_of(trained_length: int) -> tuple[int, ...]:
    """Return the windows to try, in tokens, increasing: every quarter of the trained length, and that itself."""
    quarters = {trained_length * part // QUARTERS for part in range(1, QUARTERS)}
    return (*sorted(window for window in quarters if window >= LEAST), trained_length)


def window_name(window: int) -> str:
    """Name the reading that sees the last ``window`` tokens."""
    return f"{TRUNCATED} {window}"


def window_of(name: str) -> int | None:
    """Return the window in a reading's name; None for another reading."""
    kind, _, window = name.partition(" ")
    return int(window) if kind == TRUNCATED and window.isdecimal() else None


def is_reference(name: str) -> bool:
    """Return whether a reading of that name is a reference: unpatched, in the trained window, or the best of these."""
    return name in (UNPATCHED, TRUNCATED) or is_short(name)


def is_short(name: str) -> bool:
    """Return whether a reading of that name reads a part of a text in the trained window: what to beat."""
    return name == SELECTED or window_of(name) is not None


def best_short(losses: Mapping[str, Iterable[Tensor]]) -> str:
    """Return the name of the short reading with the lowest mean loss, and of the longest window among equals.

    ``mean_loss`` takes the mean, so that whatever beats the best one in a ``document_difference`` beats each.

    Args:
        losses: nats per token, by name: the same tokens for each, one tensor per document.
    """
    return min(losses, key=lambda name: (mean_loss(list(losses[name])), -(window_of(name) or 0)))


def tail_windows(window: int, *, start: int, positions: int, prefix: int = 0) -> tuple[Window, ...]:
    """Lay out the passes that score a text from ``start`` on when the model sees the last ``window`` tokens.

    Raises:
        InvalidParameterError: as ``truncation_windows``.
    """
    stride = max(1, min(window // QUARTERS, window - prefix))  # a quarter, at most the room besides the prefix
    return truncation_windows(positions, window=window, stride=stride, start=start, prefix=prefix)
