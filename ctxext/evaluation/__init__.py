"""Measure what a longer context is worth, with truncation (no longer context, only the last tokens) beside it.

| module | what it measures | begin with |
|---|---|---|
| ``loss`` | the loss at every position of a text | ``loss_by_position`` |
| ``perplexity`` | perplexity by position, or by a published protocol | ``make_plan``, then ``prepare`` |
| ``longppl`` | perplexity over the tokens that need a long context | ``key_tokens.prepare_search``, then ``prepare`` |
| ``masked`` | the loss of masked tokens, by models that read to both sides | ``masked_readers``, then ``masked_jobs`` |
| ``passkey`` | whether the model repeats a number hidden in a long text | ``prepare`` |
| ``ruler`` | RULER's tasks, offline | ``ruler_prompts``, asked by a ``survey.Survey`` |
| ``retrieval.choices`` | whether the right answer is likelier than wrong ones | ``make_prompts``, as for RULER |
| ``comparison`` | all methods side by side | ``prepare`` |

What is prepared is a ``survey.Survey``: call ``begin``, ``measure`` and ``result``. Each module is imported when it is
first asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["comparison", "longppl", "loss", "masked", "passkey", "perplexity", "retrieval", "ruler"]


def __getattr__(name: str) -> ModuleType:
    """Import the evaluation that is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
