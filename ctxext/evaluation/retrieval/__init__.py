"""Retrieval that is not literal: questions whose answer no search for the question's words finds, made offline."""

TASK_NAMES = ("rounds", "associations", "aggregate", "variables")
"""Kinds of questions; ``questions`` explains them."""
