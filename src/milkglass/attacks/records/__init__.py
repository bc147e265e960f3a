"""Attacks on what an encrypted connection shows: sizes and times."""
