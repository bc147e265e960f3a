"""Maps from tokens to symbols, for coarse.py: the map, ways to find one, and what each symbol must hide."""
