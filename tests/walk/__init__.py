"""The parts of ``scripts/walk_architectures.py``; the test suite runs a sample of the walk through them."""
