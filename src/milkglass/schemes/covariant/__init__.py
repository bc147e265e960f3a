"""Schemes that change all weights of a decoder under a secret and keep its function: AloePri and two milder ones."""
