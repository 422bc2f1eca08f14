"""The laboratory: every kind of position information on the same small model, trained short and tested long."""
