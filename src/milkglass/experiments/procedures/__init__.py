"""Procedures that several kinds of recipes use: cells, private rows, local training, leakage."""
