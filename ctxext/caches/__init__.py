"""Hold a text in progress: cache layers, records, generation, dynamic methods and continuous batches."""
