"""Measurements of what a model does with a long context: by position, against truncation, and by retrieval."""
