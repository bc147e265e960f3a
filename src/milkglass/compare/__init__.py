"""Compares the ways of using a model on the user's own rows: what each is worth, what it costs and what is read."""
