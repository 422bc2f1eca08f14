"""Change the attention of a live model: its positions, biases, heads and rotations, one mechanism a file."""

from ctxext.attention import positions as positions  # registers the attention name "ctxext" with transformers
