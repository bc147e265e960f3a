"""Attacks on the ids that were sent, by frequency, by context, and by language models."""
