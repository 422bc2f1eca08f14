"""The tiny model, its tokens and its folder, as for evaluations."""

from tests.evaluation.conftest import checkpoint, input_ids, model  # noqa: F401
