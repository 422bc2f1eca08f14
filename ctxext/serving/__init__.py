"""Servers of extended checkpoints: one of ctxext's own, plugins of others, and a check of any that runs."""
