"""What commands share: the JSON that they print and write, and the links between the files of a result."""

from __future__ import annotations
