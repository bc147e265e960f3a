"""Attacks of one who knows how tokens were replaced, and by what, and reads the originals back."""
