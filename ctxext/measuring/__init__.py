"""Measure losses and answers of models on texts: the engine, its statistics and its journal."""
