"""The key: its file, what is derived from it, what it says of its model, and how much text was encoded under it."""
