"""Scrambles a model with a key, verifies it, and checks it before it is uploaded."""
