"""Retrieval, whatever the task: the same prompts read in several ways, each answer kept as soon as it is there."""
