"""Look at the code of a model: run a twin without data, and read its source, also where others replaced it."""
