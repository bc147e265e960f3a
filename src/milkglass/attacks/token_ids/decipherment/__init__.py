"""Corpus decipherment: one substitution for all ids, solved by an annealed mean field over bigrams."""
