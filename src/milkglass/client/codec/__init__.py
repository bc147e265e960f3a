"""Turns text into scrambled ids and back: the only place where text and ids meet."""
