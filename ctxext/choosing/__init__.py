"""Which extension suits a model and texts, found by measuring and not by a formula."""
