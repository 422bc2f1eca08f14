"""Find the rotary frequencies of a model, prove them, and write them so that a config brings them back."""
