"""Word vectors that sanitizers draw from: a model's own embeddings or GloVe, and who is near whom in them."""
