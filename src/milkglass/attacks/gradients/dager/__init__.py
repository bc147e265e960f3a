"""DAGER: exact inversion by the spans of gradients (Petrov et al. 2024)."""
