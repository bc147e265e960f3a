"""One file a kind of recipe."""
