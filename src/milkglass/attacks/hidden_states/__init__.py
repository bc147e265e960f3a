"""Attacks that read hidden states: of a client half, of a served model, of generated text."""
