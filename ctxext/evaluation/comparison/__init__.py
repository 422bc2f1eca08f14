"""Several ways to read the same text, side by side: what each costs by position, and against truncation."""

from ctxext.evaluation.comparison.series import Series, edges_for, summarise

__all__ = ["Series", "edges_for", "summarise"]
