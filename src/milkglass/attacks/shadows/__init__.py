"""Attacks on replaced tokens, by an attacker who knows how tokens are replaced and by which others."""
