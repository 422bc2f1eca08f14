"""Read long texts, cut them into stretches of tokens, and hide things in them."""
