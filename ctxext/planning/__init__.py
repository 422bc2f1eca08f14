"""Plan the memory of a training run by a dry run of the model's own code on the meta device."""
