"""Encodings of positions that a model is trained with, one file each. This folder is the registry, as ``methods/`` is.

``ctxext.patch`` and saved checkpoints find them by name; ``from ctxext.laboratory.encodings import FIRE`` imports one.
"""

from __future__ import annotations

import sys

from ctxext.methods.base import ENCODINGS
from ctxext.methods.encoding import EncodingMethod
from ctxext.registry import discover

ENCODINGS.update(discover(sys.modules[__name__], EncodingMethod))  # type: ignore[type-abstract]
globals().update({cls.__name__: cls for cls in ENCODINGS.values()})
