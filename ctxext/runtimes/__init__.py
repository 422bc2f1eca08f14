"""Runtimes that serve extended checkpoints: what each must be told, one file a runtime."""
