"""Measures on arrays and texts. They know nothing of attacks, defences or keys."""
