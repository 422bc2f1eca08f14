"""What a training run will need, by a dry run of the model's own code without memory."""
