"""Procedures that several kinds of recipes use: trials, private rows, local training, leakage."""
