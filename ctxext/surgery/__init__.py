"""How a live model is changed, proven and undone: one mechanism a file."""
