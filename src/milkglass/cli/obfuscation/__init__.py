"""A scrambled model from end to end: `obfuscate`, `verify`, `upload`, `models`."""
