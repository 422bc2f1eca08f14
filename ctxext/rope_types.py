"""The rope types of ctxext, which transformers knows as soon as both packages are imported, in either order.

Transformers keeps its rope types in one dictionary. If that exists, the names are entered at once. Otherwise a finder
of modules waits for the import that makes it, so that importing ctxext takes neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GUARD = "this checkpoint is extended by ctxext: load it with ctxext.load"

# Plain transformers raises a KeyError that quotes an unknown rope type, and so do other programs. It treats names that
# contain "dynamic" in a special way, so these do not.
ROPE_NAME = "ctxext_rope"
ROPE_TYPE = f"{ROPE_NAME}: {GUARD}"
UNROTATED_NAME = "ctxext_unrotated"
UNROTATED_TYPE = f"{UNROTATED_NAME}: {GUARD}"
HOLDER = "transformers.modeling_rope_utils"
"""Module of transformers with the dictionary of rope types, ``ROPE_INIT_FUNCTIONS``."""


class RopeTypes:
    """Finder of modules that enters rope types into the dictionary of transformers when its module has run.

    The finder stays in ``sys.meta_path``: removing it could make an import in another thread skip the next finder, and
    a module that is loaded again gets its names again.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions

    def register(self) -> None:
        """Enter the rope types now, or when the dictionary is made."""
        logging.getLogger(HOLDER).addFilter(_is_news)
        sys.meta_path.insert(0, self)
        if HOLDER in sys.modules:
            self._enter(importlib.import_module(HOLDER))  # waits while another thread runs the module

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what the finders behind this one find, with a loader that enters the rope types at its end."""
        if name != HOLDER:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_enter(module: ModuleType) -> None:
            run(module)
            self._enter(module)

        spec.loader.exec_module = run_and_enter  # type: ignore[method-assign]
        return spec

    def _enter(self, module: ModuleType) -> None:
        for name, function in self.functions.items():
            module.ROPE_INIT_FUNCTIONS.setdefault(name, function)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for transformers' log lines that it has no check for ctxext's rope types, which ctxext has."""
    message = record.getMessage()
    return "Missing validation function" not in message or not any(
        name in message for name in (ROPE_NAME, UNROTATED_NAME)
    )
