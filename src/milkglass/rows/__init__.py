"""Reads and writes the user's tables: formats, encodings, columns, labels, conversations, and rows in blocks."""
