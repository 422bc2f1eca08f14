"""What a choice says about itself."""

from typing import Any


def headline(choice: Any) -> str:
    return ""


def sentences(choice: Any) -> list[str]:
    return []
