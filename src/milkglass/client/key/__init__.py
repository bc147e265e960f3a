"""The key: its file, its streams, what it says of its model, how much was encoded under it."""
