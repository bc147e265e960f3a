"""Whole files sanitized: rows of JSON Lines, CSV, TSV or text, in blocks and in parallel."""
