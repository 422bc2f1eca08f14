"""The tiny model and its folder, as for evaluations."""

from tests.evaluation.conftest import checkpoint, model  # noqa: F401
