"""``ctxext eval passkey`` and ``ruler``: who reads what, trials that survive anything, and what is written."""

from __future__ import annotations
