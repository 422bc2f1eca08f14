"""Several ways to read the same text, side by side: what each costs by position, and against truncation."""

from ctxext.evaluation.comparison.result import Series, summarise
from ctxext.evaluation.statistics import edges_for

__all__ = ["Series", "edges_for", "summarise"]
