"""The walk over every model type of transformers (``run.py``), of which the test suite runs a sample."""
