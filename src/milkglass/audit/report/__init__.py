"""Puts an audit into words: its result as JSON, findings, charts, and one HTML page."""
