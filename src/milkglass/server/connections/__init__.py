"""Connections below HTTP: how many, how long each may take, and what the log may hold.

The numbers are in server/settings.py, `Limits`.
"""
