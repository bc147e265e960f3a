"""Maps from tokens to symbols, for coarse.py: what one is, ways to find one, and what each symbol must hide."""
