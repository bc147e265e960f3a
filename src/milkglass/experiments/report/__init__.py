"""A result as Markdown and as an HTML page."""
