"""Measures on arrays and texts: they know nothing of attacks, defences or keys."""
