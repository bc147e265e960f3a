"""What is near in a table of embeddings: exact lists of nearest rows, made in blocks."""
