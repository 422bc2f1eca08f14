"""Attention backends, one file each. This folder is the registry: ``BACKENDS`` maps a name to its class."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ctxext.errors import BackendUnavailableError, UnknownNameError
from ctxext.kernels.base import AttentionBackend, Call, Need
from ctxext.kernels.layout import Layout
from ctxext.registry import Registry

__all__ = [
    "BACKENDS",
    "PREFERENCE",
    "AttentionBackend",
    "Call",
    "Layout",
    "Need",
    "named",
    "require_usable",
    "select",
]

BACKENDS: Mapping[str, type[AttentionBackend]] = Registry(
    sys.modules[__name__],
    AttentionBackend,  # type: ignore[type-abstract]
    places=[("flash3", "flash"), ("flash4", "flash")],
)

PREFERENCE = ("flash", "sdpa", "flex", "reference")
"""Order in which ``auto`` tries: the native kernel, the general path, the compiled one, the oracle that serves all."""
NEWEST = ("flash3", "flash4")
"""What ``auto`` tries before them from Hopper on, without gradients and ALiBi: the kernels written for these GPUs."""


def named(name: str) -> AttentionBackend:
    """Build a backend from its name; raise ``UnknownNameError`` if there is none of it."""
    if name not in BACKENDS:
        raise UnknownNameError.of("attention backend", name, [*BACKENDS, "auto"])
    return BACKENDS[name]()


def require_usable(name: str) -> None:
    """Raise unless ``name`` is "auto" or a backend that can serve some call in this process.

    Raises:
        UnknownNameError: if the name does not exist.
        BackendUnavailableError: if the backend is not installed.
    """
    reason = None if name == "auto" else named(name).why_never()
    if reason is not None:
        usable = [each for each in PREFERENCE if BACKENDS[each]().why_never() is None]
        raise BackendUnavailableError(
            f"Attention backend {name!r} cannot be used here: {reason} These can: {', '.join(['auto', *usable])}."
        )


def select(name: str, need: Need) -> tuple[AttentionBackend, dict[str, str]]:
    """Choose a backend for a call.

    Args:
        name: a backend's name, or ``"auto"`` for the first of ``NEWEST``, where they are meant
            for the device, and ``PREFERENCE`` that can serve the call.

    Returns:
        The backend, and the reason for each backend that ``auto`` passed over.

    Raises:
        UnknownNameError: if the name does not exist.
        BackendUnavailableError: if the named backend, or for ``auto`` every backend, cannot serve the call. A named
            backend never falls back.
    """
    order = [*PREFERENCE, *(candidate for candidate in BACKENDS if candidate not in PREFERENCE)]
    if (need.capability or (0, 0)) >= (9, 0) and not (need.biased or need.training):
        order.sort(key=lambda candidate: candidate not in NEWEST)
    if need.lse and need.training:  # of parts, no GPU has shown the backward pass of flash-attn yet
        order.sort(key=lambda candidate: (not named(candidate).fuses(need), candidate != "sdpa"))
    reasons: dict[str, str] = {}
    for candidate in order if name == "auto" else [name]:
        backend = named(candidate)
        reason = backend.refuses(need)
        if reason is None:
            return backend, reasons
        reasons[candidate] = reason
    if name == "auto":
        listed = " ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
        raise BackendUnavailableError(f"No attention backend can serve this call. {listed}")
    usable = [candidate for candidate in order if candidate != name and BACKENDS[candidate]().refuses(need) is None]
    hint = f"These can: {', '.join(usable)}." if usable else "No other backend can either."
    raise BackendUnavailableError(f"Attention backend {name!r} cannot serve this call: {reasons[name]} {hint}")
