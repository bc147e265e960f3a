"""Attacks on words that were replaced by others before they were sent."""
