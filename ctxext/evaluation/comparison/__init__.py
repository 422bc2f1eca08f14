"""Several ways to read the same text, side by side: what each costs by position, and against truncation."""

from ctxext.evaluation.comparison.result import Series, summarise
from ctxext.evaluation.comparison.run import Comparison, prepare
from ctxext.measuring.statistics import edges_for

__all__ = ["Comparison", "Series", "edges_for", "prepare", "summarise"]
