"""Old places of names, for those that still import them from here."""

from ctxext.evaluation.labels import all_of, capitalised
from ctxext.evaluation.report.comparison import unpatched_sentence

__all__ = ["all_of", "capitalised", "unpatched_sentence"]
