"""What two runs of ``ctxext.choose`` must have in common."""

from __future__ import annotations

from typing import Any

from ctxext.choosing.choice import Choice

__all__ = ["told"]


def told(choice: Choice) -> dict[str, Any]:
    """Everything but what a clock says."""
    found = choice.to_dict()
    del found["provenance"]["date"], found["spent"]["seconds"]
    found["sentences"] = [one for one in found["sentences"] if "of computing" not in one]
    return found
