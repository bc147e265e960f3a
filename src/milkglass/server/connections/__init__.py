"""Connections below HTTP: limits of their number and time, and of the log (`Limits` in server/settings.py)."""
