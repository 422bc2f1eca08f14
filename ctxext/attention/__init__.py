"""Change the attention of a live model: its positions, biases, heads and rotations, one mechanism a file."""
