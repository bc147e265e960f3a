"""A model scrambled with a key, verified, and checked before it is uploaded."""
