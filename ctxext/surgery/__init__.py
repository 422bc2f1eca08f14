"""Mechanisms that change a live model, prove the change and undo it, one a file."""
