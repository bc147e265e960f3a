"""Attacks on the layers of a model: weights that a scheme transformed, and what the transformed model computes."""
