"""Change a live model, prove the change and undo it, one mechanism a file; no file here knows a paper or a cache."""
