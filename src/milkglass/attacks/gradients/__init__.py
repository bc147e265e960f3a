"""Attacks that read texts from the gradients that a client shares."""
