"""Writes a result as Markdown and as an HTML page."""
