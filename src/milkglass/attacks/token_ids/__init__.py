"""Attacks that read the ids that were sent: by frequency, by context, by a language model."""
