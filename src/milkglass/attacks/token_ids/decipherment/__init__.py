"""Corpus decipherment: solves one substitution for all ids, by an annealed mean field over bigrams."""
