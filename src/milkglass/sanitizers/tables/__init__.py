"""Word vectors from which sanitizers draw: a model's own embeddings or GloVe."""
